"""What breaks: one request's numbers, one reader's patience, or the engine itself."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection

import pytest

from jaxserve.config import LimitsSection, SchedulerSection
from jaxserve.engine import Delta, Engine, EngineState, Event
from jaxserve.engine.live_request import MIN_FOLLOWED_BYTES
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.unread import TOKEN_BYTES
from jaxserve.errors import (
    DeadlineUnreachableError,
    EngineDeadError,
    JaxserveError,
    NumericsError,
    SlowReaderError,
)
from jaxserve.plan import Bucket, StepPlan, StepResult
from jaxserve.request import SamplingParams
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.settlement import Update
from jaxserve.scheduler.step_time import StepWork
from tests.engines import LIMITS, ask, build_engine, check_accounts, gather, serve
from tests.fakes import VOCAB_SIZE, Script, expected_output, say

GREEDY = SamplingParams(temperature=0.0)
BAD = (66,)


def not_finite_at(index: int) -> Script:
    def script(prompt: tuple[int, ...], output_index: int) -> str | None:
        return "not_finite" if (prompt, output_index) == (BAD, index) else None

    return script  # type: ignore[return-value]  # a str that is the literal


@pytest.mark.parametrize("index", [0, 1, 5])
@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_logits_that_are_not_finite_end_that_request_alone(
    index: int, stops: tuple[str, ...]
) -> None:
    engine, runner = build_engine(script=not_finite_at(index))
    with serve(engine, runner):
        mates = [engine.submit(ask((n,), ignore_eos=True)) for n in range(3)]
        bad = engine.submit(ask(BAD, ignore_eos=True, stop_strings=stops))
        seen: list[Event] = []
        with pytest.raises(NumericsError, match=f"output token {index} are not finite"):
            seen.extend(bad)
        outputs = [gather(mate) for mate in mates]
    for n, output in enumerate(outputs):
        assert output.token_ids == expected_output((n,), GREEDY, 8)
    given = [token_id for event in bad_deltas(seen) for token_id in event.token_ids]
    assert given == expected_output(BAD, GREEDY, 8)[: len(given)]
    assert engine.metrics.value("requests_finished_total", reason="error_numerics") == 1
    assert engine.state is EngineState.STOPPED


def bad_deltas(events: list[Event]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


def test_a_reader_that_is_too_slow_loses_its_request_and_nobody_else_waits() -> None:
    bounds = LimitsSection(stream_buffer_bytes=40)  # five tokens
    engine, runner = build_engine(bounds=bounds)
    with serve(engine, runner):
        slow = engine.submit(ask((1,), max_tokens=30, ignore_eos=True))
        while engine.metrics.value("requests_finished_total", reason="error_slow_reader") == 0:
            gather_small(engine)
        seen: list[Event] = []
        with pytest.raises(SlowReaderError, match="more than 40 bytes of output are unread"):
            seen.extend(slow)
    # what came before the end is whole and in order
    (delta,) = bad_deltas(seen)
    assert list(delta.token_ids) == expected_output((1,), GREEDY, 5)


def test_who_is_followed_and_too_slow_loses_its_request_soon_and_all_is_counted() -> None:
    bounds = LimitsSection(stream_buffer_bytes=MIN_FOLLOWED_BYTES)
    num_fit = MIN_FOLLOWED_BYTES // TOKEN_BYTES
    engine, runner = build_engine(bounds=bounds, num_pages=1000, max_model_tokens=3900)
    with serve(engine, runner):
        slow = engine.submit(ask((1,), max_tokens=num_fit + 500, ignore_eos=True))
        has_ended = threading.Event()
        slow.call_at_end(has_ended.set)
        assert has_ended.wait(60)
        seen: list[Event] = []
        with pytest.raises(SlowReaderError, match=f"more than {MIN_FOLLOWED_BYTES} bytes"):
            seen.extend(slow)
        assert engine._loop._slow == []
    (delta,) = bad_deltas(seen)
    num_seen = len(delta.token_ids)
    assert num_fit < num_seen < num_fit + 10  # told at its next turn
    assert list(delta.token_ids) == expected_output((1,), GREEDY, num_seen)
    for name in ("output_tokens_total", "request_output_tokens_sum", "delivery_seconds_count"):
        assert engine.metrics.value(name) == num_seen, name


def test_where_an_engine_breaks_at_one_request_the_tokens_of_another_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deliver(loop: EngineLoop, update: Update, now_s: float) -> None:
        if update.sequence.request.prompt == BAD and len(update.sequence.output) == 4:
            raise ValueError("delivery broke")
        told(loop, update, now_s)

    told = EngineLoop._deliver
    monkeypatch.setattr(EngineLoop, "_deliver", deliver)
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        followed = engine.submit(ask((1,), max_tokens=30, ignore_eos=True))
        bad = engine.submit(ask(BAD, max_tokens=30, ignore_eos=True, logprobs=0))
        runner.gate.set()
        seen: list[Event] = []
        with pytest.raises(EngineDeadError):
            seen.extend(followed)
        with pytest.raises(EngineDeadError):
            seen.extend(bad)
    num_seen = sum(len(delta.token_ids) for delta in bad_deltas(seen))
    assert engine.metrics.value("output_tokens_total") == num_seen
    assert engine.metrics.value("request_output_tokens_sum") == num_seen


def gather_small(engine: Engine) -> None:
    assert len(gather(engine.submit(ask((2,), max_tokens=2, ignore_eos=True))).token_ids) == 2


def test_a_reader_that_is_slow_but_not_too_slow_gets_everything() -> None:
    script = say({None: b"a" * 30})  # a letter is never held back
    engine, runner = build_engine(script=script, bounds=LimitsSection(stream_buffer_bytes=30 * 8))
    with serve(engine, runner):
        stream = engine.submit(ask((1,), max_tokens=30, ignore_eos=True))
        while engine.metrics.total("requests_finished_total") == 0:
            pass  # not a single event is read before the end
        output = gather(stream)
    assert output.token_ids == list(b"a" * 30)
    assert len(output.deltas) == 1


class BrokenSchedule(Scheduler):
    def schedule(self, now_s: float) -> StepPlan:
        plan = super().schedule(now_s)
        if plan.step_id == 4:
            raise ValueError("schedule broke")
        return plan


class BrokenCommit(Scheduler):
    def commit(
        self,
        plan: StepPlan,
        result: StepResult,
        stopped: Collection[int] = (),
        *,
        now_s: float | None = None,
    ) -> list[Update]:
        if plan.step_id == 4:
            raise ValueError("commit broke")
        return super().commit(plan, result, stopped, now_s=now_s)


def break_at(where: str) -> Callable[[StepPlan], None]:
    def hook(plan: StepPlan) -> None:
        if plan.step_id == 4:
            raise ValueError(f"{where} broke")

    return hook


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["schedule", "launch", "result", "commit"])
def test_an_engine_that_breaks_ends_every_request_and_says_so(
    where: str,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = {"schedule": BrokenSchedule, "commit": BrokenCommit}.get(where, Scheduler)
    monkeypatch.setattr("jaxserve.engine.engine.Scheduler", broken)
    engine, runner = build_engine(
        overlap=overlap,
        on_launch=break_at("launch") if where == "launch" else None,
        on_result=break_at("result") if where == "result" else None,
    )
    states: list[EngineState] = []
    has_failed = threading.Event()

    def listen(state: EngineState) -> None:
        states.append(state)
        if state is EngineState.FAILED:
            has_failed.set()

    engine.add_listener(listen)
    runner.gate.clear()
    with caplog.at_level(logging.INFO, "jaxserve"), serve(engine, runner):
        prompt = "a secret of the caller"
        streams = [engine.submit(ask(prompt, ignore_eos=True)) for _ in range(6)]
        runner.gate.set()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the engine failed: ValueError"):
                gather(stream)
        assert has_failed.wait(timeout=60)
        with pytest.raises(EngineDeadError, match="must be restarted"):
            engine.submit(ask((1,)))
    engine.stop()  # still returns
    assert states == [EngineState.SERVING, EngineState.FAILED]
    assert engine.state is EngineState.FAILED
    assert f"{where} broke" in str(engine.error)
    assert engine.metrics.value("requests_finished_total", reason="error_engine_dead") == 6
    assert engine.metrics.value("requests_refused_total", reason="engine_dead") == 1
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_a_panic_of_a_library_which_is_no_exception_ends_every_request_too() -> None:
    class Panic(BaseException):
        pass

    def on_launch(_: StepPlan) -> None:
        raise Panic

    engine, runner = build_engine(on_launch=on_launch)
    with serve(engine, runner), pytest.raises(EngineDeadError, match="the engine failed: Panic"):
        gather(engine.submit(ask((1,))))
    assert engine.state is EngineState.FAILED


def test_a_token_outside_the_vocabulary_gives_no_text_and_no_fault() -> None:
    engine, runner = build_engine(script=lambda _, index: VOCAB_SIZE + 5 if index == 1 else 65)
    runner.vocab_size = VOCAB_SIZE + 10  # a head that is wider than the tokenizer
    with serve(engine, runner):
        output = gather(engine.submit(ask((1,), max_tokens=3)))
    assert (output.text, output.token_ids) == ("AA", [65, VOCAB_SIZE + 5, 65])


def test_the_log_has_one_line_a_request_and_never_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, runner = build_engine()
    with caplog.at_level(logging.DEBUG, "jaxserve"), serve(engine, runner):
        output = gather(engine.submit(ask("psst!", id="r\n7", ignore_eos=True)))
    lines = [r.message for r in caplog.records if r.message.startswith("finished")]
    assert len(lines) == 1
    assert (
        "request_id='r\\n7' tenant=anonymous reason=max_tokens prompt_tokens=5 output_tokens=8"
        in lines[0]
    )
    assert "psst" not in caplog.text
    assert output.text not in caplog.text


def test_a_scheduler_that_never_plans_a_request_is_a_failure_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lazy(Scheduler):
        def schedule(self, now_s: float) -> StepPlan:
            return StepPlan(step_id=1)

    monkeypatch.setattr("jaxserve.engine.engine.Scheduler", Lazy)
    engine, runner = build_engine(step_limits=LIMITS)
    with serve(engine, runner), pytest.raises(JaxserveError, match="RuntimeError"):
        gather(engine.submit(ask((1,))))


def test_a_deadline_out_of_reach_ends_the_stream_before_anything_runs() -> None:
    engine, runner = build_engine(scheduler=SchedulerSection(policy="edf"))
    bucket = Bucket(decode_seqs=4, verify_tokens=1, chunk_tokens=64)
    for kv in range(20):
        engine.step_times.observe(bucket, StepWork(kv, kv), 5.0)
    with serve(engine, runner):
        asked = dataclasses.replace(ask((1, 2), max_tokens=5), deadline_s=engine.now() + 10.0)
        with pytest.raises(DeadlineUnreachableError, match="would miss its deadline") as caught:
            gather(engine.submit(asked))
        assert 10.0 < caught.value.retry_after_s < 60.0
        assert gather(engine.submit(ask((1, 2), max_tokens=2, ignore_eos=True))).token_ids
    assert engine.metrics.value("requests_finished_total", reason="error_deadline_unreachable") == 1
    check_accounts(engine)
