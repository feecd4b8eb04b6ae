"""What each form of structured output means, and what of it is refused by name."""

import json

import pytest

from jaxserve.errors import BadGrammarError
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.constraints import Constraints
from tests.text.masks import accepts, build_constraints, open_constraint
from tests.text.vocabularies import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return build_constraints(TOKENIZER)


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", text=json.dumps(value))


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=text)


def lark(text: str) -> StructuredOutput:
    return StructuredOutput(kind="lark", text=text)


def choice(*choices: str) -> StructuredOutput:
    return StructuredOutput(kind="choice", choices=choices)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"\d{3}-[a-c]+", ["123-a", "000-abc"], ["123-", "12-a", "x123-a", "123-ad"]),
        (r"^ab$", ["ab"], ["a", "xab", "abx"]),
        ("a/b", ["a/b"], ["ab", r"a\/b"]),
        (r"a\/b", ["a/b"], [r"a\/b"]),
        ("a\nb", ["a\nb"], ["ab", r"a\nb"]),
        ("a.b", ["axb", "aéb"], ["a\nb"]),
        ("(?s:a.b)", ["a\nb"], ["ab"]),
        ("(?i)ja", ["ja", "JA", "Ja"], ["j"]),
        ("é+|😀", ["é", "éé", "😀"], ["e", ""]),
        ('say "hi"', ['say "hi"'], ["say hi"]),
        ("(?x) a b # with a remark", ["ab"], ["a b"]),
        ("", [""], ["a"]),
        ("a*", ["", "aa"], ["b"]),
    ],
)
def test_a_regex_is_the_whole_output(
    constraints: Constraints, pattern: str, matching: list[str], others: list[str]
) -> None:
    constraint = open_constraint(constraints, regex(pattern))
    assert [text for text in matching if not accepts(constraint, text, TOKENIZER)] == []
    assert [text for text in others if accepts(constraint, text, TOKENIZER)] == []


def test_a_choice_is_one_of_its_texts(constraints: Constraints) -> None:
    texts = ("yes", "yes, sure", 'a "quoted" \\ one', "two\nlines\t", "é😀", "start: x", "yes")
    constraint = open_constraint(constraints, choice(*texts))
    assert [text for text in texts if not accepts(constraint, text, TOKENIZER)] == []
    others = ["", "ye", "yes,", "no", "yes, sure!", "two\\nlines\\t"]
    assert [text for text in others if accepts(constraint, text, TOKENIZER)] == []


def test_a_json_object_is_any_object_and_nothing_else(constraints: Constraints) -> None:
    constraint = open_constraint(constraints, StructuredOutput(kind="json_object"))
    for text in (
        "{}",
        '{"a": 1}',
        '{"a": [1, -2.5e3, true, null, "x\\n\\u00e9"], "b": {"c": {}}}',
        '{\n  "a": 1,\n  "b": [\n    1\n  ]\n}',
    ):
        assert json.loads(text) is not None
        assert accepts(constraint, text, TOKENIZER), text
    for text in ("[]", "1", "null", '"a"', "", "{", '{"a"}', "{a: 1}", '{"a": 01}', '{"a": "\n"}'):
        assert not accepts(constraint, text, TOKENIZER), text


def test_white_space_in_json_has_an_end(constraints: Constraints) -> None:
    constraint = open_constraint(constraints, schema({"type": "array", "items": {"const": 1}}))
    fits = ["[1, 1]", "[1,1]", "[\n  1,\n  1\n]", "[  1  ,  1  ]", "[\r\n\t1]", f"[\n{' ' * 32}1]"]
    assert [text for text in fits if not accepts(constraint, text, TOKENIZER)] == []
    endless = ["[   1]", "[\n\n1]", f"[\n{' ' * 33}1]", " [1]", "[1] ", "[1]\n"]
    assert [text for text in endless if accepts(constraint, text, TOKENIZER)] == []


