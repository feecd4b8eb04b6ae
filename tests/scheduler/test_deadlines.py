"""Deadlines in virtual time (C13)."""

from jaxserve.request import FinishReason
from jaxserve.scheduler.deadlines import Deadlines
from tests.scheduler.loop import Loop


def test_who_is_late_in_the_queue_ends_without_a_prefill() -> None:
    loop = Loop(rows=1)
    blocker = loop.add(4, 30)
    late = [loop.add(9, 4, deadline_s=0.05) for _ in range(20)]
    for _ in range(8):
        loop.now_s += 0.025
        loop.step()
    assert [loop.outcomes[request] for request in late] == ["late"] * 20
    loop.drain(max_steps=40)
    assert loop.outcomes[blocker] is FinishReason.MAX_TOKENS
    late_ids = {request.sequences[0].id for request in late}
    assert not [c for plan in loop.plans for c in plan.chunks if c.sequence_id in late_ids]


def test_a_deadline_while_decoding_ends_it_with_what_it_has() -> None:
    loop = Loop()
    request = loop.add(4, 30, deadline_s=1.0)
    for _ in range(6):
        loop.step()
    loop.now_s = 1.0
    loop.step()
    assert loop.outcomes[request] is FinishReason.DEADLINE
    assert 1 <= len(loop.outputs[request]) < 30


def test_the_queue_timeout_is_over_once_a_request_was_admitted() -> None:
    loop = Loop(rows=1)
    first = loop.add(4, 8, queue_deadline_s=1.0)
    second = loop.add(4, 8, queue_deadline_s=1.0)
    loop.step()
    loop.preempt(first)  # it waits again, but it was admitted
    loop.now_s = 1.0
    loop.drain(max_steps=40)
    assert loop.outcomes == {first: FinishReason.MAX_TOKENS, second: "late"}


def test_schedule_admits_nobody_who_is_late() -> None:
    loop = Loop()
    loop.add(4, 8, deadline_s=1.0)
    assert not loop.scheduler.schedule(1.0).has_work
    assert loop.scheduler.schedule(0.999).has_work


def test_a_late_request_is_returned_once() -> None:
    loop = Loop()
    request = loop.add(4, 8, deadline_s=1.0, queue_deadline_s=0.5)
    assert loop.scheduler.expired(0.4) == []
    assert loop.scheduler.expired(2.0) == [request]
    assert loop.scheduler.expired(2.0) == []


def test_the_heap_forgets_ended_requests_and_keeps_live_ones() -> None:
    loop = Loop()
    live = loop.add(4, 8, deadline_s=50.0)
    deadlines = Deadlines()
    deadlines.add(live)
    for _ in range(100):
        ended = loop.add(4, 8, deadline_s=100.0)
        deadlines.add(ended)
        loop.abort(ended)
    deadlines.trim(num_live=1)
    assert len(deadlines._heap) == 1
    assert deadlines.pop_expired(60.0) == [live]
