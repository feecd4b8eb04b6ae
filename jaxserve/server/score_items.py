"""The items of a Score call as prompts: what is computed, and which part of it is scored."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NoReturn

from jaxserve.engine import Engine
from jaxserve.engine.fields import check_text
from jaxserve.errors import InvalidRequestError
from jaxserve.gen import generation_pb2
from jaxserve.server.convert import read_token_ids, refuse


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ScoredPrompt:
    """One item.

    Attributes:
      prompt: context and continuation; at least one token of each.
      num_scored: the continuation's tokens, at its end.
    """

    prompt: tuple[int, ...]
    num_scored: int


def read_items(items: Sequence[generation_pb2.ScoreItem], engine: Engine) -> list[ScoredPrompt]:
    """Returns the items in order.

    Raises:
      InvalidRequestError: none or too many, or one that lacks a part, names a token that is none,
        or is too long; the field is items[i] and what follows.
    """
    limit = engine.config.limits.max_score_items
    if not 1 <= len(items) <= limit:
        refuse(
            f"items has {len(items)} entries, but must have 1 to {limit} "
            "(limits.max_score_items); send more calls",
            "items",
        )
    return [_read_item(item, f"items[{place}]", engine) for place, item in enumerate(items)]


def _read_item(item: generation_pb2.ScoreItem, field: str, engine: Engine) -> ScoredPrompt:
    context, continuation = item.WhichOneof("context"), item.WhichOneof("continuation")
    if continuation is None:
        refuse(
            "continuation is missing; set continuation_text or continuation_token_ids",
            f"{field}.continuation",
        )
    if context == "context_text" and continuation == "continuation_text":
        return _read_texts(item, field, engine)
    before = _read_context(item, field, engine)
    if continuation == "continuation_text":
        _check_text(item.continuation_text, f"{field}.continuation_text", engine)
        after = (
            engine.tokenizer.encode(item.continuation_text, add_special_tokens=False)
            if context is None
            else engine.tokenizer.encode_inside(item.continuation_text)
        )
    else:
        ids = item.continuation_token_ids.ids
        after = list(read_token_ids(ids, engine.model, f"{field}.continuation_token_ids"))
    if not after:
        _refuse_empty(f"{field}.{continuation}", "a token after the context")
    return ScoredPrompt(prompt=(*before, *after), num_scored=len(after))


def _read_texts(item: generation_pb2.ScoreItem, field: str, engine: Engine) -> ScoredPrompt:
    """Tokenizes the two together: scored is all from where that differs from the context alone.

    Only where a token spans the end of the context is that more than the continuation's own.
    """
    text = item.context_text + item.continuation_text
    _check_text(text, f"{field}.continuation_text", engine)
    before = _read_context(item, field, engine)
    whole = engine.tokenizer.encode_beginning(text)
    pairs = zip(before, whole, strict=False)
    num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if num_same == len(whole):
        _refuse_empty(f"{field}.continuation_text", "a token after the context")
    if num_same == 0:
        refuse(
            "the texts' first token holds the end of context_text, and a first token has no "
            "probability; send token ids",
            f"{field}.context_text",
        )
    return ScoredPrompt(prompt=tuple(whole), num_scored=len(whole) - num_same)


def _read_context(item: generation_pb2.ScoreItem, field: str, engine: Engine) -> list[int]:
    match item.WhichOneof("context"):
        case "context_text":
            _check_text(item.context_text, f"{field}.context_text", engine)
            token_ids = engine.tokenizer.encode_beginning(item.context_text)
            if not token_ids:
                _refuse_empty(f"{field}.context_text", "a token, or leave it out")
        case "context_token_ids":
            ids = item.context_token_ids.ids
            token_ids = list(read_token_ids(ids, engine.model, f"{field}.context_token_ids"))
            if not token_ids:
                _refuse_empty(f"{field}.context_token_ids", "a token, or leave it out")
        case _:
            if engine.model.bos_id is None:
                refuse(
                    "context is missing, and this model has no begin-of-text token to stand for "
                    "it; set context_text or context_token_ids",
                    f"{field}.context",
                )
            token_ids = [engine.model.bos_id]
    return token_ids


def _check_text(text: str, field: str, engine: Engine) -> None:
    check_text(text, field, engine.config.limits.max_prompt_bytes)


def _refuse_empty(field: str, wanted: str) -> NoReturn:
    name = field.rpartition(".")[2]
    raise InvalidRequestError(f"{name} is empty, but must give {wanted}", field=field)
