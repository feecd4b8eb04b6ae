"""A step's masks together: the same as each alone, and paid for by who costs too much."""

import random
import time

import numpy as np
import pytest

from jaxserve.errors import BadGrammarError
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text import mask_batch
from jaxserve.text.constraints import Constraint, Constraints
from jaxserve.text.mask_batch import MIN_APART, MIN_TOGETHER, MaskBatch
from tests.text.masks import build_constraints, fill_mask, ids_in, open_constraint
from tests.text.vocabularies import byte_tokenizer

TOKENIZER = byte_tokenizer()
ASKED: list[tuple[StructuredOutput | None, SamplingParams]] = [
    (StructuredOutput(kind="regex", text="[a-h]{3,9}"), SamplingParams()),
    (StructuredOutput(kind="json_object"), SamplingParams()),
    (StructuredOutput(kind="choice", choices=("yes", "no")), SamplingParams()),
    (StructuredOutput(kind="regex", text="[a-z]+"), SamplingParams(bad_words=("he", "a"))),
    (None, SamplingParams(bad_words=("the",))),
    (None, SamplingParams(allowed_token_ids=(9, 40, 41))),
    (StructuredOutput(kind="lark", text='start: "a" start | "b"'), SamplingParams()),
]


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return build_constraints(TOKENIZER)


def open_letters(constraints: Constraints, number: int) -> list[Constraint]:
    return [
        open_constraint(constraints, StructuredOutput(kind="regex", text="[ab]{200}"))
        for _ in range(number)
    ]


@pytest.mark.parametrize("number", [1, MIN_TOGETHER - 1, MIN_TOGETHER, 40])
def test_masks_together_are_those_of_each_alone(constraints: Constraints, number: int) -> None:
    rng = random.Random(number)
    kinds = [ASKED[place % len(ASKED)] for place in range(number)]
    asked = [open_constraint(constraints, form, sampling) for form, sampling in kinds]
    alone = [constraint.fork() for constraint in asked]
    outputs: list[list[int]] = [[] for _ in asked]
    batch = MaskBatch(constraints.num_words)
    num_together = 0
    for _ in range(12):
        masks_NV, errors = batch.fill(list(zip(asked, outputs, strict=True)))
        assert not errors
        assert masks_NV.shape == (number, constraints.num_words)
        num_together += batch.num_together
        for place, (constraint, output) in enumerate(zip(alone, outputs, strict=True)):
            constraint.read(output)
            np.testing.assert_array_equal(masks_NV[place], fill_mask(constraint))
            output.append(rng.choice(sorted(ids_in(masks_NV[place]))))
    assert (num_together > 0) == (number >= MIN_TOGETHER)


def test_who_fails_has_an_error_and_the_others_their_masks(constraints: Constraints) -> None:
    asked = open_letters(constraints, 6)
    outputs = [TOKENIZER.encode("a", add_special_tokens=False) for _ in asked]
    outputs[2] = TOKENIZER.encode("x", add_special_tokens=False)  # it does not fit
    batch = MaskBatch(constraints.num_words)
    masks_NV, errors = batch.fill(list(zip(asked, outputs, strict=True)))
    assert list(errors) == [2]
    assert isinstance(errors[2], BadGrammarError)
    assert batch.num_together == 5
    for place in (0, 1, 3, 4, 5):
        assert ids_in(masks_NV[place]) == ids_in(fill_mask(asked[place]))


def test_where_all_take_too_long_each_is_charged_apart_for_some_steps(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"monotonic": 0.0, "thread": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: now["monotonic"])
    monkeypatch.setattr(time, "thread_time", lambda: now["thread"])
    asked = open_letters(constraints, MIN_TOGETHER)
    batch = MaskBatch(constraints.num_words)
    slow = asked[1]
    finish = Constraint.finish

    def finish_slowly(self: Constraint, mask_V: np.ndarray) -> None:
        finish(self, mask_V)
        if self is slow:
            now["monotonic"] += 0.06
            now["thread"] += 0.06

    monkeypatch.setattr(Constraint, "finish", finish_slowly)
    entries: list[tuple[Constraint, list[int]]] = [(constraint, []) for constraint in asked]
    together, ended_at = [], None
    for step in range(20):
        _, errors = batch.fill(entries)
        together.append(batch.num_together)
        if errors:
            ended_at = step
            break
    # 0.2 s saved and 5 ms a step are gone after four steps, and then its own after four more
    assert together == [MIN_TOGETHER] * 4 + [0] * 4
    assert ended_at == 7
    assert list(errors) == [1]
    assert "more than 5 ms a token" in str(errors[1])
    entries[1:2] = [(open_letters(constraints, 1)[0], [])]
    for _ in range(MIN_APART - 4):
        assert not batch.fill(entries)[1]
        assert batch.num_together == 0
    assert not batch.fill(entries)[1]
    assert batch.num_together == MIN_TOGETHER
    slow, together = entries[1][0], []  # what is saved up is whole again
    for _ in range(5):
        batch.fill(entries)
        together.append(batch.num_together)
    assert together == [MIN_TOGETHER] * 4 + [0]


def test_the_steps_apart_are_twice_as_many_each_time_up_to_a_bound(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_batch, "SAVED_S", -1.0)  # nothing is ever quick enough
    monkeypatch.setattr(mask_batch, "MAX_APART", 4 * MIN_APART)
    batch = MaskBatch(constraints.num_words)
    batch._left_s = -1.0
    entries: list[tuple[Constraint, list[int]]] = [(c, []) for c in open_letters(constraints, 4)]
    runs = []
    for _ in range(5):
        batch.fill(entries)
        assert batch.num_together == 4
        num_apart = 0
        while batch._num_apart:
            batch.fill(entries)
            num_apart += 1
            assert batch.num_together == 0
        runs.append(num_apart)
    assert runs == [MIN_APART, 2 * MIN_APART, 4 * MIN_APART, 4 * MIN_APART, 4 * MIN_APART]
