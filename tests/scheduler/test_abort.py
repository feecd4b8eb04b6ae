"""Aborts at every point of every step, and what a finished request leaves behind (C07, C08)."""

import pytest

from jaxserve.request import FinishReason
from tests.scheduler.loop import Loop, Point

POINTS: tuple[Point, ...] = ("scheduled", "launched", "read", "committed")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("resubmit", [False, True])
@pytest.mark.parametrize("at_point", range(4 * 12))
def test_an_abort_at_any_point_leaves_no_page_and_no_harm(
    at_point: int, resubmit: bool, depth: int
) -> None:
    loop = Loop(depth=depth, max_len=48)
    prompt = tuple(range(7, 37))  # 30 tokens: six chunks of 5
    request = loop.add(prompt, 5)
    mate = loop.add(3, 9)
    for _ in range(at_point):
        loop.advance()
    had_ended = request in loop.outcomes
    loop.abort(request)
    loop.scheduler.check()
    again = loop.add(prompt, 5) if resubmit else None
    loop.drain(max_steps=40)
    if not had_ended:
        assert loop.outcomes[request] is FinishReason.CANCELLED
    assert loop.outcomes[mate] is FinishReason.MAX_TOKENS
    assert again is None or len(loop.outputs[again]) == 5
    canary = loop.add(44, 4)  # all twelve pages
    loop.drain(max_steps=20)
    assert len(loop.outputs[canary]) == 4


def test_the_steps_of_the_test_above_reach_past_the_end_of_the_request() -> None:
    loop = Loop(depth=2)
    request = loop.add(tuple(range(7, 37)), 5)
    loop.add(3, 9)
    seen = {loop.advance() for _ in range(4 * 12)}
    assert request in loop.outcomes
    assert seen == set(POINTS)


def test_pages_of_an_aborted_request_wait_for_the_steps_in_flight() -> None:
    loop = Loop(depth=2)
    request = loop.add(30, 5)
    loop.step()  # the first chunk is launched and its result not read
    loop.abort(request)
    assert (loop.pool.num_pending, loop.pool.num_held) == (2, 0)
    loop.step()
    assert (loop.pool.num_pending, loop.pool.num_free) == (0, 12)


def test_a_waiting_request_that_only_pending_pages_can_serve_has_the_engine_retire_first() -> None:
    loop = Loop(depth=2, max_len=48, chunk_tokens=8)
    big = loop.add(44, 4)
    for _ in range(6):
        loop.step()
    loop.abort(big)
    loop.add(40, 2)
    plan = loop.scheduler.schedule(0.0)
    assert (plan.has_work, plan.retire_first) == (False, "pages")
    assert loop.metrics.value("overlap_waits_total", reason="pages") == 1
    loop.drain(max_steps=20)


def test_five_hundred_requests_leave_the_pool_as_it_was() -> None:
    loop = Loop(max_len=48)
    for index in range(500):
        loop.add((index % 250, 1 + index // 250, 7), 1 + index % 3)
        loop.drain(max_steps=10)  # asserts that every page is free
    last = loop.add(44, 4)  # all twelve pages
    loop.drain(max_steps=20)
    assert len(loop.outputs[last]) == 4
    assert len(loop.outcomes) == 501
