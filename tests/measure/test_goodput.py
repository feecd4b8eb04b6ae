"""Goodput and what is beside it, by hand: C44, C46, and the worked example."""

import math

import pytest

from jaxserve.errors import ConfigError
from jaxserve.measure import goodput, latency
from jaxserve.measure.goodput import Totals, is_compliant
from jaxserve.measure.limits import Limits, parse_limit, read_limits
from jaxserve.measure.records import RequestRecord, ServerPhases
from tests.measure.records import build_record, sum_up

NO_LIMITS = Limits()


def run_of(num_all: int, num_good: int, *, tokens: int) -> list[RequestRecord]:
    """A second of requests with as many tokens each, of which `num_good` are soon enough."""
    return [
        build_record([(0.1 if number < num_good else 0.9, tokens)], end_s=1.0)
        for number in range(num_all)
    ]


def test_the_slower_server_that_keeps_its_promise_is_the_better_one() -> None:
    limits = read_limits(["ttft=0.5"])
    steady = sum_up(run_of(100, 98, tokens=24), limits)
    hasty = sum_up(run_of(100, 75, tokens=29), limits)
    assert (steady.raw_throughput, hasty.raw_throughput) == (2400, 2900)
    assert (steady.attainment, hasty.attainment) == (0.98, 0.75)
    assert (steady.goodput, hasty.goodput) == (2352, 2175)


def test_tokens_are_counted_and_not_worked_out_of_the_share() -> None:
    """One long answer late, three short ones in time: 3 × 10 tokens, not 3/4 of 1030."""
    records = [build_record([(0.1, 10)], end_s=1.0) for _ in range(3)]
    records.append(build_record([(0.9, 1000)], end_s=1.0))
    totals = sum_up(records, read_limits(["ttft=0.5"]))
    assert (totals.attainment, totals.raw_throughput) == (0.75, 1030)
    assert totals.goodput == 30


def test_latencies_of_messages_with_several_tokens() -> None:
    """C44: [3, 1, 4] at 1.0, 1.4, 1.6 after an intended start at 0.5, with text but no token
    at 1.5."""
    record = build_record([(1.0, 3), (1.4, 1), (1.5, 0), (1.6, 4)], intended_s=0.5, end_s=1.7)
    assert latency.ttft_s(record) == pytest.approx(0.5)
    assert latency.e2e_s(record) == pytest.approx(1.2)
    gaps_s, counts = zip(*latency.gaps(record), strict=True)
    assert gaps_s == pytest.approx((0.4, 0.2))
    assert counts == (1, 4)
    each_s, counts = zip(*latency.inter_token_s(record), strict=True)
    assert each_s == pytest.approx((0.4, 0.05))
    assert counts == (1, 4)
    assert latency.tpot_s(record) == pytest.approx(0.6 / 5)
    assert latency.output_tokens(record) == 8


def test_a_message_alone_has_no_time_between_tokens() -> None:
    record = build_record([(1.0, 5)])
    assert latency.tpot_s(record) is None
    assert list(latency.inter_token_s(record)) == []
    assert sum_up([record], NO_LIMITS).samples["tpot"].describe().count == 0


def test_single_tokens_have_the_gaps_as_they_are() -> None:
    record = build_record([(1.0, 1), (1.1, 1), (1.3, 1)])
    assert [value for value, _ in latency.inter_token_s(record)] == pytest.approx([0.1, 0.2])
    assert latency.tpot_s(record) == pytest.approx(0.15)


def test_inter_token_latencies_weigh_by_token_and_add_up() -> None:
    """C44: by message the mean would be (0.4 + 0.2) / 2; by token it is the time per token."""
    record = build_record([(1.0, 2), (1.4, 1), (1.6, 4)])
    totals = sum_up([record], NO_LIMITS)
    found = totals.samples["itl"].describe()
    assert found.count == 5
    assert found.mean == pytest.approx(0.6 / 5)
    assert found.median == pytest.approx(0.05)
    assert totals.samples["gap"].describe().mean == pytest.approx(0.3)


def test_text_without_tokens_is_neither_a_first_token_nor_a_gap() -> None:
    record = build_record([(0.2, 0), (1.0, 1), (1.2, 0), (1.5, 1)])
    assert latency.ttft_s(record) == 1.0
    assert list(latency.gaps(record)) == [(0.5, 1)]


@pytest.mark.parametrize("duration_s", [0.3, 1.0, 1.5, 2.999, 17.25])
def test_the_peak_is_never_below_the_mean(duration_s: float) -> None:
    """C44: also where tokens come at both ends of a duration that is no whole number of seconds."""
    messages = [(0.0, 10), (duration_s / 3, 1), (duration_s, 10)]
    totals = sum_up([build_record(messages)], NO_LIMITS)
    assert totals.peak_tokens_per_s >= totals.raw_throughput * (1 - 1e-12)
    assert 0 < totals.peak_window_s < 2
    assert totals.duration_s == duration_s


