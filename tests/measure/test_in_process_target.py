"""An engine of this process as a target."""

import asyncio
import time
from typing import Any

import pytest

from jaxserve.config import LimitsSection
from jaxserve.measure import latency
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.replay import Replay
from jaxserve.measure.targets.base import Ask, End, Message
from jaxserve.measure.targets.in_process import InProcessTarget
from tests.engines import Clock, build_engine, serve
from tests.fakes import say
from tests.measure.test_grpc_target import build_ask


def replay(asks: list[Ask], **options: Any) -> tuple[dict[int, RequestRecord], Replay]:  # noqa: ANN401
    """Returns the records of a replay against an engine on the real clock."""
    options.setdefault("script", say({None: b"abcdefghij" * 9}))
    engine, runner = build_engine(clock=time.monotonic, **options)
    records: dict[int, RequestRecord] = {}

    def take(record: RequestRecord) -> None:
        records[record.index] = record

    with serve(engine, runner):
        run = Replay(target=InProcessTarget(engine), asks=iter(asks), on_record=take)
        asyncio.run(run.run())
    return records, run


def test_ids_usage_and_phases_come_from_the_engine() -> None:
    records, run = replay([build_ask(n) for n in range(6)])
    assert [records[n].outcome for n in range(6)] == ["ok"] * 6
    record = records[5]
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (
        3, 4, "max_tokens"
    )  # fmt: skip
    assert sum(arrival.num_tokens for arrival in record.arrivals) == 4
    assert not record.are_tokens_assumed
    assert run.timeline[0].levels.memory_bytes


def test_the_servers_phases_are_within_what_the_client_saw() -> None:
    records, _ = replay([build_ask(n) for n in range(6)])
    for record in records.values():
        phases = record.phases
        parts = (phases.queue_s, phases.prefill_s, phases.decode_s, phases.delivery_s)
        assert None not in parts
        inside_s = sum(part for part in parts if part is not None)
        assert 0 < inside_s <= latency.e2e_s(record) + 1e-9


def test_what_the_engine_refuses_is_refused_and_the_others_go_on() -> None:
    asks = [build_ask(0, prompt=tuple(range(1, 60))), build_ask(1)]
    records, _ = replay(asks)
    assert [records[n].outcome for n in (0, 1)] == ["refused", "ok"]


def test_a_full_queue_refuses() -> None:
    records, _ = replay(
        [build_ask(n) for n in range(40)], bounds=LimitsSection(max_waiting_requests=2)
    )
    outcomes = {record.outcome for record in records.values()}
    assert outcomes == {"ok", "refused"}
    assert any("queue is full" in record.error for record in records.values())


def test_an_output_that_is_not_finite_fails_alone() -> None:
    def script(prompt: tuple[int, ...], index: int) -> Any:  # noqa: ANN401  # a token or a word
        return "not_finite" if prompt == (9, 9) and index == 2 else 65 + index

    records, _ = replay([build_ask(0, prompt=(9, 9)), build_ask(1)], script=script)
    assert [records[n].outcome for n in (0, 1)] == ["failed", "ok"]
    assert latency.output_tokens(records[0]) == pytest.approx(2)


def test_a_deadline_that_is_over_is_late() -> None:
    records, _ = replay([build_ask(0, deadline_s=1e-6)])
    assert records[0].outcome == "timed_out"


def test_what_the_engine_cuts_at_a_deadline_is_told_as_late() -> None:
    clock = Clock()

    def script(prompt: tuple[int, ...], index: int) -> int:
        clock.now_s += 2.0
        return 65 + index

    async def read(target: InProcessTarget) -> Message | End:
        parts = [part async for part in target.stream(build_ask(), left_s=5.0)]
        return parts[-1]

    engine, runner = build_engine(clock=clock, script=script)
    with serve(engine, runner):
        last = asyncio.run(read(InProcessTarget(engine)))
    assert isinstance(last, End)
    assert (last.is_late, last.finish_reason) == (True, "deadline")


def test_facts_are_the_engines() -> None:
    engine, _ = build_engine()
    facts = asyncio.run(InProcessTarget(engine).describe())
    assert (facts.model, facts.vocab_size, facts.max_model_tokens) == ("bytes", 259, 40)
    assert {256, 257} <= facts.special_ids
