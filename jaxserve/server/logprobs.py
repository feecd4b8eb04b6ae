"""Log-probabilities as messages, cut where one would be too large."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs

NUMBER_BYTES: Final = 16  # of an id, a logarithm, a rank and what frames the bytes, at most
POSITION_BYTES: Final = 8  # what frames the alternatives of a position

TokenBytes = Callable[[int], bytes]


def build_logprobs(
    entries: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> generation_pb2.Logprobs:
    """Returns consecutive tokens' log-probabilities in parallel lists."""
    message = generation_pb2.Logprobs(
        token_ids=[entry.token_id for entry in entries],
        logprobs=[entry.logprob for entry in entries],
        ranks=[entry.rank for entry in entries],
        token_bytes=[token_bytes(entry.token_id) for entry in entries],
    )
    for entry in entries:
        if entry.top_ids:
            message.top.add(
                token_ids=entry.top_ids,
                logprobs=entry.top_logprobs,
                token_bytes=list(map(token_bytes, entry.top_ids)),
            )
    return message


def cut_logprobs(
    entries: Iterable[TokenLogprobs], token_bytes: TokenBytes, *, max_bytes: int
) -> Iterator[generation_pb2.Logprobs]:
    """Yields the same in pieces of at most `max_bytes`, though never less than a position each.

    A piece is built when it is asked for. No entries are one empty piece.
    """
    some: list[TokenLogprobs] = []
    num_bytes = 0
    for entry in entries:
        size = size_of(entry, token_bytes)
        if num_bytes and num_bytes + size > max_bytes:
            yield build_logprobs(some, token_bytes)
            some, num_bytes = [], 0
        some.append(entry)
        num_bytes += size
    yield build_logprobs(some, token_bytes)


def size_of(entry: TokenLogprobs, token_bytes: TokenBytes) -> int:
    """Returns a bound of the encoded bytes of one position."""
    num_bytes = POSITION_BYTES + NUMBER_BYTES * (1 + len(entry.top_ids))
    return num_bytes + sum(map(len, map(token_bytes, (entry.token_id, *entry.top_ids))))
