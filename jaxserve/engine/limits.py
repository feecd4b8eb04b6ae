"""The door: turns what a caller asks into a resolved `Request`, or refuses it with the fix."""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from jaxserve.config import LimitsSection
from jaxserve.engine.fields import (
    check_count,
    check_flag,
    check_integer,
    check_number,
    check_text,
    check_token_id,
    refusal,
)
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import ContextLengthError, InvalidRequestError, NoChatTemplateError
from jaxserve.request import (
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    Request,
    SamplingParams,
)
from jaxserve.text.tokenizer import Tokenizer

MAX_TEMPERATURE: Final = 1e6
MAX_BIAS: Final = 1e20  # stays finite in float32 after the smallest temperature and penalty
REPETITION_RANGE: Final = (1e-6, 1e6)  # likewise
INT32: Final = (-(1 << 31), (1 << 31) - 1)
MAX_SEED: Final = (1 << 64) - 1


def merge_sampling(
    overrides: Mapping[str, object], defaults: Mapping[str, object]
) -> SamplingParams:
    """Returns the parameters: what is set (not None), then the model's defaults, then ours."""
    chosen = {key: value for key, value in overrides.items() if value is not None}
    return SamplingParams(**{**defaults, **chosen})  # type: ignore[arg-type]  # `resolve` checks


def resolve(
    asked: GenerationRequest,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    limits: LimitsSection,
    now_s: float,
) -> Request:
    """Returns the request with everything decided: ids, seed, limits, ends.

    Raises:
      InvalidRequestError: a value is not allowed; names field, value, what is allowed, the fix.
      ContextLengthError: prompt and output do not fit the context.
      NoChatTemplateError: a conversation for a model without a template.
    """
    request_id = _check_id(asked.id, limits)
    longest = model.max_model_tokens
    sampling = check_sampling(asked.sampling, model=model, limits=limits)
    prompt = tokenize(asked.prompt, model=model, tokenizer=tokenizer, limits=limits)
    rest = longest - len(prompt)
    if rest < 1:
        raise ContextLengthError(
            f"the prompt is {len(prompt)} tokens, but with at least one token of output this "
            f"model's limit is {longest}; shorten it to {longest - 1}",
            field=prompt_field(asked.prompt),
        )
    max_tokens = rest if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > rest:
        raise ContextLengthError(
            f"max_tokens is {max_tokens}, but after a prompt of {len(prompt)} tokens this model's "
            f"limit of {longest} leaves {rest}; lower it, or leave it unset for all",
            field="stop.max_tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}, but at most {max_tokens} tokens may come; "
            "lower it or raise max_tokens",
            field="stop.min_tokens",
        )
    stop_ids = dict.fromkeys(sampling.stop_token_ids, FinishReason.STOP)
    if not sampling.ignore_eos:
        stop_ids |= dict.fromkeys(sorted(model.eos_ids), FinishReason.EOS)
    return Request(
        id=request_id,
        tenant=asked.tenant,
        prompt=prompt,
        sampling=sampling,
        seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
        max_tokens=max_tokens,
        ends_by_context=sampling.max_tokens is None,
        stop_ids=stop_ids,
        arrival_s=now_s,
        priority=check_integer(asked.priority, "priority", low=INT32[0], high=INT32[1]),
        deadline_s=None if asked.deadline_s is None else _deadline(asked.deadline_s),
        queue_deadline_s=now_s + _queue_timeout(asked.queue_timeout_s, limits),
    )


def tokenize(
    prompt: str | Sequence[int] | ChatPrompt,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    limits: LimitsSection,
) -> tuple[int, ...]:
    """Returns the prompt's token ids, at least one, all of this model's vocabulary.

    Raises:
      InvalidRequestError: empty, too long, not text, an id outside the vocabulary.
      NoChatTemplateError: a conversation for a model without a template.
    """
    field = prompt_field(prompt)
    match prompt:
        case str():
            check_text(prompt, field, limits.max_prompt_bytes)
            token_ids = tuple(tokenizer.encode(prompt))
        case ChatPrompt():
            _check_chat(prompt, tokenizer, limits)
            token_ids = tuple(tokenizer.encode_chat(prompt))
        case _:
            token_ids = _check_token_ids(prompt, model)
    if not token_ids:
        raise InvalidRequestError("the prompt is empty, but needs at least one token", field=field)
    if max(token_ids) >= model.vocab_size:  # the tokenizer knows more ids than the model
        raise InvalidRequestError(
            f"the prompt holds token {max(token_ids)}, but this model's ids end at "
            f"{model.vocab_size - 1}; leave that special token out",
            field=field,
        )
    return token_ids


def prompt_field(prompt: str | Sequence[int] | ChatPrompt) -> str:
    """Returns the proto's name for this kind of prompt."""
    match prompt:
        case str():
            return "text"
        case ChatPrompt():
            return "chat"
        case _:
            return "token_ids"


