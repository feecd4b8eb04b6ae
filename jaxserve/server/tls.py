"""The certificates of the front ends, and their change without a restart."""

import dataclasses
import datetime
import logging
import ssl
import stat
import threading
from pathlib import Path
from typing import Final

import grpc

from jaxserve.config import TlsSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics

logger = logging.getLogger(__name__)

NUM_READS: Final = 10  # of two files that somebody may be replacing
MAX_FLIGHTS: Final = 10  # of a handshake in memory; TLS 1.3 takes two
OTHERS: Final = stat.S_IRGRP | stat.S_IROTH


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class CertificateSet:
    """What the files held at one moment, checked: key and certificate belong together, a client
    that trusts the certificate gets a connection with it, and it is valid now.

    Attributes:
      cert: PEM of the certificate and those between it and its root.
      client_ca: PEM of the roots of clients' certificates; None asks for none.
      expires: when the certificate ends.
    """

    cert: bytes
    key: bytes = dataclasses.field(repr=False)
    client_ca: bytes | None
    expires: datetime.datetime
    context: ssl.SSLContext


class Certificates:
    """The set in force; any thread. New connections get it, those that are open go on."""

    def __init__(self, section: TlsSection, metrics: Metrics) -> None:
        """Raises ConfigError, as `read`."""
        self._section = section
        self._metrics = metrics
        self._current = self.read()
        self.use(self._current)

    @property
    def asks_for_certificates(self) -> bool:
        """Whether clients must have one (mTLS)."""
        return self._section.client_ca_file is not None

    @property
    def expires(self) -> datetime.datetime:
        return self._current.expires

    def read(self) -> CertificateSet:
        """Returns what the files hold now; it is not in force yet.

        Raises:
          ConfigError: a file cannot be read, they do not fit together, or the certificate is not
            valid now.
        """
        cert_file, key_file = self._section.cert_file, self._section.key_file
        assert cert_file is not None, "the section says so"
        assert key_file is not None, "likewise"
        ca_file = self._section.client_ca_file
        for _ in range(NUM_READS):
            cert, key = _read_pair(cert_file, key_file)
            client_ca = None if ca_file is None else _read(ca_file, "tls.client_ca_file")
            context = _build_context(cert_file, key_file)
            if (cert, key) == _read_pair(cert_file, key_file):
                break
        else:
            raise ConfigError(f"{cert_file} and {key_file} change all the time; write them once")
        expires = _check_certificate(context, cert, cert_file)
        if client_ca is not None:
            _ask_for_certificates(context, client_ca, ca_file)
        _warn_of_readers(key_file)
        return CertificateSet(
            cert=cert, key=key, client_ca=client_ca, expires=expires, context=context
        )

    def use(self, certificates: CertificateSet) -> None:
        """Has new connections of every door get this set."""
        self._current = certificates
        self._metrics.certificate_expiry.set(certificates.expires.timestamp())

    def build_grpc_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a gRPC port, which follow `use`."""
        lock = threading.Lock()
        given = self._current

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """grpc calls it before each handshake; None changes nothing."""
            nonlocal given
            with lock:
                current = self._current
                if current is given:
                    return None
                given = current
            return _grpc_configuration(current)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(given),
            fetch,  # type: ignore[arg-type]  # the stubs know no None; grpc's own text does
            self.asks_for_certificates,
        )

    def build_ssl_context(self) -> ssl.SSLContext:
        """Returns a context for an HTTP server, whose connections follow `use`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        if self.asks_for_certificates:
            context.verify_mode = ssl.CERT_REQUIRED

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            """Called in each handshake, before a certificate is sent or asked for."""
            connection.context = self._current.context

        context.sni_callback = choose
        return context


def _grpc_configuration(certificates: CertificateSet) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.cert)], root_certificates=certificates.client_ca
    )


def _read_pair(cert_file: Path, key_file: Path) -> tuple[bytes, bytes]:
    return _read(cert_file, "tls.cert_file"), _read(key_file, "tls.key_file")


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key} {path} cannot be read: {cause}") from error


def _build_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])

    def refuse_password() -> str:
        raise ConfigError(f"tls.key_file {key_file} is encrypted; decrypt it, and chmod 600 it")

    try:
        context.load_cert_chain(cert_file, key_file, password=refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls.cert_file {cert_file} and tls.key_file {key_file} are no certificate and its "
            f"key, in PEM: {_reason(error)}"
        ) from error
    return context


def _ask_for_certificates(context: ssl.SSLContext, client_ca: bytes, path: Path | None) -> None:
    try:
        context.load_verify_locations(cadata=client_ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls.client_ca_file {path} holds no certificates in PEM: {_reason(error)}"
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED


def _check_certificate(server: ssl.SSLContext, cert: bytes, path: Path) -> datetime.datetime:
    """Returns the certificate's end, after a handshake in memory with a client that trusts it."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself may be the root
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client.load_verify_locations(cadata=cert.decode("ascii"))
        here = server.wrap_bio(to_server, to_client, server_side=True)
        there = client.wrap_bio(to_client, to_server)
        for _ in range(MAX_FLIGHTS):
            is_done = [_shake_hands(there), _shake_hands(here)]
            if all(is_done):
                break
        found = there.getpeercert() or {}
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls.cert_file {path} is no certificate that a client could trust now: "
            f"{_reason(error)}"
        ) from error
    seconds = ssl.cert_time_to_seconds(str(found["notAfter"]))
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _shake_hands(side: ssl.SSLObject) -> bool:
    """Returns whether this side is done; it waits for the other where not."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _reason(error: Exception) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return error.verify_message
        case ssl.SSLError():
            return (error.reason or "not readable").replace("_", " ").lower()
        case OSError():
            return str(error.strerror)
        case _:
            return str(error)


def _warn_of_readers(key_file: Path) -> None:
    mode = key_file.stat().st_mode
    if mode & OTHERS:
        logger.warning(
            "tls.key_file can be read by others; chmod 600 it path=%s mode=%o",
            key_file,
            stat.S_IMODE(mode),
        )