def test_the_peak_counts_tokens_and_not_messages() -> None:
    totals = sum_up([build_record([(0.5, 8), (1.2, 1), (1.4, 1), (2.0, 1)])], NO_LIMITS)
    assert totals.peak_window_s == 1.0
    assert totals.peak_tokens_per_s == 8


def test_the_table_of_failures() -> None:
    """C46: 3 ok, an error at the start, one in the middle, an empty answer, a short one, a hang."""
    words = [(0.1 * step, 1) for step in range(1, 16)]
    records = [
        *(build_record(words, wanted_tokens=15) for _ in range(3)),
        build_record([], outcome="refused", output_tokens=None, end_s=0.01, error="full"),
        build_record(words[:4], outcome="failed", output_tokens=None, error="broke"),
        build_record([], outcome="short", output_tokens=0, end_s=0.2, wanted_tokens=15),
        build_record(words[:5], outcome="short", wanted_tokens=15),
        build_record(words[:1], outcome="timed_out", output_tokens=None, end_s=10.0),
        build_record([(9.0, 99)], is_warm_up=True, end_s=99.0),
    ]
    totals = sum_up(records, read_limits(["ttft=0.5"]))
    counts = totals.counts
    assert counts.sent == 8
    assert dict(counts.outcomes) == {
        "ok": 3, "refused": 1, "failed": 1, "short": 2, "timed_out": 1
    }  # fmt: skip
    assert (totals.num_empty, totals.num_completed) == (1, 4)
    assert counts.raw_tokens == 3 * 15 + 4 + 5 + 1
    assert counts.compliant_tokens == 45
    assert (totals.duration_s, totals.goodput, totals.attainment) == (10.0, 4.5, 3 / 8)
    first = totals.samples["ttft"].describe()
    assert (first.count, first.median) == (3, 0.1)


def test_no_answer_is_not_an_answer_at_once() -> None:
    """C46: the median time to first token was 0."""
    empty = [build_record([], outcome="short", output_tokens=0, end_s=0.1) for _ in range(9)]
    totals = sum_up([build_record([(2.0, 1)]), *empty], NO_LIMITS)
    assert totals.samples["ttft"].describe().median == 2.0


def test_the_servers_usage_is_the_truth_and_messages_are_the_next_best() -> None:
    assert latency.output_tokens(build_record([(1.0, 3)], output_tokens=5)) == 5
    assert latency.output_tokens(build_record([(1.0, 3)], output_tokens=None)) == 3


def test_only_warm_up_is_nothing() -> None:
    totals = sum_up([build_record(is_warm_up=True)], NO_LIMITS)
    assert (totals.counts.sent, totals.goodput, totals.attainment) == (0, 0.0, 0.0)
    assert totals.duration_s == 0.0
    assert totals.hit_rate is None


def test_a_late_send_is_the_clients_fault_and_the_requests_latency() -> None:
    record = build_record([(3.0, 1)], intended_s=1.0, sent_s=1.5)
    totals = sum_up([record], NO_LIMITS)
    assert totals.samples["ttft"].describe().mean == 2.0
    assert totals.samples["send_lag"].describe().mean == 0.5


def test_phases_are_described_where_the_server_tells_them() -> None:
    told = build_record(phases=ServerPhases(queue_s=0.1, prefill_s=0.2, decode_s=0.3))
    totals = sum_up([told, build_record()], NO_LIMITS)
    found = {name: totals.samples[name].describe() for name in goodput.PHASES}
    assert {name: sample.count for name, sample in found.items()} == {
        "queue": 1, "prefill": 1, "decode": 1, "delivery": 0
    }  # fmt: skip
    assert found["prefill"].mean == 0.2


@pytest.mark.parametrize(
    ("limit", "met"),
    [
        ("ttft=1", True),
        ("ttft=0.999", False),
        ("e2e=4", True),
        ("e2e=3.9", False),
        ("tpot=1", True),
        ("tpot=0.9", False),
        ("itl_max=2", True),
        ("itl_max=1.9", False),
        ("itl_p50=0.5", True),
        ("itl_p50=0.49", False),
        ("itl_p95=1.5", False),
        ("gap_max=2", True),
        ("gap_p50=1.4", False),
        ("gap_p50=1.5", True),
        ("deadline", True),
    ],
)
def test_a_limit_is_met_or_not(limit: str, met: bool) -> None:
    """Messages at 1, 2 and 4 s: gaps of 1 s for two tokens and 2 s for one."""
    record = build_record([(1.0, 1), (2.0, 2), (4.0, 1)], deadline_s=4.0)
    assert parse_limit(limit).is_met(record) is met
    assert is_compliant(record, read_limits([limit])) is met


