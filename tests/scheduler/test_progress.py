"""Everybody ends within a bound, and nobody is preempted without end (C12)."""

import pytest

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


def test_two_long_prompts_are_not_started_side_by_side_where_only_one_can_end() -> None:
    loop = Loop()
    loop.add(30, 2)
    loop.add(30, 2)
    loop.drain(max_steps=60)
    assert loop.metrics.value("preemptions_total") == 0


def test_a_preempted_request_starts_again_only_where_the_others_can_grow() -> None:
    loop = Loop(depth=1)
    old = [loop.add(8, 30), loop.add(8, 30)]
    young = loop.add(8, 20)
    while loop.is_running(young) or young.sequences[0].num_preemptions == 0:
        loop.step()
    while not loop.is_running(young) and all(request in loop.live for request in old):
        loop.step()
    assert not all(request in loop.live for request in old), "it came back into a full pool"
    loop.drain(max_steps=120)


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
    loop = Loop(num_pages=1 + 6, depth=2, max_len=24)
    elder = loop.add(4, 12)
    younger = loop.add(3, 12)
    leaver = loop.add(8, 12)
    pages: dict[int, int] = {}
    while not loop.plans or elder.sequences[0].num_computed < 8 or loop.pool.num_free:
        loop.step()
        pages = {id: len(r.sequences[0].pages) for id, r in enumerate((elder, younger, leaver))}
        if leaver.sequences[0].num_preemptions:
            break
    assert leaver.sequences[0].num_preemptions == 1, f"the youngest gives way: {pages}"
    assert loop.is_running(elder)
    assert loop.is_running(younger)
    loop.drain(max_steps=80)


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
