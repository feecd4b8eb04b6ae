"""The tools of a chat body, and whether one of them must be called."""

from collections.abc import Mapping

from jaxserve.server.openai.bodies import ChatBody
from jaxserve.server.openai.parts import NamedChoice
from jaxserve.text.chat_output import ToolChoice, check_tool_choice


def read_tools(body: ChatBody) -> tuple[tuple[Mapping[str, object], ...], ToolChoice]:
    """Returns the tools that the model is told of, in OpenAI's shape, and how free it is.

    Raises:
      InvalidRequestError: a choice that no tool answers.
    """
    tools = tuple(tool.model_dump(exclude_unset=True) for tool in body.tools)
    choice = check_tool_choice(_read_choice(body), tools)
    return () if choice.mode == "none" else tools, choice


def _read_choice(body: ChatBody) -> ToolChoice:
    match body.tool_choice:
        case NamedChoice(function=function):
            return ToolChoice(mode="required", function=function.name)
        case "none" | "auto" | "required" as mode if body.tools or mode == "required":
            return ToolChoice(mode=mode)
    return ToolChoice(mode="auto" if body.tools else "none")
