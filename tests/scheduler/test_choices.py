"""Several choices of one request: forked from its prompt, each to its own end."""

from typing import Literal

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.plan import PageCopy
from jaxserve.request import FinishReason, Request, SamplingParams, SequenceState
from tests.fakes import say
from tests.scheduler.loop import Loop

WARM = SamplingParams(temperature=0.8)


def sampling(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, num_choices=n)


def states(request: Request) -> list[SequenceState]:
    return [sequence.state for sequence in request.sequences]


def test_choices_are_forked_in_the_step_that_ends_the_prompt() -> None:
    loop = Loop(depth=1)
    request = loop.add(6, 4, sampling=sampling(3), seed=7)
    loop.step()
    assert states(request) == [SequenceState.RUNNING, *[SequenceState.UNFORKED] * 2]
    loop.step()
    chunk = loop.plans[1].chunks[0]
    assert (chunk.sequence_id, chunk.start, chunk.num_tokens) == (1, 5, 1)
    loads = loop.plans[1].row_loads
    assert [(load.sequence_id, load.choice, load.seed) for load in loads] == [(2, 1, 7), (3, 2, 7)]
    assert [(fork.sequence_id, fork.row) for fork in chunk.forks] == [
        (load.sequence_id, load.row) for load in loads
    ]
    assert {load.pages for load in loads} == {tuple(request.sequences[0].pages)}
    loop.drain(max_steps=4)
    assert len({tuple(output) for output in loop.choices[request]}) == 3
    assert loop.metrics.value("forked_choices_total") == 2


def test_the_part_filled_page_is_copied_by_all_but_the_last_who_write_into_it() -> None:
    loop = Loop(depth=1)
    request = loop.add(6, 4, sampling=sampling(3))
    loop.step()
    loop.step()
    full, part = request.sequences[0].pages
    loop.step()
    plan = loop.plans[2]
    tables = [sequence.pages for sequence in request.sequences]
    assert [table[0] for table in tables] == [full] * 3
    assert tables[2][1] == part
    assert plan.copies == tuple(PageCopy(source=part, target=table[1]) for table in tables[:2])
    assert [(chunk.new_pages, chunk.num_pages_before) for chunk in plan.chunks] == [
        ((tables[0][1],), 1),
        ((tables[1][1],), 1),
        ((), 2),
    ]
    loop.drain(max_steps=4)
    assert loop.metrics.value("kv_pages_allocated_total") == 2 + 2 + 3  # the ninth token's


def test_a_prompt_of_full_pages_is_shared_without_a_copy() -> None:
    loop = Loop()
    loop.add(8, 3, sampling=sampling(3))
    loop.drain(max_steps=8)
    assert not any(plan.copies for plan in loop.plans)
    assert loop.metrics.value("kv_pages_allocated_total") == 2 + 3


def test_choices_of_one_token_take_no_page_of_their_own() -> None:
    loop = Loop()
    loop.add(6, 1, sampling=sampling(4))
    loop.drain(max_steps=4)
    assert loop.metrics.value("kv_pages_allocated_total") == 2
    assert not any(plan.copies for plan in loop.plans)


def test_a_request_starts_once_there_is_a_row_for_each_of_its_choices() -> None:
    loop = Loop(rows=3, depth=1)
    first = loop.add(2, 2)
    wide = loop.add(6, 4, sampling=sampling(3))
    loop.add(2, 2)  # there is a row for it, but nobody overtakes
    loop.step()
    assert (loop.is_running(first), loop.is_running(wide)) == (True, False)
    loop.step()
    loop.step()
    assert [load.sequence_id for load in loop.plans[2].row_loads] == [2]
    loop.step()
    assert [load.sequence_id for load in loop.plans[3].row_loads] == [3, 4]
    loop.drain(max_steps=20)


def test_rows_are_kept_for_the_choices_while_the_prompt_is_computed() -> None:
    loop = Loop(rows=4, depth=1)
    loop.add(20, 2, sampling=sampling(3))
    mates = [loop.add(1, 3) for _ in range(3)]
    loop.step()
    assert [loop.is_running(mate) for mate in mates] == [True, False, False]
    loop.drain(max_steps=30)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("reserve", ["on_demand", "max_length"])
@pytest.mark.parametrize("chunked", [True, False])
def test_choices_are_what_each_would_be_alone(
    depth: int,
    prompt_len: int,
    batching: Literal["continuous", "static"],
    reserve: Literal["on_demand", "max_length"],
    chunked: bool,
) -> None:
    loop = Loop(
        depth=depth,
        batching=batching,
        reserve=reserve,
        chunked_prefill=chunked,
        chunk_tokens=5 if chunked else 40,
        step_tokens=10 if chunked else 44,
    )
    request = loop.add(prompt_len, 9, sampling=sampling(3), seed=3)
    mate = loop.add(3, 9, sampling=sampling(2), seed=4)
    loop.drain(max_steps=60)
    assert [len(output) for output in loop.choices[request]] == [9] * 3
    assert [len(output) for output in loop.choices[mate]] == [9] * 2
    assert loop.metrics.value("forked_choices_total") == 3
    if reserve == "max_length":
        assert loop.metrics.value("preemptions_total") == 0


