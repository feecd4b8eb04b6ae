"""The replay against a scripted server in virtual time: every figure is exact to a microsecond."""

import asyncio
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from jaxserve.errors import ConfigError
from jaxserve.measure import latency
from jaxserve.measure.limits import Limits, read_limits
from jaxserve.measure.records import RequestRecord, ServerPhases
from jaxserve.measure.replay import Replay, count_tokens
from jaxserve.measure.targets.base import Ask, Levels, Message, TargetError
from tests.measure.records import sum_up
from tests.measure.virtual import (
    HANG,
    ScriptedTarget,
    Step,
    VirtualLoop,
    build_ask,
    end,
    replay,
    run_virtual,
    tokens,
)

MICROSECOND = 1e-6


def answer(*, first_s: float, num_tokens: int, each_s: float) -> list[Step]:
    words: list[Step] = [(first_s + place * each_s, tokens(1)) for place in range(num_tokens)]
    return [*words, (words[-1][0], end(num_tokens))]


def test_every_figure_of_a_known_schedule() -> None:
    """C44: messages of [2, 1, 0 with text, 3, 1 without text], and a last one with usage alone."""
    phases = ServerPhases(queue_s=0.1, prefill_s=0.3, decode_s=0.5, delivery_s=0.01)
    script: list[Step] = [
        (0.413207, tokens(2)),
        (0.500001, tokens(1)),
        (0.600000, tokens(0)),
        (0.711113, tokens(3)),
        (0.900000, tokens(1, text="")),
        (0.950005, end(7, phases=phases)),
    ]
    records, _ = replay(ScriptedTarget({0: script}), [build_ask(0, 0.25, wanted_tokens=7)])
    record = records[0]
    assert (record.intended_s, record.outcome, record.output_tokens) == (0.25, "ok", 7)
    assert record.sent_s == pytest.approx(0.25, abs=MICROSECOND)
    assert latency.ttft_s(record) == pytest.approx(0.413207, abs=MICROSECOND)
    assert latency.e2e_s(record) == pytest.approx(0.950005, abs=MICROSECOND)
    assert latency.tpot_s(record) == pytest.approx(0.486793 / 5, abs=MICROSECOND)
    each_s, counts = zip(*latency.inter_token_s(record), strict=True)
    assert counts == (1, 3, 1)
    assert each_s == pytest.approx((0.086794, 0.211112 / 3, 0.188887), abs=MICROSECOND)
    assert record.phases == phases
    totals = sum_up(records.values(), read_limits(["ttft=0.42", "itl_max=0.19", "e2e=0.96"]))
    assert totals.goodput == pytest.approx(7 / 0.950005, rel=1e-6)
    assert totals.peak_tokens_per_s >= totals.goodput * (1 - 1e-9)


@pytest.mark.parametrize("chunks", [[1, 1, 1], [3, 1, 4], [5]])
def test_streams_of_any_chunking_have_the_same_times_by_their_messages(chunks: list[int]) -> None:
    script: list[Step] = [(0.5 + 0.2 * place, tokens(n)) for place, n in enumerate(chunks)]
    script.append((2.0, end(sum(chunks))))
    records, _ = replay(ScriptedTarget({0: script}), [build_ask(0)])
    after = sum(chunks[1:])
    expected = 0.2 * (len(chunks) - 1) / after if after else None
    assert latency.tpot_s(records[0]) == (
        None if expected is None else pytest.approx(expected, abs=MICROSECOND)
    )
    total_s = sum(value_s * count for value_s, count in latency.inter_token_s(records[0]))
    assert total_s == pytest.approx(0.2 * (len(chunks) - 1), abs=MICROSECOND)
    assert sum(count for _, count in latency.inter_token_s(records[0])) == after


