"""Masks: a grammar's end, special tokens, allowed ids, bad words, and all of them together."""

import dataclasses

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.byte_bpe import build_byte_bpe
from jaxserve.text.constraints import Constraints, build_mask
from jaxserve.text.pre_kinds import PRE_KINDS
from jaxserve.text.token_bytes import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import build_vocabulary
from tests.text.masks import (
    advance,
    allowed,
    build_constraints,
    fill_mask,
    ids_in,
    open_constraint,
    read_ids,
)
from tests.text.vocabularies import (
    BOS,
    EOS,
    IM_END,
    IM_START,
    byte_tokenizer,
    sentencepiece_tokenizer,
    word_backend,
)

TOKENIZER = byte_tokenizer()
SPECIALS = {BOS, EOS, IM_START, IM_END}
ENDS = {EOS, IM_END}
REGEX = StructuredOutput(kind="regex", text="hel(lo|p)")
ANY_TEXT = StructuredOutput(kind="regex", text="(?s:.*)")


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return build_constraints(TOKENIZER)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def one(text: str) -> int:
    (token_id,) = ids(text)
    return token_id


def test_a_request_without_any_has_none(constraints: Constraints) -> None:
    assert constraints.build(SamplingParams(), None) is None


def test_a_mask_has_a_bit_for_each_id_in_words_of_32() -> None:
    mask = build_mask({0, 31, 32, 65}, 3)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [1 | 1 << 31, 1, 2]
    assert ids_in(mask) == {0, 31, 32, 65}


