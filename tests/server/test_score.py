"""Score: log-likelihoods of continuations, through gRPC."""

import asyncio
import dataclasses
import time
from typing import Any

import grpc
import pytest

from jaxserve.client import (
    BadRequestError,
    CallCancelledError,
    CallDeadlineError,
    ConflictError,
    OverloadedError,
    Score,
    ScoreItem,
    ServerFaultError,
)
from jaxserve.client.errors import read_error
from jaxserve.config import LimitsSection, TenantLimits, TenantsSection
from jaxserve.engine import ServedModel
from jaxserve.gen import generation_pb2
from jaxserve.plan import StepPlan
from jaxserve.server.score_items import read_items
from tests.engines import build_engine
from tests.fake_logprobs import expected_prompt_logprobs
from tests.fakes import BOS_ID, EOS_ID, VOCAB_SIZE
from tests.server.harness import Steps, connect, raw_stub, run_server, until

pytestmark = pytest.mark.asyncio

CONTEXT, CONTINUATION = "The sky is", " blue"


def check(found: Score, context: bytes | tuple[int, ...], continuation: bytes) -> None:
    prompt = (*context, *continuation)
    entries = expected_prompt_logprobs(prompt, num_top=0, vocab_size=VOCAB_SIZE)
    scored = entries[-len(continuation) :]
    assert found.num_tokens == len(continuation)
    assert found.sum_logprob == pytest.approx(sum(entry.logprob for entry in scored), abs=1e-5)
    assert found.is_greedy is all(entry.rank == 1 for entry in scored)
    if found.token_logprobs:
        assert [entry.token_id for entry in found.token_logprobs] == list(continuation)
        assert [entry.rank for entry in found.token_logprobs] == [entry.rank for entry in scored]
        total = sum(entry.logprob for entry in found.token_logprobs)
        assert total == pytest.approx(found.sum_logprob, abs=1e-4)


async def test_every_kind_of_context_and_continuation() -> None:
    ids = tuple(CONTEXT.encode())
    items = [
        ScoreItem(context=before, continuation=after)
        for before in (CONTEXT, ids)
        for after in (CONTINUATION, tuple(CONTINUATION.encode()))
    ]
    async with run_server() as running, connect(running) as client:
        for is_wanted in (False, True):
            scores = await client.score(
                items, request_id="r", include_token_logprobs=is_wanted, priority=-1
            )
            assert (scores.request_id, scores.model) == ("r", "bytes")
            for found in scores.results:
                check(found, ids, CONTINUATION.encode())
                assert bool(found.token_logprobs) is is_wanted
            assert scores.usage.prompt_tokens == 4 * 15
            assert scores.usage.completion_tokens == 0
        assert {asked.priority for asked in running.asked} == {-1}
        assert [asked.id for asked in running.asked[:4]] == ["r/0", "r/1", "r/2", "r/3"]


async def test_the_most_likely_continuation_is_greedy_and_others_are_not() -> None:
    context = tuple(b"abc")
    best: list[int] = []
    for _ in range(3):
        tokens = (*context, *best)
        likely = [
            expected_prompt_logprobs((*tokens, token), num_top=0, vocab_size=VOCAB_SIZE)[-1]
            for token in range(VOCAB_SIZE)
        ]
        best.append(max(likely, key=lambda entry: entry.logprob).token_id)
    other = [*best[:2], (best[2] + 1) % VOCAB_SIZE]
    items = [ScoreItem(context=context, continuation=tokens) for tokens in (best, other)]
    async with run_server() as running, connect(running) as client:
        scores = await client.score(items)
    assert [found.is_greedy for found in scores.results] == [True, False]
    assert scores.results[0].sum_logprob > scores.results[1].sum_logprob


async def test_without_a_context_it_is_the_begin_of_text_token() -> None:
    item = ScoreItem(continuation="blue")
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="no begin-of-text token") as caught:
            await client.score([item])
        assert caught.value.field == "items[0].context"
        running.engine.model = with_bos(running.engine.model)
        scores = await client.score([item, ScoreItem(continuation=tuple(b"blue"))])
    for found in scores.results:
        check(found, (BOS_ID,), b"blue")


