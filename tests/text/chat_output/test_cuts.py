"""However an output is cut into pieces, and wherever it ends, it is read the same and whole."""

import json
import random
import re
from typing import Final

import pytest

from jaxserve.text.chat_output.gap import MAX_LAYOUT
from jaxserve.text.chat_output.json_call import MAX_HELD
from tests.text.chat_output.reading import Part, random_cuts, read
from tests.text.chat_output.test_readers import CORPUS

MARKERS: Final = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
)
# What outputs are made of at random, beside the markers of all forms.
SCRAPS: Final = (
    *MARKERS, "<tool_ca", "[TOOL", "<|py", '{"name": "f", "arguments": {"n": 1}}',
    '{"name": "f", "parameters": {"s": "<tool_call>"}}', '{"name": "g.h-1"', '"arguments": {',
    ", ", ":", "{", "}", "[", "]", '"', "\\", " ", "\n", ";", "<", "null", '"name": "f"', "\\ud83d",
    "é😀", "word", "f", "abc12", "<function=f>", "<function=", "<parameter=n>", "<parameter=s>",
    "<parameter=", "</parameter>", "</function>", "</par", ">", "12", "None", "<think>", "</think>",
    "</thi",
)  # fmt: skip
FORMS: Final = ("hermes", "llama3", "mistral", "qwen_coder", "")


@pytest.mark.parametrize(("form", "text", "parts"), CORPUS)
def test_an_output_of_the_corpus_is_read_the_same_in_any_pieces_and_to_any_end(
    form: str, text: str, parts: list[Part]
) -> None:
    for seed, end in enumerate(range(len(text) + 1)):
        whole = read(text[:end], form)
        assert end < len(text) or whole == parts
        for cuts in random_cuts(text[:end], seed, 2):
            assert read(text[:end], form, cuts=cuts) == whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reasoning", ["", "think"])
def test_scraps_of_outputs_are_read_the_same_in_any_pieces(form: str, reasoning: str) -> None:
    draw = random.Random(f"{form}{reasoning}")
    for seed in range(300):
        text = "".join(draw.choices(SCRAPS, k=draw.randint(0, 14)))
        text = " " * draw.choice([0] * 9 + [MAX_LAYOUT, MAX_LAYOUT + 1]) + text
        tail = draw.choice(["", "<think>\n"])
        whole = read(text, form, reasoning=reasoning, tail=tail)
        for cuts in random_cuts(text, seed, 4):
            assert read(text, form, cuts=cuts, reasoning=reasoning, tail=tail) == whole


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_an_output_is_lost(form: str) -> None:
    draw = random.Random(form)
    for _ in range(500):
        text = "".join(draw.choices(SCRAPS, k=draw.randint(0, 14)))
        parts = read(text, form)
        if not any(part[0] == "call" for part in parts):
            assert "".join(part[1] for part in parts) == text
        elif form != "qwen_coder":  # which writes its arguments anew
            check_only_syntax_is_left(text, parts)


def check_only_syntax_is_left(text: str, parts: list[Part]) -> None:
    """Takes all that was delivered out of a text; what is left must be what frames calls."""
    pieces = [piece for part in parts for piece in part[1:]]
    for piece in sorted(pieces, key=len, reverse=True):
        if piece in text:  # arguments written as a JSON string are not, nor content around a call
            text = text.replace(piece, "", 1)
        else:
            text = take_letters(text, json.dumps(piece, ensure_ascii=False)[1:-1])
    for marker in MARKERS:
        text = text.replace(marker, "")
    text = re.sub(r'"(name|arguments|parameters)"|null|abc12', "", text)
    assert set(text) <= set('{}[]":, \n\t;')


def take_letters(text: str, piece: str) -> str:
    """Takes a piece's characters out of a text, in order but not side by side."""
    left, at = [], 0
    for char in text:
        if at < len(piece) and char == piece[at]:
            at += 1
        else:
            left.append(char)
    assert at == len(piece), f"{piece!r} is not in the output"
    return "".join(left)


def test_a_call_whose_name_does_not_come_is_held_only_so_long() -> None:
    start = '<tool_call>{"arguments": {"s": "'
    text = start + "x" * MAX_HELD + '"}, "name": "f"}</tool_call>'
    whole = read(text, "hermes")
    assert whole == [("content", text)]
    edge = len("<tool_call>") + MAX_HELD
    for cuts in ([5], [edge - 1, edge, edge + 1], list(range(0, len(text), 1000))):
        assert read(text, "hermes", cuts=cuts) == whole


def test_a_value_that_is_no_string_is_held_only_so_long() -> None:
    for num in (MAX_HELD - 1, MAX_HELD):
        text = f"<function=f><parameter=n>\n1{' ' * num}\n</parameter></function>"
        is_held = num < MAX_HELD
        for cuts in ([], list(range(0, len(text), 999))):
            (part,) = read(text, "qwen_coder", cuts=cuts)
            assert json.loads(part[2]) == {"n": 1 if is_held else f"1{' ' * num}"}


def test_a_long_output_of_deep_nesting_costs_no_stack_and_little_time() -> None:
    arguments = '{"s": ' + "[" * 50_000 + "]" * 50_000 + "}"
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(text, "hermes") == [("call", "f", arguments)]
    many = '<tool_call>{"name": "g.h-1"}</tool_call>' * 5000
    assert len(read(many, "hermes")) == 5000
