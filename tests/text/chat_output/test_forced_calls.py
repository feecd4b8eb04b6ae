"""What is drawn under the form of demanded calls is read as calls, with arguments of the schema."""

import json
import random
from collections.abc import Mapping
from typing import Final

import pytest

from jaxserve.text.chat_output.parsers import Parsers
from jaxserve.text.chat_output.reasoning import REASONING_MARKERS
from jaxserve.text.constraints import Constraints
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_grammar import Thought, build_tool_form
from tests.text.chat_output.reading import Part, join
from tests.text.masks import advance, build_constraints, draw, fill_mask, open_constraint
from tests.text.templates import chat_tokenizer

PROPERTIES: Final[Mapping[str, object]] = {
    "city": {"type": "string", "maxLength": 5},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "unit": {"enum": ["C", "F"]},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
}
# Text stands as it is in one form, where nothing drawn at random would ever end it.
CITIES: Final = {"city": {"enum": ["Bonn", "Köln"]}}


def tools_of(properties: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    return (
        {"type": "function", "function": {"name": "weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "now"}},
    )


def tools_for(form: str) -> tuple[Mapping[str, object], ...]:
    return tools_of({**PROPERTIES, **CITIES} if form == "qwen_coder" else PROPERTIES)


SPECIALS: Final = ("<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")
# With markers that are special tokens, and with markers that are text.
TOKENIZERS: Final = {
    "special": chat_tokenizer(None, specials=SPECIALS),
    "text": chat_tokenizer(None),
}
EOS: Final = 1
FORMS: Final = ("hermes", "llama3", "mistral", "qwen_coder")


@pytest.fixture(scope="module")
def constraints() -> Mapping[str, Constraints]:
    return {
        kind: build_constraints(tokenizer, eos_ids=[EOS]) for kind, tokenizer in TOKENIZERS.items()
    }


def write(
    constraints: Constraints,
    tokenizer: Tokenizer,
    form: str,
    seed: int,
    *,
    function: str = "",
    thought: Thought | None = None,
) -> str:
    asked = build_tool_form(
        tools_for(form), parser=form, tokenizer=tokenizer, function=function, thought=thought
    )
    constraint = open_constraint(constraints, asked)
    ids = draw(constraint, random.Random(seed), eos_ids=[EOS], max_tokens=4000)
    return tokenizer.decode(ids, skip_special_tokens=False)


def read(text: str, form: str, *, reasoning: str = "", tail: str = "") -> list[Part]:
    numbers = iter(range(1000))
    output = Parsers(tool=form, reasoning=reasoning).open(
        tools=tools_for(form), tail=tail, make_id=lambda: f"id{next(numbers)}"
    )
    return join([*output.push(text), *output.flush()])


def is_call(part: Part) -> bool:
    kind, name, arguments = (*part, "")[:3]
    if kind != "call":
        return False
    values = json.loads(arguments)
    if name == "now":
        return bool(values == {})
    return bool(
        name == "weather"
        and {"city", "days"} <= values.keys() <= PROPERTIES.keys()
        and isinstance(values["city"], str)
        and values["days"] in range(1, 15)
        and values.get("unit", "C") in ("C", "F")
        and all(tag in ("a", "b") for tag in values.get("tags", []))
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_demanded_calls_are_read_as_calls_and_nothing_else(
    constraints: Mapping[str, Constraints], form: str, kind: str
) -> None:
    nums = set()
    for seed in range(6):
        text = write(constraints[kind], TOKENIZERS[kind], form, seed)
        parts = read(text, form)
        assert parts
        assert all(map(is_call, parts)), text
        nums.add(len(parts))
    assert form == "llama3" or len(nums) > 1, "several calls are drawn at times"


@pytest.mark.parametrize("form", FORMS)
def test_a_named_function_is_called_once(constraints: Mapping[str, Constraints], form: str) -> None:
    for seed in range(3):
        text = write(constraints["text"], TOKENIZERS["text"], form, seed, function="weather")
        (part,) = read(text, form)
        assert part[1] == "weather"
        assert is_call(part)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_thought_before_a_demanded_call_is_reasoning(
    constraints: Mapping[str, Constraints], form: str, is_open: bool
) -> None:
    opening, closing = REASONING_MARKERS["think"]
    thought = Thought(open=opening, close=closing, is_open=is_open)
    constraint = open_constraint(
        constraints["text"],
        build_tool_form(
            tools_for(form), parser=form, tokenizer=TOKENIZERS["text"], thought=thought
        ),
    )
    calls = write(constraints["text"], TOKENIZERS["text"], form, 0)
    text = f"{'' if is_open else opening}so it is{closing}\n\n{calls}"
    for token_id in TOKENIZERS["text"].encode(text):
        advance(constraint, token_id)
    tail = opening if is_open else ""
    first, *rest = read(text, form, reasoning="think", tail=tail)
    assert first == ("reasoning", "so it is")
    assert all(map(is_call, rest))


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_need_not_think_may_call_at_once(
    constraints: Mapping[str, Constraints], form: str
) -> None:
    opening, closing = REASONING_MARKERS["think"]
    constraint = open_constraint(
        constraints["text"],
        build_tool_form(
            tools_for(form),
            parser=form,
            tokenizer=TOKENIZERS["text"],
            thought=Thought(open=opening, close=closing),
        ),
    )
    calls = write(constraints["text"], TOKENIZERS["text"], form, 0).strip()
    for token_id in TOKENIZERS["text"].encode(calls):
        advance(constraint, token_id)
    assert EOS in {n for n in range(2) if int(fill_mask(constraint)[0]) >> n & 1}


def test_a_text_without_quotes_is_any_text_up_to_its_end(
    constraints: Mapping[str, Constraints],
) -> None:
    form = build_tool_form(tools_of(PROPERTIES), parser="qwen_coder", tokenizer=TOKENIZERS["text"])
    constraint = open_constraint(constraints["text"], form)
    text = (
        '<tool_call>\n<function=weather>\n<parameter=city>\n"K\n</p>\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    for token_id in TOKENIZERS["text"].encode(text):
        advance(constraint, token_id)
    assert read(text, "qwen_coder") == [("call", "weather", '{"city": "\\"K\\n</p>", "days": 3}')]
