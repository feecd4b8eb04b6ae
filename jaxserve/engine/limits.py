"""The door: turns what a caller asks into a resolved `Request`, or refuses it with the fix."""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from jaxserve.config import LimitsSection
from jaxserve.engine.conversation import check_conversation
from jaxserve.engine.fields import (
    check_flag,
    check_integer,
    check_number,
    check_text,
    check_token_id,
    refusal,
)
from jaxserve.engine.served_model import ServedModel
from jaxserve.engine.structured import check_structured
from jaxserve.engine.token_fields import (
    check_allowed_token_ids,
    check_bad_words,
    check_bias,
    check_stop_strings,
    check_stop_token_ids,
)
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.request import (
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    Request,
    SamplingParams,
)
from jaxserve.text.tokenizer import Tokenizer

MAX_TEMPERATURE: Final = 1e6
REPETITION_RANGE: Final = (1e-6, 1e6)  # finite in float32 after the smallest temperature
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
    check_text(asked.cache_salt, "cache_salt", limits.max_cache_salt_bytes)
    sampling = check_sampling(asked.sampling, model=model, limits=limits)
    if asked.structured_output is not None:
        check_structured(asked.structured_output, sampling)
    prompt = tokenize(asked.prompt, model=model, tokenizer=tokenizer, limits=limits)
    max_tokens = _resolve_max_tokens(sampling, len(prompt), model, prompt_field(asked.prompt))
    stop_ids = dict.fromkeys(sampling.stop_token_ids, FinishReason.STOP)
    if not sampling.ignore_eos:
        stop_ids |= dict.fromkeys(sorted(model.eos_ids), FinishReason.EOS)
    may_mask = (
        asked.structured_output is not None
        or bool(sampling.bad_words)
        or sampling.allowed_token_ids is not None
    )
    return Request(
        id=request_id,
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
        is_masked=may_mask and max_tokens > 0,
        tenant=asked.tenant,
    )


def _resolve_max_tokens(
    sampling: SamplingParams, prompt_len: int, model: ServedModel, field: str
) -> int:
    """Returns the most tokens that may come after a prompt, all of them within the context."""
    longest, asked = model.max_model_tokens, sampling.max_tokens
    least = 1 if asked is None else min(asked, 1)
    rest = longest - prompt_len
    if rest < least:
        beside = "with at least one token of output " if least else ""
        raise ContextLengthError(
            f"the prompt is {prompt_len} tokens, but {beside}this model's limit is {longest}; "
            f"shorten it to {longest - least}",
            field=field,
        )
    max_tokens = rest if asked is None else asked
    if max_tokens > rest:
        raise ContextLengthError(
            f"max_tokens is {max_tokens}, but after a prompt of {prompt_len} tokens this model's "
            f"limit of {longest} leaves {rest}; lower it, or leave it unset for all",
            field="stop.max_tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}, but at most {max_tokens} tokens may come; "
            "lower it or raise max_tokens",
            field="stop.min_tokens",
        )
    return max_tokens


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
            check_conversation(prompt, tokenizer, limits)
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
        logit_bias=check_bias(asked.logit_bias, model, limits),
        max_tokens=_max_tokens(asked),
        min_tokens=check_integer(asked.min_tokens, "stop.min_tokens", low=0, high=INT32[1]),
        stop_strings=check_stop_strings(asked.stop_strings, limits),
        stop_token_ids=check_stop_token_ids(asked.stop_token_ids, model, limits),
        ignore_eos=check_flag(asked.ignore_eos, "stop.ignore_eos"),
        include_stop_text=check_flag(asked.include_stop_text, "stop.include_stop_text"),
        skip_special_tokens=check_flag(asked.skip_special_tokens, "output.skip_special_tokens"),
        kept_special_ids=_kept_special_ids(asked.kept_special_ids),
        num_choices=_num_choices(asked, limits),
        logprobs=_num_top(asked.logprobs, "output.logprobs", limits),
        prompt_logprobs=_num_top(asked.prompt_logprobs, "output.prompt_logprobs", limits),
        bad_words=check_bad_words(asked.bad_words, limits),
        allowed_token_ids=check_allowed_token_ids(asked.allowed_token_ids, model, limits),
    )


def _check_id(request_id: str, limits: LimitsSection) -> str:
    check_text(request_id, "request_id", limits.max_request_id_bytes)
    return request_id or f"req-{secrets.token_hex(12)}"


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


def _max_tokens(asked: SamplingParams) -> int | None:
    value, field = asked.max_tokens, "stop.max_tokens"
    if value is None:
        return None
    if value == 0 and type(value) is int:
        if asked.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens is 0, but must be at least 1 unless prompt_logprobs is set; ask for "
                "one of them",
                field=field,
            )
        return 0
    return check_integer(value, field, low=1, high=INT32[1])


def _kept_special_ids(token_ids: object) -> frozenset[int]:
    field = "output.kept_special_ids"
    if not isinstance(token_ids, frozenset) or not all(type(id) is int for id in token_ids):
        raise refusal(token_ids, field, "a frozenset of token ids, empty for none")
    return token_ids


def _num_choices(asked: SamplingParams, limits: LimitsSection) -> int:
    num_choices = check_integer(
        asked.num_choices, "sampling.n", low=1, high=limits.max_choices, hint="this server's limit"
    )
    if num_choices > 1 and asked.max_tokens == 0:
        raise InvalidRequestError(
            f"n is {num_choices}, but with max_tokens 0 there is nothing to choose from; leave n "
            "out",
            field="sampling.n",
        )
    return num_choices


def _num_top(value: object, field: str, limits: LimitsSection) -> int | None:
    if value is None:
        return None
    return check_integer(
        value, field, low=0, high=limits.max_logprobs, hint="0 is the token's own alone"
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
