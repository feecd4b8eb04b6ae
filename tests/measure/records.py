"""Records of requests as a test needs them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.measure.goodput import Tally, Totals
from jaxserve.measure.limits import Limits
from jaxserve.measure.records import Arrival, RequestRecord

_NUMBERS = itertools.count()


def build_record(
    messages: Sequence[tuple[float, int]] = ((1.0, 1),),
    **facts: Any,  # noqa: ANN401  # fields of the record
) -> RequestRecord:
    """Returns a good request that was sent at 0 and ended with its last message.

    Args:
      messages: time and tokens of each.
      facts: what is to be otherwise.
    """
    index = next(_NUMBERS)
    intended_s = facts.get("intended_s", 0.0)
    chosen: dict[str, Any] = {
        "index": index,
        "request_id": f"r{index}",
        "prompt_class": "",
        "intended_s": intended_s,
        "sent_s": intended_s,
        "arrivals": tuple(Arrival(time_s=time_s, num_tokens=count) for time_s, count in messages),
        "end_s": messages[-1][0] if messages else intended_s,
        "outcome": "ok",
        "output_tokens": sum(count for _, count in messages),
        "prompt_tokens": 10,
    }
    return RequestRecord(**{**chosen, **facts})


def sum_up(records: Iterable[RequestRecord], limits: Limits) -> Totals:
    """Returns what a replay's records come to."""
    tally = Tally(limits)
    for record in records:
        tally.add(record)
    return tally.close()
