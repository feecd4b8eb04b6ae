"""Prompts out of recipes: exact lengths, no special ids, shared where told, new in each run."""

import pytest

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload import Header, Prompt, Recipe, WorkloadEntry, materialize

SPECIAL = frozenset({0, 7, 256, 257, 258})


def make(
    prompt: Prompt, *, index: int = 0, salt: str = "run", vocab_size: int = 259
) -> tuple[int, ...]:
    entry = WorkloadEntry(index=index, at_s=0.0, prompt=prompt)
    ids = materialize(entry, vocab_size=vocab_size, special_ids=SPECIAL, run_salt=salt)
    assert isinstance(ids, tuple)
    return ids


def recipe(num_tokens: int, *blocks: str) -> Recipe:
    return Recipe(num_tokens=num_tokens, block_tokens=4 if blocks else 0, blocks=blocks)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 1000])
def test_a_prompt_has_the_wanted_length_and_no_special_id(num_tokens: int) -> None:
    for blocks in ((), ("a",), ("a", "b")):
        if len(blocks) <= -(-num_tokens // 4):
            ids = make(recipe(num_tokens, *blocks))
            assert len(ids) == num_tokens
            assert not SPECIAL & set(ids)
            assert all(0 <= id < 259 for id in ids)


def test_every_id_that_is_allowed_comes_up() -> None:
    assert set(make(recipe(5000))) == set(range(259)) - SPECIAL


def test_a_vocabulary_smaller_than_its_special_ids_is_used_up_to_its_end() -> None:
    assert set(make(recipe(200), vocab_size=5)) == {1, 2, 3, 4}
    with pytest.raises(WorkloadError, match="all 1 ids of the vocabulary are special"):
        make(recipe(1), vocab_size=1)


def test_equal_keys_are_equal_tokens_and_the_rest_is_the_entrys_own() -> None:
    first, second = make(recipe(10, "a", "b"), index=1), make(recipe(12, "a", "c"), index=2)
    assert first[:4] == second[:4]
    assert first[4:8] != second[4:8]
    assert first[8:] != second[8:10]
    short = make(recipe(6, "a", "b"), index=3)
    assert short == first[:6]


def test_runs_differ_and_a_run_repeats_itself() -> None:
    assert make(recipe(9, "a")) == make(recipe(9, "a"))
    first, second = make(recipe(9, "a")), make(recipe(9, "a"), salt="next run")
    assert first[:4] != second[:4]
    assert first[4:] != second[4:]


def test_entries_differ() -> None:
    assert len({make(recipe(8), index=index) for index in range(1000)}) == 1000


def test_fixed_prompts_have_the_same_salt_in_every_run() -> None:
    unique, fixed = Header(name="", seed=1), Header(name="", seed=1, prompts="fixed")
    assert unique.salt_of("run") == "run"
    assert fixed.salt_of("run") == fixed.salt_of("next run")
    assert fixed.salt_of("run") != Header(name="", seed=2, prompts="fixed").salt_of("run")


def test_the_ids_are_the_same_on_every_machine() -> None:
    assert make(recipe(10, "a", "b"), index=3, salt="s") == (
        185,
        246,
        46,
        129,
        243,
        8,
        48,
        71,
        193,
        22,
    )


def test_a_text_and_ids_are_sent_as_they_stand() -> None:
    text = WorkloadEntry(index=0, at_s=0.0, prompt="Hi")
    assert materialize(text, vocab_size=9, special_ids=(), run_salt="x") == "Hi"
    assert make((7, 8, 7)) == (7, 8, 7)
    with pytest.raises(WorkloadError, match="entry 0 holds token 259, but the served model's"):
        make((1, 259))