def test_a_deadline_is_each_requests_own() -> None:
    limit = parse_limit("deadline")
    assert limit.is_met(build_record([(5.0, 1)]))
    assert not limit.is_met(build_record([(5.0, 1)], deadline_s=4.9))
    assert limit.is_met(build_record([(5.0, 1)], intended_s=1.0, deadline_s=4.0))


def test_who_gave_no_token_met_no_limit_of_the_first() -> None:
    assert not parse_limit("ttft=9").is_met(build_record([]))


@pytest.mark.parametrize("outcome", ["short", "refused", "failed", "timed_out", "cancelled"])
def test_nothing_but_ok_is_compliant(outcome: str) -> None:
    assert not is_compliant(build_record(outcome=outcome), NO_LIMITS)


def test_the_attainment_of_each_limit_and_class() -> None:
    limits = read_limits(["ttft=0.5", "chat:e2e=2"])
    records = [
        build_record([(0.1, 1), (1.0, 1)], prompt_class="chat"),
        build_record([(0.1, 1), (3.0, 1)], prompt_class="chat"),
        build_record([(0.9, 4)], prompt_class="code"),
        build_record([(0.1, 1)], prompt_class="code", outcome="failed"),
    ]
    totals = sum_up(records, limits)
    assert totals.counts.limited == {"ttft=0.5": 4, "e2e=2": 2}
    assert totals.counts.met == {"ttft=0.5": 2, "e2e=2": 1}
    chat, code = totals.classes["chat"], totals.classes["code"]
    assert (chat.sent, chat.compliant, chat.compliant_tokens, chat.raw_tokens) == (2, 1, 2, 4)
    assert (code.sent, code.compliant, code.compliant_tokens, code.raw_tokens) == (2, 0, 0, 5)


def test_limits_read_the_same_however_they_are_written() -> None:
    found = read_limits(["itl_p95.0=0.10", "ttft=.5"])
    assert found == read_limits(["ttft=5e-1", "itl_p95=0.1"])
    assert found.as_json() == {"all": ["itl_p95=0.1", "ttft=0.5"], "classes": {}}


def test_a_classs_own_limit_takes_the_place_of_the_common_one() -> None:
    found = read_limits(["ttft=1", "a:ttft=2"], {"a": ["ttft=3", "e2e=9"], "b": ["ttft=4"]})
    assert found.as_json() == {
        "all": ["ttft=1"],
        "classes": {"a": ["e2e=9", "ttft=2"], "b": ["ttft=4"]},
    }
    assert found.of(build_record(prompt_class="c")) == found.common


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=inf", "ttft=nan", "itl=1", "itl_95=1",
             "ttft_p95=1", "speed=1", "itl_p100=1", "deadline=1", ""],
)  # fmt: skip
def test_what_is_no_limit_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one; write ttft=S"):
        parse_limit(text)


def test_a_limit_may_not_be_given_twice() -> None:
    with pytest.raises(ConfigError, match="second one of ttft"):
        read_limits(["ttft=1", "ttft=2"])


def test_replays_are_added_up_by_their_tokens_and_times() -> None:
    limits = read_limits(["ttft=0.5"])
    first = sum_up([build_record([(0.1, 100)], end_s=1.0)], limits)
    second = sum_up([build_record([(0.6, 50)], end_s=3.0, prompt_class="late")], limits)
    both = Totals()
    both.extend(first)
    both.extend(second)
    assert (both.duration_s, both.goodput, both.raw_throughput) == (4.0, 25.0, 37.5)
    assert (both.attainment, set(both.classes)) == (0.5, {"", "late"})
    assert both.peak_tokens_per_s == 100
    assert math.isclose(both.samples["ttft"].describe().mean or 0, 0.35)


def test_the_hit_rate_is_of_prompt_tokens() -> None:
    records = [build_record(prompt_tokens=30, cached_prompt_tokens=16), build_record()]
    assert sum_up(records, NO_LIMITS).hit_rate == 16 / 40


def test_what_no_usage_tells_is_not_known() -> None:
    silent = [build_record(prompt_tokens=30), build_record(prompt_tokens=None)]
    assert sum_up(silent, NO_LIMITS).hit_rate is None
    told = [build_record(prompt_tokens=30, cached_prompt_tokens=0)]
    assert sum_up(told, NO_LIMITS).hit_rate == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ttft=0.12345671", "ttft=0.12345674"),
        ("e2e=1000001", "e2e=1000002"),
        ("itl_p99.99999=1", "itl_p99.9999=1"),
    ],
)
def test_two_limits_are_never_written_alike(one: str, other: str) -> None:
    assert read_limits([one]).as_json() != read_limits([other]).as_json()
    assert read_limits([one]).as_json()["all"] == [one]
