"""Bad words: as their tokens, with a space in front or without, after what the output has."""

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams
from jaxserve.text.bad_words import BadWords, tokenize_bad_words
from tests.text.masks import advance, allowed, build_constraints, open_constraint
from tests.text.vocabularies import EOS, IM_END, byte_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_a_word_is_banned_with_a_space_in_front_and_without() -> None:
    words = tokenize_bad_words(["world", "hello"], TOKENIZER, eos_ids=[EOS])
    assert words == {ids("world"), ids(" world"), ids("hello"), ids(" hello")}
    assert len(ids("hello")) == 1
    assert len(ids(" world")) < len(" world")


def test_in_sentencepiece_a_word_is_what_it_is_inside_a_text() -> None:
    tokenizer = sentencepiece_tokenizer()
    words = tokenize_bad_words(["the"], tokenizer, eos_ids=[2])
    spelled = {b"".join(tokenizer.token_bytes(id) for id in word) for word in words}
    assert spelled == {b"the", b" the"}


def test_a_single_token_is_always_banned_a_longer_word_by_its_last() -> None:
    bad = BadWords([(5,), (1, 2, 3), (2, 4), (9, 9)])
    assert bad.always == (5,)
    assert bad.find_banned([]) == []
    assert bad.find_banned([2]) == [4]
    assert bad.find_banned([7, 1, 2]) == [3, 4]
    assert bad.find_banned([1, 7, 2]) == [4]
    assert bad.find_banned([9]) == [9]
    assert bad.find_banned([1, 2, 3]) == []


def test_only_as_many_tokens_as_matter_are_needed() -> None:
    bad = BadWords([(1, 2, 3), (7,)])
    assert bad.num_needed == 2
    assert BadWords([(7,)]).num_needed == 0
    output = [4, 1, 2]
    assert bad.find_banned(output[-bad.num_needed :]) == bad.find_banned(output) == [3]


def test_the_mask_follows_the_output() -> None:
    constraint = open_constraint(
        build_constraints(TOKENIZER), None, SamplingParams(bad_words=("abc", "hello", "bx"))
    )
    a, b, c, x = (ids(letter)[0] for letter in "abcx")
    hello, everything = ids("hello")[0], set(range(TOKENIZER.vocab_size))
    assert allowed(constraint) == everything - {hello}
    for token_id, banned in (
        (c, set()),
        (a, set()),
        (b, {c, x}),
        (a, set()),
        (a, set()),
        (b, {c, x}),
    ):
        advance(constraint, token_id)
        assert allowed(constraint) == everything - {hello} - banned


def test_a_fork_remembers_the_output() -> None:
    first = open_constraint(build_constraints(TOKENIZER), None, SamplingParams(bad_words=("abc",)))
    a, b, c = (ids(letter)[0] for letter in "abc")
    advance(first, a)
    second = first.fork()
    advance(first, b)
    advance(second, a)
    assert c not in allowed(first)
    assert c in allowed(second)
    advance(second, b)
    assert c not in allowed(second)


def test_a_long_output_costs_no_more() -> None:
    constraint = open_constraint(
        build_constraints(TOKENIZER), None, SamplingParams(bad_words=("abc",))
    )
    a, b, c = (ids(letter)[0] for letter in "abc")
    for _ in range(500):
        advance(constraint, a)
    advance(constraint, b)
    assert c not in allowed(constraint)
    assert len(constraint._tail) == 3  # " abc" needs three


@pytest.mark.parametrize("word", ["</s>", "<|im_end|>"])
def test_what_ends_the_output_cannot_be_banned(word: str) -> None:
    with pytest.raises(InvalidRequestError, match="ends the output; leave it out") as caught:
        tokenize_bad_words(["fine", word], TOKENIZER, eos_ids=[EOS, IM_END])
    assert caught.value.field == "sampling.bad_words"


def test_another_special_token_can_be_banned() -> None:
    words = tokenize_bad_words(["<|im_start|>"], TOKENIZER, eos_ids=[EOS, IM_END])
    assert (2,) in words


def test_a_word_that_the_model_cannot_write_is_no_word() -> None:
    """The tokenizer knows more ids than the model; a mask has no bits for them."""
    smaller = build_constraints(byte_tokenizer(), vocab_size=100, eos_ids=[EOS])
    words = SamplingParams(bad_words=("hello", "~"))
    ids = allowed(open_constraint(smaller, None, words))
    (tilde,) = TOKENIZER.encode_inside("~")
    assert tilde < 100 <= min(TOKENIZER.encode_inside("hello"))
    assert ids == set(range(100)) - {tilde}
