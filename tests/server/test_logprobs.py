"""Log-probabilities of output and prompt, through gRPC (C37, and C41's large replies)."""

import math
from collections.abc import Sequence

import grpc
import pytest

from jaxserve.client import BadRequestError, Delta, Finish, FinishReason, Start, TokenLogprob
from jaxserve.config import LimitsSection
from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs
from jaxserve.server.edge import Edge
from tests.fake_logprobs import expected_logprobs, expected_prompt_logprobs
from tests.fakes import EOS_ID, VOCAB_SIZE, build_byte_tokenizer, say
from tests.server.harness import connect, raw_stub, read_rest, run_server

pytestmark = pytest.mark.asyncio

PROMPT = tuple(b"Hello, you!")
TOKENIZER = build_byte_tokenizer()


def check(found: Sequence[TokenLogprob], wanted: Sequence[TokenLogprobs]) -> None:
    """Compares all that is told of consecutive tokens; float32 went over the wire."""
    assert [(entry.token_id, entry.rank) for entry in found] == [
        (entry.token_id, entry.rank) for entry in wanted
    ]
    for entry, want in zip(found, wanted, strict=True):
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert entry.token_bytes == TOKENIZER.token_bytes(entry.token_id)
        assert tuple(top.token_id for top in entry.top) == want.top_ids
        assert [top.logprob for top in entry.top] == pytest.approx(want.top_logprobs, abs=1e-5)
        for top in entry.top:
            assert top.token_bytes == TOKENIZER.token_bytes(top.token_id)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("has_ids", [True, False])
async def test_each_output_token_has_its_own(num_top: int, has_ids: bool) -> None:
    async with run_server(script=None) as running, connect(running) as client:
        options = {"temperature": 0.9, "seed": 3, "max_tokens": 6, "ignore_eos": True}
        ids = await client.generate(PROMPT, include_token_ids=True, **options)  # type: ignore[arg-type]
        whole = await client.generate(
            PROMPT,
            logprobs=num_top,
            include_token_ids=has_ids,
            **options,  # type: ignore[arg-type]
        )
        deltas = [
            event
            async for event in client.stream(
                PROMPT,
                logprobs=num_top,
                include_token_ids=has_ids,
                **options,  # type: ignore[arg-type]
            )
            if isinstance(event, Delta)
        ]
    wanted = expected_logprobs(PROMPT, ids.token_ids, num_top=num_top, vocab_size=VOCAB_SIZE)
    check(whole.logprobs, wanted)
    check([entry for delta in deltas for entry in delta.logprobs], wanted)
    assert (whole.token_ids, whole.text) == (ids.token_ids if has_ids else (), ids.text)
    for delta in deltas:
        named = tuple(entry.token_id for entry in delta.logprobs)
        assert delta.token_ids == (named if has_ids else ())


async def test_not_set_is_none_and_zero_is_the_tokens_own() -> None:
    async with run_server() as running, connect(running) as client:
        bare = await client.generate(PROMPT, max_tokens=3)
        zero = await client.generate(PROMPT, max_tokens=3, logprobs=0, prompt_logprobs=0)
    assert (bare.logprobs, bare.prompt_logprobs) == ((), ())
    assert len(zero.logprobs) == 3
    assert len(zero.prompt_logprobs) == len(PROMPT) - 1
    assert {entry.top for entry in (*zero.logprobs, *zero.prompt_logprobs)} == {()}


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
async def test_more_alternatives_than_the_limit_are_refused_by_name(field: str) -> None:
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError, match=f"{field} is 21") as caught:
            await client.generate("x", **{field: 21})  # type: ignore[arg-type]
        assert caught.value.field == f"output.{field}"
        await client.generate("x", max_tokens=1, **{field: 20})  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("num_top", [0, 1, 5])
async def test_the_prompt_has_its_own_from_the_second_token_on(length: int, num_top: int) -> None:
    """Alone, again, and beside others, over chunks of 6 tokens and pages of 4."""
    prompt = tuple(range(10, 10 + length))
    wanted = expected_prompt_logprobs(prompt, num_top=num_top, vocab_size=VOCAB_SIZE)
    async with run_server() as running, connect(running) as client:
        for n in (1, 1, 2):
            whole = await client.generate(prompt, max_tokens=2, n=n, prompt_logprobs=num_top)
            check(whole.prompt_logprobs, wanted)
            start, *rest = [
                event
                async for event in client.stream(prompt, max_tokens=2, n=n, prompt_logprobs=num_top)
            ]
            assert isinstance(start, Start)
            check(start.prompt_logprobs, wanted)
            assert not [event for event in rest if isinstance(event, Start)]