def with_bos(model: ServedModel) -> ServedModel:
    return dataclasses.replace(model, bos_id=BOS_ID)


async def test_texts_are_tokenized_together_and_scored_from_where_they_differ() -> None:
    engine, _ = build_engine()
    for context, continuation, prompt, num_scored in (
        ("ab", "cd", (*b"abcd",), 2),
        ("ab</s>", "c", (*b"ab", EOS_ID, *b"c"), 1),
        # together they spell one token: it is scored, and all after it
        ("ab</s", ">c", (*b"ab", EOS_ID, *b"c"), 2),
    ):
        pair = generation_pb2.ScoreItem(context_text=context, continuation_text=continuation)
        (item,) = read_items([pair], engine)
        assert (item.prompt, item.num_scored) == (prompt, num_scored)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"context_text": "a"}, "items[1].continuation"),
        ({"context_text": "a", "continuation_text": ""}, "items[1].continuation_text"),
        ({"context_text": "", "continuation_text": "a"}, "items[1].context_text"),
        ({"context_text": "</s", "continuation_text": ">"}, "items[1].context_text"),
        (
            {"context_token_ids": {"ids": [1]}, "continuation_token_ids": {}},
            "items[1].continuation_token_ids",
        ),
        ({"context_token_ids": {}, "continuation_text": "a"}, "items[1].context_token_ids"),
        ({"continuation_text": "a"}, "items[1].context"),
        ({"context_text": "a", "continuation_text": "b" * 40}, "items[1]"),
        (
            {"context_text": "a", "continuation_token_ids": {"ids": [VOCAB_SIZE]}},
            "items[1]",
        ),
        (
            {"context_text": "a", "continuation_token_ids": {"ids": range(41)}},
            "items[1].continuation_token_ids",
        ),
    ],
)
async def test_what_is_wrong_with_an_item_ends_the_call_with_its_name(
    item: dict[str, Any], field: str
) -> None:
    async with run_server() as running, raw_stub(running) as stub, connect(running) as client:
        good = {"context_text": "a", "continuation_text": "b"}
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Score(generation_pb2.ScoreRequest(items=[good, item, good]))
        error = read_error(caught.value)
        assert isinstance(error, BadRequestError)
        assert error.field == field
        await until(lambda: not running.engine._intake.live())
        assert (await client.score([ScoreItem(context="a", continuation="b")])).results  # K6


async def test_the_number_of_items_is_bounded() -> None:
    bounds = LimitsSection(max_score_items=2)
    item = ScoreItem(context="a", continuation="b")
    async with run_server(bounds=bounds) as running, connect(running) as client:
        assert len((await client.score([item] * 2)).results) == 2
        for count in (0, 3):
            with pytest.raises(BadRequestError, match=f"items has {count} entries") as caught:
                await client.score([item] * count)
            assert caught.value.field == "items"


async def test_many_items_wait_for_their_turn_and_come_back_in_order() -> None:
    """More than the queue would take at once."""
    bounds = LimitsSection(max_waiting_requests=2)
    items = [ScoreItem(context=(n,), continuation=(n + 1, n + 2)) for n in range(40)]
    async with run_server(bounds=bounds) as running, connect(running) as client:
        scores = await client.score(items)
        for n, found in enumerate(scores.results):
            check(found, (n,), bytes([n + 1, n + 2]))
        assert running.num_submitted == 40


async def test_a_tenant_that_may_run_few_at_once_can_score_many() -> None:
    async with run_server() as running, connect(running) as client:
        limits = TenantLimits(max_concurrent_requests=1)
        running.engine.quotas.set_limits(TenantsSection(default=limits))
        items = [ScoreItem(context=(n,), continuation=(n + 1,)) for n in range(6)]
        for n, found in enumerate((await client.score(items)).results):
            check(found, (n,), bytes([n + 1]))
        # that some had to wait for the others is no refusal
        assert running.engine.metrics.value("requests_refused_total") == 0
        assert running.engine.metrics.value("tenant_quota_refusals_total") == 0


