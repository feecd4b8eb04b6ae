from typing import Literal

import pytest

from jaxserve.request import FinishReason, SamplingParams
from tests.fakes import say
from tests.scheduler.loop import GREEDY, Loop


def lens(loop: Loop) -> list[dict[int, int]]:
    """Returns what each step computed: sequence id → tokens."""
    return [{c.sequence_id: c.num_tokens for c in plan.chunks} for plan in loop.plans]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    loop = Loop(depth=1)
    loop.add(12, 3)
    loop.drain(max_steps=10)
    assert lens(loop) == [{1: 5}, {1: 5}, {1: 2}, {1: 1}, {1: 1}]
    assert loop.metrics.value("chunked_prompts_total") == 1


def test_chunks_run_beside_decoding_rows() -> None:
    loop = Loop(depth=1)
    loop.add(4, 6)
    loop.step()
    loop.add(12, 2)
    loop.drain(max_steps=10)
    assert lens(loop)[:5] == [{1: 4}, {1: 1, 2: 5}, {1: 1, 2: 5}, {1: 1, 2: 2}, {1: 1, 2: 1}]
    assert loop.metrics.value("mixed_steps_total") == 3
    assert loop.metrics.value("joined_running_total") == 1


def test_without_chunking_prompts_are_whole() -> None:
    loop = Loop(depth=1, num_pages=30, chunked_prefill=False, chunk_tokens=40, step_tokens=44)
    for prompt_len in (12, 20, 9):
        loop.add(prompt_len, 2)
    loop.drain(max_steps=20)
    # 40 chunk tokens a step: the third waits for the next
    assert lens(loop)[:2] == [{1: 12, 2: 20}, {1: 1, 2: 1, 3: 9}]
    assert loop.metrics.value("chunked_prompts_total") == 0


def test_chunks_are_cut_at_tiles_so_that_padding_fits_too() -> None:
    loop = Loop(depth=1, chunk_tokens=8, chunk_tile=4, step_tokens=None)
    loop.add(5, 1)  # takes two tiles: nothing is left for the second
    loop.add(7, 1)
    loop.drain(max_steps=10)
    assert lens(loop) == [{1: 5}, {2: 7}]


def test_a_step_has_at_most_max_chunks_longer_chunks() -> None:
    loop = Loop(depth=1, chunk_tokens=10, max_chunks=1)
    for _ in range(3):
        loop.add(2, 2)
    loop.drain(max_steps=10)
    assert lens(loop)[:3] == [{1: 2}, {1: 1, 2: 2}, {2: 1, 3: 2}]


def test_the_budget_keeps_a_token_for_each_decoding_row() -> None:
    loop = Loop(depth=1, chunk_tokens=10, step_tokens=6)
    old = loop.add(20, 6)
    loop.add(2, 16)
    for _ in range(6):
        loop.step()
    loop.preempt(old)  # it owes its prompt again, and as the elder it is paid first
    first = len(loop.plans)
    for _ in range(5):
        loop.step()
    assert lens(loop)[first + 1 :] == [{1: 5, 2: 1}] * 4
    loop.drain(max_steps=20)


def test_an_idle_scheduler_plans_nothing() -> None:
    loop = Loop()
    plan = loop.scheduler.schedule(0.0)
    assert (plan.has_work, plan.retire_first) == (False, None)
    assert not loop.scheduler.has_unfinished


def test_a_sampled_token_in_flight_is_left_to_the_device() -> None:
    loop = Loop(depth=2)
    loop.add((5, 6, 7), 4)
    loop.drain(max_steps=10)
    chunks = [chunk for plan in loop.plans for chunk in plan.chunks]
    assert [chunk.token_ids for chunk in chunks] == [(5, 6, 7), None, None, None]
    assert [(chunk.start, chunk.output_index) for chunk in chunks] == [
        (0, 0),
        (3, 1),
        (4, 2),
        (5, 3),
    ]


def test_known_ends_leave_no_surplus() -> None:
    loop = Loop(depth=2)
    for prompt_len, max_tokens in ((3, 1), (9, 2), (4, 7), (1, 5)):
        loop.add(prompt_len, max_tokens)
    loop.drain(max_steps=30)
    assert loop.metrics.value("surplus_tokens_total") == 0


@pytest.mark.parametrize(("depth", "surplus"), [(1, 0), (2, 1), (3, 2)])
def test_an_end_token_is_seen_late_and_the_surplus_is_counted(depth: int, surplus: int) -> None:
    loop = Loop(depth=depth, script=say({None: (40, 41, 2, 43, 44, 45)}))
    request = loop.add(3, 12, stop_ids={2: FinishReason.EOS})
    loop.drain(max_steps=20)
    assert loop.outputs[request] == [40, 41, 2]
    assert loop.outcomes[request] is FinishReason.EOS
    assert loop.metrics.value("surplus_tokens_total") == surplus


def test_an_end_token_before_min_tokens_does_not_end() -> None:
    loop = Loop(script=say({None: (2, 2, 2, 2, 2)}))
    sampling = SamplingParams(temperature=0.0, min_tokens=3)
    request = loop.add(3, 12, sampling=sampling, stop_ids={2: FinishReason.STOP})
    loop.drain(max_steps=20)
    assert loop.outputs[request] == [2, 2, 2, 2]  # three are held off, the fourth ends it


