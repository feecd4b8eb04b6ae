"""Workloads out of others: what is kept, what is shorter, and what still is shared."""

from collections.abc import Sequence

import pytest

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload import Header, Prompt, Recipe, WorkloadEntry, materialize
from jaxserve.measure.workload.entry import build_workload
from jaxserve.measure.workload.scale import Scaling, scale_entries, scaled_header
from jaxserve.measure.workload.traces import Counts


def entry(at_s: float, prompt: Prompt, wanted: int | None = 40, kind: str = "") -> WorkloadEntry:
    return WorkloadEntry(
        index=7, at_s=at_s, prompt=prompt, wanted_tokens=wanted, prompt_class=kind, deadline_s=9.0
    )


ENTRIES = (
    entry(0.0, Recipe(num_tokens=100), kind="a"),
    entry(1.0, Recipe(num_tokens=200), kind="b"),
    entry(2.0, Recipe(num_tokens=300), wanted=7, kind="a"),
    entry(3.0, Recipe(num_tokens=5), wanted=None, kind="c"),
)


def scale(
    entries: Sequence[WorkloadEntry] = ENTRIES, *, counts: Counts | None = None, **steps: object
) -> list[WorkloadEntry]:
    scaling = Scaling(**steps)  # type: ignore[arg-type]  # as each test says
    made = list(scale_entries(entries, scaling, counts=Counts() if counts is None else counts))
    assert [one.index for one in made] == list(range(len(made)))
    return made


def test_times_are_multiplied_and_nothing_else() -> None:
    made = scale(time=10.0)
    assert [one.at_s for one in made] == [0.0, 10.0, 20.0, 30.0]
    assert [one.prompt for one in made] == [one.prompt for one in ENTRIES]
    assert {one.deadline_s for one in made} == {9.0}
    assert [one.at_s for one in scale(time=1 / 3)] == [0.0, 0.333333, 0.666667, 1.0]


def test_lengths_are_divided_and_one_token_stays() -> None:
    made = scale(divide_lengths=16)
    assert [one.prompt_tokens for one in made] == [6, 12, 18, 1]
    assert [one.wanted_tokens for one in made] == [2, 2, 1, None]
    assert [one.at_s for one in made] == [0.0, 1.0, 2.0, 3.0]


def test_a_window_is_of_the_times_as_they_were() -> None:
    assert [one.at_s for one in scale(window_s=2.0, time=10.0)] == [0.0, 10.0]


def test_classes_and_a_limit_are_kept() -> None:
    assert [one.prompt_class for one in scale(classes=("a", "c"))] == ["a", "a", "c"]
    assert [one.at_s for one in scale(classes=("a", "c"), limit=2)] == [0.0, 2.0]


def test_too_long_requests_are_dropped_and_counted_after_the_division() -> None:
    counts = Counts()
    assert [one.prompt_tokens for one in scale(counts=counts, max_tokens=140)] == [100, 5]
    assert counts == {"over_max_tokens": 2}
    counts = Counts()
    assert len(scale(counts=counts, max_tokens=20, divide_lengths=16)) == 4
    assert not counts


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="no request is left"):
        scale(classes=("x",))


def test_ids_are_cut_and_texts_are_refused() -> None:
    ids = entry(0.0, tuple(range(10)))
    assert scale([ids], divide_lengths=4)[0].prompt == (0, 1)
    text = "entry 7 is a text, whose length only a tokenizer"
    with pytest.raises(WorkloadError, match=text):
        scale([entry(0.0, "Hi")], divide_lengths=2)
    with pytest.raises(WorkloadError, match=text):
        scale([entry(0.0, "Hi")], max_tokens=9)
    assert scale([entry(1.0, "Hi")], time=2.0)[0].prompt == "Hi"


def prompt_of(one: WorkloadEntry) -> tuple[int, ...]:
    made = materialize(one, vocab_size=1000, special_ids=(), run_salt="s")
    assert isinstance(made, tuple)
    return made


def num_shared(first: WorkloadEntry, second: WorkloadEntry) -> int:
    pairs = zip(prompt_of(first), prompt_of(second), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), -1)


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 16, 48, 100])
@pytest.mark.parametrize("block_tokens", [512, 16, 50])
def test_what_was_shared_still_is_in_proportion(divisor: int, block_tokens: int) -> None:
    keys = tuple(map(str, range(40)))
    long = Recipe(num_tokens=block_tokens * 50, block_tokens=block_tokens, blocks=keys)
    other = Recipe(
        num_tokens=block_tokens * 60, block_tokens=block_tokens, blocks=(*keys[:30], "x", "y")
    )
    first, second = scale([entry(0.0, long), entry(0.0, other)], divide_lengths=divisor)
    assert len(prompt_of(first)) == max(1, block_tokens * 50 // divisor)
    shared = num_shared(first, second)
    expected = block_tokens * 30 / divisor
    assert expected - 1 < shared <= expected + 1  # of random tokens one more may agree


def test_a_block_that_has_no_token_left_is_left_out() -> None:
    long = entry(0.0, Recipe(num_tokens=513, block_tokens=512, blocks=("a", "b")))
    (short,) = scale([long], divide_lengths=16)
    assert short.prompt == Recipe(num_tokens=32, block_tokens=32.0, blocks=("a",))


def test_dividing_twice_is_dividing_by_the_product() -> None:
    blocks = ("a", "b", "c")
    one = entry(0.0, Recipe(num_tokens=1536, block_tokens=512, blocks=blocks))
    twice = scale(scale([one], divide_lengths=3), divide_lengths=4)
    assert prompt_of(twice[0]) == prompt_of(scale([one], divide_lengths=12)[0])


def test_each_step_is_in_the_lineage_and_the_hash_is_of_the_new_load() -> None:
    before = build_workload(Header(name="w", lineage=({"step": "limit", "value": 9},)), ENTRIES)
    scaling = Scaling(window_s=3.0, divide_lengths=2, time=10.0)
    header = scaled_header(before.header, scaling, content_hash=before.content_hash)
    assert header.lineage == (
        {"step": "limit", "value": 9},
        {"step": "window_s", "value": 3.0, "of": before.content_hash},
        {"step": "divide_lengths", "value": 2, "of": before.content_hash},
        {"step": "time", "value": 10.0, "of": before.content_hash},
    )
    hashes = {before.content_hash}
    for steps in (
        {"window_s": 3.0},
        {"classes": ("a",)},
        {"limit": 3},
        {"limit": 1},
        {"divide_lengths": 2},
        {"max_tokens": 140},
        {"time": 2.0},
    ):
        hashes.add(build_workload(before.header, scale(before.entries, **steps)).content_hash)
    assert len(hashes) == 7  # a window and a limit that keep the same three are the same load
