"""The engine's lines: one of each ended request, and one of throughput while there is work."""

import logging
import re

import pytest

from jaxserve.config import LogSection
from jaxserve.engine.accounts import ThroughputLog
from jaxserve.metrics import Metrics
from tests.engines import Clock, ask, build_engine, gather, serve
from tests.metrics.script import BAD, GONE, LATE, LONG, SHORT, Stage, run_script


def lines(caplog: pytest.LogCaptureFixture, first_word: str) -> list[dict[str, str]]:
    messages = [record.getMessage() for record in caplog.records]
    return [
        dict(re.findall(r"(\w+)=(\S+)", text)) for text in messages if text.startswith(first_word)
    ]


def test_the_line_of_an_ended_request_says_where_its_time_went(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jaxserve.engine.accounts"):
        run_script()
    by_prompt = {int(line["prompt_tokens"]): line for line in lines(caplog, "finished")}
    assert len(lines(caplog, "finished")) == 5
    keys = ("reason", "output_tokens", "preemptions", "queue_s", "ttft_s", "decode_s", "e2e_s")
    rows = {
        len(LONG): ("eos", "4", "0", "0.0", "4.0", "4.5", "8.5"),
        len(SHORT): ("max_tokens", "8", "1", "1.0", "5.5", "14.0", "19.5"),
        len(GONE): ("cancelled", "5", "1", "1.0", "4.0", "9.0", "13.0"),
    }
    for prompt_len, row in rows.items():
        assert tuple(by_prompt[prompt_len][key] for key in keys) == row
    late, bad = sorted(
        (line for line in lines(caplog, "finished") if int(line["prompt_tokens"]) == len(BAD)),
        key=lambda line: line["reason"],
    )
    assert len(LATE) == len(BAD)
    assert tuple(late[key] for key in keys) == (
        "error_deadline", "0", "0", "None", "None", "None", "1.5",
    )  # fmt: skip
    assert tuple(bad[key] for key in keys) == (
        "error_numerics", "1", "0", "7.5", "10.5", "0.0", "12.0",
    )  # fmt: skip


def test_the_lines_of_throughput_are_exact_and_stop_with_the_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps end at 1, 2.5, 4, 5.5, 7, …: a line is due 5 s after 1, 7 and 13: at 7, 13 and 19."""
    with caplog.at_level(logging.INFO, "jaxserve.engine.accounts"):
        run_script(LogSection(interval_s=5.0))
    found = [tuple(line.values()) for line in lines(caplog, "throughput")]
    assert found == [
        ("2.0", "0.8", "1", "2", "75.0"),  # prompts of 9 + 3, outputs 3 + 2, in 6 s
        ("0.5", "0.8", "3", "0", "100.0"),  # 2 + 1, and 1 + 2 + 1 + 1
        ("0.0", "1.0", "1", "1", "75.0"),  # nothing, and 3 + 3
    ]


class Story:
    """A throughput log over counters that the test moves."""

    def __init__(self, interval_s: float = 10.0) -> None:
        self.metrics = Metrics()
        self.log = ThroughputLog(self.metrics, interval_s)

    def step(self, now_s: float, *, prompt: int = 0, output: int = 0) -> None:
        self.metrics.prompt_tokens.inc(prompt)
        self.metrics.output_tokens.inc(output)
        self.log.note_step(now_s)


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "jaxserve.engine.accounts")
    return caplog


def test_rates_are_by_the_time_since_the_last_line(info: pytest.LogCaptureFixture) -> None:
    story = Story()
    story.metrics.requests_running.set(3)
    story.metrics.requests_waiting.set(2)
    story.metrics.kv_usage.set(0.25)
    story.step(100.0, prompt=500, output=500)  # before it: not of this interval
    story.step(105.0, prompt=100)
    story.step(112.0, prompt=20, output=60)
    story.step(121.0, output=7)
    story.step(122.0, output=3)
    assert lines(info, "throughput") == [
        {"prompt_tokens_per_s": "10.0", "output_tokens_per_s": "5.0", "running": "3",
         "waiting": "2", "kv_percent": "25.0"},
        {"prompt_tokens_per_s": "0.0", "output_tokens_per_s": "1.0", "running": "3",
         "waiting": "2", "kv_percent": "25.0"},
    ]  # fmt: skip


def test_a_short_rest_counts_and_a_long_one_begins_anew(info: pytest.LogCaptureFixture) -> None:
    story = Story()
    story.step(0.0)
    story.step(3.0, output=5)
    story.log.rest(4.0)
    story.log.rest(7.0)  # still the same
    story.step(10.0, output=5)
    story.log.rest(11.0)
    story.step(5000.0, output=8)
    story.step(5009.0, output=9)
    story.step(5010.0, output=11)
    rates = [line["output_tokens_per_s"] for line in lines(info, "throughput")]
    assert rates == ["1.0", "2.0"]


def test_steps_that_take_long_are_no_rest(info: pytest.LogCaptureFixture) -> None:
    story = Story()
    for n in range(4):
        story.step(60.0 * n, output=60)
    assert [line["output_tokens_per_s"] for line in lines(info, "throughput")] == ["1.0"] * 3


def test_an_interval_of_zero_is_off(info: pytest.LogCaptureFixture) -> None:
    story = Story(interval_s=0.0)
    for n in range(4):
        story.step(60.0 * n, output=60)
    assert lines(info, "throughput") == []


def test_an_engine_without_work_logs_nothing(info: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    engine, runner = build_engine(clock=clock, log=LogSection(interval_s=1.0))
    with serve(engine, runner):
        gather(engine.submit(ask("a", ignore_eos=True)))
        clock.now_s += 100
        gather(engine.submit(ask("b", ignore_eos=True)))
        clock.now_s += 100
    assert lines(info, "throughput") == []


def test_who_comes_during_a_step_is_waiting_at_once_and_who_leaves_before_one_no_more() -> None:
    stage = Stage()
    value = stage.engine.metrics.value
    stream = stage.engine.submit(ask(LONG, max_tokens=7))
    assert (value("requests_waiting"), value("waiting_tokens")) == (1, 9)
    stream.cancel()
    stage.step()
    assert (value("requests_waiting"), value("waiting_tokens")) == (0, 0)
    assert value("requests_finished_total", reason="cancelled") == 1
    assert value("step_tokens_count") == value("queue_seconds_count") == 0
    stage.close()


def test_who_comes_during_a_step_is_still_waiting_after_it() -> None:
    """The step's own count of the queue must not forget the ones that it has not seen."""
    stage = Stage()
    value = stage.engine.metrics.value
    stage.engine.submit(ask(LONG, max_tokens=7))
    stage.at_launch = lambda: stage.engine.submit(ask(SHORT))
    stage.step()
    stage.at_launch = None
    assert (value("requests_running"), value("requests_waiting")) == (1, 1)
    assert value("waiting_tokens") == len(SHORT)
    while stage.has_work:
        stage.step()
    stage.close()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_preemption_counts_no_phase_of_a_request_twice(num_steps: int) -> None:
    """It comes before, with and after the first token."""
    stage = Stage()
    value = stage.engine.metrics.value
    stream = stage.engine.submit(ask(LONG, max_tokens=7))
    for _ in range(num_steps):
        stage.step()
    (live,) = stage.engine._intake.live()
    stage.engine._scheduler.preempt(live.request)
    while stage.has_work:
        stage.step()
    output = gather(stream)
    assert len(output.token_ids) == 4
    for name in ("queue_seconds", "prefill_seconds", "time_to_first_token_seconds"):
        assert value(f"{name}_count") == 1, name
    assert (value("preemptions_total"), value("prompt_tokens_total")) == (1, len(LONG))
    # lost were 6, 9 and 10; the full pages of retired steps are found again
    assert value("recomputed_tokens_total") == {1: 6, 2: 9 - 4, 3: 10 - 8}[num_steps]
    assert value("inter_token_seconds_count") == 3
    stage.close()


def test_two_engines_in_a_process_count_apart() -> None:
    first, second = (build_engine() for _ in range(2))
    with serve(*first) as engine, serve(*second) as other:
        gather(engine.submit(ask("a", ignore_eos=True)))
        assert engine.metrics.value("output_tokens_total") == 8
        assert other.metrics.value("output_tokens_total") == 0
