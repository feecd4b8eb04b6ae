"""What is worked out of one request's record: its latencies and tokens, by the definitions below.

DEFINITIONS is copied into every result. The client's own clock counts; all are seconds.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from jaxserve.measure.records import Arrival, RequestRecord

DEFINITIONS: Final[Mapping[str, str]] = {
    "ttft": "time to first token: from the intended start to the first message with a token; the "
    "wait of a late send is in it",
    "itl": "inter-token latency: the gap between two messages with tokens, divided evenly among "
    "the n tokens of the later one, counted n times; the first message's tokens have none, so a "
    "request's sum is last message - first message, and its mean is its tpot",
    "gap": "the gaps between messages with tokens as they are, one for each message: what a "
    "reader sees of coalescing and stalls",
    "tpot": "time per output token: (last - first message with tokens) / (tokens after the first "
    "message); absent where there is one such message",
    "e2e": "from the intended start to the last byte",
    "send_lag": "from the intended start to the send; how late this tool itself was",
    "output_tokens": "the server's usage; where none came, as after an error, the tokens of the "
    "messages that were read. Text is never tokenized again",
    "latency": "latencies are those of requests with the outcome ok; send_lag is of all",
    "queue": "the server's: arrival to first scheduled",
    "prefill": "the server's: first scheduled to first token on its host",
    "decode": "the server's: first token to the end",
    "delivery": "the server's: last token on its host to accepted by its carrier; absent where the "
    "server does not tell",
}


def output_tokens(record: RequestRecord) -> int:
    """Returns the tokens that came of the request."""
    if record.output_tokens is not None:
        return record.output_tokens
    return sum(arrival.num_tokens for arrival in record.arrivals)


def send_lag_s(record: RequestRecord) -> float:
    return record.sent_s - record.intended_s


def e2e_s(record: RequestRecord) -> float:
    return record.end_s - record.intended_s


def ttft_s(record: RequestRecord) -> float | None:
    """Returns the time to first token; None where no token came."""
    first = next(_messages(record), None)
    return None if first is None else first.time_s - record.intended_s


def gaps(record: RequestRecord) -> Iterator[tuple[float, int]]:
    """Yields the gap before each message with tokens but the first, and the tokens that ended it.

    Empty text does not matter, tokens do:

        time     1.0   1.3   1.4   1.6          gaps: (0.4, 1), (0.2, 4)
        tokens     3     0     1     4          tpot: 0.6 / 5
    """
    messages = _messages(record)
    before = next(messages, None)
    for message in messages:
        assert before is not None
        yield message.time_s - before.time_s, message.num_tokens
        before = message


def inter_token_s(record: RequestRecord) -> Iterator[tuple[float, int]]:
    """Yields inter-token latencies, each with the number of tokens that had it."""
    return ((gap_s / num_tokens, num_tokens) for gap_s, num_tokens in gaps(record))


def tpot_s(record: RequestRecord) -> float | None:
    """Returns the time per output token; None where no token came after the first message."""
    total_s, num_tokens = 0.0, 0
    for gap_s, count in gaps(record):
        total_s, num_tokens = total_s + gap_s, num_tokens + count
    return total_s / num_tokens if num_tokens else None


def _messages(record: RequestRecord) -> Iterator[Arrival]:
    return (arrival for arrival in record.arrivals if arrival.num_tokens > 0)
