"""Certificates: what will not do is refused, and what changes is seen by the next connection."""

import asyncio
import contextlib
import datetime
import hashlib
import logging
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trustme

from jaxserve.client import AsyncClient
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.tls import Certificates
from tests.server.credentials import HOST, LONG_AGO, Files, chain, sections
from tests.server.harness import Steps, run_server, until

pytestmark = pytest.mark.asyncio


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(folder=tmp_path)


def fingerprint(leaf: trustme.LeafCert) -> str:
    der = ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())
    return hashlib.sha256(der).hexdigest()


async def shown(port: int, files: Files) -> str:
    """Returns the fingerprint of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cadata=files.root.cert_pem.bytes().decode())
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return hashlib.sha256(der).hexdigest()


# reading


async def test_a_good_pair_is_read_with_its_end(files: Files) -> None:
    end = datetime.datetime(2035, 6, 1, 12, tzinfo=datetime.UTC)
    files.write(files.root.issue_cert(HOST, not_after=end))
    metrics = Metrics()
    assert Certificates(files.section(), metrics).expires == end
    assert metrics.value("certificate_expiry_timestamp_seconds") == end.timestamp()


async def test_a_chain_is_sent_whole(files: Files) -> None:
    leaf = files.root.create_child_ca().issue_cert(HOST)
    files.write(leaf)
    assert (files.folder / "cert.pem").read_bytes().count(b"BEGIN CERTIFICATE") == 2
    async with run_server(sections=sections(None, files.section())) as running:
        assert await shown(running.server.port, files) == fingerprint(leaf)


def swap_key(files: Files) -> None:
    files.root.issue_cert(HOST).private_key_pem.write_to_path(files.folder / "key.pem")


def cut_cert(files: Files) -> None:
    path = files.folder / "cert.pem"
    path.write_bytes(path.read_bytes()[:300])


def write_expired(files: Files) -> None:
    files.write(files.expired())


def write_future(files: Files) -> None:
    start = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
    leaf = files.root.issue_cert(
        HOST, not_before=start, not_after=start + datetime.timedelta(days=1)
    )
    files.write(leaf)


def remove_key(files: Files) -> None:
    (files.folder / "key.pem").unlink()


def empty_cert(files: Files) -> None:
    (files.folder / "cert.pem").write_text("")


def swap_files(files: Files) -> None:
    cert, key = files.folder / "cert.pem", files.folder / "key.pem"
    both = cert.read_bytes(), key.read_bytes()
    key.write_bytes(both[0])
    cert.write_bytes(both[1])


def encrypt_key(files: Files) -> None:
    (files.folder / "key.pem").write_text(ENCRYPTED_KEY)


def junk_root(files: Files) -> None:
    (files.folder / "clients.pem").write_text("junk")


# an EC key under the password "x"
ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAgQxciTkduHVwICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEMoBtS6PGbMJ/Alsin6FhUEEgZAn
HaYTQHwuvkp30OxT/RiBMVLMNvwixKdd3chOHQcP8rs+jtIAddQhwIGYoqT+fG40
r+zrNhMZsqEpMkxOOQyb0arvzyX2spwYOzclu+Io2FicnULW4y9ahGvEC2OgvXNY
uZFHzHkC1czNir91qsToi5gGqVlAgwiFMFQsrXrWp3AXIaXJwfgNbk3TjNhZz1Y=
-----END ENCRYPTED PRIVATE KEY-----
"""
BREAKS: list[tuple[Callable[[Files], None], str]] = [
    (swap_key, "are no certificate and its key, in PEM: key values mismatch"),
    (cut_cert, "are no certificate and its key"),
    (write_expired, "no certificate that a client could trust now: certificate has expired"),
    (write_future, "no certificate that a client could trust now: certificate is not yet valid"),
    (remove_key, "key.pem cannot be read: No such file or directory"),
    (empty_cert, "are no certificate and its key"),
    (swap_files, "are no certificate and its key"),
    (encrypt_key, "key.pem is encrypted; decrypt it"),
    (junk_root, "clients.pem holds no certificates in PEM"),
]


