"""Takes a chat's output apart: content, reasoning, and calls of tools."""

from jaxserve.text.chat_output.deltas import (
    CallDelta,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)
from jaxserve.text.chat_output.parsers import ChatOutput, Parsers, find_parsers
from jaxserve.text.chat_output.tools import (
    ToolChoice,
    check_tool_calls,
    check_tool_choice,
    check_tools,
)

__all__ = [
    "CallDelta",
    "ChatOutput",
    "ContentDelta",
    "OutputDelta",
    "Parsers",
    "ReasoningDelta",
    "ToolChoice",
    "check_tool_calls",
    "check_tool_choice",
    "check_tools",
    "find_parsers",
]