def test_the_table_of_everything_that_goes_wrong() -> None:
    """C46, by hand: three good ones, and one of each kind of failure."""
    scripts: dict[int, list[Step]] = {
        **{index: answer(first_s=0.1, num_tokens=15, each_s=0.1) for index in range(3)},
        3: [(0.0, TargetError("the queue is full", outcome="refused"))],
        4: [(0.1, tokens(1)), (0.2, tokens(1)), (0.25, TargetError("broke", outcome="failed"))],
        5: [(0.3, end(0))],
        6: answer(first_s=0.1, num_tokens=4, each_s=0.1),
        7: [(0.1, tokens(1)), (0.1, HANG)],
        8: [(0.1, tokens(1))],
    }
    target = ScriptedTarget(scripts)
    asks = [build_ask(index, 0.5 * index, wanted_tokens=15) for index in scripts]
    records, run = replay(target, asks, timeout_s=20.0)
    assert [records[index].outcome for index in range(9)] == [
        "ok", "ok", "ok", "refused", "failed", "short", "short", "timed_out", "failed"
    ]  # fmt: skip
    assert records[3].error == "the queue is full"
    assert records[8].error == "the stream stopped without saying that it was the end"
    assert records[4].output_tokens is None
    assert latency.output_tokens(records[4]) == 2
    assert records[7].end_s == pytest.approx(3.5 + 20.0, abs=MICROSECOND)
    assert target.closed == [3, 4, 8, 7]
    totals = sum_up(records.values(), read_limits(["ttft=0.1"]))
    assert (totals.counts.sent, totals.counts.compliant, totals.num_empty) == (9, 3, 1)
    assert totals.counts.raw_tokens == 45 + 2 + 0 + 4 + 1 + 1
    assert totals.duration_s == pytest.approx(23.5, abs=MICROSECOND)
    assert totals.goodput == pytest.approx(45 / 23.5, abs=MICROSECOND)
    assert totals.samples["ttft"].describe().median == pytest.approx(0.1, abs=MICROSECOND)
    assert (run.num_sent, run.num_ended) == (9, 9)


def test_a_stall_is_in_the_latency_of_everyone_who_came_during_it() -> None:
    """No coordinated omission: the server does one at a time and stalls for 5 s with the first.

    Requests come every second and take 0.5 s, so those of 1 to 9 s wait 4.5, 4.0, … 0.5, 0 s.
    """
    scripts = {index: answer(first_s=0.5, num_tokens=1, each_s=0) for index in range(12)}
    scripts[0] = answer(first_s=5.5, num_tokens=1, each_s=0)
    target = ScriptedTarget(scripts, free_s=0.0)
    records, _ = replay(target, [build_ask(index, float(index)) for index in scripts])
    found = [latency.ttft_s(records[index]) for index in range(12)]
    expected = [5.5, *(max(5.5 + 0.5 * n - n, 0.5) for n in range(1, 12))]
    assert found == pytest.approx(expected, abs=MICROSECOND)
    assert [latency.send_lag_s(records[n]) for n in range(12)] == pytest.approx([0.0] * 12)


def test_a_closed_loop_waits_with_the_server_and_says_nothing_of_it() -> None:
    """The same server: each request counts from the end of the one before, so one is slow."""
    scripts = {index: answer(first_s=0.5, num_tokens=1, each_s=0) for index in range(6)}
    scripts[0] = answer(first_s=5.5, num_tokens=1, each_s=0)
    target = ScriptedTarget(scripts, free_s=0.0)
    records, _ = replay(target, [build_ask(index) for index in scripts], concurrency=1)
    found = [latency.ttft_s(records[index]) for index in range(6)]
    assert found == pytest.approx([5.5] + [0.5] * 5, abs=MICROSECOND)
    assert [records[n].intended_s for n in range(6)] == pytest.approx([0, 5.5, 6, 6.5, 7, 7.5])


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    scripts = {n: answer(first_s=1.0 + n % 3, num_tokens=1, each_s=0) for n in range(30)}
    _, run = replay(ScriptedTarget(scripts), [build_ask(n) for n in scripts], concurrency=4)
    assert {sample.in_flight for sample in run.timeline[1:-2]} == {4}


def test_a_late_client_sends_late_and_its_lag_is_in_the_latency() -> None:
    """The client itself stands still for 2 s: the request of 1.0 s is sent at 2.6 s."""
    scripts = {n: answer(first_s=0.5, num_tokens=1, each_s=0) for n in range(4)}

    def stand_still(record: RequestRecord) -> None:
        if record.index == 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now_s += 2.0

    asks = [build_ask(0, 0.1), build_ask(1, 1.0), build_ask(2, 2.0), build_ask(3, 4.0)]
    records, _ = replay(ScriptedTarget(scripts), asks, on_record=stand_still)
    lags = [latency.send_lag_s(records[n]) for n in range(4)]
    assert lags == pytest.approx([0.0, 1.6, 0.6, 0.0], abs=MICROSECOND)
    assert [latency.ttft_s(records[n]) for n in (1, 2, 3)] == pytest.approx(
        [2.1, 1.1, 0.5], abs=MICROSECOND
    )