def test_a_fork_without_a_page_waits_and_is_computed_alone() -> None:
    loop = Loop(num_pages=1 + 3, max_len=12, depth=2)
    request = loop.add(10, 2, sampling=sampling(3))  # three pages, and no fourth for a copy
    loop.drain(max_steps=30)
    assert [len(output) for output in loop.choices[request]] == [2] * 3
    assert [sequence.num_preemptions for sequence in request.sequences] == [0, 1, 1]
    assert not any(plan.copies for plan in loop.plans)
    assert loop.metrics.value("recomputed_tokens_total") == 2 * 10


def test_choices_that_outgrow_the_pool_are_preempted_one_by_one() -> None:
    loop = Loop()
    request = loop.add(9, 28, sampling=sampling(4))
    loop.drain(max_steps=200)
    counts = [sequence.num_preemptions for sequence in request.sequences]
    assert counts[0] == 0
    assert 1 <= max(counts) <= 4
    assert [len(output) for output in loop.choices[request]] == [28] * 4


def test_each_choice_ends_by_itself_and_the_request_with_the_last() -> None:
    loop = Loop(depth=2)
    request = loop.add(5, 20, sampling=sampling(3))
    loop.stops_at[request] = 2  # and 3, and 4
    running = []
    while request not in loop.outcomes:
        loop.step()
        running.append(sum(state is SequenceState.RUNNING for state in states(request)))
    assert [len(output) for output in loop.choices[request]] == [2, 3, 4]
    assert running == [3, 3, 2, 1, 0]
    assert set(loop.ends.values()) == {FinishReason.STOP}
    loop.drain(max_steps=4)


def test_a_choice_that_ends_leaves_its_row_to_the_next_in_the_queue() -> None:
    loop = Loop(rows=2, depth=1)
    request = loop.add(2, 20, sampling=sampling(2))
    loop.stops_at[request] = 3
    mate = loop.add(2, 2)
    for _ in range(3):
        loop.step()
    assert states(request) == [SequenceState.FINISHED, SequenceState.RUNNING]
    loop.step()
    assert [chunk.sequence_id for chunk in loop.plans[3].chunks] == [2, mate.sequences[0].id]
    loop.drain(max_steps=20)


def test_where_nothing_is_finite_all_choices_end() -> None:
    loop = Loop(script=lambda prompt, index: "not_finite" if index == 0 else None)
    request = loop.add(5, 4, sampling=sampling(3))
    loop.drain(max_steps=6)
    assert loop.outcomes[request] == "not_finite"


def test_surplus_tokens_of_forks_are_counted() -> None:
    loop = Loop(depth=2, script=say({None: (2,) * 9}))
    loop.add(3, 9, sampling=sampling(3), stop_ids={2: FinishReason.EOS})
    loop.drain(max_steps=6)
    assert loop.metrics.value("surplus_tokens_total") == 3  # the step after the forks
    request = loop.add(3, 9, sampling=sampling(3))
    loop.step()
    loop.abort(request)
    loop.drain(max_steps=6)
    assert loop.metrics.value("surplus_tokens_total") == 6  # the forks' own


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_point", range(4 * 9))
def test_an_abort_at_any_point_gives_back_what_forks_hold(at_point: int, depth: int) -> None:
    loop = Loop(depth=depth, max_len=48)
    request = loop.add(14, 5, sampling=sampling(3))
    mate = loop.add(3, 9)
    for _ in range(at_point):
        loop.advance()
    loop.abort(request)
    loop.scheduler.check()
    again = loop.add(14, 5, sampling=sampling(3))
    loop.drain(max_steps=60)
    assert loop.outcomes[mate] is FinishReason.MAX_TOKENS
    assert [len(output) for output in loop.choices[again]] == [5] * 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize("at_point", range(4 * 9))
