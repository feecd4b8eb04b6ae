"""The fake runner sees what it is there to see."""

import dataclasses
import math

import pytest

from jaxserve.plan import Chunk, Fork, PageCopy, PromptScoring, RowLoad, StepLimits, StepPlan
from jaxserve.request import SamplingParams
from tests.fake_logprobs import expected_logprobs, expected_prompt_logprobs, next_logprobs
from tests.fakes import (
    VOCAB_SIZE,
    FakeRunner,
    PlanError,
    build_mask,
    expected_output,
    say,
    stack_masks,
)

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
    return StepPlan(step_id=1, others=(chunk,), row_loads=(load,))


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
        steps.append(runner.launch(StepPlan(step_id=1 + index, others=(chunk,))))
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
        runner.launch(StepPlan(step_id=3, others=(chunk,)))


def test_a_damaged_cell_changes_the_output() -> None:
    runner = make_runner()
    runner.launch(start(1, row=0, pages=(1,), prompt=(5, 6))).result()
    runner._pool[1][0] = (5, 0, 99)  # the right token, written by another
    chunk = decode(1, row=0, position=2, output_index=1)
    token = runner.launch(StepPlan(step_id=2, others=(chunk,))).result().token_ids[1]
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
        (StepPlan(step_id=1, others=(decode(1, row=0, position=0, output_index=0),)), "own row 0"),
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


SEEDED = SamplingParams(temperature=0.8, num_choices=2)
PROMPT = (5, 6, 7)


def fork_two() -> StepPlan:
    """Returns a plan that computes a prompt of three quarters of a page, for two choices."""
    plan = start(1, row=0, pages=(1,), prompt=PROMPT)
    load = dataclasses.replace(plan.row_loads[0], sampling=SEEDED, seed=9)
    other = dataclasses.replace(load, sequence_id=2, row=1, choice=1)
    chunk = dataclasses.replace(plan.chunks[0], forks=(Fork(sequence_id=2, row=1),))
    return dataclasses.replace(plan, others=(chunk,), row_loads=(load, other))


def go_on(step_id: int, *, position: int, into_copy: bool = False) -> StepPlan:
    """Returns a plan of one more token for each; the first choice writes into a copy."""
    first, second = (
        decode(id_, row=id_ - 1, position=position, output_index=position - 2) for id_ in (1, 2)
    )
    copies: tuple[PageCopy, ...] = ()
    if into_copy:
        first = dataclasses.replace(first, new_pages=(2,), num_pages_before=0)
        copies = (PageCopy(source=1, target=2),)
    return StepPlan(step_id=step_id, others=(first, second), copies=copies)


def run_two(*plans: StepPlan) -> list[list[int]]:
    """Returns what each choice got."""
    runner = make_runner(late_writes=True)
    results = [runner.launch(plan).result() for plan in plans]
    return [[result.token_ids[id_] for result in results] for id_ in (1, 2)]


def expect(choice: int, n: int) -> list[int]:
    return expected_output(PROMPT, SEEDED, n, seed=9, choice=choice)


def fill_next_page(step_id: int) -> StepPlan:
    """Returns a plan of the token behind the page, which takes another for each choice."""
    plan = go_on(step_id, position=4)
    chunks = [
        dataclasses.replace(chunk, new_pages=(page,), num_pages_before=1)
        for chunk, page in zip(plan.chunks, (3, 4), strict=True)
    ]
    return dataclasses.replace(plan, others=tuple(chunks))


def test_forks_get_what_the_oracle_says_of_their_choice() -> None:
    outputs = run_two(fork_two(), go_on(2, position=3, into_copy=True), fill_next_page(3))
    assert outputs == [expect(0, 3), expect(1, 3)]
    assert outputs[0] != outputs[1]


def test_a_shared_page_written_without_a_copy_changes_the_output() -> None:
    outputs = run_two(fork_two(), go_on(2, position=3))
    assert [output[0] for output in outputs] == [expect(0, 1)[0], expect(1, 1)[0]]
    assert outputs[0][1] != expect(0, 2)[1]


def test_a_missing_copy_changes_the_output() -> None:
    plan = dataclasses.replace(go_on(2, position=3, into_copy=True), copies=())
    assert run_two(fork_two(), plan)[0][1] != expect(0, 2)[1]


def test_a_copy_made_a_step_late_changes_the_output() -> None:
    runner = make_runner()
    runner.launch(fork_two()).result()
    runner.launch(dataclasses.replace(go_on(2, position=3, into_copy=True), copies=())).result()
    runner._pool[2] = list(runner._pool[1])
    token = runner.launch(fill_next_page(3)).result().token_ids[1]
    assert token != expect(0, 3)[2]