@pytest.mark.parametrize(("damage", "what"), BREAKS)
async def test_what_will_not_do_is_refused_by_name(
    files: Files, damage: Callable[[Files], None], what: str
) -> None:
    damage(files)
    with pytest.raises(ConfigError) as caught:
        Certificates(files.section(asks_for_certificates=True), Metrics())
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, True), (0o604, True)])
async def test_a_private_key_that_others_can_read_is_warned_about(
    files: Files, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    (files.folder / "key.pem").chmod(mode)
    Certificates(files.section(), Metrics())
    assert ("can be read by others" in caplog.text) == is_warned
    assert stat.S_IMODE((files.folder / "key.pem").stat().st_mode) == mode


# changing


async def test_new_connections_see_a_new_certificate_and_open_ones_go_on(files: Files) -> None:
    first = files.root.issue_cert(HOST)
    files.write(first)
    steps = Steps()
    async with (
        run_server(steps, sections=sections(None, files.section())) as running,
        AsyncClient(running.target, tls=files.trust()) as client,
    ):
        port = running.server.port
        stream = client.stream("x", max_tokens=20, ignore_eos=True)
        events = asyncio.create_task(read(stream))
        await until(lambda: running.num_submitted == 1)
        assert await shown(port, files) == fingerprint(first)
        for _ in range(3):
            leaf = files.root.issue_cert(HOST)
            files.write(leaf)
            assert await shown(port, files) != fingerprint(leaf), "nobody has asked for it yet"
            running.server.door.credentials.reload()
            assert await shown(port, files) == fingerprint(leaf)
            assert await shown(port, files) == fingerprint(leaf)
        assert not events.done()
        steps.open()
        assert (await events)[-1].usage.completion_tokens == 20  # type: ignore[attr-defined]


async def read(stream: AsyncIterator[object]) -> list[object]:
    return [event async for event in stream]


@pytest.mark.parametrize(("damage", "what"), BREAKS)
async def test_a_broken_new_certificate_keeps_the_old_one_and_is_in_the_log(
    files: Files, caplog: pytest.LogCaptureFixture, damage: Callable[[Files], None], what: str
) -> None:
    first = files.root.issue_cert(HOST)
    files.write(first)
    client = files.trust(files.client_root.issue_cert("client"))
    tls = files.section(asks_for_certificates=True)
    async with run_server(sections=sections(None, tls)) as running:
        damage(files)
        with caplog.at_level(logging.ERROR), pytest.raises(ConfigError):
            running.server.door.credentials.reload()
        assert "credentials stay as they were" in caplog.text
        assert what in caplog.text
        async with AsyncClient(running.target, tls=client) as connected:
            assert (await connected.health()).is_ready
        value = running.engine.metrics.value
        assert value("credential_reloads_total", outcome="failed") == 1
        files.write(files.root.issue_cert(HOST))
        files.client_root.cert_pem.write_to_path(files.folder / "clients.pem")
        running.server.door.credentials.reload()
        assert value("credential_reloads_total", outcome="ok") == 1


async def test_a_new_root_for_clients_holds_from_the_next_connection_on(files: Files) -> None:
    old, new_root = files.client_root.issue_cert("client"), trustme.CA()
    tls = files.section(asks_for_certificates=True)
    async with run_server(sections=sections(None, tls)) as running:
        async with AsyncClient(running.target, tls=files.trust(old)) as kept:
            assert (await kept.health()).is_ready
            new_root.cert_pem.write_to_path(files.folder / "clients.pem")
            running.server.door.credentials.reload()
            assert (await kept.health()).is_ready
        new = new_root.issue_cert("client")
        async with AsyncClient(running.target, tls=files.trust(new)) as client:
            assert (await client.health()).is_ready
        async with AsyncClient(running.target, tls=files.trust(old)) as client:
            with pytest.raises(Exception, match=r"(?i)unavailable|handshake|connect"):
                await client.health(timeout_s=30)


# HTTP


@contextlib.asynccontextmanager
async def run_https(certificates: Certificates) -> AsyncIterator[int]:
    """A listener as an HTTP server's: answers each connection's first line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    context = certificates.build_ssl_context()
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_http_shows_the_same_certificate_and_follows_its_change(files: Files) -> None:
    first = files.root.issue_cert(HOST)
    files.write(first)
    certificates = Certificates(files.section(), Metrics())
    async with run_https(certificates) as port:
        assert await shown(port, files) == fingerprint(first)
        second = files.root.issue_cert(HOST)
        files.write(second)
        certificates.use(certificates.read())
        assert await shown(port, files) == fingerprint(second)


async def ask(port: int, files: Files, leaf: trustme.LeafCert | None, folder: Path) -> bytes:
    """Returns what a connection with this certificate is answered; empty where it is refused."""
    context = ssl.create_default_context(cadata=files.root.cert_pem.bytes().decode())
    if leaf is not None:
        pem = folder / "own.pem"
        pem.write_bytes(leaf.private_key_pem.bytes() + chain(leaf))
        context.load_cert_chain(pem)
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=HOST
        )
        writer.write(b"hello\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    except (ssl.SSLError, ConnectionError):
        return b""
    return answer


async def test_http_lets_only_certificates_of_the_clients_root_in(
    files: Files, tmp_path: Path
) -> None:
    certificates = Certificates(files.section(asks_for_certificates=True), Metrics())
    expired = files.client_root.issue_cert(
        "client", not_before=LONG_AGO, not_after=LONG_AGO + datetime.timedelta(days=1)
    )
    new_root = trustme.CA()
    async with run_https(certificates) as port:
        right = files.client_root.issue_cert("client")
        assert await ask(port, files, right, tmp_path) == b"hello\n"
        for leaf in (None, expired, trustme.CA().issue_cert("client")):
            assert await ask(port, files, leaf, tmp_path) == b""
        new_root.cert_pem.write_to_path(files.folder / "clients.pem")
        certificates.use(certificates.read())
        assert await ask(port, files, new_root.issue_cert("client"), tmp_path) == b"hello\n"
        assert await ask(port, files, right, tmp_path) == b""
