"""Reasoning is told from the answer, whether the model or the prompt opens it."""

import pytest

from jaxserve.text.chat_output.gap import MAX_LAYOUT
from tests.text.chat_output.reading import Part, random_cuts, read

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

CASES: list[tuple[str, str, list[Part]]] = [
    ("<think>\nhm, so\n</think>\n\nYes.", "", [("reasoning", "hm, so"), ("content", "Yes.")]),
    ("\n<think>hm</think>Yes. ", "", [("reasoning", "hm"), ("content", "Yes. ")]),
    ("hm\n</think>\nYes.", "…<think>\n", [("reasoning", "hm"), ("content", "Yes.")]),
    ("<think>\nhm</think>Yes.", "<think>", [("reasoning", "hm"), ("content", "Yes.")]),
    ("\n</think>Yes.", "<think>", [("content", "Yes.")]),
    ("<think>\n\n</think>\n\nYes.", "", [("content", "Yes.")]),
    ("<think>hm", "", [("reasoning", "hm")]),
    ("hm \n</thi", "<think>\n", [("reasoning", "hm \n</thi")]),
    ("<thi", "<think>\n", [("reasoning", "<thi")]),
    ("<thi", "", [("content", "<thi")]),
    (" \n", "", [("content", " \n")]),
    ("Yes <think>no</think>", "", [("content", "Yes <think>no</think>")]),
    ("Yes</think>", "", [("content", "Yes</think>")]),
    ("Yes", "<think></think>", [("content", "Yes")]),
    ("Yes", "<think> is a marker", [("content", "Yes")]),
    (f"<think>{CALL}</think>{CALL}", "", [("reasoning", CALL), ("call", "f", "{}")]),
    (f"hm</think>\n{CALL}\n", "<think>", [("reasoning", "hm"), ("call", "f", "{}")]),
    ("<think>a</think>b</think>", "", [("reasoning", "a"), ("content", "b</think>")]),
    (
        " " * (MAX_LAYOUT + 1) + "<think>a</think>",
        "",
        [("content", " " * (MAX_LAYOUT + 1) + "<think>a</think>")],
    ),
]


@pytest.mark.parametrize(("text", "tail", "parts"), CASES)
def test_reasoning_is_told_from_the_answer(text: str, tail: str, parts: list[Part]) -> None:
    assert read(text, "hermes", reasoning="think", tail=tail) == parts
    for cuts in random_cuts(text, 0, 20):
        assert read(text, "hermes", reasoning="think", tail=tail, cuts=cuts) == parts


def test_mistrals_markers_are_read_too() -> None:
    text = "[THINK]hm[/THINK]Yes[TOOL_CALLS]f{}"
    parts = [("reasoning", "hm"), ("content", "Yes"), ("call", "f", "{}")]
    assert read(text, "mistral", reasoning="mistral") == parts


def test_without_a_reasoning_parser_the_markers_are_content() -> None:
    assert read("<think>a</think>b", "hermes") == [("content", "<think>a</think>b")]
