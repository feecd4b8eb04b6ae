"""What the `openai` package does beyond plain answers: forms, tools, errors, timeouts, cancels.

LIMITED_KEY is of a tenant with a request a minute and no priority.
"""

import asyncio
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
from openai.types.chat import ChatCompletion

from scripts.judges.openai_sdk_client import CHAT, GREEDY, IMMEDIATE_S, PROMPT, Judge


class Weather(pydantic.BaseModel):
    """Arguments of a function, and a form of an answer."""

    city: Literal["Paris", "Rome", "Oslo"]
    unit: Literal["celsius", "kelvin"]
    days: int = pydantic.Field(ge=1, le=9)


def judge_forms(judge: Judge) -> None:
    checks, chat = judge.checks, judge.client.chat.completions
    parsed = chat.parse(
        model=judge.model, messages=CHAT, response_format=Weather, max_tokens=80, temperature=0
    )
    checks.holds(
        "parse: a pydantic model",
        type(parsed.choices[0].message.parsed) is Weather,
        parsed.choices[0].message.parsed,
    )
    with chat.stream(
        model=judge.model, messages=CHAT, response_format=Weather, max_tokens=80, temperature=0
    ) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    checks.same(
        "stream: the same pydantic model",
        final.choices[0].message.parsed,
        parsed.choices[0].message.parsed,
    )
    reply = judge.chat(response_format={"type": "json_object"}, max_tokens=400)
    choice = reply.choices[0]
    fits = choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    checks.holds(
        "json_object",
        choice.message.content.lstrip().startswith("{") and fits,
        choice.message.content,
    )

    def cut() -> object:
        return chat.parse(model=judge.model, messages=CHAT, response_format=Weather, max_tokens=3)

    checks.raises("parse of what max_tokens cut", openai.LengthFinishReasonError, cut)
    picked = judge.chat(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0]
    checks.holds(
        "structured_outputs through extra_body",
        picked.message.content in ("yes", "no"),
        picked.message.content,
    )


def judge_tools(judge: Judge) -> None:
    checks, chat = judge.checks, judge.client.chat.completions
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked: dict[str, Any] = {"tools": [tool], "max_tokens": 120}
    replies: list[ChatCompletion] = []
    for name, tool_choice in (("required", "required"), ("named", named)):
        parsed = chat.parse(
            model=judge.model, messages=CHAT, temperature=0, tool_choice=tool_choice, **asked
        )
        call = parsed.choices[0].message.tool_calls[0]
        checks.holds(
            f"tool_choice {name}: parsed arguments",
            type(call.function.parsed_arguments) is Weather and call.id,
            call.function,
        )
        checks.same(
            f"tool_choice {name}: finish_reason", parsed.choices[0].finish_reason, "tool_calls"
        )
        replies.append(parsed)
    none = judge.chat(tool_choice="none", **asked).choices[0].message
    checks.same("tool_choice none", none.tool_calls, None)
    with chat.stream(
        model=judge.model, messages=CHAT, temperature=0, tool_choice="required", **asked
    ) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    call = replies[0].choices[0].message.tool_calls[0]
    checks.same(
        "stream: the call of the whole",
        final.choices[0].message.tool_calls[0].function,
        call.function,
    )
    checks.same(
        "stream: arguments.done", [event.arguments for event in events], [call.function.arguments]
    )
    answered = judge.chat(
        [
            *CHAT,
            replies[0].choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"},
        ],
        tools=[tool],
    )
    checks.holds(
        "a call and its answer go back in",
        answered.choices[0].message.content,
        answered.choices[0].message.content,
    )


