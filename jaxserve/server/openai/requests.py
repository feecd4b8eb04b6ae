"""An OpenAI body as requests for the engine."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from jaxserve.engine import ServedModel
from jaxserve.engine.limits import merge_sampling
from jaxserve.errors import InvalidRequestError, ModelNotFoundError
from jaxserve.request import ChatMessage, ChatPrompt, GenerationRequest, SamplingParams
from jaxserve.server.openai.bodies import ENDPOINTS, ChatBody, CompletionBody, read_body
from jaxserve.server.openai.fields import shorten

DEFAULT_COMPLETION_TOKENS: Final = 16


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    """What a body asks for, and what its reply must know.

    Attributes:
      requests: one for each prompt, in their order; at least one.
    """

    is_chat: bool
    requests: tuple[GenerationRequest, ...]
    return_token_ids: bool


def read_request(
    url: str, body: object, *, model: ServedModel, names: Collection[str] = ()
) -> Asked:
    """Returns what a body asks of an endpoint, all fields read.

    Args:
      url: a key of `ENDPOINTS`.
      body: a parsed JSON document.
      names: that the model is known by, besides its own.

    Raises:
      InvalidRequestError: names the field.
      UnsupportedError: names the field.
      ModelNotFoundError: the body asks for another model.
    """
    read = read_body(ENDPOINTS[url], body)
    if read.model is not None and read.model not in {model.name, *names}:
        raise ModelNotFoundError(
            f"model {shorten(read.model)!r} is not served here; use {model.name!r} or leave it out",
            field="model",
        )
    sampling = _read_sampling(read, model)
    match read:
        case ChatBody():
            prompts: tuple[str | tuple[int, ...] | ChatPrompt, ...] = (_read_chat(read),)
        case CompletionBody():
            prompts = read.prompt
    return Asked(
        is_chat=isinstance(read, ChatBody),
        requests=tuple(
            GenerationRequest(prompt=prompt, sampling=sampling, priority=read.priority)
            for prompt in prompts
        ),
        return_token_ids=read.return_token_ids,
    )


def _read_chat(body: ChatBody) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(
            ChatMessage(
                role="system" if message.role == "developer" else message.role,
                content=message.text,
                name=message.name,
            )
            for message in body.messages
        ),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs or {},
    )


def _read_sampling(body: ChatBody | CompletionBody, model: ServedModel) -> SamplingParams:
    same = (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "seed", "min_tokens", "ignore_eos", "skip_special_tokens",
    )  # fmt: skip
    overrides: dict[str, object] = {name: getattr(body, name) for name in same}
    overrides |= {
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "logit_bias": None if body.logit_bias is None else _read_bias(body.logit_bias),
        "max_tokens": _read_max_tokens(body),
        "stop_strings": None if body.stop is None else tuple(body.stop),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "include_stop_text": body.include_stop_str_in_output,
    }
    return merge_sampling(overrides, model.sampling_defaults)


def _read_max_tokens(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise InvalidRequestError(
            f"max_tokens is {older} and max_completion_tokens {newer}, but they mean the same; "
            "send one of them",
            field="max_completion_tokens",
        )
    return older if newer is None else newer


def _read_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Returns the biases by token id; JSON has only strings for keys."""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias has the key {shorten(key)!r}, but keys must be token ids, such as "
                '"50256"',
                field="logit_bias",
            )
        by_id[int(key)] = value
    return by_id
