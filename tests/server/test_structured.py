"""Forms of output, allowed ids and bad words, through gRPC."""

import json
import re

import pytest

from jaxserve.client import (
    BadRequestError,
    FinishReason,
    NotSupportedError,
    StructuredOutput,
)
from jaxserve.config import LimitsSection
from tests.fakes import EOS_ID, VOCAB_SIZE
from tests.server.harness import Running, connect, run_server

pytestmark = pytest.mark.asyncio

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
FORMS = [
    (StructuredOutput(kind="regex", text="[ab]{3}c"), r"[ab]{3}c"),
    (StructuredOutput(kind="choice", choices=("yes", "no", "né")), r"yes|no|né"),
    (StructuredOutput(kind="lark", text='start: "x" ("y" | "z")'), r"x[yz]"),
    (StructuredOutput(kind="json_schema", text=SCHEMA), r'\{\s*"a"\s*:\s*"[xy]"\s*\}'),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=[form.kind for form, _ in FORMS])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_every_choice_has_the_form_and_ends_by_itself(
    form: StructuredOutput, pattern: str, temperature: float
) -> None:
    """The fake device draws any token that its mask allows; without one, none of these."""
    async with run_server(script=None) as running, connect(running) as client:
        for seed in range(4):
            whole = await client.generate(
                "x", structured_output=form, temperature=temperature, seed=seed, n=2
            )
            for choice in whole.choices:
                if choice.finish_reason is FinishReason.EOS:
                    assert re.fullmatch(pattern, choice.text)
                else:  # white space may fill the context in a form that allows it
                    assert choice.finish_reason is FinishReason.CONTEXT_LENGTH
                    assert form.kind == "json_schema"
        free = await client.generate("x", temperature=temperature, seed=1, ignore_eos=True)
        assert not re.fullmatch(pattern, free.text)


async def test_an_object_begins_as_one() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        form = StructuredOutput(kind="json_object")
        whole = await client.generate("x", structured_output=form, max_tokens=20)
        assert whole.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutput(kind="json_schema", text="{"), "structured_output.json_schema"),
        (
            StructuredOutput(kind="json_schema", text='{"type": "x"}'),
            "structured_output.json_schema",
        ),
        (StructuredOutput(kind="regex", text="("), "structured_output.regex"),
        (StructuredOutput(kind="regex", text="a" * 70_000), "structured_output.regex"),
        (StructuredOutput(kind="lark", text="start: missing"), "structured_output.lark_grammar"),
        (StructuredOutput(kind="choice"), "structured_output.choice"),
        (StructuredOutput(kind="choice", choices=("a", "")), "structured_output.choice"),
    ],
)
async def test_a_form_that_is_wrong_is_refused_by_name(form: StructuredOutput, field: str) -> None:
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.generate("x", structured_output=form)
        assert caught.value.field == field
        assert running.num_submitted == 0
        await check_well(running)


async def check_well(running: Running) -> None:
    async with connect(running) as client:
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("options", "field"), [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 1}, "min_tokens")]
)
async def test_what_keeps_a_form_from_ending_is_refused_by_name(
    options: dict[str, int], field: str
) -> None:
    form = StructuredOutput(kind="regex", text="a+")
    async with run_server() as running, connect(running) as client:
        with pytest.raises(NotSupportedError, match=field) as caught:
            await client.generate("x", structured_output=form, **options)  # type: ignore[arg-type]
        assert caught.value.field == f"stop.{field}"


async def test_nothing_but_allowed_ids_is_drawn_and_an_end() -> None:
    allowed = [10, 100, 200]
    async with run_server(script=None) as running, connect(running) as client:
        whole = await client.generate(
            "x",
            allowed_token_ids=allowed,
            temperature=2.0,
            seed=1,
            n=3,
            max_tokens=12,
            include_token_ids=True,
        )
        seen = {token for choice in whole.choices for token in choice.token_ids}
        assert seen <= {*allowed, EOS_ID}
        assert len(seen) > 2
        banned = await client.generate(
            "x",
            allowed_token_ids=list(b"@~"),
            bad_words=["@"],
            max_tokens=4,
            ignore_eos=True,
            include_token_ids=True,
        )
        assert banned.text == "~~~~"


async def test_a_bad_word_is_never_written_in_one_token_or_in_several() -> None:
    async with run_server(script=None) as running, connect(running) as client:
        options = {"allowed_token_ids": list(b"@~"), "ignore_eos": True, "max_tokens": 16}
        free = await client.generate("x", temperature=1.0, seed=1, **options)  # type: ignore[arg-type]
        assert "@~" in free.text
        for words, pattern in ((["@~"], r"~*@*"), (["@@", "~~"], r"~?(@~)*@?")):
            whole = await client.generate(
                "x",
                temperature=1.0,
                seed=1,
                n=2,
                bad_words=words,
                **options,  # type: ignore[arg-type]
            )
            for choice in whole.choices:
                assert re.fullmatch(pattern, choice.text), choice.text


async def test_allowed_ids_and_bad_words_are_bounded_in_number_and_kind() -> None:
    bounds = LimitsSection(max_allowed_token_ids=2, max_bad_words=1, max_stop_string_bytes=3)
    async with run_server(bounds=bounds) as running, connect(running) as client:
        for option, values, field in (
            ("allowed_token_ids", [1, 2, 3], "sampling.allowed_token_ids"),
            ("allowed_token_ids", [], "sampling.allowed_token_ids"),
            ("allowed_token_ids", [VOCAB_SIZE], "sampling.allowed_token_ids"),
            ("allowed_token_ids", [(1 << 32) - 1], "sampling.allowed_token_ids"),
            ("bad_words", ["a", "b"], "sampling.bad_words"),
            ("bad_words", [""], "sampling.bad_words"),
            ("bad_words", ["abcd"], "sampling.bad_words"),
        ):
            with pytest.raises(BadRequestError) as caught:
                await client.generate("x", **{option: values})  # type: ignore[arg-type]
            assert caught.value.field == field
        await check_well(running)
