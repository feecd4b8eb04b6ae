"""The bounded queue, ids in flight, and who can never fit."""

import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import Finished
from jaxserve.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)
from jaxserve.request import FinishReason
from tests.engines import ONE_ROW, ask, build_engine, gather, serve


def test_the_queue_is_bounded_in_requests() -> None:
    engine, runner = build_engine(bounds=LimitsSection(max_waiting_requests=8), step_limits=ONE_ROW)
    runner.gate.clear()
    with serve(engine, runner):
        busy = iter(engine.submit(ask((1,), ignore_eos=True)))
        next(busy)  # it has the row, so it is not in the queue
        waiting = [engine.submit(ask((n,), ignore_eos=True)) for n in range(8)]
        with pytest.raises(QueueFullError, match="8 requests wait, the limit is 8") as refusal:
            engine.submit(ask((9,)))
        assert 0.1 <= refusal.value.retry_after_s <= 60
        waiting.pop().cancel()
        runner.gate.set()
        for stream in waiting:
            assert len(gather(stream).token_ids) == 8
        assert isinstance(list(busy)[-1], Finished)
        gather(engine.submit(ask((9,))))
    assert engine.metrics.value("requests_refused_total", reason="queue_full") == 1
    assert engine.metrics.value("requests_submitted_total") == 10


def test_the_queue_is_bounded_in_tokens_but_an_empty_one_takes_any_prompt() -> None:
    engine, runner = build_engine(bounds=LimitsSection(max_waiting_tokens=10), step_limits=ONE_ROW)
    runner.gate.clear()
    with serve(engine, runner):
        next(busy := iter(engine.submit(ask((1,)))))
        first = engine.submit(ask(tuple(range(20))))
        with pytest.raises(QueueFullError, match="21 prompt tokens would wait, the limit is 10"):
            engine.submit(ask((1,)))
        runner.gate.set()
        gather(first)
        list(busy)
        small = [engine.submit(ask((1, 2, 3))) for _ in range(3)]
        for stream in small:
            gather(stream)


def test_an_id_in_flight_is_refused_and_free_again_after_the_end() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        first = engine.submit(ask((1,), id="x"))
        with pytest.raises(DuplicateRequestError, match="'x' is in flight"):
            engine.submit(ask((2,), id="x"))
        runner.gate.set()
        gather(first)
        gather(engine.submit(ask((2,), id="x")))


def test_ids_are_made_up_where_none_is_given() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        streams = [engine.submit(ask((1,))) for _ in range(3)]
        ids = {gather(stream).started.request_id for stream in streams}
    assert len(ids) == 3
    assert all(request_id.startswith("req-") for request_id in ids)


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("prompt_len", [43, 44, 45, 46, 47, 48, 49, 52, 59, 60])
def test_what_can_never_fit_is_refused_and_the_next_one_runs(
    prompt_len: int, max_tokens: int
) -> None:
    engine, runner = build_engine(max_model_tokens=60)  # more than the pool's 48
    with serve(engine, runner):
        asked = ask(tuple(range(prompt_len)), max_tokens=max_tokens, ignore_eos=True)
        if prompt_len + max_tokens <= 48:
            assert len(gather(engine.submit(asked)).token_ids) == max_tokens
        else:
            with pytest.raises(InvalidRequestError, match=r"\b(48|60)\b") as refusal:
                engine.submit(asked)
            assert str(prompt_len) in str(refusal.value)
        small = gather(engine.submit(ask((1, 2, 3), max_tokens=2, ignore_eos=True)))
    assert small.finished.reason is FinishReason.MAX_TOKENS


def test_requests_that_outgrow_the_pool_together_all_end() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        streams = [
            engine.submit(ask(tuple(range(n, n + 8)), max_tokens=32, ignore_eos=True))
            for n in range(4)
        ]
        outputs = [gather(stream) for stream in streams]
    assert all(len(output.token_ids) == 32 for output in outputs)
    assert runner.num_steps < 6 * 40
    assert engine.metrics.value("preemptions_total") > 0
    reported = sum(output.finished.execution.preemptions for output in outputs)
    assert reported == engine.metrics.value("preemptions_total")


def test_a_refusal_is_counted_by_its_reason_and_starts_nothing() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        for bad in (ask((), max_tokens=1), ask((1,), temperature=-1.0), ask((300,))):
            with pytest.raises(RequestError):
                engine.submit(bad)
    assert engine.metrics.value("requests_refused_total", reason="invalid_field") == 3
    assert engine.metrics.value("requests_submitted_total") == 0
    assert runner.num_steps == 0