def judge_errors(judge: Judge) -> None:
    checks, client = judge.checks, judge.client

    def chat(at: openai.OpenAI = client, **more: Any) -> Any:  # noqa: ANN401
        return at.chat.completions.create(
            **{"model": judge.model, "messages": CHAT, **GREEDY, **more}
        )

    limited = client.with_options(api_key=os.environ["LIMITED_KEY"])
    patient = client.with_options(max_retries=2)
    for name, kind, call, code in (
        (
            "400: out of range",
            openai.BadRequestError,
            lambda: chat(temperature=-1),
            "invalid_field",
        ),
        (
            "400: unknown field",
            openai.BadRequestError,
            lambda: chat(extra_body={"temprature": 1}),
            "invalid_field",
        ),
        (
            "400: not supported",
            openai.BadRequestError,
            lambda: chat(extra_body={"audio": {}}),
            "unsupported",
        ),
        (
            "400: too long",
            openai.BadRequestError,
            lambda: chat(max_tokens=10**6),
            "context_length_exceeded",
        ),
        (
            "400: a schema",
            openai.BadRequestError,
            lambda: chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "strange"}},
                }
            ),
            "bad_grammar",
        ),
        (
            "401: another key",
            openai.AuthenticationError,
            lambda: chat(client.with_options(api_key="jsk_no")),
            "unauthenticated",
        ),
        (
            "403: priority",
            openai.PermissionDeniedError,
            lambda: chat(limited, extra_body={"priority": 5}),
            "permission_denied",
        ),
        (
            "404: another model",
            openai.NotFoundError,
            lambda: chat(model="gpt-4"),
            "model_not_found",
        ),
        (
            "504: timeout, with a retry",
            openai.InternalServerError,
            lambda: chat(patient, extra_body={"timeout": 1e-3}),
            "deadline",
        ),
    ):
        error = checks.raises(name, kind, call)
        if error is not None:
            checks.same(f"{name}: code", error.code, code)
    chat(limited)
    error = checks.raises("429: a quota", openai.RateLimitError, lambda: chat(limited))
    if error is not None:
        waits = {
            name: error.response.headers.get(name) for name in ("retry-after", "retry-after-ms")
        }
        checks.holds("429: Retry-After", 0 < float(waits["retry-after"] or 0) <= 60, waits)
    checks.raises(
        "a stream of one refused", openai.RateLimitError, lambda: chat(limited, stream=True)
    )


def judge_ends(judge: Judge) -> None:
    checks, client = judge.checks, judge.client
    long: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    hasty = client.with_options(timeout=1.0)

    def ask_hastily() -> object:
        return hasty.completions.create(model=judge.model, prompt=PROMPT, **long)

    checks.raises("the client's own timeout", openai.APITimeoutError, ask_hastily)
    idle_s = judge.wait_idle()
    checks.holds("… ends it in the server", idle_s < IMMEDIATE_S, f"{idle_s:.2f} s")
    asks: dict[str, Callable[..., Any]] = {
        "chat": judge.chat,
        "completions": functools.partial(judge.complete, PROMPT),
    }
    for name, ask in asks.items():
        stream = ask(stream=True, extra_headers={"x-request-id": "cancelled"}, **long)
        for _ in range(4):
            next(iter(stream))
        again = functools.partial(ask, extra_headers={"x-request-id": "cancelled"})
        error = checks.raises(f"{name}: its id is taken meanwhile", openai.ConflictError, again)
        checks.same(f"{name}: code", error and error.code, "duplicate_request_id")
        stream.close()
        idle_s = judge.wait_idle()
        checks.holds(
            f"{name}: a closed stream ends in the server", idle_s < IMMEDIATE_S, f"{idle_s:.2f} s"
        )
        checks.same(f"{name}: its id is free again", again()._request_id, "cancelled")

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{judge.url}/v1", api_key=os.environ["KEY"]) as aio:
            asks = [
                aio.completions.create(model=judge.model, prompt=PROMPT, **GREEDY) for _ in range(6)
            ]
            return [reply.choices[0].text for reply in await asyncio.gather(*asks)]

    checks.same(
        "AsyncOpenAI: six at once",
        {*asyncio.run(together())},
        {judge.complete(PROMPT).choices[0].text},
    )
