"""The fake runner sees what it is there to see."""

import dataclasses

import pytest

from jaxserve.plan import Chunk, RowLoad, StepLimits, StepPlan
from jaxserve.request import SamplingParams
from tests.fakes import FakeRunner, PlanError, expected_output, say

GREEDY = SamplingParams(temperature=0.0)
LIMITS = StepLimits(max_rows=2, max_chunk_tokens=8, chunk_tile=4, max_chunks=2, max_seqs=2)


def make_runner(*, late_writes: bool = False) -> FakeRunner:
    return FakeRunner(limits=LIMITS, num_pages=6, page_size=4, late_writes=late_writes)


def start(
    sequence_id: int, *, row: int, pages: tuple[int, ...], prompt: tuple[int, ...]
) -> StepPlan:
    """Returns a plan that admits one sequence with its whole prompt."""
    load = RowLoad(
        sequence_id=sequence_id,
        row=row,
        pages=pages,
        sampling=GREEDY,
        seed=0,
        choice=0,
        stop_ids=(),
    )
    chunk = Chunk(
        sequence_id=sequence_id,
        row=row,
        start=0,
        num_tokens=len(prompt),
        token_ids=prompt,
        samples=True,
        output_index=0,
        prompt_len=len(prompt),
        num_pages_before=len(pages),
    )
    return StepPlan(step_id=1, chunks=(chunk,), row_loads=(load,))


def decode(sequence_id: int, *, row: int, position: int, output_index: int) -> Chunk:
    return Chunk(
        sequence_id=sequence_id,
        row=row,
        start=position,
        num_tokens=1,
        token_ids=None,
        samples=True,
        output_index=output_index,
        prompt_len=3,
    )


def test_a_sequence_gets_what_the_oracle_says() -> None:
    runner = make_runner()
    steps = [runner.launch(start(1, row=0, pages=(1, 2), prompt=(5, 6, 7)))]
    for index in (1, 2, 3):
        chunk = decode(1, row=0, position=2 + index, output_index=index)
        steps.append(runner.launch(StepPlan(step_id=1 + index, chunks=(chunk,))))
    tokens = [step.result().token_ids[1] for step in steps]
    assert tokens == expected_output((5, 6, 7), GREEDY, 4)
    assert len(set(tokens)) > 1


def test_forced_tokens_come_first_and_the_oracle_knows_them() -> None:
    runner = make_runner()
    runner.script = say({(5, 6): (40,)})
    token = runner.launch(start(1, row=0, pages=(1,), prompt=(5, 6))).result().token_ids[1]
    assert [token] == expected_output((5, 6), GREEDY, 1, script=runner.script) == [40]


@pytest.mark.parametrize("late_writes", [False, True])
def test_a_page_given_away_too_early_is_refused(late_writes: bool) -> None:
    runner = make_runner(late_writes=late_writes)
    runner.launch(start(1, row=0, pages=(1,), prompt=(5, 6)))
    plan = start(2, row=1, pages=(1,), prompt=(7, 8))
    with pytest.raises(PlanError, match="page 1 is still written"):
        runner.launch(dataclasses.replace(plan, step_id=2))


def test_a_page_taken_from_a_live_sequence_is_refused() -> None:
    runner = make_runner()
    runner.launch(start(1, row=0, pages=(1,), prompt=(5, 6))).result()
    plan = start(2, row=1, pages=(1,), prompt=(7, 8))
    runner.launch(dataclasses.replace(plan, step_id=2)).result()
    chunk = decode(1, row=0, position=2, output_index=1)
    with pytest.raises(PlanError, match="sequence 1 uses page 1 of sequence 2"):
        runner.launch(StepPlan(step_id=3, chunks=(chunk,)))


def test_a_damaged_cell_changes_the_output() -> None:
    runner = make_runner()
    runner.launch(start(1, row=0, pages=(1,), prompt=(5, 6))).result()
    runner._pool[1][0] = (5, 0, 99)  # the right token, written by another
    chunk = decode(1, row=0, position=2, output_index=1)
    token = runner.launch(StepPlan(step_id=2, chunks=(chunk,))).result().token_ids[1]
    assert token != expected_output((5, 6), GREEDY, 2)[1]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (start(1, row=0, pages=(0,), prompt=(5,)), "page 0"),
        (start(1, row=0, pages=(6,), prompt=(5,)), "page 6"),
        (start(1, row=2, pages=(1,), prompt=(5,)), "row 2"),
        (start(1, row=0, pages=(1,), prompt=(5, -1)), "token ids"),
        (start(1, row=0, pages=(1,), prompt=(5,) * 5), "no page for 5 tokens"),
        (start(1, row=0, pages=(1, 2, 3), prompt=(5,) * 9), "12 tile-rounded"),
        (StepPlan(step_id=1), "has work"),
        (StepPlan(step_id=1, chunks=(decode(1, row=0, position=0, output_index=0),)), "own row 0"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_runner().launch(plan)


def test_a_held_step_returns_when_it_is_let_go() -> None:
    runner = make_runner()
    runner.gate.clear()
    step = runner.launch(start(1, row=0, pages=(1,), prompt=(5, 6)))
    runner.gate.set()
    assert step.result().token_ids.keys() == {1}
    with pytest.raises(PlanError, match="called twice"):
        step.result()