async def test_a_full_queue_of_others_ends_the_call_as_any_other() -> None:
    steps = Steps()
    bounds = LimitsSection(max_waiting_requests=1)
    async with run_server(steps, bounds=bounds) as running, connect(running) as client:
        calls = [asyncio.create_task(client.generate("x", max_tokens=3))]
        await until(lambda: running.runner.num_steps == 2)  # it runs, and the thread waits
        calls.append(asyncio.create_task(client.generate("x", max_tokens=3)))
        await until(lambda: running.num_submitted == 2)
        with pytest.raises(OverloadedError, match="queue is full") as caught:
            await client.score([ScoreItem(context="a", continuation="b")])
        assert (caught.value.reason, caught.value.field) == ("QUEUE_FULL", "")
        assert running.engine.metrics.value("requests_refused_total", reason="queue_full") == 1
        steps.open()
        await asyncio.gather(*calls)


async def test_an_engine_that_fails_ends_the_call() -> None:
    async with run_server() as running, connect(running) as client:
        running.runner.on_launch = break_launch
        with pytest.raises(ServerFaultError):
            await client.score([ScoreItem(context="a", continuation="b")] * 3)


def break_launch(plan: StepPlan) -> None:
    raise RuntimeError("the device is gone")


async def test_all_items_end_when_the_call_does() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        items = [ScoreItem(context=(1, 2, 3), continuation=(n,)) for n in range(9)]
        call = asyncio.create_task(client.score(items, request_id="r"))
        await until(lambda: running.num_submitted == 4)  # as many as there are rows
        call.cancel()
        await until(lambda: running.num_open_calls == 0)
        steps.open()
        await until(lambda: not running.engine._intake.live())
        assert sorted(running.aborts) == ["r/0", "r/1", "r/2", "r/3"]
        assert running.num_submitted == 4
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_one_that_cannot_be_scored_ends_the_others() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        items = [ScoreItem(context=(1, 2, 3), continuation=(n,)) for n in range(9)]
        call = asyncio.create_task(client.score(items, request_id="r"))
        await until(lambda: running.num_submitted == 4)
        assert await client.cancel("r/2")
        steps.open()
        with pytest.raises(CallCancelledError, match="CancelGeneration") as caught:
            await call
        assert caught.value.reason == "CANCELLED"
        await until(lambda: not running.engine._intake.live())


async def test_a_call_can_be_ended_by_its_own_id_and_none_else_may_have_it() -> None:
    steps = Steps()
    async with run_server(steps) as running, connect(running) as client:
        items = [ScoreItem(context=(1, 2, 3), continuation=(n,)) for n in range(9)]
        call = asyncio.create_task(client.score(items, request_id="r"))
        await until(lambda: running.num_submitted == 4)
        with pytest.raises(ConflictError, match="'r' is in flight"):
            await client.score(items[:1], request_id="r")
        assert await client.cancel("r")
        steps.open()
        with pytest.raises(CallCancelledError):
            await call
        assert running.num_submitted == 4
        assert not await client.cancel("r")
        assert (await client.score(items[:1], request_id="r")).request_id == "r"


async def test_the_calls_deadline_is_that_of_its_items() -> None:
    steps = Steps()
    async with run_server(steps, clock=time.monotonic) as running, connect(running) as client:
        item = ScoreItem(context="a", continuation="b")
        with pytest.raises(CallDeadlineError):
            await client.score([item], timeout_s=0.05)
        (asked,) = running.asked
        assert asked.deadline_s is not None
        steps.open()
        await until(lambda: not running.engine._intake.live())


async def test_a_long_reply_is_refused_by_the_limits_name() -> None:
    bounds = LimitsSection(max_message_bytes=400)
    items = [ScoreItem(context=(1,), continuation=tuple(range(20)))] * 3
    async with run_server(bounds=bounds) as running, connect(running) as client:
        assert len((await client.score(items)).results) == 3
        with pytest.raises(BadRequestError, match="limit of a message is 400"):
            await client.score(items, include_token_logprobs=True)
