"""One call, from its message to its answer."""

import asyncio
import time

import grpc
import pytest

from jaxserve.client import (
    BadRequestError,
    CallDeadlineError,
    ConflictError,
    Delta,
    Finish,
    FinishReason,
    NotFoundError,
    OverloadedError,
    PreconditionError,
    Start,
    UnavailableError,
)
from jaxserve.config import LimitsSection
from jaxserve.gen import generation_pb2
from jaxserve.request import ChatMessage, ChatPrompt, SamplingParams
from tests.engines import NO_CACHE, Clock
from tests.fakes import CHAT_TEMPLATE, EOS_ID, expected_output, say
from tests.server.harness import EOF, Steps, connect, raw_stub, run_server, until

pytestmark = pytest.mark.asyncio

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(b"Hi!")


async def test_the_unary_answer_is_the_stream_put_together() -> None:
    answer = [*"h🌶é, stop here".encode(), EOS_ID]
    script = say({PROMPT: answer})
    async with (
        run_server(script=script, prefix_cache=NO_CACHE) as running,
        connect(running) as client,
    ):
        for options in ({}, {"stop_strings": ["op"]}, {"max_tokens": 3}, {"stream_interval": 4}):
            arguments = {"temperature": 0.0, "include_token_ids": True, **options}
            whole = await client.generate("Hi!", **arguments)  # type: ignore[arg-type]
            start, *deltas, finish = [e async for e in client.stream("Hi!", **arguments)]  # type: ignore[arg-type]
            assert isinstance(start, Start)
            assert isinstance(finish, Finish)
            assert all(isinstance(delta, Delta) for delta in deltas)
            assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == whole.text
            token_ids = [
                id for delta in deltas if isinstance(delta, Delta) for id in delta.token_ids
            ]
            assert tuple(token_ids) == whole.token_ids
            assert finish.reason is whole.finish_reason
            assert finish.matched_stop == whole.matched_stop
            assert finish.usage == whole.usage


async def test_the_phases_and_delivery_fit_in_the_clients_own_time() -> None:
    async with run_server(clock=time.monotonic) as running, connect(running) as client:
        for is_stream in (True, False):
            sent_s = time.monotonic()
            if is_stream:
                *_, end = [event async for event in client.stream("Hi!", max_tokens=5)]
                assert isinstance(end, Finish)
                assert end.timings is not None
                timings = end.timings
            else:
                timings = (await client.generate("Hi!", max_tokens=5)).timings
            took_s = time.monotonic() - sent_s
            phases = (timings.queue_s, timings.prefill_s, timings.decode_s, timings.delivery_s)
            assert all(seconds > 0 for seconds in phases)
            assert sum(phases) < took_s
            assert (timings.delivery_sum_s > 0) is is_stream


async def test_the_tokens_are_the_engines() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        result = await client.generate(
            PROMPT, temperature=0.0, max_tokens=8, include_token_ids=True
        )
    assert list(result.token_ids) == expected_output(PROMPT, GREEDY, 8, stop_ids=(EOS_ID,))
    assert result.finish_reason is FinishReason.MAX_TOKENS
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 8)
    assert (result.model, result.execution) == ("bytes", None)


async def test_each_token_is_sent_when_it_is_there() -> None:
    steps = Steps()
    async with run_server(steps, script=say({None: b"abcdefgh"})) as running:
        async with raw_stub(running) as stub:
            request = generation_pb2.GenerateRequest(text="Hi!")
            request.stop.max_tokens = 3
            call = stub.StreamGenerate(request)
            steps.allow(1)
            assert (await call.read()).start.prompt_tokens == 3
            assert (await call.read()).delta.text == "a"
            steps.allow(1)
            assert (await call.read()).delta.text == "b"
            steps.open()
            assert (await call.read()).delta.text == "c"
            assert (await call.read()).finish.reason == generation_pb2.FINISH_REASON_MAX_TOKENS
            assert await call.read() is EOF


async def test_an_interval_gathers_tokens_and_the_rest_comes_last() -> None:
    steps = Steps()
    steps.open()
    async with run_server(steps, script=say({None: b"abcdefgh"})) as running:
        async with connect(running) as client:
            events = [e async for e in client.stream("Hi!", max_tokens=7, stream_interval=3)]
    texts = [event.text for event in events if isinstance(event, Delta)]
    assert "".join(texts) == "abcdefg"
    assert all(len(text) >= 3 for text in texts[:-1])  # the engine may run ahead: never fewer


async def test_what_is_not_asked_for_is_not_sent() -> None:
    async with run_server(script=say({None: b"abcdefgh"})) as running:
        async with connect(running) as client:
            bare = [e async for e in client.stream("Hi!", max_tokens=4, omit_text=True)]
            ids = [
                e
                async for e in client.stream(
                    "Hi!", max_tokens=4, omit_text=True, include_token_ids=True
                )
            ]
            info = await client.generate("Hi!", max_tokens=4, include_execution_info=True)
    assert [type(event) for event in bare] == [Start, Finish]
    deltas = [event for event in ids if isinstance(event, Delta)]
    assert {delta.text for delta in deltas} == {""}
    assert [id for delta in deltas for id in delta.token_ids] == list(b"abcd")
    assert info.token_ids == ()
    assert info.execution is not None
    assert (info.execution.prefill_chunks, info.execution.preemptions) == (1, 0)