def test_a_mask_covers_the_vocabulary_and_allows_nothing_behind_it() -> None:
    for vocab_size in (TOKENIZER.vocab_size, TOKENIZER.vocab_size + 39):
        assert vocab_size % 32, "there should be bits behind the last id"
        constraints = build_constraints(TOKENIZER, vocab_size=vocab_size)
        for form, sampling in (
            (ANY_TEXT, SamplingParams()),
            (None, SamplingParams(bad_words=("hello",))),
            (None, SamplingParams(allowed_token_ids=(9,))),
        ):
            mask = fill_mask(open_constraint(constraints, form, sampling))
            assert mask.dtype == np.uint32
            assert mask.shape == (-(-vocab_size // 32),)
            assert max(ids_in(mask)) < vocab_size


def test_the_output_is_held_to_the_grammar_and_ends_with_any_eos(constraints: Constraints) -> None:
    constraint = open_constraint(constraints, REGEX)
    spelled = {TOKENIZER.token_bytes(id) for id in allowed(constraint)}
    assert spelled == {b"h", b"he", b"hell", b"hello"}
    read_ids(constraint, ids("hel"))
    assert allowed(constraint) == {one("l"), one("p")}
    read_ids(constraint, [one("p")])
    assert allowed(constraint) == ENDS


def test_where_more_text_is_possible_both_it_and_eos_are_allowed(constraints: Constraints) -> None:
    constraint = open_constraint(constraints, StructuredOutput(kind="choice", choices=("a", "ab")))
    assert allowed(constraint) == {one("a")}
    advance(constraint, one("a"))
    assert allowed(constraint) == ENDS | {one("b")}


@pytest.mark.parametrize("end", sorted(ENDS))
def test_after_eos_nothing_but_eos_comes(constraints: Constraints, end: int) -> None:
    only_a = StructuredOutput(kind="choice", choices=("a",))
    for form in (ANY_TEXT, only_a):
        constraint = open_constraint(constraints, form)
        read_ids(constraint, [one("a"), end])
        assert allowed(constraint) == ENDS
        advance(constraint, one("a"))  # a surplus token of a step launched before
        assert allowed(constraint) == ENDS


def test_special_tokens_never_are_text(constraints: Constraints) -> None:
    free = allowed(open_constraint(constraints, ANY_TEXT))
    assert free & SPECIALS == ENDS
    assert one("<") in free
    spelled_out = StructuredOutput(kind="choice", choices=("<|im_start|>",))
    assert allowed(open_constraint(constraints, spelled_out)) == {one("<"), one("<|")}


def test_a_grammar_may_name_a_special_token(constraints: Constraints) -> None:
    for lark in ('start: <|im_start|> "a"', f'start: <[{IM_START}]> "a"'):
        constraint = open_constraint(constraints, StructuredOutput(kind="lark", text=lark))
        assert allowed(constraint) == {IM_START}
        advance(constraint, IM_START)
        assert allowed(constraint) == {one("a")}


def test_a_model_may_have_more_ids_than_the_tokenizer() -> None:
    larger = build_constraints(TOKENIZER, vocab_size=300, eos_ids=[EOS, 290])
    constraint = open_constraint(larger, ANY_TEXT)
    assert {id for id in allowed(constraint) if id >= TOKENIZER.vocab_size} == {290}
    read_ids(constraint, ids("hello"))
    assert allowed(constraint) & {EOS, 290, 289} == {EOS, 290}


def test_a_model_may_have_fewer_ids_than_the_tokenizer() -> None:
    smaller = build_constraints(TOKENIZER, vocab_size=200, eos_ids=[EOS, 250])
    constraint = open_constraint(smaller, ANY_TEXT)
    assert max(allowed(constraint)) == 199
    assert allowed(constraint) & SPECIALS == {EOS}


def test_sentencepiece_tokens_match_by_their_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    constraint = open_constraint(
        build_constraints(tokenizer),
        StructuredOutput(kind="choice", choices=("the user", " the user")),
    )
    spelled = {tokenizer.token_bytes(id) for id in allowed(constraint)}
    assert spelled >= {b"t", b" ", b" t"}
    assert all(b"the user".startswith(s) or b" the user".startswith(s) for s in spelled)
    read_ids(constraint, tokenizer.encode("the user", add_special_tokens=False))
    assert allowed(constraint) == tokenizer.eos_ids


def test_a_token_of_bytes_that_are_no_text_matches_none() -> None:
    tokens = [*byte_alphabet(), "ÿþ", "</s>"]
    backend = build_byte_bpe(build_vocabulary(tokens), ["ÿ þ"], pre=PRE_KINDS["gpt-2"])
    tokenizer = Tokenizer.from_backend(backend, eos_ids=[257])
    assert tokenizer.token_bytes(256) == b"\xff\xfe"
    constraints = build_constraints(tokenizer)
    constraint = open_constraint(constraints, StructuredOutput(kind="lark", text="start: <[256]>"))
    assert allowed(open_constraint(constraints, ANY_TEXT)).isdisjoint({256})
    assert allowed(constraint) == {256}


def test_a_form_needs_a_token_that_ends_it() -> None:
    endless = build_constraints(TOKENIZER, eos_ids=[])
    with pytest.raises(UnsupportedError, match="no end-of-sequence token") as caught:
        endless.build(SamplingParams(), REGEX)
    assert caught.value.field == "structured_output"


def test_a_form_needs_tokens_that_spell_the_text() -> None:
    words = Tokenizer.from_backend(word_backend("[UNK]", "a", "b"), eos_ids=[0])
    with pytest.raises(UnsupportedError, match="joins its tokens by spaces"):
        build_constraints(words).build(SamplingParams(), REGEX)


def test_a_fork_goes_on_by_itself(constraints: Constraints) -> None:
    first = open_constraint(constraints, REGEX, SamplingParams(bad_words=("zz",)))
    read_ids(first, ids("hel"))
    second = first.fork()
    mask = fill_mask(first)
    before = ids_in(mask)
    read_ids(second, ids("lo"))
    assert ids_in(mask) == before  # no shared array
    assert allowed(second) == ENDS
    assert allowed(first) == {one("l"), one("p")}
    advance(first, one("l"))
    assert allowed(first) == {one("o")}


def test_only_allowed_ids_and_what_ends_the_output_are_drawn(constraints: Constraints) -> None:
    a, b = one("a"), one("b")
    constraint = open_constraint(constraints, None, SamplingParams(allowed_token_ids=(a, b)))
    assert allowed(constraint) == {a, b} | ENDS
    advance(constraint, a)
    assert allowed(constraint) == {a, b} | ENDS
    with_stop = SamplingParams(allowed_token_ids=(a,), stop_token_ids=(b,))
    assert allowed(open_constraint(constraints, None, with_stop)) == {a, b} | ENDS
    no_end = SamplingParams(allowed_token_ids=(a, EOS), ignore_eos=True)
    assert allowed(open_constraint(constraints, None, no_end)) == {a, EOS}


def test_allowed_ids_and_a_grammar_hold_together(constraints: Constraints) -> None:
    letters = tuple(one(letter) for letter in "help")
    constraint = open_constraint(constraints, REGEX, SamplingParams(allowed_token_ids=letters))
    assert allowed(constraint) == {one("h")}
    read_ids(constraint, [one("h"), one("e"), one("l")])
    assert allowed(constraint) == {one("l"), one("p")}


def test_bad_words_and_a_grammar_hold_together(constraints: Constraints) -> None:
    """A word of one token, which is banned from the start, and a longer one."""
    bad = SamplingParams(bad_words=("hello", "hep"))
    constraint = open_constraint(constraints, REGEX, bad)
    spelled = {TOKENIZER.token_bytes(id) for id in allowed(constraint)}
    assert spelled == {b"h", b"he", b"hell"}
    read_ids(constraint, [one("h"), one("e")])
    assert one("l") in allowed(constraint)


def test_eos_is_left_where_nothing_else_is(constraints: Constraints) -> None:
    nothing = SamplingParams(allowed_token_ids=(one("x"),))
    assert allowed(open_constraint(constraints, REGEX, nothing)) == ENDS
    banned = SamplingParams(allowed_token_ids=(one("x"),), bad_words=("x",))
    assert allowed(open_constraint(constraints, None, banned)) == ENDS


def test_before_min_tokens_bad_words_give_way(constraints: Constraints) -> None:
    x = one("x")
    sampling = SamplingParams(allowed_token_ids=(x,), bad_words=("x",), min_tokens=2)
    constraint = open_constraint(constraints, None, sampling)
    assert x in allowed(constraint)
    advance(constraint, x)
    assert x in allowed(constraint)
    advance(constraint, x)
    assert allowed(constraint) == ENDS


def test_without_an_end_bad_words_give_way(constraints: Constraints) -> None:
    x = one("x")
    sampling = SamplingParams(allowed_token_ids=(x,), bad_words=("x",), ignore_eos=True)
    assert allowed(open_constraint(constraints, None, sampling)) == {x}
    endless = build_constraints(TOKENIZER, eos_ids=[])
    sampling = SamplingParams(allowed_token_ids=(x,), bad_words=("x",))
    assert allowed(open_constraint(endless, None, sampling)) == {x}


def test_min_tokens_of_nothing_but_ends_is_refused(constraints: Constraints) -> None:
    sampling = SamplingParams(allowed_token_ids=(EOS, 9), stop_token_ids=(9,), min_tokens=1)
    with pytest.raises(InvalidRequestError, match="only tokens that end the output") as caught:
        constraints.build(sampling, None)
    assert constraints.build(dataclasses.replace(sampling, min_tokens=0), None) is not None
    assert caught.value.field == "sampling.allowed_token_ids"