def change(plan: StepPlan, **fields: object) -> StepPlan:
    """Returns the plan with its first chunk changed."""
    chunk = dataclasses.replace(plan.chunks[0], **fields)  # type: ignore[arg-type]  # by name
    return dataclasses.replace(plan, others=(chunk, *plan.chunks[1:]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dataclasses.replace(go_on(2, position=3), copies=(PageCopy(source=1, target=2),)), "new"),
        (
            dataclasses.replace(
                go_on(2, position=3, into_copy=True), copies=(PageCopy(source=2, target=2),)
            ),
            "given to another",
        ),
        (change(go_on(2, position=3), samples=False, output_index=0, num_top=1), "num_top of a"),
        (change(go_on(2, position=3), samples=False, is_masked=True), "is_masked of a"),
        (
            change(go_on(2, position=3), scoring=PromptScoring(first=3, targets=(1,), num_top=0)),
            "behind the prompt",
        ),
        (
            change(go_on(2, position=3), scoring=PromptScoring(first=1, targets=(7,), num_top=0)),
            "outside of the chunk",
        ),
        (change(go_on(2, position=3), forks=(Fork(sequence_id=3, row=1),)), "a row is in a plan"),
    ],
)
def test_a_plan_that_breaks_a_rule_of_choices_is_refused(plan: StepPlan, message: str) -> None:
    runner = make_runner()
    runner.launch(fork_two()).result()
    with pytest.raises(PlanError, match=message):
        runner.launch(plan)


def test_forks_begin_with_the_pages_of_the_first_choice_and_are_loaded() -> None:
    plan = fork_two()
    first, other = plan.row_loads
    moved = dataclasses.replace(other, pages=(3,))
    with pytest.raises(PlanError, match="fork 2 begins with pages"):
        make_runner().launch(dataclasses.replace(plan, row_loads=(first, moved)))
    with pytest.raises(PlanError, match="have no row load"):
        make_runner().launch(dataclasses.replace(plan, row_loads=(first,)))


def test_a_page_that_is_still_copied_is_not_given_away() -> None:
    runner = make_runner()
    runner.launch(fork_two()).result()
    runner.launch(go_on(2, position=3, into_copy=True))
    taker = change(fill_next_page(3), new_pages=(1,))
    with pytest.raises(PlanError, match="page 1 is still"):
        runner.launch(taker)


def test_a_masked_step_waits_for_its_masks_and_keeps_to_them() -> None:
    runner = make_runner()
    step = runner.launch(change(fork_two(), is_masked=True))
    with pytest.raises(PlanError, match="waits for its masks"):
        step.result()
    with pytest.raises(PlanError, match="waits for its masks"):
        runner.launch(go_on(2, position=3, into_copy=True))
    runner = make_runner()
    step = runner.launch(change(fork_two(), is_masked=True))
    step.launch_output(stack_masks({1: build_mask([77]), 2: build_mask([])}))
    result = step.result()
    assert (result.token_ids[1], result.not_finite) == (77, frozenset({2}))
    with pytest.raises(PlanError, match="launched already"):
        step.launch_output(stack_masks({}))


def test_a_masked_token_is_what_the_oracle_says() -> None:
    runner = make_runner()
    step = runner.launch(change(fork_two(), is_masked=True))
    mask = build_mask(range(40, 50))
    step.launch_output(stack_masks({1: mask, 2: mask}))
    tokens = step.result().token_ids
    for choice in (0, 1):
        wanted = expected_output(
            PROMPT, SEEDED, 1, seed=9, choice=choice, mask_of=lambda output: mask
        )
        assert [tokens[1 + choice]] == wanted
        assert 40 <= wanted[0] < 50


def test_log_probabilities_are_a_distribution_and_depend_on_the_page_table() -> None:
    assert sum(map(math.exp, next_logprobs(PROMPT, VOCAB_SIZE))) == pytest.approx(1)
    scoring = PromptScoring(first=0, targets=(6, 7), num_top=2)
    plan = change(fork_two(), num_top=3, scoring=scoring)
    runner = make_runner()
    result = runner.launch(plan).result()
    told = expected_prompt_logprobs(PROMPT, num_top=2, vocab_size=VOCAB_SIZE)
    assert list(result.prompt_logprobs[1]) == told
    for id_ in (1, 2):
        output = [result.token_ids[id_]]
        wanted = expected_logprobs(PROMPT, output, num_top=3, vocab_size=VOCAB_SIZE)
        assert [result.logprobs[id_]] == wanted
        assert wanted[0].top_logprobs == tuple(sorted(wanted[0].top_logprobs, reverse=True))
    runner._pool[1][0] = (5, 0, 99)  # the right token, written by another
    damaged = change(go_on(2, position=3, into_copy=True), num_top=3)
    token = runner.launch(damaged).result().logprobs[1]
    assert [token] != expected_logprobs(
        (*PROMPT, result.token_ids[1]), [token.token_id], num_top=3, vocab_size=VOCAB_SIZE
    )