async def test_every_kind_of_end_is_told_with_what_matched() -> None:
    script = say({PROMPT: [*b"ab", EOS_ID], None: b"abcdefgh" * 9})
    async with run_server(script=script) as running, connect(running) as client:
        eos = await client.generate(PROMPT)
        string = await client.generate("x", stop_strings=["cd"], include_stop_text=True)
        token = await client.generate("x", stop_token_ids=[ord("c")])
        full = await client.generate("x")
        ignored = await client.generate(PROMPT, ignore_eos=True, max_tokens=4)
    assert (eos.finish_reason, eos.matched_stop, eos.text) == (FinishReason.EOS, None, "ab")
    assert (string.finish_reason, string.matched_stop) == (FinishReason.STOP, "cd")
    assert string.text == "abcd"
    assert (token.finish_reason, token.matched_stop) == (FinishReason.STOP, ord("c"))
    assert full.finish_reason is FinishReason.CONTEXT_LENGTH
    assert full.usage.completion_tokens == 39
    assert ignored.finish_reason is FinishReason.MAX_TOKENS


async def test_a_request_id_is_the_fields_or_the_metadatas_or_made_and_is_echoed() -> None:
    async with run_server() as running, raw_stub(running) as stub:
        request = generation_pb2.GenerateRequest(text="x", request_id="mine")
        request.stop.max_tokens = 2
        metadata = (("x-request-id", "theirs"),)
        ids = []
        for field in ("mine", ""):
            request.request_id = field
            for sent in (metadata, ()):
                call = stub.Generate(request, metadata=sent)
                response = await call
                echoed = dict(await call.initial_metadata())["x-request-id"]
                assert echoed == response.request_id
                ids.append(response.request_id)
    assert ids[:3] == ["mine", "mine", "theirs"]
    assert ids[3].startswith("req-")


@pytest.mark.parametrize("request_id", ["é", "a\nb", " a", "a" * 257, "\x7f"])
async def test_an_id_that_no_header_can_carry_is_refused(request_id: str) -> None:
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="request_id") as caught:
            await client.generate("x", request_id=request_id)
        assert caught.value.field == "request_id"
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_an_id_in_flight_is_refused_and_the_first_goes_on() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        first = asyncio.create_task(client.generate("x", request_id="same", max_tokens=2))
        await until(lambda: running.num_submitted == 1)
        with pytest.raises(ConflictError, match="same") as caught:
            await client.generate("x", request_id="same")
        assert caught.value.reason == "DUPLICATE_REQUEST_ID"
        steps.open()
        assert (await first).usage.completion_tokens == 2


async def test_the_deadline_and_the_queue_timeout_reach_the_engine() -> None:
    async with run_server(clock=time.monotonic) as running, connect(running) as client:
        before_s = time.monotonic()
        await client.generate("x", max_tokens=1, timeout_s=50.0, queue_timeout_s=7.25, priority=-3)
        await client.generate("x", max_tokens=1)
        after_s = time.monotonic()
    with_deadline, without = running.asked
    assert with_deadline.deadline_s is not None
    assert before_s + 49 < with_deadline.deadline_s <= after_s + 50.1
    assert (with_deadline.queue_timeout_s, with_deadline.priority) == (7.25, -3)
    assert (without.deadline_s, without.queue_timeout_s, without.priority) == (None, None, 0)


async def test_a_passed_deadline_ends_the_call_and_the_request() -> None:
    steps = Steps()
    async with run_server(steps, clock=time.monotonic) as running, connect(running) as client:
        with pytest.raises(CallDeadlineError):
            await client.generate("x", timeout_s=0.1)
        steps.open()
        await until(lambda: not running.engine._intake.live())
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_what_expires_in_the_queue_is_never_computed() -> None:
    steps = Steps()
    async with run_server(steps, clock=time.monotonic) as running, connect(running) as client:
        long = asyncio.create_task(client.generate("long", max_tokens=5))
        await until(lambda: running.runner.num_steps == 2)  # the engine thread waits for a result
        queued = [client.generate("x" * 20, timeout_s=0.05) for _ in range(20)]
        results = await asyncio.gather(*queued, return_exceptions=True)
        assert [type(result) for result in results] == [CallDeadlineError] * 20
        await until(lambda: running.num_open_calls == 1)
        steps.open()
        assert (await long).usage.completion_tokens == 5
        assert sum(len(plan.row_loads) for plan in running.runner.plans) == 1


async def test_a_queue_timeout_ends_the_call_with_the_reason() -> None:
    steps, clock = Steps(), Clock()
    async with run_server(steps, clock=clock) as running, connect(running) as client:
        long = asyncio.create_task(client.generate("long", max_tokens=9))
        await until(lambda: running.runner.num_steps == 2)
        queued = asyncio.create_task(client.generate("x", queue_timeout_s=2.0))
        await until(lambda: running.num_submitted == 2)
        clock.now_s += 2.5
        steps.open()
        with pytest.raises(CallDeadlineError, match="queue_timeout") as caught:
            await queued
        assert (caught.value.reason, caught.value.field) == ("DEADLINE", "queue_timeout")
        assert (await long).usage.completion_tokens == 9
        assert running.aborts == []


