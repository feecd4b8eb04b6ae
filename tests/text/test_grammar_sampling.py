"""Whatever is drawn under a mask has the form that was asked for."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.constraints import Constraints
from tests.text.masks import build_constraints, draw, open_constraint
from tests.text.vocabularies import byte_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
SEEDS = range(4)

Check = Callable[[Any], bool]


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return build_constraints(TOKENIZER)


@pytest.fixture(scope="module")
def pieces() -> Constraints:
    return build_constraints(SENTENCEPIECE)


def write(constraints: Constraints, form: StructuredOutput, seed: int) -> str:
    constraint = open_constraint(constraints, form)
    output = draw(constraint, random.Random(seed), eos_ids=TOKENIZER.eos_ids)
    return b"".join(map(TOKENIZER.token_bytes, output)).decode()


def is_person(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    return (
        list(value) == [key for key in ("name", "age", "tags") if key in value]
        and {"name", "age"} <= value.keys()
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and all(tag in ("a", "b") for tag in value.get("tags", []))
        and len(value.get("tags", [])) <= 3
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_tree(value: Any, depth: int = 3) -> bool:  # noqa: ANN401
    return value.keys() == {"leaf"} or (
        value.keys() == {"left", "right"}
        and depth > 0
        and all(is_tree(side, depth - 1) for side in value.values())
    )


def closed(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def tree(depth: int) -> dict[str, object]:
    leaf = closed(leaf={"type": "null"})
    if depth == 0:
        return leaf
    return {"anyOf": [leaf, closed(left=tree(depth - 1), right=tree(depth - 1))]}


SCHEMAS: dict[str, tuple[object, Check]] = {
    "person": (PERSON, is_person),
    "people": (
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"$ref": "#/$defs/p"},
            "$defs": {"p": PERSON},
        },
        lambda value: 1 <= len(value) <= 2 and all(map(is_person, value)),
    ),
    "tree": (tree(3), is_tree),
    "number": (
        {"type": "number", "minimum": -1.5, "maximum": 2.25},
        lambda value: -1.5 <= value <= 2.25,
    ),
    "multiple": ({"type": "integer", "multipleOf": 7}, lambda value: value % 7 == 0),
    "string": (
        {"type": "string", "pattern": "^[a-f]{2,4}(-\\d)?$"},
        lambda value: bool(re.fullmatch("[a-f]{2,4}(-[0-9])?", value)),
    ),
    "union": ({"type": ["boolean", "null"]}, lambda value: value in (True, False, None)),
    "date": (
        {"type": "string", "format": "date-time", "maxLength": 40},
        lambda value: bool(re.match(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d", value)),
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_drawn_under_a_schema_is_valid(
    constraints: Constraints, name: str, seed: int
) -> None:
    value, check = SCHEMAS[name]
    form = StructuredOutput(kind="json_schema", text=json.dumps(value))
    text = write(constraints, form, seed)
    assert check(json.loads(text)), text


def test_the_checks_see_what_is_not_valid() -> None:
    assert not is_person({"name": "x", "age": 151})
    assert not is_person({"age": 1, "name": "x"})
    assert not is_tree({"left": {"leaf": None}})


@pytest.mark.parametrize(
    "pattern",
    [
        r"(ab|c){2,5}\d?",
        r"[^\s]{1,8}",
        r"(?i)x(yz)*",
        r"[a-z]+@[a-z]+\.(com|org)",
        r"(a|b)*a(a|b){3}",
    ],
)
def test_what_is_drawn_under_a_regex_matches_it(constraints: Constraints, pattern: str) -> None:
    for seed in SEEDS:
        text = write(constraints, StructuredOutput(kind="regex", text=pattern), seed)
        assert re.fullmatch(pattern, text), text


def test_what_is_drawn_of_choices_is_one_of_them(constraints: Constraints) -> None:
    choices = tuple(f"choice {n}" for n in range(40))
    form = StructuredOutput(kind="choice", choices=choices)
    drawn = {write(constraints, form, seed) for seed in range(10)}
    assert drawn <= set(choices)
    assert len(drawn) > 3


def test_what_is_drawn_as_a_json_object_parses(constraints: Constraints) -> None:
    for seed in SEEDS:
        constraint = open_constraint(
            constraints,
            StructuredOutput(kind="json_object"),
            SamplingParams(allowed_token_ids=_ids_of(b'{}[],: "ab01\ntruefalsn')),
        )
        output = draw(constraint, random.Random(seed), eos_ids=TOKENIZER.eos_ids, end_share=1.0)
        text = b"".join(map(TOKENIZER.token_bytes, output)).decode()
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("seed", SEEDS)
def test_sentencepiece_outputs_are_valid_too(pieces: Constraints, seed: int) -> None:
    form = StructuredOutput(kind="json_schema", text=json.dumps(PERSON))
    constraint = open_constraint(pieces, form)
    output = draw(constraint, random.Random(seed), eos_ids=SENTENCEPIECE.eos_ids)
    assert is_person(json.loads(b"".join(map(SENTENCEPIECE.token_bytes, output))))


def test_an_output_under_bad_words_has_none_of_them_and_the_form(constraints: Constraints) -> None:
    form = StructuredOutput(kind="regex", text="[abc]{20}")
    for seed in SEEDS:
        constraint = open_constraint(constraints, form, SamplingParams(bad_words=("ab", "cc")))
        output = draw(constraint, random.Random(seed), eos_ids=TOKENIZER.eos_ids)
        text = b"".join(map(TOKENIZER.token_bytes, output)).decode()
        assert re.fullmatch("[abc]{20}", text)
        assert "ab" not in text
        assert "cc" not in text


def _ids_of(alphabet: bytes) -> tuple[int, ...]:
    single = {TOKENIZER.token_bytes(id): id for id in range(TOKENIZER.vocab_size)}
    return tuple(sorted({single[bytes([byte])] for byte in alphabet}))