def test_any_choice_may_end_at_any_point(at_point: int, choice: int, depth: int) -> None:
    loop = Loop(depth=depth)
    request = loop.add(14, 5, sampling=SamplingParams(num_choices=3, prompt_logprobs=1))
    for _ in range(at_point):
        loop.advance()
    sequence = request.sequences[choice]
    if sequence not in loop.ends:
        loop.end(sequence, FinishReason.CANCELLED)
    loop.scheduler.check()
    loop.drain(max_steps=40)
    others = [o for index, o in enumerate(loop.choices[request]) if index != choice]
    assert [len(output) for output in others] == [5, 5]
    assert len(loop.prompt_logprobs[request]) == 13


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_point", range(4 * 9))
def test_a_preemption_at_any_point_changes_no_choice(at_point: int, depth: int) -> None:
    loop = Loop(depth=depth)
    request = loop.add(10, 6, sampling=sampling(3), seed=5)
    loop.add(3, 6)
    for _ in range(at_point):
        loop.advance()
    if request in loop.live:
        loop.preempt(request)
    loop.drain(max_steps=80)
    assert [len(output) for output in loop.choices[request]] == [6] * 3


def test_one_choice_is_preempted_and_the_others_go_on() -> None:
    loop = Loop(depth=1)
    request = loop.add(6, 8, sampling=sampling(3))
    for _ in range(4):
        loop.step()
    loop.scheduler._planner.preemption.preempt(request.sequences[1])
    assert states(request) == [
        SequenceState.RUNNING,
        SequenceState.WAITING,
        SequenceState.RUNNING,
    ]
    loop.scheduler.update_gauges()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 0)
    assert loop.metrics.value("requests_waiting") == 0
    assert loop.metrics.value("waiting_tokens") == 6
    loop.drain(max_steps=40)
    assert [len(output) for output in loop.choices[request]] == [8] * 3
    assert loop.metrics.value("recomputed_tokens_total") == 8


def test_a_higher_class_with_choices_takes_as_many_rows_as_it_needs() -> None:
    loop = Loop(rows=4)
    low = [loop.add(2, 12) for _ in range(4)]
    for _ in range(5):
        loop.step()
    high = loop.add(3, 3, sampling=sampling(3), priority=1)
    for _ in range(7):
        loop.step()
    assert loop.outcomes[high] is FinishReason.MAX_TOKENS
    assert [request.sequences[0].num_preemptions for request in low] == [0, 1, 1, 1]
    loop.drain(max_steps=80)


def test_a_higher_class_takes_the_rows_that_are_kept_for_a_lower_ones_forks() -> None:
    loop = Loop(rows=4, depth=1)
    low = loop.add(20, 2, sampling=sampling(4))
    loop.step()
    high = loop.add(2, 1, sampling=sampling(4), priority=1)
    for _ in range(3):
        loop.step()
    assert (low.sequences[0].num_preemptions, high in loop.outcomes) == (1, True)
    loop.drain(max_steps=30)
    assert loop.metrics.value("preemptions_total") == 1


def test_a_higher_class_counts_shared_pages_once() -> None:
    loop = Loop(num_pages=17, rows=6, max_len=60, depth=1)
    loop.add(5, 30, priority=1)
    low = loop.add(16, 8, sampling=sampling(3))
    for _ in range(7):
        loop.step()
    assert all(loop.choices[low])
    held = {page for sequence in low.sequences for page in sequence.pages}
    loop.add(4 * (loop.pool.num_free + len(held)) + 1, 1, priority=1)  # a page too many
    loop.step()
    assert loop.metrics.value("preemptions_total") == 0
    loop.drain(max_steps=80)


def test_a_page_stays_while_it_is_copied_though_its_last_holder_has_ended() -> None:
    loop = Loop(step_tokens=2, depth=2)
    request = loop.add(3, 4, sampling=sampling(3))
    for _ in range(3):
        loop.step()
    part = request.sequences[2].pages[0]  # that of the last choice, which has not gone on yet
    assert [copy.source for copy in loop.plans[2].copies] == [part, part]
    assert loop.pool.num_pending == 0
    loop.end(request.sequences[2], FinishReason.CANCELLED)
    assert loop.pool.num_pending == 1
    loop.drain(max_steps=20)


def test_more_choices_than_rows_are_refused_with_the_field_and_the_fix() -> None:
    loop = Loop(rows=4)
    loop.scheduler.check_fits(3, 4, 4)
    with pytest.raises(InvalidRequestError, match="n is 5, but 4 sequences run at once") as caught:
        loop.scheduler.check_fits(3, 4, 5)
    assert caught.value.field == "sampling.n"


def test_choices_whose_whole_length_cannot_be_reserved_are_refused() -> None:
    loop = Loop(reserve="max_length")  # 12 pages
    loop.add(9, 7, sampling=sampling(4))  # 2 + 4 · 2
    loop.drain(max_steps=20)
    loop.scheduler.check_fits(8, 12, 3)  # 2 + 3 · 3
    with pytest.raises(InvalidRequestError, match="n is 4, which takes 14 KV pages of 12"):
        loop.scheduler.check_fits(8, 12, 4)
    Loop().scheduler.check_fits(8, 12, 4)  # on demand they take turns