def test_the_clients_limit_counts_from_the_intended_time_too() -> None:
    def stand_still(record: RequestRecord) -> None:
        if record.index == 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now_s += 2.0

    scripts: dict[int, list[Step]] = {
        0: answer(first_s=0.5, num_tokens=1, each_s=0),
        1: [(0.1, tokens(1)), (0.1, HANG)],
    }
    asks = [build_ask(0), build_ask(1, 1.0)]
    records, _ = replay(ScriptedTarget(scripts), asks, on_record=stand_still, timeout_s=4.0)
    assert records[1].sent_s == pytest.approx(2.5, abs=MICROSECOND)
    assert records[1].end_s == pytest.approx(5.0, abs=MICROSECOND)


def test_who_cancels_the_replay_cancels_its_requests() -> None:
    target = ScriptedTarget({0: [(0.1, tokens(1)), (0.1, HANG)]})
    records: list[RequestRecord] = []

    async def work() -> None:
        run = Replay(target=target, asks=iter([build_ask(0)]), on_record=records.append)
        task = asyncio.create_task(run.run())
        await asyncio.sleep(1.0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        run_virtual(work())
    assert (records, target.closed) == ([], [0])


def test_an_answer_without_tokens_is_short_though_none_were_wanted() -> None:
    scripts: dict[int, list[Step]] = {0: [(0.3, end(0))], 1: [(0.1, tokens(1)), (0.2, end(1))]}
    records, _ = replay(ScriptedTarget(scripts), [build_ask(0), build_ask(1)])
    assert [records[n].outcome for n in (0, 1)] == ["short", "ok"]


def test_the_wall_clock_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it may jump, as it does when it is set."""

    def ask_wall_clock() -> NoReturn:
        raise AssertionError("a latency must not come from a clock that is set")

    monkeypatch.setattr(time, "time", ask_wall_clock)
    scripts = {0: answer(first_s=0.5, num_tokens=3, each_s=0.1)}
    records, _ = replay(ScriptedTarget(scripts), [build_ask(0, 1.5)])
    assert latency.e2e_s(records[0]) == pytest.approx(0.7, abs=MICROSECOND)


def test_a_request_is_sent_at_its_time_however_many_are_open() -> None:
    scripts = {n: answer(first_s=100.0, num_tokens=1, each_s=0) for n in range(500)}
    records, run = replay(ScriptedTarget(scripts), [build_ask(n, 0.01 * n) for n in scripts])
    assert max(latency.send_lag_s(record) for record in records.values()) < MICROSECOND
    assert max(sample.in_flight for sample in run.timeline) == 500


def test_requests_are_drawn_just_ahead_of_their_time() -> None:
    """A long workload is never in memory as a whole."""
    target = ScriptedTarget({n: answer(first_s=0.5, num_tokens=1, each_s=0) for n in range(1000)})
    drawn: list[int] = []
    ahead: list[int] = []

    def draw() -> Iterator[Ask]:
        for index in range(1000):
            drawn.append(index)
            ahead.append(len(drawn) - len(target.asked))
            yield build_ask(index, float(index))

    replay(target, draw())
    assert max(ahead) <= 2
    assert len(drawn) == 1000


def test_a_deadline_is_told_to_the_server_and_kept_by_the_client() -> None:
    target = ScriptedTarget({0: [(0.1, tokens(1)), (0.1, HANG)]})
    records, _ = replay(target, [build_ask(0, 1.0, deadline_s=3.0)])
    assert target.asked[0][1] == pytest.approx(3.0, abs=MICROSECOND)
    assert records[0].outcome == "timed_out"
    assert records[0].end_s == pytest.approx(4.0, abs=MICROSECOND)
    assert sum_up(records.values(), read_limits(["deadline"])).counts.compliant == 0


def test_what_a_server_cuts_at_a_deadline_is_late() -> None:
    script: list[Step] = [(0.1, tokens(1)), (0.2, end(1, is_late=True))]
    records, _ = replay(ScriptedTarget({0: script}), [build_ask(0)])
    assert records[0].outcome == "timed_out"


def test_what_runs_long_after_the_last_send_is_cancelled() -> None:
    scripts: dict[int, list[Step]] = {
        0: answer(first_s=1.0, num_tokens=1, each_s=0),
        1: [(0.5, tokens(1)), (0.5, HANG)],
    }
    target = ScriptedTarget(scripts)
    records, _ = replay(target, [build_ask(0, 0.0), build_ask(1, 2.0)], max_drain_s=3.0)
    assert [records[0].outcome, records[1].outcome] == ["ok", "cancelled"]
    assert records[1].end_s == pytest.approx(5.0, abs=MICROSECOND)
    assert target.closed == [1]


def test_a_request_that_cannot_be_sent_ends_the_replay_with_its_error() -> None:
    scripts: dict[int, list[Step]] = {
        0: [(9.0, end(1))],
        1: [(0.0, ConfigError("top_k: not of OpenAI's API"))],
    }
    target = ScriptedTarget(scripts)
    with pytest.raises(ConfigError, match="top_k"):
        replay(target, [build_ask(0, 0.0), build_ask(1, 1.0)])
    assert target.closed == [1, 0]


def test_warm_up_is_marked_and_left_out_of_every_figure() -> None:
    """C46: the first request compiles for a minute."""
    scripts = {
        0: answer(first_s=60.0, num_tokens=1, each_s=0),
        1: answer(first_s=0.2, num_tokens=1, each_s=0),
    }
    asks = [build_ask(0, is_warm_up=True), build_ask(1, 70.0)]
    records, _ = replay(ScriptedTarget(scripts), asks)
    totals = sum_up(records.values(), Limits())
    assert totals.counts.sent == 1
    assert totals.duration_s == pytest.approx(0.2, abs=MICROSECOND)
    assert totals.samples["ttft"].describe().max == pytest.approx(0.2)


def test_the_timeline_has_a_sample_each_second() -> None:
    scripts = {n: answer(first_s=0.5, num_tokens=4, each_s=0.5) for n in range(3)}
    target = ScriptedTarget(scripts, levels=lambda: Levels(running=2.0, kv_usage=0.5))
    _, run = replay(target, [build_ask(n, float(n)) for n in scripts])
    assert [sample.time_s for sample in run.timeline] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert run.timeline[2].levels == Levels(running=2.0, kv_usage=0.5)
    assert run.timeline[-1].output_tokens >= 11


@pytest.mark.parametrize(
    ("messages", "total", "counts", "are_assumed"),
    [
        ([tokens(2), tokens(0), tokens(3)], 9, [2, 0, 3], False),
        ([tokens(None), tokens(None)], 2, [1, 1], False),
        ([tokens(None), tokens(None)], 5, [3, 2], True),
        ([tokens(None), tokens(None, text=""), tokens(None)], 2, [1, 0, 1], True),
        ([tokens(None), tokens(None, text=""), tokens(None)], 3, [1, 1, 1], False),
        ([tokens(None), tokens(None, text=""), tokens(None)], None, [1, 0, 1], True),
        ([tokens(None), tokens(None)], 1, [1, 0], True),
        ([tokens(None), tokens(None)], 0, [0, 0], True),
        ([tokens(None, text="")], 0, [0], True),
        ([], 7, [], False),
    ],
)
def test_tokens_of_messages_that_do_not_tell(
    messages: list[Message], total: int | None, counts: list[int], are_assumed: bool
) -> None:
    assert count_tokens(messages, total) == (counts, are_assumed)


def test_a_total_that_messages_do_not_carry_is_still_the_truth() -> None:
    script: list[Step] = [(0.1, tokens(None)), (0.2, tokens(None)), (0.2, end(6))]
    records, _ = replay(ScriptedTarget({0: script}), [build_ask(0, wanted_tokens=6)])
    assert records[0].outcome == "ok"
    assert records[0].are_tokens_assumed
    assert [arrival.num_tokens for arrival in records[0].arrivals] == [3, 3]
