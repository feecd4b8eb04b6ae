"""`/v1/chat/completions` in one body: conversations, tools, reasoning, forms, log-probabilities."""

import json
from typing import Any

import pytest

from jaxserve.server.openai.reply_models import ChatReply
from tests.fake_logprobs import expected_logprobs
from tests.fakes import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, say
from tests.server.http.harness import CHAT, HI, error_of, run_app

pytestmark = pytest.mark.asyncio

# Hermes' form of calls, and reasoning between think marks.
TOOL_TEMPLATE = (
    "{# <think> #}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{{ message.tool_call_id or '' }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
ROOMY: dict[str, Any] = {"num_pages": 400, "max_model_tokens": 800, "chat_template": TOOL_TEMPLATE}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def writes(text: str) -> dict[str, Any]:
    """A model that writes this and ends."""
    return {**ROOMY, "script": say({None: [*text.encode(), EOS_ID]})}


async def test_a_chat_key_for_key() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        reply = await running.chat(max_completion_tokens=2)
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 1.7e9
    prompt_tokens = len("user: hi") + 1 + len("assistant: ")
    assert reply == {
        "object": "chat.completion",
        "model": "bytes",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": prompt_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_choices_and_log_probabilities() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        reply = await running.chat(
            n=2, max_tokens=2, logprobs=True, top_logprobs=3, return_token_ids=True
        )
    prompt = reply["prompt_token_ids"]
    assert bytes(id_ for id_ in prompt if id_ < 256) == b"user: hiassistant: "
    entries = expected_logprobs(prompt, b"ab", num_top=3, vocab_size=VOCAB_SIZE)
    for choice in reply["choices"]:
        assert choice["token_ids"] == [*b"ab"]
        content = choice["logprobs"]["content"]
        for found, entry in zip(content, entries, strict=True):
            assert found["token"] == chr(entry.token_id)
            assert found["bytes"] == [entry.token_id]
            assert found["logprob"] == pytest.approx(entry.logprob)
            tops = [(top["bytes"], top["logprob"]) for top in found["top_logprobs"]]
            assert tops == [
                ([id_], pytest.approx(logprob))
                for id_, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ]
    ChatReply.model_validate(reply)


async def test_log_probabilities_without_alternatives() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        reply = await running.chat(max_tokens=2, logprobs=True)
        refused = await running.post(CHAT, {"messages": HI, "top_logprobs": 2})
    content = reply["choices"][0]["logprobs"]["content"]
    assert [found["top_logprobs"] for found in content] == [[], []]
    assert error_of(refused)[2:] == ("top_logprobs", "invalid_field")


@pytest.mark.parametrize("text", [f"Let me see.{CALL}", f"{CALL}{OTHER}", "no call at all"])
async def test_tools_are_called(text: str) -> None:
    async with run_app(**writes(text)) as running:
        reply = await running.chat(tools=TOOLS)
    (choice,) = reply["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert [(call["type"], call["function"]["name"]) for call in calls] == [
        ("function", name) for name in ("add", "stop") if f'"{name}"' in text
    ]
    if calls:
        assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
        assert len({call["id"] for call in calls}) == len(calls)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] in (None, "Let me see.")
    else:
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text
    ChatReply.model_validate(reply)


async def test_without_tools_or_with_none_of_them_a_call_is_text() -> None:
    async with run_app(**writes(CALL)) as running:
        plain = await running.chat()
        none = await running.chat(tools=TOOLS, tool_choice="none")
        assert [len(asked.prompt.tools) for asked in running.asked] == [0, 0]  # type: ignore[union-attr]
    for reply in (plain, none):
        assert reply["choices"][0]["message"]["content"] == CALL
        assert reply["choices"][0]["finish_reason"] == "stop"


async def test_one_call_alone_where_parallel_ones_are_not_wanted() -> None:
    async with run_app(**writes(CALL + OTHER)) as running:
        reply = await running.chat(tools=TOOLS, parallel_tool_calls=False)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add"


async def test_a_call_that_was_cut_has_length() -> None:
    async with run_app(**writes(CALL)) as running:
        reply = await running.chat(tools=TOOLS, max_tokens=len(CALL) - 15)
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_call_can_be_demanded(choice: object) -> None:
    async with run_app(**{**ROOMY, "script": None}) as running:
        reply = await running.chat(tools=TOOLS[:1], tool_choice=choice, max_tokens=500)
    (found,) = reply["choices"]
    if found["finish_reason"] == "tool_calls":  # a model of random tokens may write long numbers
        call = found["message"]["tool_calls"][0]
        assert call["function"]["name"] == "add"
        assert list(json.loads(call["function"]["arguments"])) == ["a"]
    else:
        assert found["finish_reason"] == "length"


async def test_a_conversation_with_calls_and_their_answers_goes_on() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]},
        {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "c1"},
    ]
    async with run_app(**writes("one")) as running:
        reply = await running.chat(messages, tools=TOOLS, return_token_ids=True)
        rendered = bytes(id_ for id_ in reply["prompt_token_ids"] if id_ < 256).decode()
    call_text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert rendered.endswith(f"user: one?assistant: {call_text}tool: 1c1assistant: ")
    assert reply["choices"][0]["message"]["content"] == "one"


async def test_what_an_sdk_has_parsed_may_come_back_with_its_message() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    plain = {"role": "assistant", "content": '{"b": 2}', "tool_calls": [call]}
    parsed_call = call | {"function": function | {"parsed_arguments": {"a": 1}}}
    parsed = plain | {"parsed": {"b": 2}, "tool_calls": [parsed_call]}
    prompts = []
    async with run_app(**writes("one")) as running:
        for message in (plain, parsed):
            messages = [*HI, message, {"role": "tool", "content": "1", "tool_call_id": "c1"}]
            reply = await running.chat(messages, return_token_ids=True)
            prompts.append(reply["prompt_token_ids"])
    assert prompts[0] == prompts[1]


async def test_reasoning_is_apart() -> None:
    async with run_app(**writes("<think>hm</think>yes")) as running:
        reply = await running.chat()
        without = await running.chat(include_reasoning=False)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert "reasoning_content" not in without["choices"][0]["message"]
    assert without["choices"][0]["message"]["content"] == "yes"
    ChatReply.model_validate(reply)


async def test_a_form_of_the_answer_holds() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    async with run_app(script=None, chat_template=CHAT_TEMPLATE, max_model_tokens=300,
                       num_pages=200) as running:  # fmt: skip
        reply = await running.chat(response_format=form, max_tokens=250)
        text = await running.chat(response_format={"type": "text"}, max_tokens=2)
    (choice,) = reply["choices"]
    if choice["finish_reason"] == "stop":  # a model of random tokens may write spaces for ever
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    assert text["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
         "tools[0].function.x"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "a"}},
         "structured_outputs.whitespace_pattern"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "no such"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
         "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
         "messages[0].reasoning_content"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with run_app(**writes("x")) as running:
        response = await running.post(CHAT, {"messages": HI, "max_tokens": 9} | body)
        status, kind, found, _ = error_of(response)
        assert (status, kind, found) == (400, "invalid_request_error", param), response.text
        assert running.num_submitted == 0


async def test_a_model_without_a_template_says_so() -> None:
    async with run_app() as running:
        refused = await running.post(CHAT, {"messages": HI})
    assert error_of(refused) == (400, "invalid_request_error", "messages", "no_chat_template")
