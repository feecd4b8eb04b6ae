"""Connections: bounds on what comes and how slowly, and on clients that take nothing."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config import LimitsSection, ServerSection
from jaxserve.errors import ConfigError
from jaxserve.server.http import HttpServer
from tests.server.credentials import sections, write_keys
from tests.server.harness import Steps, until
from tests.server.http.harness import COMPLETIONS, run_listening
from tests.server.http.test_client_goes_away import connecting, request_bytes

pytestmark = pytest.mark.asyncio

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def parse(response: bytes) -> tuple[int, str, dict[str, str]]:
    """Returns the status, the error's code and the headers of a refusal."""
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return int(first.split()[1]), error["code"], headers


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "bad_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_http"),  # TLS
        (HEALTH + b"bad header\r\n\r\n", 400, "bad_http"),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n", 431, "headers_too_large"),
        (HEALTH + b"x: " + b"a" * 3000 + b"\r\n\r\n", 431, "headers_too_large"),
        (HEALTH + b"x: y\r\n" * 2000 + b"\r\n", 431, "headers_too_large"),
        (HEALTH + b"x: " + b"a" * 100_000, 431, "headers_too_large"),  # and no end in sight
        (b"GET /" + b"a" * 100_000, 431, "headers_too_large"),
    ],
)
async def test_what_is_no_request_is_answered_and_closed(
    content: bytes, status: int, code: str
) -> None:
    bounds = LimitsSection(max_header_bytes=2000)
    async with run_listening(config={"limits": bounds}) as running:
        async with connecting(running) as (reader, writer):
            writer.write(content)
            found, found_code, headers = parse(await reader.read(-1))
        assert (found, found_code, headers["connection"]) == (status, code, "close")
        assert (await running.client.get("/health")).status_code == 200


async def test_headers_within_the_limit_are_read_byte_by_byte_too() -> None:
    bounds = LimitsSection(max_header_bytes=2000)
    async with run_listening(config={"limits": bounds}) as running:
        async with connecting(running) as (reader, writer):
            for byte in HEALTH + b"x: " + b"a" * 1800 + b"\r\nconnection: close\r\n\r\n":
                writer.write(bytes([byte]))
                await writer.drain()
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("content", [b"", HEALTH, b"\r\n\r\n", b"POST /v1/comp"])
async def test_who_does_not_ask_in_time_is_given_up(content: bytes) -> None:
    section = ServerSection(http_port=0, http_read_timeout_s=0.1)
    async with run_listening(section=section) as running:
        async with connecting(running) as (reader, writer):
            writer.write(content)
            status, code, _ = parse(await reader.read(-1))
    assert (status, code) == (408, "request_timeout")


async def test_headers_that_drip_are_given_up_on_a_kept_connection_too() -> None:
    section = ServerSection(http_port=0, http_read_timeout_s=0.2)
    async with run_listening(section=section) as running:
        async with connecting(running) as (reader, writer):
            writer.write(HEALTH + b"\r\n")
            assert await reader.readuntil(b'{"status":"serving"}')

            async def drip() -> None:
                for byte in HEALTH * 100:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            # not to the end: what drips after it has the connection reset
            status, code, _ = parse(await reader.readuntil(b"}}"))
            dripping.cancel()
    assert (status, code) == (408, "request_timeout")


async def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    section = ServerSection(http_port=0, http_read_timeout_s=0.1)
    async with run_listening(section=section) as running:
        async with connecting(running) as (reader, writer):
            writer.write(request_bytes({"prompt": "a"})[:-3])
            status, code, headers = parse(await reader.read(-1))
        assert (status, code, headers["connection"]) == (408, "request_timeout", "close")
        assert running.num_submitted == 0


async def test_who_waits_for_a_long_answer_is_not_given_up() -> None:
    section = ServerSection(http_port=0, http_read_timeout_s=0.1)
    steps = Steps()
    async with run_listening(steps, section=section) as running:
        asking = asyncio.create_task(running.complete(max_tokens=2))
        await until(lambda: running.num_submitted == 1)
        await asyncio.sleep(0.25)
        steps.open()
        assert (await asking)["usage"]["completion_tokens"] == 2


