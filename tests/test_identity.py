"""The key of a page tells apart whatever gives other K/V, and whose it is (C01, C02, C03)."""

import dataclasses
import itertools
import random
from typing import Any

import pytest

from jaxserve.identity import CacheIdentity, find_difference, identity_key, page_key

BASE = CacheIdentity(
    weights="w", tokenizer="t", positions="p", kv_dtype="float32", page_size=4, owner="o"
)
OTHER_VALUES: dict[str, Any] = {
    "weights": "w2", "tokenizer": "t2", "positions": "p2", "kv_dtype": "bfloat16", "page_size": 8,
    "kv_scales": "s", "adapter": "a", "adapter_generation": 1, "contents": ((0, "c"),),
    "scope": "shared", "owner": "o2", "salt": "s",
}  # fmt: skip
TEXTS = ("weights", "tokenizer", "positions", "kv_dtype", "kv_scales", "adapter", "owner", "salt")


def replaced(values: dict[str, Any]) -> CacheIdentity:
    return dataclasses.replace(BASE, **values)


def test_every_field_has_another_value_here() -> None:
    assert OTHER_VALUES.keys() == {field.name for field in dataclasses.fields(CacheIdentity)}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_each_field_changes_the_key(name: str) -> None:
    other = replaced({name: OTHER_VALUES[name]})
    assert identity_key(other) != identity_key(BASE)
    assert find_difference(other, BASE) == name


def test_equal_identities_have_one_key() -> None:
    again = dataclasses.replace(BASE)
    assert identity_key(again) == identity_key(BASE)
    assert len(identity_key(BASE)) == 32
    assert find_difference(again, BASE) is None


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(TEXTS, 2)))
def test_a_text_in_another_field_is_another_key(first: str, second: str) -> None:
    """The salt of one tenant is the name of another's adapter: nothing is shared for it."""
    keys = [
        identity_key(replaced({first: one, second: other}))
        for one, other in (("x", ""), ("", "x"), ("x", "x"), ("", ""), ("xx", ""), ("", "xx"))
    ]
    assert len(set(keys)) == len(keys)


NEIGHBOURS = [("weights", "tokenizer"), ("tokenizer", "positions"), ("owner", "salt")]
FRAMES = ("", "\0", "|", ":", "{name}", "s{name}s", "ts{name}s", "t\0s{name}\0s", ", {name}=")


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(("first", "second"), NEIGHBOURS)
def test_a_text_cannot_pass_for_the_end_of_its_field(first: str, second: str, frame: str) -> None:
    """Where only marks stand between two fields, a text with such marks in it moves the end."""
    mark = frame.format(name=second)
    one = identity_key(replaced({first: "a", second: f"b{mark}c"}))
    assert one != identity_key(replaced({first: f"a{mark}b", second: "c"}))


def test_random_identities_share_a_key_only_where_they_are_equal() -> None:
    rng = random.Random(1)
    pieces = ("", "a", "b", "ab", "s:a", "a\0", "\0", "\0\0\0\0\0\0\0\1", "é", "\ud800", "1")
    seen: dict[bytes, CacheIdentity] = {}
    for _ in range(5000):
        identity = dataclasses.replace(
            BASE,
            owner=rng.choice(pieces),
            salt=rng.choice((None, *pieces)),
            adapter=rng.choice((None, *pieces)),
            adapter_generation=rng.choice((0, 1, 10, -1)),
            contents=tuple((rng.randrange(2), rng.choice(pieces)) for _ in range(rng.randrange(3))),
            weights=rng.choice(pieces),
        )
        assert seen.setdefault(identity_key(identity), identity) == identity
    assert len(seen) > 4000


def test_a_page_depends_on_its_tokens_and_all_before_it() -> None:
    root = identity_key(BASE)
    first, second = page_key(root, (1, 2, 3, 4)), page_key(root, (1, 2, 3, 5))
    assert first != second
    assert page_key(first, (7, 7, 7, 7)) != page_key(second, (7, 7, 7, 7))
    salted = identity_key(dataclasses.replace(BASE, salt="x"))
    assert page_key(page_key(salted, (1, 2, 3, 4)), (7, 7, 7, 7)) != page_key(first, (7, 7, 7, 7))


@pytest.mark.parametrize("factor", [1, 2, 31, 33, 257, 65599])
def test_edits_that_fool_a_rolling_hash_do_not(factor: int) -> None:
    root, tokens = identity_key(BASE), range(100, 116)
    edited = {tuple(tokens)}
    for index in range(len(tokens) - 1):
        for up, down in ((factor, -1), (1, -factor), (-factor, 1)):
            pair = (tokens[index] + up, tokens[index + 1] + down)
            edited.add((*tokens[:index], *pair, *tokens[index + 2 :]))
    assert len({page_key(root, page) for page in edited}) == len(edited) > 30


def test_token_ids_are_whole_int64_numbers() -> None:
    root = identity_key(BASE)
    values = (-1, 0, 1, 2**31, -(2**31), 2**31 - 1, 2**32, 2**32 - 1, 2**63 - 1)
    keys = {page_key(root, pair) for pair in itertools.product(values, repeat=2)}
    assert len(keys) == len(values) ** 2
    assert page_key(root, (True, False)) == page_key(root, (1, 0))  # the same tokens
    assert page_key(root, (1,)) != page_key(root, (1, 0))


def test_a_key_may_not_be_taken_for_tokens() -> None:
    root = identity_key(BASE)
    tokens = tuple(root)  # 32 numbers below 256
    assert page_key(root, tokens) != page_key(root + bytes(tokens), ())


def test_keys_stay_what_they_are() -> None:
    """Whoever keeps keys longer than a process relies on it: a change needs a new version."""
    root = identity_key(BASE)
    assert root.hex()[:16] == "05483ef9b9fccc63"
    assert page_key(root, (1, 2, 3, 4)).hex()[:16] == "c1eb3a859d55a94d"
