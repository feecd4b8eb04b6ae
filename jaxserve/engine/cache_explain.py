"""Why two requests share computed K/V, or do not."""

import dataclasses
from collections.abc import Sequence

from jaxserve.config import Config
from jaxserve.engine.namespaces import Namespaces
from jaxserve.identity import CacheIdentity, find_difference
from jaxserve.request import ChatMessage, ChatPrompt
from jaxserve.scheduler.prefix_cache import count_same
from jaxserve.scheduler.prefix_reuse import MIN_COPIED_SHARE
from jaxserve.text.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Explanation:
    """What the second of two requests finds of the first: the pool has room for it, and the first's
    output has filled the last page of its prompt.

    Attributes:
      num_common: tokens that both begin with.
      differs_in: the part of the identity in which they differ; None for none.
      values: of that part, the first's and the second's.
      num_pages: full pages that the second shares.
      num_copied: tokens of the next page that it copies.
      num_computed: of its tokens, those that it computes.
    """

    num_first: int
    num_second: int
    num_common: int
    differs_in: str | None
    values: tuple[object, object] | None
    num_pages: int
    num_copied: int
    num_computed: int


def explain_sharing(
    first: tuple[Sequence[int], CacheIdentity | None],
    second: tuple[Sequence[int], CacheIdentity | None],
    *,
    page_size: int,
) -> Explanation:
    """Returns what a request finds of one that has ended before it began.

    Args:
      first, second: token ids of the prompt, and the identity; None with the cache off.
    """
    first_ids, first_identity = first
    second_ids, second_identity = second
    num_common = count_same(first_ids, second_ids)
    differs_in, values = None, None
    if first_identity is None or second_identity is None:
        num_pages = num_copied = 0
    elif (differs_in := find_difference(first_identity, second_identity)) is not None:
        values = getattr(first_identity, differs_in), getattr(second_identity, differs_in)
        num_pages = num_copied = 0
    else:
        # The last token of a prompt is always computed.
        num_pages, num_copied = divmod(min(num_common, max(0, len(second_ids) - 1)), page_size)
        if num_copied * MIN_COPIED_SHARE < page_size:
            num_copied = 0
    return Explanation(
        num_first=len(first_ids),
        num_second=len(second_ids),
        num_common=num_common,
        differs_in=differs_in,
        values=values,
        num_pages=num_pages,
        num_copied=num_copied,
        num_computed=len(second_ids) - num_pages * page_size - num_copied,
    )


def build_namespaces(
    config: Config, *, changing_ropes: Sequence[tuple[str, int]] = ()
) -> Namespaces:
    """Returns what gives two requests of one model their identities; the model's own part of them
    is left out, being the same."""
    model = CacheIdentity(
        weights="", tokenizer="", positions="", kv_dtype="", page_size=config.kv.page_size
    )
    return Namespaces(config.prefix_cache, model, changing_ropes=changing_ropes)


def encode_prompt(text: str, tokenizer: Tokenizer, *, is_chat: bool) -> tuple[int, ...]:
    """Returns a prompt's token ids.

    Args:
      is_chat: it is a user's turn, in the model's chat template.
    """
    if not is_chat:
        return tuple(tokenizer.encode(text))
    turn = ChatPrompt(messages=(ChatMessage(role="user", content=text),))
    return tuple(tokenizer.encode_chat(turn))