async def test_a_sender_of_too_much_hears_of_it() -> None:
    bounds = LimitsSection(max_message_bytes=100_000)
    async with run_listening(config={"limits": bounds}) as running:
        body = {"prompt": "a", "user": "u" * 300_000}
        response = await running.client.post(COMPLETIONS, json=body)
        assert response.status_code == 413

        async def pieces() -> Any:  # noqa: ANN401
            for _ in range(100):
                yield b" " * 65_536

        kind = {"content-type": "application/json"}
        with contextlib.suppress(httpx.HTTPError):  # cut off while it was still sending
            response = await running.client.post(COMPLETIONS, content=pieces(), headers=kind)
            assert response.status_code == 413
        assert (await running.complete(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_connections_are_bounded() -> None:
    bounds = LimitsSection(max_connections=2)
    async with run_listening(config={"limits": bounds}) as running:
        async with connecting(running), connecting(running) as (reader, writer):
            writer.write(HEALTH + b"\r\n")
            assert await reader.readuntil(b'{"status":"serving"}')
            async with connecting(running) as (third, _):
                status, code, headers = parse(await third.read(-1))
            assert (status, code) == (429, "queue_full")
            assert headers["retry-after"] == "1"
        await asyncio.sleep(0.05)
        assert (await running.client.get("/health")).status_code == 200


async def test_who_has_no_key_takes_no_place_from_those_that_have_one(tmp_path: Path) -> None:
    keys, (key,) = write_keys(tmp_path, "acme")
    config = {**sections(keys), "limits": LimitsSection(max_open_calls=1)}
    loop = asyncio.get_running_loop()
    async with run_listening(config=config) as running:
        stalled = [small_buffers() for _ in range(3)]
        for client in stalled:  # ask for much, and read nothing
            await loop.sock_connect(client, ("127.0.0.1", running.port))
            asked = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400
            await loop.sock_sendall(client, asked)
        await until(lambda: running.door.open_calls.count == 3)
        response = await running.client.get(
            "/v1/models", headers={"authorization": f"Bearer {key}"}
        )
        assert response.status_code == 200
        for client in stalled:
            client.close()
        await until(lambda: running.door.open_calls.count == 0)


async def test_requests_in_a_row_on_one_connection_are_answered_in_order() -> None:
    async with run_listening() as running, connecting(running) as (reader, writer):
        bodies = [{"prompt": "a", "max_tokens": n} for n in (3, 1, 2)]
        last = request_bytes(bodies[2], connection="close")
        writer.write(request_bytes(bodies[0]) + request_bytes(bodies[1]) + last)
        text = (await reader.read(-1)).decode()
    told = [part.split('"text":"')[1].split('"')[0] for part in text.split("HTTP/1.1 200")[1:]]
    assert told == ["abc", "a", "ab"]


WISH = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}


@pytest.mark.parametrize("num_parts", [1, 2, 5])
async def test_who_asks_for_another_protocol_is_served_in_this_one(num_parts: int) -> None:
    """As Java's client and curl do; their bodies must be neither lost nor read as requests."""
    body = {"prompt": "a", "max_tokens": 2, "user": "GET /health HTTP/1.1\r\n\r\n"}
    last = {"prompt": "a", "max_tokens": 3}
    async with run_listening() as running, connecting(running) as (reader, writer):
        sent = request_bytes(body, **WISH) + request_bytes(body, **WISH)
        sent += request_bytes(last, connection="close")
        size = -(-len(sent) // num_parts)
        for first in range(0, len(sent), size):
            writer.write(sent[first : first + size])
            await asyncio.sleep(0.02)
        text = (await reader.read(-1)).decode()
        assert running.num_submitted == 3
    told = [part.split('"text":"')[1].split('"')[0] for part in text.split("HTTP/1.1 200")[1:]]
    assert told == ["ab", "ab", "abc"]


async def test_the_body_of_such_a_request_is_no_request() -> None:
    inner = HEALTH + b"\r\n"
    head = (
        b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    )
    async with run_listening() as running, connecting(running) as (reader, writer):
        writer.write(head + b"content-length: %d\r\n\r\n" % len(inner))
        assert await reader.readuntil(b'{"status":"serving"}')
        writer.write(inner + b"GET /no HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        text = await reader.read(-1)
    assert text.count(b"HTTP/1.1 ") == 1
    assert text.startswith(b"HTTP/1.1 404")


async def test_a_connect_is_refused_and_closed() -> None:
    async with run_listening() as running, connecting(running) as (reader, writer):
        writer.write(b"CONNECT /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEALTH + b"\r\n")
        found = parse(await reader.read(-1))
    assert found[:2] == (405, "method_not_allowed")


async def test_what_comes_behind_a_body_is_no_header(tmp_path: Path) -> None:
    """A proxy that decides by the headers has not seen it."""
    keys, (key,) = write_keys(tmp_path, "acme")
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\nconnection: close\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    secret = b"authorization: Bearer %s\r\n" % key.encode()
    found = []
    async with run_listening(config=sections(keys)) as running:
        for content in (
            head + b"\r\n" + chunks + secret + b"\r\n",
            head + secret + b"\r\n" + chunks + secret + b"\r\n",
        ):
            async with connecting(running) as (reader, writer):
                writer.write(content)
                found.append((await reader.read(-1)).split()[1])
    assert found == [b"401", b"200"]


@pytest.mark.parametrize("coding", ["gzip, chunked", "xchunked", "chunked, chunked", "identity"])
async def test_a_body_that_is_coded_for_the_way_is_refused(coding: str) -> None:
    async with run_listening() as running, connecting(running) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: %s\r\n\r\n2\r\n{}\r\n0\r\n\r\n" % coding.encode())
        assert parse(await reader.read(-1))[:2] == (400, "bad_http")


async def test_who_waits_to_send_his_body_and_is_refused_is_told_that_it_is_not_read(
    tmp_path: Path,
) -> None:
    """He may leave the body out: his next request would be taken for it."""
    keys, _ = write_keys(tmp_path, "acme")
    async with run_listening(config=sections(keys)) as running:
        async with connecting(running) as (reader, writer):
            writer.write(request_bytes({}, expect="100-continue").partition(b"{")[0])
            status, _, headers = parse(await reader.read(-1))
    assert (status, headers["connection"]) == (401, "close")


def small_buffers() -> socket.socket:
    """A client whose machine takes little unasked."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    return client


async def open_stalled(port: int | None, body: dict[str, Any]) -> socket.socket:
    loop = asyncio.get_running_loop()
    client = small_buffers()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, request_bytes(body, **{"x-request-id": "slow"}))
    return client


LONG: dict[str, Any] = {"num_pages": 2400, "max_model_tokens": 9000}
MUCH = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "logprobs": 20, "stream": True}


async def test_who_takes_nothing_is_cut_off_and_his_request_ends() -> None:
    section = ServerSection(http_port=0, http_write_timeout_s=0.3)
    async with run_listening(section=section, **LONG) as running:
        # more than the buffers of two sockets hold
        much = {**MUCH, "prompt": "x" * 1500, "echo": True, "n": 4, "max_tokens": 20}
        slow = await open_stalled(running.port, much)
        fast = await running.complete(max_tokens=5)
        assert fast["usage"]["completion_tokens"] == 5, "nobody else waits for him"
        await until(lambda: running.door.open_calls.count == 0)
        await until(lambda: not running.engine._intake.live())
        assert running.engine.metrics.value("http_requests_total", status="499") == 1
        await until(lambda: running.num_connections == 1)  # the one of `fast`
        slow.close()


async def test_a_slow_readers_stream_ends_with_a_status_when_he_reads_on() -> None:
    bounds = LimitsSection(stream_buffer_bytes=20_000)
    async with run_listening(bounds=bounds, **LONG) as running:
        loop = asyncio.get_running_loop()
        slow = await open_stalled(running.port, MUCH)
        await until(lambda: running.finished("error_slow_reader") == 1)
        pieces = []
        while piece := await loop.sock_recv(slow, 1 << 20):
            pieces.append(piece)
            if b'"slow_reader"' in piece:
                break
        slow.close()
        text = b"".join(pieces).decode()
        assert '"code":"slow_reader"' in text
        assert "[DONE]" not in text
        letters = "".join(part.split('"')[0] for part in text.split('"text":"')[1:])
        assert letters
        assert ("abcdefghij" * 9).startswith(letters[:90]), "what came before is whole"


async def test_a_long_whole_reply_reaches_a_slow_reader() -> None:
    body = {**MUCH, "max_tokens": 800, "stream": False}
    async with run_listening(**LONG) as running:
        loop = asyncio.get_running_loop()
        slow = await open_stalled(running.port, body)
        text = b""
        while not (b"\r\n\r\n" in text and b'"usage"' in text[-2000:] and text.endswith(b"}}")):
            text += await loop.sock_recv(slow, 4096)
            await asyncio.sleep(0)
        slow.close()
        reply = json.loads(text.partition(b"\r\n\r\n")[2])
    assert reply["usage"]["completion_tokens"] == 800
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 800


async def test_two_servers_on_one_port_are_refused_with_the_fix() -> None:
    async with run_listening() as running:
        assert running.port is not None
        section = ServerSection(http_port=running.port)
        running.door.config = running.door.config.model_copy(update={"server": section})
        with pytest.raises(ConfigError, match=r"--http-port 0 picks a free one"):
            await HttpServer(running.door).start()