@pytest.mark.parametrize(
    ("value", "matching", "others"),
    [
        (True, ["1", '"x"', "{}", "[null]"], ["x"]),
        ({}, ["1", '"x"', "{}"], [""]),
        ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ["a", "2"]),
        ({"type": "null", "x-mine": 1, "title": "T", "deprecated": True}, ["null"], ["1"]),
        ({"type": ["integer", "null"]}, ["-5", "null"], ["1.5", "true"]),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12"]),
        ({"type": "number", "maximum": 1.5}, ["1.5", "-7", "1.25"], ["1.6", "2"]),
        ({"type": "integer", "multipleOf": 5}, ["10", "0", "-15"], ["12"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"éé😀"'], ['"a"', '"abcd"']),
        ({"type": "string", "pattern": "^a+b$"}, ['"aab"'], ['"ab "', '"b"']),
        ({"type": "string", "format": "date"}, ['"2026-11-30"'], ['"2026-13-30"', '"x"']),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"2023-03-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2024-04-31"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:59Z"', '"00:00:00.5+01:30"'],
            ['"10:20:60Z"', '"24:00:00Z"'],
        ),
        (
            {"type": "string", "format": "email"},
            ['"a@b.example"', f'"{"a" * 64}@b.example"'],
            [f'"{"a" * 65}@b.example"', '"a"'],
        ),
        (
            {"items": {"type": "string", "format": "date-time", "pattern": "^2"}},
            ['["2024-02-29T01:02:03Z"]', "[]"],
            ['["2023-02-29T01:02:03Z"]', '["2024-02-29T01:02:60Z"]', '["1999-01-01T01:02:03Z"]'],
        ),
        (
            {"properties": {"format": {"const": {"format": "time"}}}, "required": ["format"]},
            ['{"format":{"format":"time"}}'],
            ["{}"],
        ),
        (
            {"type": "array", "minItems": 1, "maxItems": 2, "items": {}},
            ["[1]", "[1,2]"],
            ["[]", "[1,2,3]"],
        ),
        ({"prefixItems": [{"const": 1}, {"const": "b"}], "items": False}, ['[1,"b"]'], ['["b",1]']),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            ['{"a":1}', '{"a":1,"b":"x"}'],
            ["{}", '{"b":"x"}', '{"a":1,"c":2}', '{"b":"x","a":1}'],
        ),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
            },
            ["[]", "[[],[[]]]"],
            ["[1]"],
        ),
        ({"anyOf": [{"const": 1}, {"type": "boolean"}]}, ["1", "true"], ["2"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"x"'], ["true"]),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, ["5"], ["4", "5.5"]),
        (
            {
                "type": "object",
                "patternProperties": {"^x_": {"const": 1}},
                "additionalProperties": False,
            },
            ['{"x_a":1}'],
            ['{"y":1}'],
        ),
    ],
)
def test_a_json_schema_is_kept(
    constraints: Constraints, value: object, matching: list[str], others: list[str]
) -> None:
    constraint = open_constraint(constraints, schema(value))
    assert [text for text in matching if not accepts(constraint, text, TOKENIZER)] == []
    assert [text for text in others if accepts(constraint, text, TOKENIZER)] == []


@pytest.mark.parametrize("depth", [300, 5000])
def test_a_schema_that_is_nested_very_deeply_is_refused(
    constraints: Constraints, depth: int
) -> None:
    """Deeper than Python's own stack, with and without the JSON reader's help."""
    text = '{"items":' * depth + "{}" + "}" * depth
    deep = StructuredOutput(kind="json_schema", text=text)
    with pytest.raises(BadGrammarError) as refusal:
        constraints.build(SamplingParams(), deep)
    assert refusal.value.field == "structured_output.json_schema"


def test_a_lark_grammar_may_recurse_and_hold_a_schema(constraints: Constraints) -> None:
    constraint = open_constraint(
        constraints,
        lark(
            'start: "(" start ")" | NUMBER | %json {"type": "boolean"}\n'
            "NUMBER: /[0-9]+/  // a remark\n%ignore / /"
        ),
    )
    for text in ("7", "((42))", "( 1 )", "(true)"):
        assert accepts(constraint, text, TOKENIZER), text
    for text in ("(1", "x", "()", "(1))"):
        assert not accepts(constraint, text, TOKENIZER), text


def test_a_lark_grammar_is_one_even_if_it_looks_like_json(constraints: Constraints) -> None:
    with pytest.raises(BadGrammarError, match="expecting rule"):
        constraints.build(SamplingParams(), lark('{"grammars": [{"json_schema": {}}]}'))