def test_the_end_token_goes_before_the_limit_and_the_limit_names_the_context() -> None:
    loop = Loop(script=say({None: (9, 2, 9, 9)}))
    by_token = loop.add(3, 2, stop_ids={2: FinishReason.EOS})
    by_context = loop.add(4, 3)
    by_context.ends_by_context = True
    with pytest.raises(AssertionError):  # the loop expects MAX_TOKENS
        loop.drain(max_steps=10)
    assert loop.outcomes[by_token] is FinishReason.EOS
    assert loop.outcomes[by_context] is FinishReason.CONTEXT_LENGTH


def test_logits_that_are_not_finite_end_that_request_alone() -> None:
    def script(prompt: tuple[int, ...], index: int) -> Literal["not_finite"] | None:
        return "not_finite" if (prompt[0], index) == (9, 2) else None

    loop = Loop(depth=2, script=script)
    bad = loop.add((9, 9), 6)
    mate = loop.add((8, 8), 6)
    loop.drain(max_steps=10)
    assert (loop.outcomes[bad], len(loop.outputs[bad])) == ("not_finite", 2)
    assert len(loop.outputs[mate]) == 6


def test_what_commit_ended_must_be_finished_before_the_next_step() -> None:
    loop = Loop(depth=1)
    loop.add(3, 1)
    plan = loop.scheduler.schedule(0.0)
    loop.scheduler.commit(plan, loop.runner.launch(plan).result())
    with pytest.raises(AssertionError, match="were not finished"):
        loop.scheduler.schedule(0.0)


def test_no_more_steps_are_in_flight_than_the_overlap_depth() -> None:
    loop = Loop(depth=2)
    loop.add(3, 8)
    loop.scheduler.schedule(0.0)
    loop.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="2 steps are in flight already"):
        loop.scheduler.schedule(0.0)


def test_a_static_batch_is_not_joined_and_its_idle_rows_are_counted() -> None:
    share = {}
    for batching in ("continuous", "static"):
        loop = Loop(batching=batching)
        for max_tokens in (2, 20, 2, 2, 20, 2, 2, 2):
            loop.add(2, max_tokens)
        loop.drain(max_steps=100)
        offered = loop.metrics.value("offered_rows_total")
        share[batching] = loop.metrics.value("useful_rows_total") / offered
        joined = loop.metrics.value("joined_running_total")
        assert (joined > 0) == (batching == "continuous")
    assert share["continuous"] == 1
    assert share["static"] < 0.5


def test_a_static_batch_fills_over_several_steps_and_then_closes() -> None:
    loop = Loop(batching="static", depth=1, chunk_tokens=4)
    for _ in range(6):
        loop.add(4, 6)
    loop.drain(max_steps=100)
    loads = [[load.sequence_id for load in plan.row_loads] for plan in loop.plans]
    assert loads[:4] == [[1], [2], [3], [4]]
    assert loads.index([5]) == loads.index([6]) - 1 == 9  # the first batch is done by then


def test_reserving_the_whole_length_strands_pages_and_never_preempts() -> None:
    loop = Loop(reserve="max_length")
    for _ in range(4):
        loop.add(8, 17)  # six pages each: two at a time
    loop.step()
    loop.step()
    loop.scheduler.update_gauges()
    assert loop.scheduler.num_running == 2
    assert loop.metrics.value("kv_reserved_bytes") == 12 * 4000
    used = loop.metrics.value("kv_used_bytes")
    assert used == sum(s.sequences[0].num_computed for s in loop.live) * 1000
    assert loop.metrics.value("kv_stranded_bytes") == 48000 - used
    loop.drain(max_steps=100)
    assert loop.metrics.value("preemptions_total") == 0
    assert loop.metrics.value("kv_reserved_pages_total") > 0
    assert loop.metrics.value("kv_pages_allocated_total") == 4 * 6


def test_pages_on_demand_are_not_reserved() -> None:
    loop = Loop()
    loop.add(8, 17)
    loop.drain(max_steps=30)
    assert loop.metrics.value("kv_reserved_pages_total") == 0
    assert loop.metrics.value("kv_pages_allocated_total") == 6  # 24 tokens: the 25th is not written


def test_the_gauges_show_queue_and_rows() -> None:
    loop = Loop(rows=2)
    for _ in range(5):
        loop.add(2, 8)
    loop.step()
    loop.scheduler.update_gauges()
    assert loop.metrics.value("requests_running") == loop.scheduler.num_running == 2
    assert loop.metrics.value("requests_waiting") == loop.scheduler.num_waiting == 3
    assert loop.metrics.value("waiting_tokens") == loop.scheduler.waiting_tokens == 6
    assert loop.metrics.value("kv_capacity_tokens") == 48


def test_a_row_load_carries_what_the_row_needs() -> None:
    loop = Loop(depth=1)
    sampling = SamplingParams(temperature=0.0, presence_penalty=0.5)
    counted = loop.add((5, 6, 7), 4, sampling=sampling, seed=9, stop_ids={1: FinishReason.EOS})
    plain = loop.add((8, 9), 4, sampling=GREEDY)
    loop.step()
    first, second = loop.plans[0].row_loads
    assert (first.prompt, first.output, first.seed, first.stop_ids) == ((5, 6, 7), (), 9, (1,))
    assert (second.prompt, second.output) == ((), ())
    assert first.row != second.row
    loop.preempt(counted)
    loop.preempt(plain)
    loop.step()
    again = loop.plans[1].row_loads[0]
    assert again.output == tuple(loop.outputs[counted][:1])
    loop.drain(max_steps=20)
