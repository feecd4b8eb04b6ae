"""An OpenAI body as requests for the engine."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from jaxserve.engine import ServedModel
from jaxserve.engine.limits import merge_sampling
from jaxserve.errors import InvalidRequestError, ModelNotFoundError, UnsupportedError
from jaxserve.request import ChatPrompt, GenerationRequest, SamplingParams, StructuredOutput
from jaxserve.server.chat_plan import ChatPlan
from jaxserve.server.openai.bodies import ENDPOINTS, ChatBody, CompletionBody, read_body
from jaxserve.server.openai.fields import shorten
from jaxserve.server.openai.forms import GUIDED, read_form
from jaxserve.server.openai.messages import read_messages
from jaxserve.server.openai.parts import StreamOptions
from jaxserve.server.openai.tools import read_tools
from jaxserve.text.chat_output import ToolChoice

DEFAULT_COMPLETION_TOKENS: Final = 16
_NO_TOOLS: Final = ToolChoice(mode="none")
_SAME: Final = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "min_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    """What a body asks for, and what its reply must know.

    Attributes:
      requests: one for each prompt, in their order; at least one.
      num_choices: of each request.
      logprobs: alternatives to report with each token; None reports no log-probability.
      prompt_logprobs: likewise for the prompt's tokens, in vLLM's form.
      echo: each choice's text begins with its prompt.
      has_output: False where only the prompt is wanted.
      tokens_as_ids: log-probabilities name tokens by their ids.
      stream: None where the reply is one body.
      stream_interval: output tokens to gather before a chunk is sent.
      timeout_s: from arrival; None is none.
      tool_choice: of a chat.
      chat: how it is put to the engine and read; None before there is one, and where it is none.
      keeps_reasoning: whether what the model thought is part of the reply.
      max_calls: tool calls of a choice that are part of the reply; None is all.
    """

    is_chat: bool
    requests: tuple[GenerationRequest, ...]
    num_choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    has_output: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    stream: StreamOptions | None = None
    stream_interval: int = 1
    timeout_s: float | None = None
    tool_choice: ToolChoice = _NO_TOOLS
    chat: ChatPlan | None = None
    keeps_reasoning: bool = True
    max_calls: int | None = None


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
    check_model(read.model, model, names)
    asked = _read_chat(read, model) if isinstance(read, ChatBody) else _read_completion(read, model)
    if read.stream_options is not None and not read.stream:
        raise _refusal(
            "stream_options is for streams; set stream, or leave it out", "stream_options"
        )
    if read.stream_interval is not None and not read.stream:
        raise _refusal(
            "stream_interval is for streams; set stream, or leave it out", "stream_interval"
        )
    if read.prompt_logprobs is not None and read.stream:
        raise UnsupportedError(
            "prompt_logprobs is not supported in a stream; leave one of them out",
            field="prompt_logprobs",
        )
    return dataclasses.replace(
        asked,
        num_choices=1 if read.n is None else read.n,
        prompt_logprobs=read.prompt_logprobs,
        return_token_ids=read.return_token_ids,
        tokens_as_ids=read.return_tokens_as_token_ids,
        stream=(read.stream_options or StreamOptions()) if read.stream else None,
        stream_interval=read.stream_interval or 1,
        timeout_s=read.timeout,
    )


def check_model(name: str | None, model: ServedModel, names: Collection[str] = ()) -> None:
    """Raises ModelNotFoundError unless the name is one of the served model's, or is left out."""
    if name is not None and name not in {model.name, *names}:
        raise ModelNotFoundError(
            f"model {shorten(name)!r} is not served here; use {model.name!r} or leave it out",
            field="model",
        )


def _read_completion(body: CompletionBody, model: ServedModel) -> Asked:
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo and (body.logprobs is not None or max_tokens == 0):
        # a prompt of which nothing is written must be asked for something
        prompt_logprobs = max(body.logprobs or 0, prompt_logprobs or 0)
    sampling = _read_sampling(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    form = _read_form(body)
    return Asked(
        is_chat=False,
        requests=tuple(_build_request(body, prompt, sampling, form) for prompt in body.prompt),
        logprobs=body.logprobs,
        echo=body.echo,
        has_output=max_tokens != 0,
    )


def _read_chat(body: ChatBody, model: ServedModel) -> Asked:
    tools, choice = read_tools(body)
    prompt = ChatPrompt(
        messages=read_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs or {},
        tools=tools,
    )
    logprobs = _read_chat_logprobs(body)
    sampling = _read_sampling(
        body,
        model,
        max_tokens=_read_max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    return Asked(
        is_chat=True,
        requests=(_build_request(body, prompt, sampling, _read_form(body)),),
        logprobs=logprobs,
        tool_choice=choice,
        keeps_reasoning=body.include_reasoning,
        max_calls=None if body.parallel_tool_calls else 1,
    )


def _build_request(
    body: ChatBody | CompletionBody,
    prompt: str | tuple[int, ...] | ChatPrompt,
    sampling: SamplingParams,
    form: StructuredOutput | None,
) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        sampling=sampling,
        structured_output=form,
        priority=body.priority,
        queue_timeout_s=body.queue_timeout,
        cache_salt=body.cache_salt or "",
    )


def _read_chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise _refusal(
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true; set it, or leave "
            "top_logprobs out",
            "top_logprobs",
        )
    return (body.top_logprobs or 0) if body.logprobs else None


def _read_form(body: ChatBody | CompletionBody) -> StructuredOutput | None:
    guided = {name: getattr(body, name) for name in GUIDED if getattr(body, name) is not None}
    return read_form(body.response_format, body.structured_outputs, guided)


def _read_sampling(
    body: ChatBody | CompletionBody,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    overrides: dict[str, object] = {name: getattr(body, name) for name in _SAME}
    overrides |= {
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "logit_bias": None if body.logit_bias is None else _read_bias(body.logit_bias),
        "max_tokens": max_tokens,
        "stop_strings": _as_tuple(body.stop),
        "stop_token_ids": _as_tuple(body.stop_token_ids),
        "include_stop_text": body.include_stop_str_in_output,
        "num_choices": body.n,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "bad_words": _as_tuple(body.bad_words),
        "allowed_token_ids": _as_tuple(body.allowed_token_ids),
    }
    return merge_sampling(overrides, model.sampling_defaults)


def _as_tuple[T](values: list[T] | None) -> tuple[T, ...] | None:
    return None if values is None else tuple(values)


def _read_max_tokens(body: ChatBody) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise _refusal(
            f"max_tokens is {older} and max_completion_tokens {newer}, but they mean the same; "
            "send one of them",
            "max_completion_tokens",
        )
    return older if newer is None else newer


def _read_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Returns the biases by token id; JSON has only strings for keys."""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise _refusal(
                f"logit_bias has the key {shorten(key)!r}, but keys must be token ids, such as "
                '"50256"',
                "logit_bias",
            )
        token_id = int(key)
        if token_id in by_id:
            raise _refusal(
                f"logit_bias has the token id {token_id} twice; send it once", "logit_bias"
            )
        by_id[token_id] = value
    return by_id


def _refusal(message: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=field)