KEYWORDS_REFUSED = {
    "if": {"if": {}, "then": {}},
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
}


@pytest.mark.parametrize("keyword", KEYWORDS_REFUSED)
def test_a_keyword_that_cannot_be_kept_is_refused_by_name(
    constraints: Constraints, keyword: str
) -> None:
    nested = {"type": "object", "properties": {"a": KEYWORDS_REFUSED[keyword]}}
    with pytest.raises(BadGrammarError, match=r"Unimplemented keys") as caught:
        constraints.build(SamplingParams(), schema(nested))
    assert f'"{keyword}"' in str(caught.value)
    assert caught.value.field == "structured_output.json_schema"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (schema({"type": "string", "format": "idn-email"}), "idn-email"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf is supported only"),
        (schema({"$ref": "https://example.com/schema"}), "https://example.com/schema"),
        (schema({"$ref": "#/$defs/none"}), "none"),
        (schema({"type": "strin"}), "strin"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "minimum|nothing|range"),
        (schema({"$ref": "#"}), "nothing that this model's tokens can spell"),
        (schema({"x-guidance": {"whitespace_flexible": False}}), "'x-guidance', which is not"),
        (schema(False), "allows nothing"),
        (schema([]), "is not an object"),
        (StructuredOutput(kind="json_schema", text='{"type": '), "not JSON: Expecting value"),
        (StructuredOutput(kind="json_schema", text="[" * 50_000), "nested too deeply"),
        (regex("(a"), "unclosed group"),
        (regex(r"(a)\1"), "backreferences are not supported"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"\ba"), "lookarounds not supported"),
        (regex("[^\\x00-\\x{10FFFF}]"), "nothing that this model's tokens can spell"),
        (choice(), "choice is empty"),
        (lark(""), "no start rule"),
        (lark("start: a"), 'unknown name: "a"'),
        (lark("start: start"), "nothing that this model's tokens can spell"),
        (lark('start: "a'), "lexer error"),
        (lark("start: <|nope|>"), "unknown special token"),
        (lark("start: <[9999]>"), "Token range end too large"),
        (lark('%import "/etc/passwd"\nstart: "a"'), "Expected name"),
        (lark("start: @other"), "unknown grammar @other"),
        (lark("start: a\na[temperature=0.5]: /x+/"), "'temperature', which is not supported"),
        (lark('start: a "."\na[capture, stop="."]: /x+/'), "'stop', which is not supported"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    constraints: Constraints, form: StructuredOutput, message: str
) -> None:
    with pytest.raises(BadGrammarError, match=message) as caught:
        constraints.build(SamplingParams(), form)
    assert caught.value.field.startswith("structured_output.")
    assert len(str(caught.value)) < 450
    assert "backtrace" not in str(caught.value)


def test_a_rule_option_inside_quotes_is_text(constraints: Constraints) -> None:
    text = 'start: "[temperature=" /[a\\/]+\\[stop=/ "]" // x[stop="y"]\n# [stop="z"]'
    constraint = open_constraint(constraints, lark(text))
    assert accepts(constraint, "[temperature=a/[stop=]", TOKENIZER)


def test_a_form_made_of_another_field_is_refused_under_its_name(constraints: Constraints) -> None:
    form = StructuredOutput(kind="lark", text="start: a", field="chat.tools_json")
    with pytest.raises(BadGrammarError, match="unknown name") as caught:
        constraints.build(SamplingParams(), form)
    assert caught.value.field == "chat.tools_json"


@pytest.mark.parametrize(
    "form",
    [
        regex("é" * 33),
        choice("a" * 30, "b" * 33),
        schema({"const": "a" * 60}),
        lark('start: "a"' + " " * 60),
    ],
)
def test_a_grammar_has_a_size_limit(form: StructuredOutput) -> None:
    small = build_constraints(TOKENIZER, max_bytes=64)
    with pytest.raises(BadGrammarError, match="this server's limit is 64; shorten it"):
        small.build(SamplingParams(), form)
    assert small.build(SamplingParams(), regex("é" * 31)) is not None


def test_a_lone_surrogate_is_refused(constraints: Constraints) -> None:
    with pytest.raises(BadGrammarError, match="lone surrogate"):
        constraints.build(SamplingParams(), choice("a", "\ud800"))
