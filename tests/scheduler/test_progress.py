"""Everybody ends within a bound, and nobody is preempted without end (C12)."""

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import FinishReason
from tests.scheduler.loop import Loop


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
def test_four_requests_that_outgrow_the_pool_together_all_finish(depth: int, chunked: bool) -> None:
    loop = Loop(
        depth=depth,
        chunked_prefill=chunked,
        chunk_tokens=5 if chunked else 40,
        step_tokens=10 if chunked else 44,
    )
    requests = [loop.add(8, 32) for _ in range(4)]
    loop.drain(max_steps=6 * 34)
    counts = [request.sequences[0].num_preemptions for request in requests]
    assert counts[0] == 0, "the oldest is never the victim"
    assert 1 <= max(counts) <= 3
    assert loop.metrics.value("preemptions_total") == sum(counts)
    assert loop.metrics.value("recomputed_tokens_total") > 0


def test_a_request_alone_may_fill_the_pool_to_the_last_page() -> None:
    loop = Loop(max_len=60)
    request = loop.add(8, 40)
    loop.drain(max_steps=45)
    assert loop.outcomes[request] is FinishReason.MAX_TOKENS
    assert loop.metrics.value("preemptions_total") == 0
    with pytest.raises(InvalidRequestError, match=r"8\) \+ max_tokens \(44\) is 52 .* holds 48"):
        loop.add(8, 44)


def test_a_long_prompt_starts_within_a_bound_in_a_stream_of_short_ones() -> None:
    loop = Loop()
    for _ in range(6):
        loop.add(4, 6)
    long = loop.add(30, 4)
    for _ in range(30):
        loop.add(4, 6)
        loop.step()
    assert long in loop.outcomes, "younger short prompts have overtaken it"
    loop.drain(max_steps=200)


def test_nobody_is_admitted_onto_the_page_that_a_runner_needs_next() -> None:
    loop = Loop(num_pages=1 + 3, max_len=12, chunk_tokens=12, step_tokens=None)
    loop.add(4, 3)  # its first page is full after the prompt
    loop.add(8, 2)  # two pages: there are two, but one of them is spoken for
    loop.step()
    assert loop.scheduler.num_running == 1
    loop.drain(max_steps=12)
    assert loop.metrics.value("preemptions_total") == 0


def test_a_preempted_request_starts_again_only_where_the_others_can_grow() -> None:
    loop = Loop(num_pages=1 + 4, max_len=16, chunk_tokens=8, step_tokens=None, depth=1)
    loop.add(4, 10)
    young = loop.add(4, 8)
    loop.step()
    loop.step()
    loop.preempt(young)  # its two pages are free, and two is what it needs; but the other grows
    loop.drain(max_steps=30)
    assert young.sequences[0].num_preemptions == 1


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    loop = Loop()
    for _ in range(4):
        loop.add(8, 32)
    loop.add(1, 1)
    loop.drain(max_steps=250)
    preempting = [plan for plan in loop.plans if plan.preempted]
    assert preempting
    assert not any(plan.row_loads for plan in preempting)


def test_a_younger_one_takes_no_page_that_an_elder_waits_for() -> None:
    loop = Loop(num_pages=1 + 14, page_size=2, max_len=28, chunk_tokens=8, step_tokens=None)
    loop.add(1, 3)
    loop.add(24, 2)
    loop.add(1, 6)
    for _ in range(3):
        loop.step()
    # In the third step the first takes its last page, so three are free; the second needs four,
    # and gets the first one's when that has ended; the third needs one, and leaves it alone.
    lens = [[(c.sequence_id, c.num_tokens) for c in plan.chunks] for plan in loop.plans]
    assert lens == [[(1, 1), (3, 1), (2, 8)], [(1, 1), (3, 1), (2, 8)], [(1, 1)]]
    loop.drain(max_steps=20)


def test_a_higher_class_takes_the_row_of_a_lower_one() -> None:
    loop = Loop(rows=2)
    low = [loop.add(4, 30) for _ in range(2)]
    for _ in range(5):
        loop.step()
    high = loop.add(4, 3, priority=1)
    for _ in range(7):
        loop.step()
    assert loop.outcomes[high] is FinishReason.MAX_TOKENS
    assert [request.sequences[0].num_preemptions for request in low] == [0, 1]
    loop.drain(max_steps=120)


def test_a_higher_class_takes_pages_only_where_that_lets_it_start() -> None:
    loop = Loop(rows=4)
    same = loop.add(30, 9, priority=1)
    low = loop.add(4, 6)
    for _ in range(9):
        loop.step()
    high = loop.add(20, 3, priority=1)  # five pages: the low one's and the free ones do not do
    loop.step()
    assert low.sequences[0].num_preemptions == 0
    loop.drain(max_steps=80)
    assert [loop.outcomes[r] for r in (same, low, high)] == [FinishReason.MAX_TOKENS] * 3


def test_equal_classes_never_preempt_each_other_for_admission() -> None:
    loop = Loop(rows=1)
    for _ in range(6):
        loop.add(4, 6, priority=3)
    loop.drain(max_steps=80)
    assert loop.metrics.value("preemptions_total") == 0


def test_priorities_near_the_memory_limit_do_not_take_turns_in_preempting() -> None:
    loop = Loop()
    requests = [loop.add(8, 24, priority=index % 3) for index in range(9)]
    loop.drain(max_steps=6 * 9 * 32)
    assert max(request.sequences[0].num_preemptions for request in requests) <= 6
