"""Where markers are special tokens, only these are markers: text that spells one is text."""

import random
from typing import Final

import pytest

from jaxserve.text.chat_output import Parsers, find_parsers
from jaxserve.text.chat_output.reasoning import REASONING_MARKERS
from jaxserve.text.detokenizer import SPECIAL_MARK, Detokenizer
from tests.text.chat_output.reading import TOOLS, Part, join
from tests.text.chat_output.test_cuts import SCRAPS
from tests.text.chat_output.test_readers import CORPUS
from tests.text.templates import TEMPLATES, chat_tokenizer

MARKERS: Final = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<think>", "</think>",
)  # fmt: skip
TOKENIZER: Final = chat_tokenizer(None, specials=("<s>", "</s>", *MARKERS))
SPECIALS: Final = TOKENIZER.find_specials(MARKERS)


def read(
    token_ids: list[int], form: str, *, reasoning: str = "", sizes: list[int] | None = None
) -> list[Part]:
    """Returns the parts of an output, decoded and read a few tokens at a time."""
    numbers = iter(range(1000))
    parsers = Parsers(tool=form, reasoning=reasoning, specials=SPECIALS)
    output = parsers.open(tools=TOOLS, make_id=lambda: f"id{next(numbers)}")
    decoder = Detokenizer(TOKENIZER, kept_special_ids=parsers.marker_ids)
    deltas, at = [], 0
    for size in [*(sizes or []), len(token_ids)]:
        deltas += output.push(decoder.push(token_ids[at : at + size]))
        at += size
    parts = join([*deltas, *output.push(decoder.flush()), *output.flush()])
    assert SPECIAL_MARK not in "".join(piece for part in parts for piece in part)
    return parts


def spell(text: str) -> list[int]:
    """Returns ids of the text's bytes: no special token."""
    return [id for char in text for id in TOKENIZER._encode_plain(char)]


@pytest.mark.parametrize(("form", "text", "parts"), CORPUS)
def test_calls_between_special_tokens_are_read(form: str, text: str, parts: list[Part]) -> None:
    if any(marker in piece for part in parts for piece in part[1:] for marker in MARKERS):
        parts = []  # a special token in a call's text ends it: below
    ids = TOKENIZER.encode(text)
    draw = random.Random(text)
    whole = read(ids, form)
    assert whole == parts or not parts
    for _ in range(3):
        assert read(ids, form, sizes=[draw.randint(0, 4) for _ in range(60)]) == whole


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_text_that_spells_markers_calls_nothing(form: str) -> None:
    for other, text, _ in CORPUS:
        if other == form and any(marker in text for marker in MARKERS):
            assert read(spell(text), form) == [("content", text)]


def test_a_call_in_text_after_a_special_token_is_read_and_one_in_spelled_markers_is_not() -> None:
    call = '{"name": "g.h-1", "arguments": {}}'
    special = TOKENIZER.encode(f"<tool_call>{call}</tool_call>")
    ids = [*spell(f"You wrote <tool_call>{call}</tool_call>"), *special]
    assert read(ids, "hermes") == [
        ("content", f"You wrote <tool_call>{call}</tool_call>"),
        ("call", "g.h-1", "{}"),
    ]


def test_a_special_token_in_a_string_ends_the_call_and_a_spelled_one_does_not() -> None:
    start = TOKENIZER.encode('<tool_call>{"name": "f", "arguments": {"s": "a\\')
    end = TOKENIZER.encode("</tool_call>") + spell(".")
    assert read([*start, *end], "hermes") == [("call", "f", '{"s": "a\\'), ("content", ".")]
    rest = spell('\\</tool_call>"}}')
    assert read([*start, *rest, *end], "hermes") == [
        ("call", "f", '{"s": "a\\\\</tool_call>"}'),
        ("content", "."),
    ]
    unfinished = TOKENIZER.encode('[TOOL_CALLS]f[ARGS]{"s": "a[TOOL_CALLS]g.h-1[ARGS]{}')
    assert read(unfinished, "mistral") == [("call", "f", '{"s": "a'), ("call", "g.h-1", "{}")]


def test_reasoning_ends_at_the_special_token() -> None:
    opening, closing = REASONING_MARKERS["think"]
    ids = [*TOKENIZER.encode(opening), *spell(f"not {closing} yet"), *TOKENIZER.encode(closing)]
    assert read([*ids, *spell("Yes")], "", reasoning="think") == [
        ("reasoning", f"not {closing} yet"),
        ("content", "Yes"),
    ]
    assert read(spell(f"{opening}a{closing}"), "", reasoning="think") == [
        ("content", f"{opening}a{closing}")
    ]


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "qwen_coder"])
def test_scraps_with_special_tokens_are_read_the_same_in_any_pieces(form: str) -> None:
    draw = random.Random(form)
    for _ in range(200):
        scraps = draw.choices(SCRAPS, k=draw.randint(0, 14))
        ids = [
            id
            for scrap in scraps
            for id in (spell(scrap) if draw.random() < 0.3 else TOKENIZER.encode(scrap))
        ]
        whole = read(ids, form, reasoning="think")
        for _ in range(3):
            sizes = [draw.randint(0, 5) for _ in range(80)]
            assert read(ids, form, reasoning="think", sizes=sizes) == whole


def test_the_parsers_of_a_model_know_which_markers_are_special() -> None:
    tokenizer = chat_tokenizer(TEMPLATES["hermes"], specials=("<s>", "<|im_end|>", "<tool_call>"))
    parsers = find_parsers(tokenizer)
    assert parsers.specials == {"<tool_call>": 2}
    assert parsers.marker_ids == {2}