def test_nobody_is_admitted_onto_the_pages_reserved_for_forks() -> None:
    loop = Loop(reserve="max_length", rows=6, depth=1)
    wide = loop.add(12, 5, sampling=sampling(3))  # four pages, and one more for each fork
    loop.add(1, 24)  # six: just what is left
    last = loop.add(1, 4)
    loop.step()
    assert (loop.pool.num_free, loop.is_running(last)) == (2, False)
    loop.drain(max_steps=60)
    assert [len(output) for output in loop.choices[wide]] == [5] * 3


def test_a_request_waits_for_the_reserved_pages_of_its_forks_too() -> None:
    loop = Loop(reserve="max_length", rows=6, depth=1)
    loop.add(1, 32)  # eight pages
    wide = loop.add(12, 5, sampling=sampling(3))  # six
    loop.step()
    assert not loop.is_running(wide)
    loop.drain(max_steps=60)
    assert loop.metrics.value("preemptions_total") == 0


def test_nobody_is_admitted_onto_the_pages_that_forks_will_copy_into() -> None:
    loop = Loop(num_pages=1 + 6, max_len=16, depth=1)
    loop.add(6, 3, sampling=sampling(3))
    loop.add(9, 3)  # three pages: there are four when the other forks, but two are spoken for
    loop.drain(max_steps=20)
    assert loop.metrics.value("preemptions_total") == 0


def test_the_gauges_count_requests_and_shared_pages_once() -> None:
    loop = Loop(depth=1, page_size=4)
    request = loop.add(6, 8, sampling=sampling(3))
    loop.add(5, 4, sampling=sampling(2))  # waits for a second row
    loop.step()
    loop.step()
    loop.scheduler.update_gauges()
    assert [len(sequence.pages) for sequence in request.sequences] == [2, 2, 2]
    assert loop.metrics.value("kv_reserved_bytes") == 2 * 4000
    assert loop.metrics.value("kv_used_bytes") == 6 * 1000
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)
    assert loop.metrics.value("requests_running") == loop.metrics.value("requests_waiting") == 1
    assert loop.metrics.value("waiting_tokens") == 5
    loop.step()
    loop.scheduler.update_gauges()
    assert loop.metrics.value("kv_reserved_bytes") == 4 * 4000
    assert loop.metrics.value("kv_used_bytes") == (4 + 3 * 3) * 1000  # the first page is shared
    loop.drain(max_steps=40)
    loop.scheduler.update_gauges()
    assert loop.metrics.value("kv_used_bytes") == loop.metrics.value("kv_stranded_bytes") == 0


def test_a_static_batch_counts_the_rows_of_all_choices() -> None:
    loop = Loop(batching="static", depth=1)
    loop.add(2, 3, sampling=sampling(3))
    loop.drain(max_steps=10)
    assert loop.metrics.value("offered_rows_total") == 3 * 3
    assert loop.metrics.value("useful_rows_total") == 1 + 3 + 3


def test_a_queue_timeout_and_a_deadline_end_all_choices() -> None:
    loop = Loop(rows=2)
    running = loop.add(3, 30, sampling=sampling(2), deadline_s=1.0, queue_deadline_s=0.5)
    waiting = loop.add(3, 30, sampling=sampling(2), queue_deadline_s=0.5)
    for _ in range(4):
        loop.step()
    loop.now_s = 0.5
    loop.step()
    assert loop.outcomes == {waiting: "late"}
    loop.now_s = 1.0
    loop.step()
    assert loop.outcomes[running] is FinishReason.DEADLINE
    assert all(loop.choices[running])
    loop.drain(max_steps=4)


def test_masks_are_asked_for_where_a_masked_choice_samples() -> None:
    loop = Loop(depth=2)
    request = loop.add(7, 6, sampling=sampling(3), is_masked=True)
    plain = loop.add(3, 6)
    loop.drain(max_steps=30)
    is_masked = {
        (chunk.is_masked, chunk.samples)
        for plan in loop.plans
        for chunk in plan.chunks
        if chunk.sequence_id <= 3
    }
    assert is_masked == {(False, False), (True, True)}
    assert [len(output) for output in loop.choices[request]] == [6] * 3
    assert len(loop.outputs[plain]) == 6


def test_log_probabilities_are_asked_for_with_each_sample() -> None:
    loop = Loop()
    params = SamplingParams(num_choices=2, logprobs=3)
    request = loop.add(7, 4, sampling=params)  # the loop compares what it is told
    loop.add(3, 4, sampling=WARM)
    loop.drain(max_steps=20)
    assert [len(loop.logprobs[sequence]) for sequence in request.sequences] == [4, 4]
    asked = {c.num_top for p in loop.plans for c in p.chunks if c.samples and c.sequence_id <= 2}
    assert asked == {3}