async def test_a_prompt_can_be_scored_without_any_output() -> None:
    wanted = expected_prompt_logprobs(PROMPT, num_top=2, vocab_size=VOCAB_SIZE)
    async with run_server() as running, connect(running) as client:
        events = [event async for event in client.stream(PROMPT, max_tokens=0, prompt_logprobs=2)]
        start, finish = events
        whole = await client.generate(PROMPT, max_tokens=0, prompt_logprobs=2, echo=True)
        with pytest.raises(BadRequestError, match="max_tokens is 0") as caught:
            await client.generate(PROMPT, max_tokens=0)
    assert isinstance(start, Start)
    check(start.prompt_logprobs, wanted)
    assert isinstance(finish, Finish)
    assert finish.reason is FinishReason.MAX_TOKENS
    assert (whole.text, whole.usage.completion_tokens) == ("Hello, you!", 0)
    check(whole.prompt_logprobs, wanted)
    assert caught.value.field == "stop.max_tokens"


async def test_token_bytes_are_there_where_the_text_is_not() -> None:
    """A character in four tokens, and a special token that the text leaves out."""
    async with run_server(script=say({None: [*"🌶".encode(), EOS_ID]})) as running:
        async with connect(running) as client:
            whole = await client.generate(PROMPT, logprobs=0)
            assert whole.text == "🌶"
            spelled = [entry.token_bytes for entry in whole.logprobs]
            assert spelled == [bytes([byte]) for byte in "🌶".encode()] + [b"</s>"]
            text = b"".join(spelled[:-1]).decode()
            assert text == whole.text


async def test_what_is_too_large_for_one_message_comes_in_several() -> None:
    """Harness: a limit so small that 36 prompt tokens with 20 alternatives do not fit."""
    prompt = tuple(range(36))
    bounds = LimitsSection(max_message_bytes=4000)
    wanted = expected_prompt_logprobs(prompt, num_top=20, vocab_size=VOCAB_SIZE)
    async with run_server(bounds=bounds) as running:
        async with raw_stub(running) as stub, connect(running) as client:
            request = generation_pb2.GenerateRequest(token_ids={"ids": prompt})
            request.output.prompt_logprobs = 20
            request.output.logprobs = 20
            request.stop.max_tokens = 4
            request.output.stream_interval = 1000
            messages = await read_rest(stub.StreamGenerate(request))
            kinds = [message.WhichOneof("event") for message in messages]
            assert kinds.count("start") > 2
            assert kinds == sorted(kinds, key=["start", "delta", "finish"].index)
            assert max(message.ByteSize() for message in messages) <= 4000
            # the client puts them together
            start, *_ = [
                event
                async for event in client.stream(
                    prompt, max_tokens=4, prompt_logprobs=20, logprobs=20
                )
            ]
            assert isinstance(start, Start)
            check(start.prompt_logprobs, wanted)
            # as one message it is refused by the limit's name, and the server is well (K6)
            with pytest.raises(BadRequestError, match="limit of a message is 4000") as caught:
                await client.generate(prompt, max_tokens=4, prompt_logprobs=20)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_a_position_that_fits_no_message_ends_the_stream_by_the_limits_name() -> None:
    bounds = LimitsSection(max_message_bytes=150)
    async with run_server(bounds=bounds) as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="limit of a message is 150"):
            async for _ in client.stream((1, 2), max_tokens=2, logprobs=20):
                pass
        await client.generate("x", max_tokens=1, logprobs=0)


async def test_a_far_too_large_answer_is_given_up_while_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when all of it has been computed and kept."""
    refused: list[int] = []
    refuse = Edge.refuse_size

    def watched(edge: Edge, num_bytes: int) -> None:
        refused.append(num_bytes)
        refuse(edge, num_bytes)

    monkeypatch.setattr(Edge, "refuse_size", watched)
    bounds = LimitsSection(max_message_bytes=600)
    async with run_server(bounds=bounds) as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="limit of a message is 600"):
            await client.generate(tuple(range(8)), max_tokens=30, logprobs=20, ignore_eos=True)
        assert refused[0] < 3 * 600


async def test_every_number_is_finite() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        whole = await client.generate(PROMPT, max_tokens=8, logprobs=20, prompt_logprobs=20, n=2)
    entries = [*whole.prompt_logprobs, *whole.logprobs]
    assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in entries)
    assert all(math.isfinite(top.logprob) for entry in entries for top in entry.top)
    assert all(entry.rank >= 1 for entry in entries)
