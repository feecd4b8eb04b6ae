"""A body ready for one engine: a chat's tools and their choice as its model takes them, and its
output as that writes it."""

import dataclasses
from collections.abc import Collection

from jaxserve.engine import Engine
from jaxserve.request import ChatPrompt
from jaxserve.server.chat_plan import ChatChoices, plan_chat
from jaxserve.server.openai.requests import Asked, read_request
from jaxserve.text.chat_output import check_tools


def read_asked(url: str, body: object, *, engine: Engine, names: Collection[str] = ()) -> Asked:
    """Returns what a body asks of an endpoint, to be submitted to this engine.

    Args are those of `read_request`.

    Raises:
      RequestError: as `read_request`; or the model's calls of tools cannot be read or demanded.
    """
    asked = read_request(url, body, model=engine.model, names=names)
    if not asked.is_chat:
        return asked
    (request,) = asked.requests
    assert isinstance(request.prompt, ChatPrompt), "a chat"
    check_tools(request.prompt.tools, max_tools=engine.config.limits.max_tools)
    plan = plan_chat(request, request.prompt, asked.tool_choice, output="parsed", engine=engine)
    return dataclasses.replace(asked, requests=(plan.request,), chat=plan)


def open_chat(asked: Asked, engine: Engine, prompt_ids: tuple[int, ...]) -> ChatChoices | None:
    """Returns the reader of a chat's output; None where there is none, or nothing to be read.

    Args:
      prompt_ids: of the rendered prompt.
    """
    return None if asked.chat is None else asked.chat.open(prompt_ids, engine)
