"""The form of demanded calls: what of a tool's schema it keeps, and what is refused."""

from collections.abc import Mapping

import pytest

from jaxserve.errors import BadGrammarError, InvalidRequestError, UnsupportedError
from jaxserve.request import SamplingParams
from jaxserve.text.constraints import Constraints
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_grammar import build_tool_form
from tests.text.masks import accepts, allowed, build_constraints, open_constraint
from tests.text.vocabularies import byte_backend, byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return build_constraints(TOKENIZER)


def tool(name: str, parameters: object = None, **more: object) -> Mapping[str, object]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


def takes(constraints: Constraints, offered: Mapping[str, object], arguments: str) -> bool:
    """Whether a call of this tool may have these arguments."""
    form = build_tool_form([offered], parser="llama3", tokenizer=TOKENIZER)
    call = f'{{"name": "f", "parameters": {arguments}}}'
    return accepts(open_constraint(constraints, form), call, TOKENIZER)


def test_references_of_a_tools_schema_hold_inside_the_call(constraints: Constraints) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "value": {"$ref": "#/$defs/small"}},
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    offered = tool("f", node)
    assert takes(constraints, offered, '{"next": {"value": 3}, "value": 4}')
    assert not takes(constraints, offered, '{"value": 10}')
    assert not takes(constraints, offered, '{"next": {"next": {"value": "x"}}}')


def test_what_looks_like_a_reference_in_a_value_is_left(constraints: Constraints) -> None:
    offered = tool("f", {"properties": {"a": {"const": {"$ref": "#/x"}}}, "required": ["a"]})
    assert takes(constraints, offered, '{"a": {"$ref": "#/x"}}')
    assert not takes(constraints, offered, '{"a": {"$ref": "#/properties/parameters/x"}}')


def test_a_parameter_may_be_named_as_a_keyword_is(constraints: Constraints) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    for name in ("default", "enum", "const", "properties", "format"):
        offered = tool(
            "f",
            {
                "properties": {name: {"$ref": "#/$defs/digit"}},
                "required": [name],
                "additionalProperties": False,
                "$defs": {"digit": digit},
            },
        )
        assert takes(constraints, offered, f'{{"{name}": 3}}')
        assert not takes(constraints, offered, f'{{"{name}": 10}}')


def test_a_date_of_a_call_is_in_the_calendar(constraints: Constraints) -> None:
    offered = tool("f", {"properties": {"day": {"type": "string", "format": "date"}}})
    assert takes(constraints, offered, '{"day": "2024-02-29"}')
    assert not takes(constraints, offered, '{"day": "2023-02-29"}')


@pytest.mark.parametrize(
    ("parameters", "fits", "fails"),
    [
        (None, "{}", '{"a": 1}'),
        ({}, '{"a": 1}', "1"),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', "[]"),
    ],
)
def test_arguments_are_an_object(
    constraints: Constraints, parameters: object, fits: str, fails: str
) -> None:
    assert takes(constraints, tool("f", parameters), fits)
    assert not takes(constraints, tool("f", parameters), fails)


def test_only_a_strict_tool_is_refused_for_what_cannot_be_kept(constraints: Constraints) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}}
    assert takes(constraints, tool("f", parameters), '{"a": 1}')
    assert not takes(constraints, tool("f", parameters), '{"a": "x"}')
    form = build_tool_form(
        [tool("f", parameters, strict=True)], parser="llama3", tokenizer=TOKENIZER
    )
    with pytest.raises(BadGrammarError, match=r'Unimplemented keys: \["not"\]') as caught:
        constraints.build(SamplingParams(), form)
    assert caught.value.field == "chat.tools_json"


def test_functions_with_a_common_start_are_told_apart(constraints: Constraints) -> None:
    tools = [
        tool("get", {"properties": {"a": {"const": 1}}, "required": ["a"]}),
        tool("get_all", {"properties": {"b": {"const": 2}}, "required": ["b"]}),
        tool("go"),
    ]
    form = build_tool_form(tools, parser="llama3", tokenizer=TOKENIZER)
    constraint = open_constraint(constraints, form)
    for name, arguments in (("get", '{"a": 1}'), ("get_all", '{"b": 2}'), ("go", "{}")):
        call = f'{{"name": "{name}", "parameters": {arguments}}}'
        assert accepts(constraint, call, TOKENIZER)
    mixed = '{"name": "get", "parameters": {"b": 2}}'
    assert not accepts(constraint, mixed, TOKENIZER)


def test_a_tagged_value_is_json_unless_it_may_be_a_string(constraints: Constraints) -> None:
    parameters = {
        "properties": {
            "point": {"$ref": "#/$defs/point"},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["point", "text"],
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}}},
    }
    form = build_tool_form([tool("f", parameters)], parser="qwen_coder", tokenizer=TOKENIZER)
    constraint = open_constraint(constraints, form)

    def call(point: str, text: str) -> str:
        values = "".join(
            f"<parameter={name}>\n{value}\n</parameter>\n"
            for name, value in (("point", point), ("text", text))
        )
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"

    assert accepts(constraint, call("[1, 2]", "any <b> text\n"), TOKENIZER)
    assert not accepts(constraint, call("one, two", "x"), TOKENIZER)


def test_a_marker_that_is_a_special_token_is_drawn_as_such(constraints: Constraints) -> None:
    form = build_tool_form([tool("f")], parser="mistral", tokenizer=TOKENIZER)
    first = allowed(open_constraint(constraints, form))
    assert first == set(TOKENIZER.encode("[", add_special_tokens=False))
    backend = byte_backend()
    backend.add_special_tokens(["[TOOL_CALLS]"])
    special = Tokenizer.from_backend(backend, eos_ids=TOKENIZER.eos_ids)
    form = build_tool_form([tool("f")], parser="mistral", tokenizer=special)
    marker = special.encode("[TOOL_CALLS]", add_special_tokens=False)
    assert allowed(open_constraint(build_constraints(special), form)) == set(marker)


def test_a_format_without_a_form_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="hermes, llama3, mistral, qwen_coder") as caught:
        build_tool_form([tool("f")], parser="", tokenizer=TOKENIZER)
    assert caught.value.field == "chat.tool_choice"


def test_a_function_that_is_not_offered_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'g', but no tool has that name"):
        build_tool_form([tool("f")], parser="hermes", tokenizer=TOKENIZER, function="g")
