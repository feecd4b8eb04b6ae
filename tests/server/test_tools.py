"""Tools, calls and reasoning of conversations, through gRPC."""

import json
from typing import Any

import pytest

from jaxserve.client import (
    BadRequestError,
    ChatMessage,
    ChatPrompt,
    Delta,
    Finish,
    FinishReason,
    NotSupportedError,
    StructuredOutput,
    ToolCall,
)
from jaxserve.config import LimitsSection
from tests.fakes import CHAT_TEMPLATE, EOS_ID, Script
from tests.server.harness import TOOL_TEMPLATE, Running, connect, run_server

pytestmark = pytest.mark.asyncio

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOP = {"type": "function", "function": {"name": "nop"}}
USER = ChatMessage(role="user", content="Add.")
ASKED = ChatPrompt(messages=(USER,), tools=(ADD,))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>Let me.</think>Yes: {CALL}"


def write(text: str) -> Script:
    """Returns a script that writes a text after any prompt."""
    tokens = [*text.encode(), EOS_ID]

    def script(prompt: tuple[int, ...], index: int) -> int | None:
        return tokens[index] if index < len(tokens) else None

    return script


def run(text: str | None, **options: Any) -> Any:  # noqa: ANN401  # an async context
    """Serves a model that writes this; None is the hash, which only a mask gives a form."""
    options.setdefault("chat_template", TOOL_TEMPLATE)
    script = None if text is None else write(text)
    return run_server(script=script, max_model_tokens=400, num_pages=401, **options)


async def tokens_of(running: Running, prompt: ChatPrompt) -> str:
    async with connect(running) as client:
        return await client.detokenize(
            (await client.tokenize(prompt)).token_ids, skip_special_tokens=False
        )


async def test_reasoning_and_calls_come_apart_from_the_text_in_both_ways() -> None:
    async with run(ANSWER) as running, connect(running) as client:
        whole = await client.generate(ASKED, n=2)
        events = [event async for event in client.stream(ASKED, n=2)]
    assert len(whole.choices) == 2
    ids = set()
    for choice in whole.choices:
        (call,) = choice.tool_calls
        assert (choice.reasoning, choice.text) == ("Let me.", "Yes:")
        assert (call.name, json.loads(call.arguments_json)) == ("add", {"a": 1})
        assert (choice.finish_reason, choice.matched_stop) == (FinishReason.TOOL_CALLS, None)
        ids.add(call.id)
        deltas = [
            event for event in events if isinstance(event, Delta) and event.index == choice.index
        ]
        assert "".join(delta.text for delta in deltas) == choice.text
        assert "".join(delta.reasoning for delta in deltas) == choice.reasoning
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert [(piece.index, piece.name) for piece in pieces if piece.id] == [(0, "add")]
        assert "".join(piece.arguments for piece in pieces) == call.arguments_json
    assert len(ids) == 2  # an id is its call's alone
    assert {event.reason for event in events if isinstance(event, Finish)} == {
        FinishReason.TOOL_CALLS
    }


async def test_tokens_and_logprobs_are_those_of_all_that_was_written() -> None:
    async with run(ANSWER) as running, connect(running) as client:
        whole = await client.generate(ASKED, include_token_ids=True, logprobs=0)
    assert whole.token_ids == (*ANSWER.encode(), EOS_ID)
    assert b"".join(entry.token_bytes for entry in whole.logprobs[:-1]).decode() == ANSWER
    assert whole.usage.completion_tokens == len(ANSWER) + 1


async def test_raw_text_is_left_as_it_is() -> None:
    async with run(ANSWER) as running, connect(running) as client:
        whole = await client.generate(ASKED, raw_text=True)
    assert (whole.text, whole.reasoning, whole.tool_calls) == (ANSWER, "", ())
    assert whole.finish_reason is FinishReason.EOS


async def test_without_tools_a_call_is_text_and_reasoning_is_reasoning_still() -> None:
    bare = ChatPrompt(messages=(USER,))
    async with run(ANSWER) as running, connect(running) as client:
        for prompt, options in ((bare, {}), (ASKED, {"tool_choice": "none"})):
            whole = await client.generate(prompt, **options)  # type: ignore[arg-type]
            assert (whole.text, whole.reasoning) == (f"Yes: {CALL}", "Let me.")
            assert (whole.tool_calls, whole.finish_reason) == ((), FinishReason.EOS)


async def test_a_prompt_that_is_no_conversation_is_answered_as_it_is() -> None:
    async with run(ANSWER) as running, connect(running) as client:
        for prompt in ("Add.", tuple(b"Add.")):
            assert (await client.generate(prompt)).text == ANSWER


