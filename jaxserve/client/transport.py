"""How a client connects: message limits, pings, TLS, and the key it calls with."""

import dataclasses
from typing import Final

import grpc

MAX_MESSAGE_BYTES: Final = 16 << 20  # the server's default, limits.max_message_bytes


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Tls:
    """Encrypts a connection, and says whom to trust; all are the bytes of PEM files.

    Attributes:
      root_certificates: who may vouch for the server; None asks the system's own list.
      certificate: the client's own, and those between it and its root, for a server that asks for
        one; with `private_key`.
      server_name: the name that must be in the server's certificate; empty takes the target's.
    """

    root_certificates: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = dataclasses.field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key go together; give both or neither")


def channel_options(max_message_bytes: int, tls: Tls | None) -> list[tuple[str, int | str]]:
    """Returns grpc's options: message limits both ways, and pings that find a dead server."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=tls.root_certificates,
        private_key=tls.private_key,
        certificate_chain=tls.certificate,
    )


def call_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """Returns what each call carries.

    Args:
      key: empty for none.

    Raises:
      ValueError: no header can carry it; the message does not repeat it.
    """
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError("key must be printable ASCII without spaces at its ends; look at its file")
    return (("authorization", f"Bearer {key}"),)
