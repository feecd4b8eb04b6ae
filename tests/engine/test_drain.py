"""States of the engine: who is let in, and how it goes to rest."""

import threading

import pytest

from jaxserve.engine import EngineState
from jaxserve.errors import NotServingError
from tests.engines import ask, build_engine, gather, serve


def test_before_start_and_after_stop_nobody_is_let_in() -> None:
    engine, runner = build_engine()
    with pytest.raises(NotServingError, match="the engine is starting"):
        engine.submit(ask((1,)))
    with serve(engine, runner):
        gather(engine.submit(ask((1,))))
    with pytest.raises(NotServingError, match="the engine is stopped"):
        engine.submit(ask((1,)))
    assert engine.metrics.value("requests_refused_total", reason="not_serving") == 2


def test_draining_lets_running_requests_end_and_refuses_new_ones() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        streams = [engine.submit(ask((n,), max_tokens=20, ignore_eos=True)) for n in range(6)]
        is_draining = threading.Event()
        engine.add_listener(lambda state: is_draining.set())
        drain = threading.Thread(target=engine.drain, args=(600.0,))
        drain.start()
        assert is_draining.wait(timeout=60)
        with pytest.raises(NotServingError, match="the engine is draining"):
            engine.submit(ask((1,)))
        runner.gate.set()
        outputs = [gather(stream) for stream in streams]
        drain.join(timeout=60)
        assert not drain.is_alive()
    assert all(len(output.token_ids) == 20 for output in outputs)
    assert engine.state is EngineState.STOPPED


def test_what_is_not_done_in_time_ends_with_an_error() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        streams = [engine.submit(ask((n,), max_tokens=20, ignore_eos=True)) for n in range(6)]
        next(iter_first := iter(streams[0]))
        drain = threading.Thread(target=engine.drain, args=(0.0,))
        drain.start()
        while not engine._intake.is_cut:
            pass
        runner.gate.set()
        with pytest.raises(NotServingError, match="stopped before this request was done"):
            list(iter_first)
        for stream in streams[1:]:
            with pytest.raises(NotServingError, match="send it again"):
                gather(stream)
        drain.join(timeout=60)
    assert engine.metrics.value("requests_finished_total", reason="error_not_serving") == 6


def test_a_second_stop_cuts_a_long_drain_short() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        stream = engine.submit(ask((1,), max_tokens=30, ignore_eos=True))
        next(events := iter(stream))
        drain = threading.Thread(target=engine.drain, args=(3600.0,))
        drain.start()
        stop = threading.Thread(target=engine.stop)
        stop.start()
        while not engine._intake.is_cut:
            pass
        runner.gate.set()
        drain.join(timeout=60)
        stop.join(timeout=60)
        assert not drain.is_alive()
        assert not stop.is_alive()
        with pytest.raises(NotServingError):
            list(events)


def test_listeners_hear_each_state_once() -> None:
    engine, runner = build_engine()
    states: list[EngineState] = []
    engine.add_listener(states.append)
    with serve(engine, runner):
        gather(engine.submit(ask((1,))))
        engine.stop()
        engine.stop()
    assert states == [EngineState.SERVING, EngineState.DRAINING, EngineState.STOPPED]


def test_an_engine_that_was_never_started_can_be_stopped() -> None:
    engine, _ = build_engine()
    engine.stop()
    engine.stop()
    assert engine.state is EngineState.STOPPED