async def test_the_template_is_given_tools_calls_answers_and_reasoning() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    prompt = ChatPrompt(
        messages=(
            USER,
            ChatMessage(role="assistant", content="", tool_calls=(call,), reasoning="Hm."),
            ChatMessage(role="tool", content="2", tool_call_id="c1"),
        ),
        tools=(NOP,),
    )
    async with run("x") as running, connect(running) as client:
        text = await tokens_of(running, prompt)
        whole = await client.generate(prompt, max_tokens=1)
        assert whole.usage.prompt_tokens == len((await client.tokenize(prompt)).token_ids)
    assert '"name": "nop"' in text
    assert "<think>Hm.</think>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "tool: 2" in text


@pytest.mark.parametrize("options", [{"tool_choice": "required"}, {"tool_function": "add"}])
async def test_a_call_that_is_demanded_is_written(options: dict[str, Any]) -> None:
    """Whatever the device would draw by itself: it draws under a mask."""
    prompt = ChatPrompt(messages=(USER,), tools=(ADD,))
    async with run(None, chat_template=TOOL_TEMPLATE.replace("think", "thunk")) as running:
        async with connect(running) as client:
            for seed in range(3):
                whole = await client.generate(prompt, temperature=1.0, seed=seed, **options)
                for call in whole.tool_calls:
                    assert isinstance(call, ToolCall)
                    assert (call.name, json.loads(call.arguments_json)["a"] in (1, 2)) == (
                        "add",
                        True,
                    )
                assert whole.tool_calls
                assert whole.text == ""
                if "tool_function" in options:
                    assert whole.finish_reason is FinishReason.TOOL_CALLS


async def test_a_demanded_call_and_another_form_do_not_go_together() -> None:
    async with run("x") as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="leave one of them out") as caught:
            await client.generate(
                ASKED,
                tool_choice="required",
                structured_output=StructuredOutput(kind="regex", text="a"),
            )
        assert caught.value.field == "structured_output"


async def test_tools_whose_calls_cannot_be_read_are_refused() -> None:
    async with run("x", chat_template=CHAT_TEMPLATE) as running, connect(running) as client:
        (model,) = await client.models()
        assert (model.tool_parser, model.reasoning_parser) == ("", "")
        for options in ({}, {"tool_choice": "required"}):
            with pytest.raises((NotSupportedError, BadRequestError)) as caught:
                await client.generate(ASKED, **options)  # type: ignore[arg-type]
            assert caught.value.field.startswith("chat.tool")
        assert (await client.generate(ChatPrompt(messages=(USER,)), max_tokens=1)).text == "x"


async def test_tools_for_a_model_whose_calls_have_an_unknown_form_are_refused() -> None:
    """Its template takes them, so the model would write calls that nobody reads."""
    template = TOOL_TEMPLATE.replace("tool_call>", "strange_call>")
    async with run("x", chat_template=template) as running, connect(running) as client:
        with pytest.raises(NotSupportedError, match=r"model\.tool_parser") as caught:
            await client.generate(ASKED)
        assert caught.value.field == "chat.tools_json"


async def test_the_parsers_are_the_models_facts() -> None:
    async with run("x") as running, connect(running) as client:
        (model,) = await client.models()
        assert (model.tool_parser, model.reasoning_parser) == ("hermes", "think")


async def test_tools_are_bounded_in_number_and_size() -> None:
    bounds = LimitsSection(max_tools=2, max_prompt_bytes=2000)
    tools = tuple(
        {"type": "function", "function": {"name": f"f{n}", "description": "x" * 800}}
        for n in range(3)
    )
    async with run("x", bounds=bounds) as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="limit is 2") as caught:
            await client.generate(ChatPrompt(messages=(USER,), tools=tools))
        assert caught.value.field == "chat.tools_json"
        long = ({**NOP, "function": {"name": "f", "description": "x" * 3000}},)
        with pytest.raises(BadRequestError, match="bytes") as caught:
            await client.generate(ChatPrompt(messages=(USER,), tools=long))
        assert caught.value.field == "chat.tools_json"


async def test_a_call_cut_by_a_limit_is_not_the_reason_for_the_end() -> None:
    async with run(ANSWER) as running, connect(running) as client:
        whole = await client.generate(ASKED, max_tokens=len(ANSWER) - len("}\n</tool_call>") - 1)
        assert whole.finish_reason is FinishReason.MAX_TOKENS
