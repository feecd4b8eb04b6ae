"""Checks of the fields that name tokens or texts: what is banned, favoured, allowed or ends."""

from collections.abc import Mapping, Sequence
from typing import Final

from jaxserve.config import LimitsSection
from jaxserve.engine.fields import check_count, check_number, check_text, check_token_id, refusal
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import InvalidRequestError

MAX_BIAS: Final = 1e20  # stays finite in float32 after the smallest temperature and penalty


def check_bias(
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


def check_stop_strings(stops: Sequence[str], limits: LimitsSection) -> tuple[str, ...]:
    field = "stop.stop_strings"
    return _check_texts(stops, field, limits, most=limits.max_stop_strings, why="match at once")


def check_bad_words(words: Sequence[str], limits: LimitsSection) -> tuple[str, ...]:
    field = "sampling.bad_words"
    return _check_texts(words, field, limits, most=limits.max_bad_words, why="ban everything")


def check_stop_token_ids(
    token_ids: Sequence[int], model: ServedModel, limits: LimitsSection
) -> tuple[int, ...]:
    field = "stop.stop_token_ids"
    check_count(token_ids, field, limits.max_stop_token_ids)
    return tuple(
        check_token_id(token_id, field, what="a stop token id", vocab_size=model.vocab_size)
        for token_id in token_ids
    )


def check_allowed_token_ids(
    token_ids: Sequence[int] | None, model: ServedModel, limits: LimitsSection
) -> tuple[int, ...] | None:
    """Returns them as they are; None is everything."""
    if token_ids is None:
        return None
    field = "sampling.allowed_token_ids"
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise refusal(token_ids, field, "a list of token ids; leave it out to allow all")
    check_count(token_ids, field, limits.max_allowed_token_ids)
    if not token_ids:
        raise InvalidRequestError(
            "allowed_token_ids is empty, but must hold at least one id; leave it out to allow all",
            field=field,
        )
    seen: set[int] = set()
    for value in token_ids:
        token_id = check_token_id(
            value, field, what="an allowed token id", vocab_size=model.vocab_size
        )
        if token_id in seen:
            raise InvalidRequestError(
                f"allowed_token_ids holds {token_id} twice, but must be distinct; send it once",
                field=field,
            )
        seen.add(token_id)
    return tuple(seen)


def _check_texts(
    texts: Sequence[str], field: str, limits: LimitsSection, *, most: int, why: str
) -> tuple[str, ...]:
    name = field.rpartition(".")[2]
    if isinstance(texts, str):  # its letters would each be one
        raise InvalidRequestError(
            f"{name} is one string, but must be a list of them; put it in a list", field=field
        )
    check_count(texts, field, most)
    for text in texts:
        if not check_text(text, field, limits.max_stop_string_bytes):
            raise InvalidRequestError(
                f"{name} holds an empty string, which would {why}; leave it out", field=field
            )
    return tuple(texts)
