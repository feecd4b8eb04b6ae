"""Log-probabilities as messages, cut where one would be too large."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs

NUMBER_BYTES: Final = 16  # of an id, a logarithm, a rank and what frames the bytes, at most
POSITION_BYTES: Final = 8  # what frames the alternatives of a position

TokenBytes = Callable[[int], bytes]


def build_logprobs(
    entries: Iterable[TokenLogprobs], token_bytes: TokenBytes
) -> generation_pb2.Logprobs:
    """Returns consecutive tokens' log-probabilities in parallel lists."""
    message = generation_pb2.Logprobs()
    for entry in entries:
        _add(message, entry, token_bytes)
    return message


def cut_logprobs(
    entries: Iterable[TokenLogprobs], token_bytes: TokenBytes, *, max_bytes: int
) -> Iterator[generation_pb2.Logprobs]:
    """Yields the same in pieces of at most `max_bytes`, though never less than a position each.

    A piece is built when it is asked for. No entries are one empty piece.
    """
    message, num_bytes = generation_pb2.Logprobs(), 0
    for entry in entries:
        size = size_of(entry, token_bytes)
        if num_bytes and num_bytes + size > max_bytes:
            yield message
            message, num_bytes = generation_pb2.Logprobs(), 0
        _add(message, entry, token_bytes)
        num_bytes += size
    yield message


def size_of(entry: TokenLogprobs, token_bytes: TokenBytes) -> int:
    """Returns a bound of the encoded bytes of one position."""
    ids = (entry.token_id, *entry.top_ids)
    return POSITION_BYTES + sum(NUMBER_BYTES + len(token_bytes(token_id)) for token_id in ids)


def _add(message: generation_pb2.Logprobs, entry: TokenLogprobs, token_bytes: TokenBytes) -> None:
    message.token_ids.append(entry.token_id)
    message.logprobs.append(entry.logprob)
    message.ranks.append(entry.rank)
    message.token_bytes.append(token_bytes(entry.token_id))
    if entry.top_ids:
        message.top.add(
            token_ids=entry.top_ids,
            logprobs=entry.top_logprobs,
            token_bytes=[token_bytes(token_id) for token_id in entry.top_ids],
        )
