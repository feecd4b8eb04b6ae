"""What the figures say, against numbers that are known."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.measure.limits import read_limits
from jaxserve.measure.records import RequestRecord, ServerPhases
from jaxserve.measure.report import build_sections, figures_of, timeline_figures
from jaxserve.measure.report.figures import BarFigure, Figure, HeatFigure, LineFigure
from jaxserve.measure.report.observed import Curve, Observed
from jaxserve.measure.report.timeline_figures import choose_repeat
from jaxserve.measure.result import read_result
from tests.measure.records import build_record
from tests.measure.report.example import build_sweep, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def found(run: Path) -> dict[str, Figure]:
    sections = build_sections(read_result(run), run.with_name("requests.jsonl"))
    return {figure.key: figure for figure in figures_of(sections)}


def lines_of(found: dict[str, Figure], key: str) -> LineFigure:
    figure = found[key]
    assert isinstance(figure, LineFigure)
    return figure


def bars_of(found: dict[str, Figure], key: str) -> BarFigure:
    figure = found[key]
    assert isinstance(figure, BarFigure)
    return figure


def observe(records: Sequence[RequestRecord], limits: Sequence[str] = ()) -> Observed:
    observed = Observed(read_limits(limits), repeat=0)
    observed.take((0, record) for record in records)
    return observed


def test_a_curve_keeps_each_value_to_a_fifth_of_a_percent() -> None:
    curve = Curve()
    values = [0.001 * 1.3**place for place in range(40)]
    for value in values:
        curve.add(value)
    shares = [(place + 1) / 40 for place in range(40)]
    assert curve.quantiles(shares) == pytest.approx(values, rel=0.0011)


def test_a_value_counts_as_often_as_it_is_said_to() -> None:
    curve = Curve()
    curve.add(1.0, 3)
    curve.add(2.0)
    points = curve.points()
    assert curve.total == 4
    assert points[0][1] == 0.0
    assert [share for _, share in points] == [0.0, 0.75, 1.0]
    assert [value for value, _ in points] == pytest.approx([1.0, 1.0, 2.0], rel=0.0011)


def test_nothing_and_below_a_microsecond_have_a_place_on_a_logarithm() -> None:
    curve = Curve()
    curve.add(0.0)
    assert curve.quantiles([1.0]) == [1e-6]


def test_the_curves_are_of_ok_requests_and_warm_ups_are_in_none() -> None:
    observed = Observed(read_limits(()), repeat=0)
    ok = build_record([(1.0, 1), (2.0, 1)])
    failed = build_record([(9.0, 1)], outcome="failed", error="no")
    observed.take([(0, ok), (0, failed), (None, build_record([(7.0, 1)], is_warm_up=True))])
    assert observed.curves["ttft", None].total == 1
    assert observed.num_by_class.total() == 2
    assert observed.errors == {("failed", "no"): 1}


def test_curves_rise_from_0_to_100_percent(found: dict[str, Figure]) -> None:
    for name in ("ttft", "itl", "gap", "tpot", "e2e"):
        for series in lines_of(found, f"cdf-{name}").series:
            shares = [share for _, share in series.points]
            assert shares[0] == 0.0
            assert shares[-1] == 100.0
            assert shares == sorted(shares)
            assert [x for x, _ in series.points] == sorted(x for x, _ in series.points)


def test_the_first_curve_is_of_all_and_each_class_has_its_own(found: dict[str, Figure]) -> None:
    names = [series.name for series in lines_of(found, "cdf-ttft").series]
    assert names == ["all requests", "class chat", "class code", "class batch"]


def test_each_limit_is_a_line_at_its_value_in_the_unit_of_the_axis(
    found: dict[str, Figure],
) -> None:
    ttft = lines_of(found, "cdf-ttft")
    factor = 1000.0 if "ms" in ttft.x.label else 1.0
    rules = {rule.label: rule.value / factor for rule in ttft.rules}
    assert rules == {"ttft ≤ 800 ms": 0.8, "batch: ttft ≤ 5 s": 5.0}
    (itl,) = lines_of(found, "cdf-itl").rules
    assert itl.label == "itl_p95 ≤ 60 ms each"
    assert itl.value == pytest.approx(60.0)
    assert not lines_of(found, "cdf-tpot").rules


def area(points: Sequence[tuple[float, float]]) -> float:
    return sum(y * (end - x) for (x, y), (end, _) in itertools.pairwise(points))


def test_over_time_no_arrival_send_or_token_is_lost(run: Path, found: dict[str, Figure]) -> None:
    result = read_result(run)
    due, sent = lines_of(found, "time-arrivals").series
    assert area(due.points) == pytest.approx(150)
    assert area(sent.points) == pytest.approx(150)
    repeat = result["repeats"]["each"][choose_repeat(result)]
    _, compliant = lines_of(found, "time-tokens").series
    goodput_tokens = repeat["goodput"] * repeat["duration_s"]
    assert area(compliant.points) == pytest.approx(goodput_tokens, rel=1e-6)


def test_in_flight_is_what_was_sent_and_had_not_ended() -> None:
    records = [
        build_record([(2.0, 1)], intended_s=0.0, sent_s=0.5),
        build_record([(4.0, 1)], intended_s=1.0, sent_s=1.0),
        build_record([(6.0, 1)], intended_s=4.0, sent_s=4.0),  # sent as the one before ends
    ]
    section = timeline_figures.build_section({}, observe(records))
    (figure,) = (one for one in section.figures if one.key == "time-in-flight")
    assert isinstance(figure, LineFigure)
    heights = dict(figure.series[0].points)
    assert max(heights.values()) == 2
    assert heights[0.5] == 1
    assert heights[1.0] == 2
    assert heights[3.0] == 1
    assert heights[4.0] == 1
    assert heights[6.0] == 1  # the most within the bin: it ends there


def test_the_timeline_is_of_the_repeat_in_the_middle() -> None:
    each = [{"goodput": 5.0}, {"goodput": 1.0}, {"goodput": 3.0}]
    assert choose_repeat({"repeats": {"each": each}}) == 2
    assert choose_repeat({"repeats": {"each": each[:2]}}) == 1
    assert choose_repeat({}) == 0


def test_the_rows_of_the_batch_are_a_line(found: dict[str, Figure]) -> None:
    (rule,) = lines_of(found, "time-rows").rules
    assert (rule.axis, rule.value, rule.label) == ("y", 8.0, "all 8 rows")
    assert lines_of(found, "time-kv").y.high == 100.0


def test_outcomes_are_parts_of_what_was_sent(run: Path, found: dict[str, Figure]) -> None:
    result = read_result(run)
    figure = bars_of(found, "outcomes")
    assert sum(row.values[0] for row in figure.rows) == figure.high == 300
    assert figure.rows[0].values == (result["goodput"]["compliant_requests"],)


def test_attainment_is_told_of_every_limit_of_all_and_of_each_class(
    run: Path, found: dict[str, Figure]
) -> None:
    shares = {row.label: row.values[0] for row in bars_of(found, "attainment").rows}
    attainment = read_result(run)["attainment"]
    assert shares["all requests, together"] == attainment["all"]["share"]
    assert (
        shares["class batch, ttft=5"] == attainment["classes"]["batch"]["limits"]["ttft=5"]["share"]
    )
    assert "class chat, ttft=5" not in shares


def test_the_phases_of_a_request_add_up_to_its_end_to_end() -> None:
    phases = ServerPhases(queue_s=0.2, prefill_s=0.3, decode_s=0.4, delivery_s=0.05)
    record = build_record([(1.0, 1), (1.2, 1)], sent_s=0.1, end_s=1.25, phases=phases)
    sums = observe([record]).phases[None]
    assert sums.seconds == pytest.approx(
        {
            "late send": 0.1,
            "queue": 0.2,
            "prefill": 0.3,
            "decode": 0.4,
            "delivery": 0.05,
            "on the way": 0.2,
        }
    )
    assert sum(sums.seconds.values()) == pytest.approx(1.25)


def test_the_host_phases_are_shares_of_the_loop_without_idle(found: dict[str, Figure]) -> None:
    figure = bars_of(found, "host-phases")
    assert [row.label for row in figure.rows][:2] == ["wait", "dispatch"]
    assert figure.high == pytest.approx(49.4)
    assert "idle" not in [row.label for row in figure.rows]


def test_the_heat_map_puts_each_bucket_at_its_rows_and_tokens(found: dict[str, Figure]) -> None:
    figure = found["bucket-heat"]
    assert isinstance(figure, HeatFigure)
    assert (list(figure.columns), list(figure.rows)) == (["0", "64", "256"], ["2", "4", "8"])
    cell = figure.cells[0][1]  # 2x1+64: 1,000 real and 2,100 padded
    assert cell is not None
    assert cell.heat == pytest.approx(2100 / 3100)
    assert figure.cells[1][2] is None  # 4x1+256 never ran


def test_buckets_with_other_names_have_bars_alone(run: Path) -> None:
    result = read_result(run)
    result["server"]["buckets"] = [
        {"bucket": "big", "steps": 1, "real_tokens": 3, "padded_tokens": 1}
    ]
    keys = {figure.key for figure in figures_of(build_sections(result))}
    assert "bucket-heat" not in keys
    assert "bucket-tokens" in keys


def test_the_sweep_shows_goodput_and_raw_by_load_and_its_answer() -> None:
    found = {figure.key: figure for figure in figures_of(build_sections(build_sweep()))}
    figure = lines_of(found, "sweep-goodput")
    goodput, raw = figure.series
    assert goodput.points[-1][1] == pytest.approx(144.0)
    assert raw.points[-1] == (8.0, 390.0)
    assert [rule.value for rule in figure.rules] == [4.7]
    wanted = [rule.value for rule in lines_of(found, "sweep-attainment").rules if rule.axis == "y"]
    assert wanted == [95.0]
    (limit,) = lines_of(found, "sweep-ttft").rules
    assert (limit.label, limit.axis) == ("ttft=0.5", "y")


def test_a_sweep_of_closed_loops_is_by_requests_in_flight() -> None:
    sweep = build_sweep()
    for number, point in enumerate(sweep["points"]):
        point |= {"requests_per_s": None, "concurrency": 2**number}
    found = {figure.key: figure for figure in figures_of(build_sections(sweep))}
    assert lines_of(found, "sweep-goodput").x.label == "requests in flight"
    assert lines_of(found, "sweep-goodput").series[0].points[-1][0] == 32
