"""Tools, the choice among them, and earlier calls: their shape is checked at the door."""

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat_output import (
    ToolChoice,
    check_tool_calls,
    check_tool_choice,
    check_tools,
)
from jaxserve.text.chat_output.tools import parameter_types
from tests.text.chat_output.reading import TOOLS


def tool(name: object = "f", **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **function}}


def test_tools_come_back_as_they_were_sent() -> None:
    tools = [tool(strict=True, parameters=None), tool("g", description=None, extra=1)]
    assert check_tools(tools, max_tools=2) == tuple(tools)
    assert check_tools([], max_tools=0) == ()


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ({}, "not a list"),
        ("[]", "not a list"),
        ([tool(), tool("g"), tool("h")], "3 entries, but the limit is 2"),
        ([1], r"tools\[0\] is not a tool"),
        ([{"type": "web_search"}], r"tools\[0\].type is 'web_search'"),
        ([{"type": "function"}], "is not a tool"),
        ([{"function": {"name": "f"}}], "is not a tool"),
        ([tool(1)], "is not a tool"),
        ([tool("")], "1 to 64 letters"),
        ([tool("a b")], "1 to 64 letters"),
        ([tool("ä")], "1 to 64 letters"),
        ([tool("f\n")], "1 to 64 letters"),
        ([tool("x" * 65)], "1 to 64 letters"),
        ([tool(), tool()], "has 'f' twice"),
        ([tool(description=1)], "description must be a string"),
        ([tool(parameters=[1])], "parameters must be a JSON Schema"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(tools: object, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        check_tools(tools, max_tools=2)
    assert caught.value.field == "chat.tools"


def test_a_choice_must_be_one_of_the_tools() -> None:
    for choice in (
        ToolChoice(),
        ToolChoice(mode="none"),
        ToolChoice(mode="required"),
        ToolChoice(function="f"),
    ):
        assert check_tool_choice(choice, TOOLS) == choice
    with pytest.raises(InvalidRequestError, match="'h', which is none of the tools; use one of f"):
        check_tool_choice(ToolChoice(function="h"), TOOLS)
    with pytest.raises(InvalidRequestError, match="but there are no tools") as caught:
        check_tool_choice(ToolChoice(mode="required"), ())
    assert caught.value.field == "chat.tool_choice"
    assert check_tool_choice(ToolChoice(mode="none"), ()).mode == "none"


def test_earlier_calls_come_back_as_they_were_sent() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}},
        {"function": {"name": "f", "arguments": {"n": 1}}},
    ]
    assert check_tool_calls(calls, "messages[1]") == tuple(calls)


@pytest.mark.parametrize(
    "call",
    [
        1,
        {"type": "custom", "function": {"name": "f", "arguments": ""}},
        {"function": {"name": 1, "arguments": ""}},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "arguments": [1]}},
        {"id": 1, "function": {"name": "f", "arguments": ""}},
    ],
)
def test_what_is_no_call_is_refused_by_its_place(call: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.tool_calls\[0\] is not a call"):
        check_tool_calls([call], "messages[1]")


def test_calls_that_are_no_list_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not a list"):
        check_tool_calls("x", "messages[1]")


def test_a_parameters_types_are_read_through_unions_and_references() -> None:
    schema = {
        "$defs": {"P": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["string", "null"]},
            "c": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/P"}]},
            "d": {"enum": ["x", 1, None, True]},
            "e": {"const": [1]},
            "f": {"$ref": "#/$defs/Loop"},
            "g": {"$ref": "#/nowhere"},
            "h": True,
        },
    }
    types = parameter_types([tool(parameters=schema), tool("g"), tool("h", parameters={})])
    assert types == {
        "f": {
            "a": {"integer"},
            "b": {"string", "null"},
            "c": {"number", "object"},
            "d": {"string", "integer", "null", "boolean"},
            "e": {"array"},
            "f": set(),
            "g": set(),
            "h": set(),
        },
        "g": {},
        "h": {},
    }
