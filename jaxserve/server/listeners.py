"""Addresses that are listened on: which may be open to whom, and the transport's options."""

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc

from jaxserve.config import Config, LimitsSection, is_loopback
from jaxserve.errors import ConfigError
from jaxserve.server.credentials import Credentials

logger = logging.getLogger(__name__)

UNIX: Final = "unix:"
PROBE_S: Final = 1.0


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_exposure(config: Config, credentials: Credentials, *, key: str, host: str) -> None:
    """Refuses a listener that would let a network in unasked, and warns of keys in the clear.

    Args:
      key: of the configuration that holds the host.

    Raises:
      ConfigError: beyond this machine, callers must show a key or a certificate.
    """
    if is_loopback(host):
        return
    if credentials.asks_for_nothing and not config.auth.allow_open:
        raise ConfigError(
            f"{key} is {host!r}, which others may reach, but nobody is asked who he is; make keys "
            "(`jaxserve keys new`) and set auth.keys_file, or listen on 127.0.0.1; "
            "auth.allow_open = true lets everyone in"
        )
    if credentials.asks_for_nothing:
        logger.warning("EVERYONE who reaches this address may call it address=%s", host)
    if credentials.certificates is None:
        what = "prompts and outputs" if credentials.asks_for_nothing else "keys and prompts"
        logger.warning(
            "NO TLS: whoever listens on the network can read %s; set tls.cert_file and "
            "tls.key_file address=%s",
            what,
            host,
        )


def build_options(limits: LimitsSection, *, num_calls: int) -> list[tuple[str, int]]:
    """Returns grpc's options of a server.

    Args:
      num_calls: open at once on one connection.
    """
    return [
        ("grpc.so_reuseport", 0),  # or a second server on the port would take half the calls
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        # twice: grpc counts a stream for a moment after its end, and gives who is refused for that
        # no reason; beyond `maximum_concurrent_rpcs` a call is told RESOURCE_EXHAUSTED
        ("grpc.max_concurrent_streams", 2 * num_calls),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", 10_000),  # who only connects is soon gone
        # a long prefill sends nothing: let clients ping meanwhile, and find dead ones
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def bind_tcp(server: grpc.aio.Server, config: Config, credentials: Credentials) -> int:
    """Binds the public port, with TLS where there are certificates; returns its number.

    Raises:
      ConfigError: the address cannot be bound.
    """
    section = config.server
    address = format_address(section.host, section.port)
    try:
        if credentials.certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials.certificates.build_grpc_credentials())
    except RuntimeError as error:
        raise ConfigError(
            f"server.host {section.host!r}, server.port {section.port}: cannot be bound; is "
            "the host an address of this machine, and no other server on the port? "
            "--port 0 picks a free one"
        ) from error


def bind_admin(server: grpc.aio.Server, address: str) -> str:
    """Binds the admin address and returns it, with the port that was picked for 0.

    Raises:
      ConfigError: it cannot be bound.
    """
    path = find_socket(address)
    if path is None:
        logger.warning(
            "every user of this machine can open admin.address; unix:/path keeps it to this user"
        )
    else:
        _clear_socket(path)
    try:
        with _only_for_this_user() if path else contextlib.nullcontext():
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"admin.address {address!r} cannot be bound; is its folder there, its path shorter "
            "than 100 characters, and no other server on it?"
        ) from error
    if path is not None:
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def find_socket(address: str) -> Path | None:
    """Returns the socket's path of a `unix:` address; None for others."""
    return Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None


def _clear_socket(path: Path) -> None:
    """Takes away the socket that a killed server has left; grpc would do so with a live one's."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return
    if not is_socket:
        raise ConfigError(f"admin.address: {path} is there, and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"admin.address: {path}: {error.strerror}") from error
    raise ConfigError(f"admin.address: another server listens on {path}")


@contextlib.contextmanager
def _only_for_this_user() -> Iterator[None]:
    """Files made in the block are 0600 from their first moment; a chmod afterwards is too late."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
