"""Results as OpenAI reply bodies."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from jaxserve.engine import Completion
from jaxserve.request import FinishReason
from jaxserve.server.openai.requests import Asked

# Clients know only these words. What was cut short by a deadline or by the operator is "length".
FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.CANCELLED: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}


def build_reply(
    asked: Asked, completions: Sequence[Completion], *, model_name: str, created_s: float
) -> dict[str, object]:
    """Returns the body: one choice for each prompt, in their order.

    Args:
      created_s: Unix time.
    """
    prefix, kind = ("chatcmpl", "chat.completion") if asked.is_chat else ("cmpl", "text_completion")
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(created_s),
        "model": model_name,
        "choices": [
            _build_choice(asked, index, completion) for index, completion in enumerate(completions)
        ],
        "usage": build_usage(completions),
    }


def build_usage(completions: Sequence[Completion]) -> dict[str, object]:
    """Returns the sums over all choices."""
    prompt = sum(completion.usage.prompt_tokens for completion in completions)
    output = sum(completion.usage.completion_tokens for completion in completions)
    cached = sum(completion.usage.cached_prompt_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _build_choice(asked: Asked, index: int, completion: Completion) -> dict[str, object]:
    content: dict[str, object] = {"text": completion.text}
    if asked.is_chat:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        content = {"message": message}
    choice = {
        "index": index,
        **content,
        "logprobs": None,
        "finish_reason": FINISH_REASONS[completion.finish_reason],
    }
    if asked.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice
