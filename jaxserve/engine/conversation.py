"""Checks of a conversation before it is rendered: sizes and kinds, with the fix."""

import json
from collections.abc import Mapping

from jaxserve.config import LimitsSection
from jaxserve.engine.fields import check_count, check_text, refusal
from jaxserve.errors import InvalidRequestError, NoChatTemplateError
from jaxserve.request import ChatPrompt
from jaxserve.text.tokenizer import Tokenizer


def check_conversation(prompt: ChatPrompt, tokenizer: Tokenizer, limits: LimitsSection) -> None:
    """Refuses what is too large or no conversation; all of it counts as one prompt.

    Raises:
      InvalidRequestError: names the field.
      NoChatTemplateError: the model has no chat template.
    """
    if tokenizer.chat_template is None:
        raise NoChatTemplateError(
            "this model has no chat template; send the prompt as text or token ids", field="chat"
        )
    check_count(prompt.messages, "chat.messages", limits.max_chat_messages)
    check_count(prompt.tools, "chat.tools", limits.max_tools)
    num_left = limits.max_prompt_bytes
    for tool in prompt.tools:
        num_left -= _check_json(tool, "chat.tools", num_left)
    for message in prompt.messages:
        for text in (
            message.role,
            message.name,
            message.content,
            message.tool_call_id,
            message.reasoning,
        ):
            num_left -= check_text(text, "chat.messages", num_left)
        check_count(message.tool_calls, "chat.messages", limits.max_tools)
        for call in message.tool_calls:
            num_left -= _check_json(call, "chat.messages", num_left)


def _check_json(value: object, field: str, limit: int) -> int:
    """Returns the bytes of an object as JSON."""
    if not isinstance(value, Mapping):
        raise refusal(value, field, "a list of JSON objects in OpenAI's shape")
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{field.rpartition('.')[2]} holds what is no JSON ({error}), but must hold JSON "
            "objects in OpenAI's shape; repair it",
            field=field,
        ) from None
    return check_text(text, field, limit)
