"""`[server]`, `[tls]` and `[admin]`: where and how the front ends listen."""

import ipaddress
from pathlib import Path
from typing import Self

import pydantic

from jaxserve.config.section import Section


class ServerSection(Section):
    """Where the front ends listen."""

    host: str = pydantic.Field("127.0.0.1", min_length=1, description="Address to bind.")
    port: int = pydantic.Field(50051, ge=0, le=65535, description="0 picks a free one.")
    drain_timeout_s: float = pydantic.Field(
        30.0, ge=0, description="After SIGTERM, how long running requests may finish."
    )
    health_host: str = pydantic.Field(
        "127.0.0.1", min_length=1, description="Address to bind for health_port."
    )
    health_port: int | None = pydantic.Field(
        None,
        ge=0,
        le=65535,
        description="Port with health alone, in plaintext, for probes that have no TLS "
        "(docs/operations.md); 0 picks a free one. Unset: none.",
    )
    reflection: bool = pydantic.Field(
        True, description="Tell gRPC clients what can be called; with keys, those that have one."
    )
    vllm_engine: bool = pydantic.Field(
        False,
        description="Serve vllm.grpc.engine.VllmEngine on the same port, for the gateway smg "
        "(docs/smg.md). Extra: smg.",
    )
    http_host: str = pydantic.Field(
        "127.0.0.1", min_length=1, description="Address to bind for HTTP (docs/http.md)."
    )
    http_port: int | None = pydantic.Field(
        None, ge=0, le=65535, description="Port for HTTP; 0 picks a free one. Unset: no HTTP."
    )
    page: bool = pydantic.Field(
        True,
        description="Serve a page at / of the HTTP port: a chat, and the server's load "
        "(docs/page.md).",
    )
    http_allowed_hosts: tuple[str, ...] = pydantic.Field(
        (),
        description="Names by which requests may reach an open loopback http_host, besides "
        "localhost and its addresses; for a proxy that passes its own name on.",
    )
    http_cors_origins: tuple[str, ...] = pydantic.Field(
        (),
        description="Origins whose pages may call from a browser, such as http://localhost:3000; "
        '["*"] is any.',
    )
    http_read_timeout_s: float = pydantic.Field(
        30.0, gt=0, description="For an HTTP request's headers, and then its body, to arrive."
    )
    http_write_timeout_s: float = pydantic.Field(
        60.0, gt=0, description="An HTTP client that takes nothing for so long is cut off."
    )


class TlsSection(Section):
    """Certificates of the front ends (docs/security.md). Unset: plaintext."""

    cert_file: Path | None = pydantic.Field(
        None, description="PEM: the server's certificate, then those between it and its root."
    )
    key_file: Path | None = pydantic.Field(None, description="PEM: the certificate's private key.")
    client_ca_file: Path | None = pydantic.Field(
        None, description="PEM: roots; only clients with a certificate from one of them connect."
    )

    @pydantic.model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together; set both or neither")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs cert_file and key_file")
        return self


class AdminSection(Section):
    """Where AdminService listens (docs/security.md)."""

    address: str | None = pydantic.Field(
        None,
        description="unix:/path/of/a/socket, which only this user can open, or a loopback "
        "address with its port, which every user of the machine can. Unset: nowhere.",
    )

    @pydantic.field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is None or address.removeprefix("unix:") not in (address, ""):
            return address
        host, _, port = address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
        if not (is_port and is_loopback(host.removeprefix("[").removesuffix("]"))):
            raise ValueError(
                "it must be unix:/path/of/a/socket or a loopback address with its port, such as "
                "127.0.0.1:50052"
            )
        return address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on `host`; False where that is not certain."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
