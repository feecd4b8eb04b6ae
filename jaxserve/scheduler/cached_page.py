"""A page that is kept for those who begin with the same tokens, and what keeping it is worth."""

import dataclasses
from typing import Final

from jaxserve.identity import CacheIdentity

MAX_USES: Final = 8  # a page that was used more often is kept no longer for it
# Where attending costs a token as much as the rest of the model does: what K/V costs to compute
# again rises with its position. A round number for models of a few billion parameters.
ATTENTION_TOKENS: Final = 8192


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class CachedPage:
    """A full page that later requests may read, or the identity that such pages follow.

    What is before a page in the pool is in the pool; what is before one in host memory alone is in
    either. With a page goes all that is behind it.

    Attributes:
      parent: of the tokens before; None of an identity.
      page: in the pool; 0 of an identity, and of what is in host memory alone.
      depth: pages up to and with this one.
      tokens_of_children: sorted; `children` are theirs, in the same order.
      host_page: where it is in host memory, or soon will be; None where it is not.
      host_children: by their tokens, those behind it that are in host memory alone.
      is_live: whether it is in the pool and can be found there.
      is_idle: nobody holds its page, and no step in flight does anything to it.
      is_proven: tokens that were sampled behind it were finite.
      num_uses: how often it was taken, its making included.
      rank: what it is worth; of those that may go the least goes first.
      stamp: of the last time it became idle; 0 while it is not.
    """

    key: bytes
    identity: CacheIdentity
    parent: "CachedPage | None"
    token_ids: tuple[int, ...]
    page: int
    depth: int
    tokens_of_children: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    children: list["CachedPage"] = dataclasses.field(default_factory=list)
    host_page: int | None = None
    host_children: dict[tuple[int, ...], "CachedPage"] = dataclasses.field(default_factory=dict)
    is_live: bool = True
    is_idle: bool = False
    is_proven: bool = False
    num_uses: int = 1
    rank: float = 0.0
    stamp: int = 0

    def path(self) -> list["CachedPage"]:
        """Returns the pages from the first up to this one."""
        pages: list[CachedPage] = []
        node: CachedPage | None = self
        while node is not None and node.depth:
            pages.append(node)
            node = node.parent
        pages.reverse()
        return pages


def worth(node: CachedPage, *, page_size: int, attention_tokens: int) -> float:
    """Returns what it costs to compute a page again, times how often it was used."""
    cost = 1 + node.depth * page_size / attention_tokens
    return min(node.num_uses, MAX_USES) * cost
