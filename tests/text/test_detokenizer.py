"""Pieces of text equal the whole text, whatever the ids (CASES C35)."""

import itertools
import random

import pytest

from jaxserve.checkpoint.registry import find_model
from jaxserve.text.detokenizer import SPECIAL_MARK, Detokenizer
from jaxserve.text.stops import StopMatcher
from jaxserve.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    IM_END,
    byte_tokenizer,
    sentencepiece_backend,
    sentencepiece_tokenizer,
    word_backend,
)

FAMILY = "👨‍👩‍👧"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return find_model("smollm2-135m-instruct").load_header().tokenizer


def stream(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    skip: bool = True,
    size: int = 1,
    prompt: tuple[int, ...] | None = None,
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, prompt=prompt)
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


def fuzz(
    tokenizer: Tokenizer,
    *,
    num_sequences: int,
    seed: int,
    prompt: tuple[int, ...] | None = None,
) -> None:
    """Random ids: mostly bytes and lone tokens, some special, some unknown."""
    rng = random.Random(seed)
    special = sorted(tokenizer.special_ids)
    byte_like = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    unknown = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 2**31, 2**32, 2**40, -1]
    for _ in range(num_sequences):
        kinds = rng.choices("btsu", weights=[6, 3, 1, 1], k=rng.randint(1, 24))
        ids = [
            {
                "b": rng.choice(byte_like),
                "t": rng.randrange(tokenizer.vocab_size),
                "s": rng.choice(special),
                "u": rng.choice(unknown),
            }[kind]
            for kind in kinds
        ]
        skip = rng.random() < 0.5
        pieces = stream(tokenizer, ids, skip=skip, size=rng.randint(1, 4), prompt=prompt)
        for piece in pieces:
            piece.encode()  # valid text at every cut
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_random_ids_stream_to_their_one_shot_text(demo: Tokenizer) -> None:
    fuzz(demo, num_sequences=3000, seed=35)
    fuzz(byte_tokenizer(), num_sequences=1000, seed=36)


@pytest.mark.nightly
def test_a_hundred_thousand_random_sequences_stream_to_their_one_shot_text(demo: Tokenizer) -> None:
    fuzz(demo, num_sequences=100_000, seed=37)


def test_our_one_shot_text_is_the_librarys(demo: Tokenizer) -> None:
    rng = random.Random(38)
    for _ in range(1000):
        ids = [rng.randrange(demo.vocab_size) for _ in range(rng.randint(1, 12))]
        assert demo.decode(ids) == demo._backend.decode(ids, skip_special_tokens=True)


def test_a_character_cut_anywhere_is_held_and_then_replaced(demo: Tokenizer) -> None:
    ids = demo.encode(FAMILY)
    assert len(ids) > 5
    for end in range(len(ids) + 1):
        pieces = stream(demo, ids[:end])
        assert "".join(pieces) == demo.decode(ids[:end])
        assert "\ufffd" not in "".join(pieces[:-1])
        assert pieces[-1] in ("", "\ufffd")
    assert "".join(stream(demo, ids)) == FAMILY


def test_the_prompts_open_character_is_not_completed_with_the_prompt(demo: Tokenizer) -> None:
    prompt = demo.encode("Hi 🌶")
    for missing in (1, 2, 3):
        rest = prompt[-missing:]
        text = "".join(stream(demo, rest))
        assert "Hi" not in text
        assert text == demo.decode(rest)


def test_special_tokens_show_only_where_asked() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<s>hello</s>")
    assert "".join(stream(tokenizer, ids)) == "hello"
    assert "".join(stream(tokenizer, ids, skip=False)) == "<s>hello</s>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_kept_special_token_has_a_mark_before_it(skip: bool, size: int) -> None:
    tokenizer = byte_tokenizer()
    kept = frozenset({IM_END})
    decoder = Detokenizer(tokenizer, skip, kept_special_ids=kept)
    cut = tokenizer.encode("é")[:1]  # the first byte of a character that goes no further
    ids = [*tokenizer.encode("<s>h<|im_end|>"), *cut, IM_END, *tokenizer.encode("i")]
    pieces = [decoder.push(batch) for batch in itertools.batched(ids, size)]
    mark = SPECIAL_MARK + "<|im_end|>"
    wanted = f"{'' if skip else '<s>'}h{mark}\ufffd{mark}i"
    assert "".join([*pieces, decoder.flush()]) == wanted
    with pytest.raises(UnicodeEncodeError):
        SPECIAL_MARK.encode()  # so that no bytes decode to it


def test_a_sentencepiece_output_keeps_the_space_it_begins_with() -> None:
    tokenizer = Tokenizer.from_backend(sentencepiece_backend(), bos_id=1)
    ids = tokenizer.encode("a b é", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a b é"
    assert "".join(stream(tokenizer, ids)) == " a b é"


def test_the_space_goes_only_where_the_output_begins_the_text() -> None:
    tokenizer = sentencepiece_tokenizer()
    output = tokenizer.encode("the user", add_special_tokens=False)
    prompts = {
        (): "the user",
        (1,): "the user",
        (1, 999_999): "the user",
        (1, *tokenizer.encode("a")): " the user",
        None: " the user",
    }
    for prompt, wanted in prompts.items():
        for size in (1, 2, 3):
            assert "".join(stream(tokenizer, output, size=size, prompt=prompt)) == wanted
    two_spaces = tokenizer.encode("  the", add_special_tokens=False)
    assert (
        "".join(stream(tokenizer, two_spaces, prompt=())) == "  the" == tokenizer.decode(two_spaces)
    )
    assert "".join(stream(tokenizer, [2, *output], prompt=())) == "the user"
    bare = sentencepiece_tokenizer(adds_space_prefix=False)
    output = bare.encode(" the", add_special_tokens=False)
    assert "".join(stream(bare, output, prompt=())) == " the" == bare.decode(output)


def test_random_sentencepiece_ids_stream_to_their_one_shot_text() -> None:
    for adds_space_prefix in (True, False):
        tokenizer = sentencepiece_tokenizer(adds_space_prefix=adds_space_prefix)
        fuzz(tokenizer, num_sequences=1000, seed=39, prompt=())


def test_valid_sentencepiece_text_is_the_librarys() -> None:
    tokenizer = sentencepiece_tokenizer()
    rng = random.Random(40)
    for _ in range(500):
        text = "".join(rng.choices(["the ", " ", "é", "🌶", "日", "user", "\n\n", "\n"], k=8))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_a_forced_stream_gives_one_text_and_one_stop_however_it_is_cut() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("the é user\n\nus🌶")
    text = tokenizer.decode(ids)
    cuts = range(1, len(ids))
    for stop in ("é us", "\n\n", "us🌶", "🌶", "e"):
        before = text[: text.index(stop)]
        for num_cuts in (0, 1, 2, 3, len(cuts)):
            for places in itertools.combinations(cuts, num_cuts):
                matcher, decoder = StopMatcher((stop,)), Detokenizer(tokenizer, prompt=())
                shown, is_stopped = "", False
                for start, end in itertools.pairwise([0, *places, len(ids)]):
                    output = matcher.push(decoder.push(ids[start:end]))
                    shown += output.text
                    is_stopped = is_stopped or output.matched == stop
                assert (shown, is_stopped) == (before, True)


def test_words_without_a_decoder_are_set_apart() -> None:
    tokenizer = Tokenizer.from_backend(word_backend("<unk>", "one", "two"))
    assert "".join(stream(tokenizer, [1, 2, 99, 1])) == "one two one"
    assert tokenizer.decode([1, 2, 99, 1]) == "one two one"
