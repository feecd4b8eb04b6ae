"""An OpenAI endpoint as a target: what is sent, what is read, and every way to fail."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from jaxserve.errors import ConfigError
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.replay import Replay
from jaxserve.measure.targets.base import Ask, End, Message, TargetError
from jaxserve.measure.targets.openai_endpoint import OpenAITarget

URL = "http://peer/v1"
USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


def event(**facts: Any) -> bytes:  # noqa: ANN401  # any JSON
    return b"data: " + json.dumps(facts).encode() + b"\n\n"


def choice(text: str, finish: str | None = None, **facts: Any) -> bytes:  # noqa: ANN401
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish, **facts}])


def chat(content: str | None, finish: str | None = None, **delta: Any) -> bytes:  # noqa: ANN401
    delta = delta if content is None else {"content": content, **delta}
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"
NO_USAGES: list[object] = [
    "four",
    [4],
    {"prompt_tokens": 3, "completion_tokens": "4"},
    {"prompt_tokens": 3, "completion_tokens": -4},
    {"prompt_tokens": 3, "completion_tokens": True},
    {"prompt_tokens": 3, "completion_tokens": 4.0},
    {"prompt_tokens": 3, "completion_tokens": float("nan")},
    {"prompt_tokens": 3, "completion_tokens": 10**30},
    {"prompt_tokens": "x", "completion_tokens": 4},
    {**USAGE, "prompt_tokens_details": {"cached_tokens": "all"}},
    {**USAGE, "prompt_tokens_details": [3]},
]


class Peer:
    """An endpoint that sends these bytes, and keeps what it was asked."""

    def __init__(self, *chunks: bytes, status: int = 200, error: Exception | None = None) -> None:
        self.chunks = chunks
        self.status = status
        self.error = error
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            models = [{"id": "big", "max_model_len": 512}, {"id": "small"}]
            return httpx.Response(200, json={"data": models})
        if self.error is not None and not self.chunks:
            raise self.error
        self.asked.append(json.loads(request.content))
        self.headers.append(request.headers)
        return httpx.Response(self.status, content=self._content())

    async def _content(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        if self.error is not None:
            raise self.error

    def target(self, **options: Any) -> OpenAITarget:  # noqa: ANN401  # of the target
        options.setdefault("model", "big")
        return OpenAITarget(URL, transport=httpx.MockTransport(self), **options)


def build_ask(**facts: Any) -> Ask:  # noqa: ANN401  # fields
    chosen: dict[str, Any] = {"index": 0, "request_id": "r0", "at_s": 0.0, "prompt": (5, 6, 7)}
    return Ask(**{**chosen, **facts})


def read(target: OpenAITarget, ask: Ask | None = None) -> list[Message | End]:
    async def gather() -> list[Message | End]:
        async with contextlib.aclosing(target.stream(ask or build_ask(), left_s=None)) as stream:
            return [part async for part in stream]

    return asyncio.run(gather())


def counts(parts: list[Message | End]) -> list[int | None]:
    return [part.num_tokens for part in parts if isinstance(part, Message)]


def test_a_plain_completion_is_asked_by_openais_names_alone() -> None:
    peer = Peer(choice("a"), choice("b", "length"), event(choices=[], usage=USAGE), DONE)
    sampling = {"temperature": 0.0, "max_tokens": 4}
    parts = read(peer.target(), build_ask(sampling=sampling))
    assert peer.asked == [
        {
            "model": "big",
            "prompt": [5, 6, 7],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "max_tokens": 4,
        }
    ]
    assert peer.headers[0]["x-request-id"] == "r0"
    assert peer.headers[0]["accept-encoding"] == "identity"
    assert counts(parts) == [None, None]
    assert parts[-1] == End(
        finish_reason="length", prompt_tokens=3, output_tokens=4, cached_prompt_tokens=None
    )


class OpenPeer(Peer):
    """Keeps the body open after its last chunk."""

    async def _content(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        await asyncio.Event().wait()


def test_a_stream_ends_with_its_last_word_though_the_body_stays_open() -> None:
    peer = OpenPeer(choice("a", "length", token_ids=[1]), event(choices=[], usage=USAGE), DONE)
    assert counts(parts := read(peer.target())) == [1]
    assert isinstance(parts[-1], End)


def test_vllms_extras_are_sent_only_where_they_are_asked_for() -> None:
    sampling = {"ignore_eos": True, "max_tokens": 4, "top_k": 5}
    peer = Peer(choice("a", "length"), DONE)
    read(peer.target(extras="vllm"), build_ask(sampling=sampling, priority=2))
    body = peer.asked[0]
    assert (body["ignore_eos"], body["top_k"], body["return_token_ids"]) == (True, 5, True)
    assert body["priority"] == -2
    read(peer.target(extras="jaxserve"), build_ask(sampling=sampling, priority=2))
    assert peer.asked[1] == {**body, "priority": 2}
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    with pytest.raises(ConfigError, match="ignore_eos, top_k: not of OpenAI's API"):
        read(peer.target(), build_ask(sampling=sampling))
    with pytest.raises(ConfigError, match="priority"):
        read(peer.target(), build_ask(priority=1))


def test_token_ids_of_each_message_are_its_count() -> None:
    peer = Peer(
        choice("ab", token_ids=[1, 2]),
        choice("", token_ids=[3]),
        choice("c", "length", token_ids=[4]),
        event(choices=[], usage=USAGE),
        DONE,
    )
    parts = read(peer.target(extras="vllm"))
    assert counts(parts) == [2, 1, 1]
    assert parts[1] == Message(num_tokens=1, has_text=False)


def test_a_running_usage_is_counted_by_its_steps() -> None:
    def running(text: str, told: int, finish: str | None = None) -> bytes:
        usage = {"prompt_tokens": 3, "completion_tokens": told}
        return event(choices=[{"text": text, "finish_reason": finish}], usage=usage)

    peer = Peer(running("", 0), running("ab", 2), running("", 3), running("c", 4, "stop"), DONE)
    parts = read(peer.target(extras="vllm"))
    assert counts(parts) == [0, 2, 1, 1]
    assert isinstance(parts[-1], End)
    assert parts[-1].output_tokens == 4


def test_a_chats_role_and_its_bare_end_are_no_messages() -> None:
    peer = Peer(
        chat("", role="assistant"),
        chat("Hel"),
        chat("lo"),
        chat(None, reasoning_content="hm"),
        chat(None, "stop"),
        event(choices=[], usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 2}}),
        DONE,
    )
    parts = read(peer.target(api="chat"), build_ask(prompt="Hi"))
    assert peer.asked[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert counts(parts) == [None, None, None]
    assert isinstance(parts[-1], End)
    assert parts[-1].cached_prompt_tokens == 2


def test_a_chat_of_token_ids_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="chat takes text"):
        read(Peer().target(api="chat"))


@pytest.mark.parametrize("size", [1, 5, 100_000])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    content = choice("é\u2028") + choice("b", "length") + event(choices=[], usage=USAGE) + DONE
    peer = Peer(*(content[start : start + size] for start in range(0, len(content), size)))
    parts = read(peer.target())
    assert len(parts) == 3
    assert isinstance(parts[-1], End)


@pytest.mark.parametrize(
    ("peer", "outcome", "words"),
    [
        (Peer(b'{"error": "queue full"}', status=429), "refused", "HTTP 429: .*queue full"),
        (Peer(b"no such model", status=404), "refused", "HTTP 404"),
        (Peer(b"starting", status=503), "refused", "HTTP 503"),
        (Peer(b"boom", status=500), "failed", "HTTP 500: boom"),
        (Peer(b"late", status=504), "timed_out", "HTTP 504"),
        (Peer(error=httpx.ConnectError("nobody")), "refused", "no connection: nobody"),
        (Peer(choice("a"), error=httpx.ReadError("reset")), "failed", "broke: reset"),
        (Peer(choice("a"), event(error={"message": "oom"})), "failed", "the stream says .*oom"),
        (Peer(choice("a"), DONE), "failed", "stopped before its end"),
        (Peer(choice("a")), "failed", "stopped before its end"),
        (Peer(b"data: {nonsense\n\n"), "failed", "not OpenAI's"),
        (Peer(b"data: [1]\n\n"), "failed", "not OpenAI's"),
        (Peer(b"data: \xff\n\n"), "failed", "not OpenAI's"),
        (Peer(b"data: " + b"[" * 100_000 + b"\n\n"), "failed", "not OpenAI's"),
        (Peer(event(choices={"0": 1})), "failed", "not OpenAI's"),
        *(
            (Peer(choice("a", "length"), event(choices=[], usage=usage)), "failed", "not OpenAI's")
            for usage in NO_USAGES
        ),
    ],
)
def test_every_way_to_fail_has_its_outcome(peer: Peer, outcome: str, words: str) -> None:
    with pytest.raises(TargetError, match=words) as caught:
        read(peer.target())
    assert caught.value.outcome == outcome


def test_a_running_usage_that_falls_takes_no_token_back() -> None:
    steps = [{"completion_tokens": told} for told in (3, 1, 4)]
    chunks = [event(choices=[{"index": 0, "text": "a"}], usage=usage) for usage in steps]
    parts = read(Peer(*chunks, choice("", "length"), DONE).target())
    assert counts(parts)[:3] == [3, 0, 1]


def test_the_model_is_the_first_or_the_one_that_is_named() -> None:
    async def names(model: str) -> tuple[str, int, int]:
        facts = await Peer().target(model=model, vocab_size=99).describe()
        return facts.model, facts.max_model_tokens, facts.vocab_size

    assert asyncio.run(names("")) == ("big", 512, 99)
    assert asyncio.run(names("small")) == ("small", 0, 99)
    with pytest.raises(TargetError, match="'tiny' is not served there, but big, small"):
        asyncio.run(names("tiny"))


def test_a_key_is_sent_as_such() -> None:
    peer = Peer(choice("a", "stop"), DONE)
    read(peer.target(api_key="sesame"))
    assert peer.headers[0]["authorization"] == "Bearer sesame"


@contextlib.asynccontextmanager
async def http_server(answer: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A real socket that reads a request and then writes what `answer` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if b"content-length" in line)
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Connection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def replay_once(answer: Callable[[asyncio.StreamWriter], Any], **options: Any) -> RequestRecord:  # noqa: ANN401
    records: list[RequestRecord] = []

    async def work() -> None:
        async with http_server(answer) as url:
            target = OpenAITarget(url, model="big")
            asks = iter([build_ask(wanted_tokens=4)])
            await Replay(target=target, asks=asks, on_record=records.append, **options).run()
            await target.close()

    asyncio.run(work())
    return records[0]


def test_over_a_real_socket_an_answer_is_read_to_its_end() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in (choice("a"), choice("b", "length"), event(choices=[], usage=USAGE), DONE):
            writer.write(part)
            await writer.drain()

    record = replay_once(answer)
    assert (record.outcome, record.output_tokens, record.prompt_tokens) == ("ok", 4, 3)
    assert [arrival.num_tokens for arrival in record.arrivals] == [2, 2]
    assert record.are_tokens_assumed


def test_over_a_real_socket_a_server_that_hangs_is_given_up() -> None:
    gone = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(choice("a"))
        await writer.drain()
        try:
            while True:
                writer.write(b": still here\n\n")
                await writer.drain()
                await asyncio.sleep(0.005)
        finally:
            gone.append(True)

    record = replay_once(answer, timeout_s=0.2)
    assert (record.outcome, len(record.arrivals)) == ("timed_out", 1)
    assert gone