async def test_a_full_queue_says_when_to_try_again() -> None:
    steps = Steps()
    bounds = LimitsSection(max_waiting_requests=2)
    async with run_server(steps, bounds=bounds) as running, connect(running) as client:
        calls = [asyncio.create_task(client.generate("x", max_tokens=3))]
        await until(lambda: running.runner.num_steps == 2)  # it runs, and the thread waits
        calls += [asyncio.create_task(client.generate("x", max_tokens=3)) for _ in range(2)]
        await until(lambda: running.num_submitted == 3)
        with pytest.raises(OverloadedError, match="queue is full") as caught:
            await client.generate("x")
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 60
        steps.open()
        results = await asyncio.gather(*calls)
        assert [result.usage.completion_tokens for result in results] == [3] * 3


async def test_too_many_open_calls_are_refused_and_health_still_answers() -> None:
    steps = Steps()
    bounds = LimitsSection(max_open_calls=2)
    async with run_server(steps, bounds=bounds) as running, connect(running) as client:
        calls = [asyncio.create_task(client.generate("x", max_tokens=1)) for _ in range(2)]
        await until(lambda: running.num_open_calls == 2)
        with pytest.raises(OverloadedError, match="max_open_calls") as caught:
            await client.models()
        assert caught.value.retry_after_s == 1.0
        assert (await client.health()).is_ready
        steps.open()
        await asyncio.gather(*calls)
        assert len(await client.models()) == 1


async def test_chat_is_rendered_and_refused_where_there_is_no_template() -> None:
    conversation = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
    async with run_server(chat_template=CHAT_TEMPLATE) as running, connect(running) as client:
        tokens = await client.tokenize(conversation)
        result = await client.generate(conversation, max_tokens=1)
        assert result.usage.prompt_tokens == len(tokens.token_ids)
        assert tokens.token_ids.count(EOS_ID) == 1
        (model,) = await client.models()
        assert model.has_chat_template
    async with run_server() as running, connect(running) as client:
        with pytest.raises(PreconditionError, match="no chat template") as caught:
            await client.generate(conversation)
        assert (caught.value.reason, caught.value.field) == ("NO_CHAT_TEMPLATE", "chat")
        (model,) = await client.models()
        assert not model.has_chat_template


async def test_tokenize_and_detokenize() -> None:
    async with run_server(chat_template=CHAT_TEMPLATE) as running, connect(running) as client:
        tokens = await client.tokenize("hé</s>", include_offsets=True)
        assert tokens.token_ids == (*"hé".encode(), EOS_ID)
        assert tokens.offsets[0] == (0, 1)
        assert len(tokens.offsets) == len(tokens.token_ids)
        assert tokens.max_model_tokens == 40
        assert (await client.tokenize("")).token_ids == ()
        assert (await client.tokenize("x", add_special_tokens=False)).token_ids == (ord("x"),)
        assert await client.detokenize(tokens.token_ids) == "hé"
        assert await client.detokenize(tokens.token_ids, skip_special_tokens=False) == "hé</s>"
        assert await client.detokenize([]) == ""
        conversation = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
        with pytest.raises(BadRequestError, match="include_offsets"):
            await client.tokenize(conversation, include_offsets=True)
        async with raw_stub(running) as stub:
            with pytest.raises(grpc.RpcError, match="set text or chat"):
                await stub.Tokenize(generation_pb2.TokenizeRequest())


async def test_another_models_name_is_not_found() -> None:
    async with run_server() as running, connect(running) as client:
        for call in (
            client.generate("x", model="other"),
            client.tokenize("x", model="other"),
            client.detokenize([1], model="other"),
        ):
            with pytest.raises(NotFoundError, match="'bytes'") as caught:
                await call
            assert (caught.value.reason, caught.value.field) == ("MODEL_NOT_FOUND", "model")
        assert (await client.generate("x", model="bytes", max_tokens=1)).model == "bytes"


async def test_a_long_prompt_does_not_hold_the_loop_up() -> None:
    """It is tokenized in a thread, and still refused by name."""
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="shorten it to 39") as caught:
            await client.generate("x" * 100_000)
        assert caught.value.field == "text"
        bounds = running.engine.config.limits
        with pytest.raises(BadRequestError, match="bytes") as caught:
            await client.tokenize("x" * (bounds.max_prompt_bytes + 1))
        assert caught.value.field == "text"


async def test_no_engine_means_unavailable_with_nothing_begun() -> None:
    async with run_server() as running, connect(running) as client:
        running.server.door._engine = None
        for call in (client.generate("x"), client.models(), client.tokenize("x")):
            with pytest.raises(UnavailableError, match="loading") as caught:
                await call
            assert caught.value.reason == "NOT_SERVING"
        assert running.num_submitted == 0
