"""Parsers are found by the chat template, and give each call an id."""

import re

import pytest

from jaxserve.errors import UnsupportedError
from jaxserve.text.chat_output import CallDelta, ContentDelta, ToolChoice, find_parsers
from jaxserve.text.chat_output.parsers import Parsers
from jaxserve.text.chat_output.tools import AUTO
from tests.text.chat_output.reading import TOOLS
from tests.text.templates import TEMPLATES, chat_tokenizer


@pytest.mark.parametrize(
    ("name", "tool", "reasoning"),
    [
        ("hermes", "hermes", ""),
        ("llama3", "llama3", ""),
        ("mistral", "mistral", ""),
        ("mistral_newer", "mistral", "mistral"),
        ("qwen_coder", "qwen_coder", "think"),
        ("tool_less", "", ""),
        ("other", "", ""),
    ],
)
def test_the_parsers_are_found_by_what_the_template_renders(
    name: str, tool: str, reasoning: str
) -> None:
    found = find_parsers(chat_tokenizer(TEMPLATES[name]))
    assert (found.tool, found.reasoning) == (tool, reasoning)


def test_special_tokens_among_the_markers_are_kept_in_the_text() -> None:
    tokenizer = chat_tokenizer(TEMPLATES["mistral"], specials=["[TOOL_CALLS]", "[INST]"])
    kept = find_parsers(tokenizer).specials
    assert kept == {"[TOOL_CALLS]": 0}
    assert find_parsers(tokenizer, tool="none").marker_ids == frozenset()


def test_the_configuration_has_the_last_word() -> None:
    tokenizer = chat_tokenizer(TEMPLATES["qwen_coder"])
    assert find_parsers(tokenizer, tool="qwen").tool == "hermes"
    assert find_parsers(tokenizer, tool="none", reasoning="none") == Parsers()
    assert find_parsers(tokenizer, tool="llama3", reasoning="mistral").reasoning == "mistral"


def test_a_model_without_a_template_or_with_a_broken_one_has_no_parsers() -> None:
    assert find_parsers(chat_tokenizer(None)).tool == ""
    assert find_parsers(chat_tokenizer("{% if %}")).tool == ""


def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    for template in (TEMPLATES["tool_less"], "{% if %}", None):
        found = find_parsers(chat_tokenizer(template), tool="hermes")
        with pytest.raises(UnsupportedError, match=r"no place for them.* set model\.chat_template"):
            found.check_offer()


def test_tools_are_refused_where_calls_could_not_be_read() -> None:
    unknown = find_parsers(chat_tokenizer(TEMPLATES["other"]))
    with pytest.raises(UnsupportedError, match=r"set model\.tool_parser"):
        unknown.check_offer()
    find_parsers(chat_tokenizer(TEMPLATES["other"]), tool="none").check_offer()
    find_parsers(chat_tokenizer(TEMPLATES["hermes"])).check_offer()


@pytest.mark.parametrize("tool", ["hermes", "mistral"])
def test_ids_of_calls_are_random_and_of_the_templates_length(tool: str) -> None:
    ids = {Parsers(tool=tool).make_call_id() for _ in range(100)}
    wanted = r"[0-9A-Za-z]{9}" if tool == "mistral" else r"call_[0-9a-f]{24}"
    assert len(ids) == 100
    assert all(re.fullmatch(wanted, id) for id in ids)


def test_a_calls_first_delta_has_its_id_and_name() -> None:
    output = Parsers(tool="hermes").open(tools=TOOLS, make_id=lambda: "x")
    assert output.push('Hi <tool_call>{"name": "f"') == [ContentDelta(text="Hi")]
    has_calls = [output.has_calls]
    assert output.push(', "arguments": {"n"') == [
        CallDelta(index=0, id="x", name="f"),
        CallDelta(index=0, arguments='{"n"'),
    ]
    has_calls.append(output.has_calls)
    assert has_calls == [False, True]
    assert output.push(": 1}}</tool_call>") == [CallDelta(index=0, arguments=": 1}")]
    assert output.flush() == []


@pytest.mark.parametrize(("tools", "choice"), [((), AUTO), (TOOLS, ToolChoice(mode="none"))])
def test_without_tools_on_offer_calls_are_content(
    tools: tuple[dict[str, object], ...], choice: ToolChoice
) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    output = Parsers(tool="hermes").open(tools=tools, tool_choice=choice)
    assert [*output.push(text), *output.flush()] == [ContentDelta(text=text)]