def check_sampling(
    asked: SamplingParams, *, model: ServedModel, limits: LimitsSection
) -> SamplingParams:
    """Returns the parameters with every value checked and in its own type.

    Raises:
      InvalidRequestError: names the field at fault.
    """
    low_repetition, high_repetition = REPETITION_RANGE
    top_k = check_integer(asked.top_k, "sampling.top_k", low=0, high=MAX_SEED, hint="0 is off")
    return dataclasses.replace(
        asked,
        temperature=check_number(
            asked.temperature, "sampling.temperature", high=MAX_TEMPERATURE, hint="0 is greedy"
        ),
        top_k=0 if top_k >= model.vocab_size else top_k,
        top_p=check_number(asked.top_p, "sampling.top_p", above=0.0, high=1.0, hint="1 is off"),
        min_p=check_number(asked.min_p, "sampling.min_p", high=1.0, hint="0 is off"),
        presence_penalty=_penalty(asked.presence_penalty, "sampling.presence_penalty"),
        frequency_penalty=_penalty(asked.frequency_penalty, "sampling.frequency_penalty"),
        repetition_penalty=check_number(
            asked.repetition_penalty,
            "sampling.repetition_penalty",
            low=low_repetition,
            high=high_repetition,
            hint="1 is off",
        ),
        seed=None
        if asked.seed is None
        else check_integer(asked.seed, "sampling.seed", low=0, high=MAX_SEED),
        logit_bias=_bias(asked.logit_bias, model, limits),
        max_tokens=None
        if asked.max_tokens is None
        else check_integer(asked.max_tokens, "stop.max_tokens", low=1, high=INT32[1]),
        min_tokens=check_integer(asked.min_tokens, "stop.min_tokens", low=0, high=INT32[1]),
        stop_strings=_stop_strings(asked.stop_strings, limits),
        stop_token_ids=_stop_token_ids(asked.stop_token_ids, model, limits),
        ignore_eos=check_flag(asked.ignore_eos, "stop.ignore_eos"),
        include_stop_text=check_flag(asked.include_stop_text, "stop.include_stop_text"),
        skip_special_tokens=check_flag(asked.skip_special_tokens, "output.skip_special_tokens"),
    )


def _check_id(request_id: str, limits: LimitsSection) -> str:
    check_text(request_id, "request_id", limits.max_request_id_bytes)
    return request_id or f"req-{secrets.token_hex(12)}"


def _check_chat(prompt: ChatPrompt, tokenizer: Tokenizer, limits: LimitsSection) -> None:
    if tokenizer.chat_template is None:
        raise NoChatTemplateError(
            "this model has no chat template; send the prompt as text or token ids", field="chat"
        )
    check_count(prompt.messages, "chat.messages", limits.max_chat_messages)
    num_left = limits.max_prompt_bytes
    for message in prompt.messages:
        for text in (message.role, message.name, message.content):
            num_left -= check_text(text, "chat.messages", num_left)


def _check_token_ids(prompt: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    field = "token_ids"
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise refusal(prompt, "prompt", "text, token ids or a conversation")
    if len(prompt) > model.max_model_tokens:  # before each id is looked at
        raise ContextLengthError(
            f"the prompt is {len(prompt)} tokens, but this model's limit is "
            f"{model.max_model_tokens}; shorten it",
            field=field,
        )
    return tuple(
        check_token_id(token_id, field, what="a prompt token id", vocab_size=model.vocab_size)
        for token_id in prompt
    )


def _bias(
    bias: Mapping[int, float], model: ServedModel, limits: LimitsSection
) -> Mapping[int, float]:
    field = "sampling.logit_bias"
    if not isinstance(bias, Mapping):
        raise refusal(bias, field, "a mapping of token ids to numbers, empty for none")
    check_count(bias, field, limits.max_logit_bias)
    return {
        check_token_id(
            token_id, field, what="a logit_bias id", vocab_size=model.vocab_size
        ): check_number(value, field, low=-MAX_BIAS, high=MAX_BIAS)
        for token_id, value in bias.items()
    }


def _stop_strings(stops: Sequence[str], limits: LimitsSection) -> tuple[str, ...]:
    field = "stop.stop_strings"
    if isinstance(stops, str):  # its letters would each be a stop
        raise InvalidRequestError(
            "stop_strings is one string, but must be a list of them; put it in a list", field=field
        )
    check_count(stops, field, limits.max_stop_strings)
    for stop in stops:
        if not check_text(stop, field, limits.max_stop_string_bytes):
            raise InvalidRequestError(
                "stop_strings holds an empty string, which would match at once; leave it out",
                field=field,
            )
    return tuple(stops)


def _stop_token_ids(
    token_ids: Sequence[int], model: ServedModel, limits: LimitsSection
) -> tuple[int, ...]:
    field = "stop.stop_token_ids"
    check_count(token_ids, field, limits.max_stop_token_ids)
    return tuple(
        check_token_id(token_id, field, what="a stop token id", vocab_size=model.vocab_size)
        for token_id in token_ids
    )


def _deadline(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise refusal(value, "deadline", "finite seconds on the engine's clock")
    return float(value)


def _queue_timeout(value: object, limits: LimitsSection) -> float:
    if value is None:
        return limits.queue_timeout_s
    longest = limits.queue_timeout_s
    return check_number(value, "queue_timeout", above=0.0, high=longest, hint="this server's limit")


def _penalty(value: object, field: str) -> float:
    return check_number(value, field, low=-2.0, high=2.0, hint="0 is off")
