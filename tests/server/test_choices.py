"""Several choices of one request, through gRPC."""

import asyncio

import grpc
import pytest

from jaxserve.client import Delta, Finish, FinishReason, Start
from jaxserve.gen import generation_pb2
from jaxserve.request import SamplingParams
from tests.engines import NO_CACHE
from tests.fakes import EOS_ID, expected_output
from tests.server.harness import Steps, connect, raw_stub, read_rest, run_server, until

pytestmark = pytest.mark.asyncio

PROMPT = tuple(b"Hi!")
NOISY = SamplingParams(temperature=0.8)


def alone(choice: int, *, num_tokens: int) -> list[int]:
    """What a choice must write, as if there were no other."""
    return expected_output(PROMPT, NOISY, num_tokens, seed=7, stop_ids=(EOS_ID,), choice=choice)


async def test_each_choice_has_noise_of_its_own_and_the_unary_answer_is_the_stream() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        options = {"n": 4, "seed": 7, "temperature": 0.8, "ignore_eos": True, "max_tokens": 6}
        whole = await client.generate(PROMPT, include_token_ids=True, **options)  # type: ignore[arg-type]
        events = [
            event
            async for event in client.stream(PROMPT, include_token_ids=True, **options)  # type: ignore[arg-type]
        ]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    outputs = [list(choice.token_ids) for choice in whole.choices]
    assert outputs == [alone(choice, num_tokens=6) for choice in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    streamed: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, Delta):
            streamed.setdefault(event.index, []).extend(event.token_ids)
            texts[event.index] = texts.get(event.index, "") + event.text
    assert [streamed[index] for index in range(4)] == outputs
    assert [texts[index] for index in range(4)] == [choice.text for choice in whole.choices]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 24)


async def test_each_choice_has_one_finish_and_the_last_one_the_accounts() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        events = [
            event
            async for event in client.stream(
                PROMPT, n=3, seed=7, temperature=0.8, max_tokens=5, include_execution_info=True
            )
        ]
    assert isinstance(events[0], Start)
    assert sum(isinstance(event, Start) for event in events) == 1
    finishes = [event for event in events if isinstance(event, Finish)]
    assert sorted(finish.index for finish in finishes) == [0, 1, 2]
    assert events[-1] is finishes[-1]
    for finish in finishes[:-1]:
        assert (finish.usage, finish.timings, finish.execution) == (None, None, None)
    last = finishes[-1]
    assert None not in (last.usage, last.timings, last.execution)
    ended: set[int] = set()
    for event in events:
        if isinstance(event, Delta):
            assert event.index not in ended
        elif isinstance(event, Finish):
            ended.add(event.index)


async def test_choices_end_each_by_its_own_stop() -> None:
    """Each stops at a token of its own output; the others go on."""
    wanted = [alone(choice, num_tokens=8) for choice in range(3)]
    stop = next(token for token in wanted[1][1:5] if all(token not in w for w in (wanted[0],)))
    async with run_server(script=None) as running, connect(running) as client:
        whole = await client.generate(
            PROMPT,
            n=3,
            seed=7,
            temperature=0.8,
            max_tokens=8,
            ignore_eos=True,
            stop_token_ids=[stop],
            include_token_ids=True,
        )
    for choice, tokens in zip(whole.choices, wanted, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else 8
        assert list(choice.token_ids) == tokens[:end]
        reason = FinishReason.STOP if stop in tokens else FinishReason.MAX_TOKENS
        assert (choice.finish_reason, choice.matched_stop) == (
            reason,
            stop if stop in tokens else None,
        )


async def test_greedy_choices_are_the_same() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        whole = await client.generate(
            PROMPT, n=4, temperature=0.0, max_tokens=6, include_token_ids=True
        )
    assert len({choice.token_ids for choice in whole.choices}) == 1


@pytest.mark.parametrize("prompt", ["Hé 🌶", tuple("Hé 🌶".encode())])
async def test_each_choice_begins_with_the_prompts_text(prompt: str | tuple[int, ...]) -> None:
    options = {"n": 2, "seed": 7, "temperature": 0.8, "max_tokens": 4}
    async with run_server(prefix_cache=NO_CACHE) as running, connect(running) as client:
        plain = await client.generate(prompt, **options)  # type: ignore[arg-type]
        whole = await client.generate(prompt, echo=True, **options)  # type: ignore[arg-type]
        texts = {0: "", 1: ""}
        async for event in client.stream(prompt, echo=True, **options):  # type: ignore[arg-type]
            if isinstance(event, Delta):
                texts[event.index] += event.text
    for choice, bare in zip(whole.choices, plain.choices, strict=True):
        assert choice.text == f"Hé 🌶{bare.text}" == texts[choice.index]
    assert whole.usage == plain.usage


async def test_special_tokens_of_the_prompt_are_in_its_echo_as_in_the_output() -> None:
    prompt = (*b"Hi", EOS_ID, *b"!")
    async with run_server() as running, connect(running) as client:
        for is_skipped, text in ((True, "Hi!a"), (False, "Hi</s>!a")):
            whole = await client.generate(
                prompt, echo=True, skip_special_tokens=is_skipped, max_tokens=1
            )
            assert whole.text == text


async def test_a_cancel_ends_all_choices() -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        request = generation_pb2.GenerateRequest(text="Hi!", request_id="gone")
        request.sampling.n = 4
        request.stop.max_tokens = 30
        call = stub.StreamGenerate(request)
        steps.allow(3)
        assert (await call.read()).HasField("start")
        call.cancel()
        await until(lambda: running.aborts == ["gone"])
        steps.open()
        await until(lambda: running.finished("cancelled") == 1)
        assert not running.engine._scheduler.has_unfinished


async def test_a_request_without_room_for_its_choices_is_refused() -> None:
    """Four rows: five choices can never run at once."""
    async with run_server() as running, raw_stub(running) as stub:
        request = generation_pb2.GenerateRequest(text="x")
        request.sampling.n = 5
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request.sampling.n = 4
        request.stop.max_tokens = 2
        assert len((await stub.Generate(request)).choices) == 4


async def test_ending_one_by_its_id_gives_every_choice_its_end() -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        request = generation_pb2.GenerateRequest(text="Hi!", request_id="r")
        request.sampling.n = 3
        request.stop.max_tokens = 30
        request.stop.ignore_eos = True
        call = stub.StreamGenerate(request)
        steps.allow(2)
        assert (await call.read()).HasField("start")
        cancel = generation_pb2.CancelGenerationRequest(request_id="r")
        assert (await stub.CancelGeneration(cancel)).found
        steps.open()
        messages = await asyncio.wait_for(read_rest(call), 60)
        finishes = [message.finish for message in messages if message.HasField("finish")]
        assert sorted(finish.index for finish in finishes) == [0, 1, 2]
        assert {finish.reason for finish in finishes} == {generation_pb2.FINISH_REASON_CANCELLED}
        assert messages[-1].finish.HasField("usage")
