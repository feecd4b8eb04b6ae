"""Agents of pydantic-ai: `scripts/judges/pydantic_agent`. Runs under its own interpreter."""

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Literal

import pydantic
from openai import AsyncOpenAI
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    ModelSettings,
    NativeOutput,
    PromptedOutput,
    RunContext,
    ToolOutput,
)
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from scripts.judges.checks import Checks

ASKED = "Name a city to visit in spring."


class Trip(pydantic.BaseModel):
    """A trip to a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


class Anything(pydantic.BaseModel, extra="allow"):
    """What a small model writes when it may write any object."""


def build_model(url: str, key: str) -> OpenAIChatModel:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    return OpenAIChatModel(os.environ["MODEL"], provider=OpenAIProvider(openai_client=client))


async def judge(url: str, checks: Checks) -> None:
    model = build_model(url, os.environ["KEY"])
    settings = ModelSettings(temperature=0.0, max_tokens=40)
    plain = Agent(model, instructions="Answer briefly.", model_settings=settings)
    whole = await plain.run(ASKED)
    checks.holds("run: a text", whole.output, whole.output)
    usage = whole.usage
    checks.holds("run: usage", usage.input_tokens > 0 < usage.output_tokens <= 40, usage)
    last = whole.all_messages()[-1]
    assert isinstance(last, ModelResponse)
    checks.holds(
        "run: the reply's id, model, time, reason",
        last.provider_response_id and last.model_name and last.finish_reason,
        (last.provider_response_id, last.model_name, last.timestamp, last.finish_reason),
    )
    more = await plain.run("Why?", message_history=whole.all_messages())
    checks.holds("run: with a history", more.usage.input_tokens > usage.input_tokens, more.output)
    async with plain.run_stream(ASKED) as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        checks.same("run_stream: the text of the whole", "".join(pieces), whole.output)
        checks.same(
            "run_stream: the usage of the whole", streamed.usage.output_tokens, usage.output_tokens
        )
    roomy = ModelSettings(temperature=0.0, max_tokens=150)
    for output in (NativeOutput(Trip), ToolOutput(Trip)):
        name = type(output).__name__
        agent = Agent(model, output_type=output, model_settings=roomy, retries=0)
        result = await agent.run(ASKED)
        checks.holds(f"{name}: an object", type(result.output) is Trip, result.output)
        async with agent.run_stream(ASKED) as streamed_trip:
            checks.same(
                f"{name}: the same, streamed", await streamed_trip.get_output(), result.output
            )
    await judge_prompted(model, checks)
    await judge_tool(model, checks)
    wrong = Agent(build_model(url, "jsk_no"))
    limited = Agent(build_model(url, os.environ["LIMITED_KEY"]), model_settings=settings)
    await limited.run(ASKED)
    for status, agent in ((401, wrong), (429, limited)):
        try:
            await agent.run(ASKED)
        except ModelHTTPError as error:
            checks.same(f"a status is a ModelHTTPError: {status}", error.status_code, status)
        else:
            checks.holds(f"a status is a ModelHTTPError: {status}", False, "no error")


async def judge_prompted(model: OpenAIChatModel, checks: Checks) -> None:
    """The schema is in the prompt alone, and the request asks for `json_object`."""
    settings = ModelSettings(temperature=0.0, max_tokens=400)
    output = PromptedOutput(Anything)
    agent = Agent(model, output_type=output, retries=0, model_settings=settings)
    result = await agent.run(ASKED)
    checks.holds("PromptedOutput: a JSON object", type(result.output) is Anything, result.output)


class CallFirst(AbstractCapability[None]):  # type: ignore[misc]  # no types without the package
    """Demands a call in the first step and none later: a small model decides neither by itself."""

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        return lambda context: ModelSettings(
            tool_choice=["find_price"] if context.run_step == 1 else "none"
        )


async def judge_tool(model: OpenAIChatModel, checks: Checks) -> None:
    asked: list[Trip] = []
    settings = ModelSettings(temperature=0.0, max_tokens=60)
    agent = Agent(model, model_settings=settings, capabilities=[CallFirst()])

    @agent.tool_plain  # type: ignore[untyped-decorator]  # likewise
    def find_price(trip: Trip) -> str:
        """Returns what a trip costs."""
        asked.append(trip)
        return "120 euros"

    result = await agent.run(ASKED)
    checks.same("a tool is called once", len(asked), 1)
    checks.holds("its arguments are of the schema", type(asked[0]) is Trip, asked)
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    wanted = ["user-prompt", "tool-call", "tool-return", "text"]
    checks.same("the call, its result and an answer", kinds, wanted)
    streamed_to: list[Trip] = []
    async with agent.run_stream(ASKED) as streamed:
        streamed_to = asked[1:]
        checks.same(
            "run_stream: the answer of the whole", await streamed.get_output(), result.output
        )
    checks.same("run_stream: the call", streamed_to, asked[:1])


def main() -> int:
    checks = Checks(f"pydantic-ai {importlib.metadata.version('pydantic-ai-slim')}")
    checks.part(lambda url: asyncio.run(judge(url, checks)), sys.argv[1])
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
