"""What the figures need of the requests, added up record by record in little memory."""

import array
import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from jaxserve.measure import latency
from jaxserve.measure.goodput import is_compliant
from jaxserve.measure.limits import Limits
from jaxserve.measure.records import RequestRecord

# Values are kept to 0.2 %, less than a line is wide: any number of them fits.
PRECISION: Final = 1.002
SMALLEST_S: Final = 1e-6
TICK_S: Final = 0.1  # of token counts over time
SHARES: Final = (
    *(place / 200 for place in range(1, 200)),
    0.9975, 0.999, 0.9995, 0.9999, 1.0,
)  # fmt: skip
PARTS: Final = ("late send", "queue", "prefill", "decode", "delivery", "on the way")
QUANTITIES: Final = ("ttft", "itl", "gap", "tpot", "e2e")


class Curve:
    """A distribution of seconds, each value kept to 0.2 %; what is below 1 µs counts as 1 µs."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, value_s: float, number: int = 1) -> None:
        place = round(math.log(max(value_s, SMALLEST_S) / SMALLEST_S) / math.log(PRECISION))
        self._counts[place] += number

    @property
    def total(self) -> int:
        return self._counts.total()

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Returns the smallest value that at least such a share of all does not exceed."""
        places = sorted(self._counts)
        ends: list[int] = []
        for place in places:
            ends.append(self._counts[place] + (ends[-1] if ends else 0))
        found = (bisect.bisect_left(ends, share * ends[-1] - 1e-6) for share in shares)
        return [SMALLEST_S * PRECISION ** places[min(place, len(places) - 1)] for place in found]

    def points(self) -> list[tuple[float, float]]:
        """Returns value and share of all that do not exceed it, from (smallest, 0) on."""
        # of several shares that fall on one value the last, highest, stays
        points = dict(zip(self.quantiles(SHARES), SHARES, strict=True))
        return [(next(iter(points)), 0.0), *points.items()]


@dataclasses.dataclass(slots=True, kw_only=True)
class PhaseSums:
    """Seconds of ok requests whose server told its phases, and what the client saw beside them."""

    num_requests: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, record: RequestRecord) -> None:
        phases = record.phases
        if phases.queue_s is None or phases.prefill_s is None or phases.decode_s is None:
            return
        told = (
            latency.send_lag_s(record),
            phases.queue_s,
            phases.prefill_s,
            phases.decode_s,
            phases.delivery_s or 0.0,
        )
        self.num_requests += 1
        for part, value_s in zip(PARTS, (*told, latency.e2e_s(record) - sum(told)), strict=True):
            self.seconds[part] += value_s


class Observed:
    """What was seen of a result's requests; warm-ups are passed over.

    Attributes:
      curves: by quantity and prompt class, None of all, of ok requests.
      repeat: whose times are kept for timelines.
      errors: by outcome and message.
    """

    def __init__(self, limits: Limits, *, repeat: int) -> None:
        self._limits = limits
        self.repeat = repeat
        self.curves: dict[tuple[str, str | None], Curve] = {}
        self.num_by_class: collections.Counter[str] = collections.Counter()
        self.phases: dict[str | None, PhaseSums] = {}
        self.errors: collections.Counter[tuple[str, str]] = collections.Counter()
        self.intended_s = array.array("d")
        self.sent_s = array.array("d")
        self.end_s = array.array("d")
        self.tokens: collections.Counter[int] = collections.Counter()
        self.compliant_tokens: collections.Counter[int] = collections.Counter()

    @property
    def classes(self) -> list[str]:
        """Prompt classes, the most requests first; none where there is but one."""
        names = [name for name, _ in self.num_by_class.most_common()]
        return names if len(names) > 1 else []

    def take(self, records: Iterable[tuple[int | None, RequestRecord]]) -> None:
        for repeat, record in records:
            if repeat is None or record.is_warm_up:
                continue
            self.num_by_class[record.prompt_class] += 1
            if record.error:
                self.errors[record.outcome, record.error[:2000]] += 1
            if record.outcome == "ok":
                self._add_latencies(record)
            if repeat == self.repeat:
                self._add_times(record)

    def _add_latencies(self, record: RequestRecord) -> None:
        for name, value_s, number in _latencies(record):
            for key in (None, record.prompt_class):
                self.curves.setdefault((name, key), Curve()).add(value_s, number)
        for key in (None, record.prompt_class):
            self.phases.setdefault(key, PhaseSums()).add(record)

    def _add_times(self, record: RequestRecord) -> None:
        self.intended_s.append(record.intended_s)
        self.sent_s.append(record.sent_s)
        self.end_s.append(record.end_s)
        meets = is_compliant(record, self._limits)
        for arrival in record.arrivals:
            tick = math.floor(arrival.time_s / TICK_S)
            self.tokens[tick] += arrival.num_tokens
            if meets:
                self.compliant_tokens[tick] += arrival.num_tokens


def _latencies(record: RequestRecord) -> Iterator[tuple[str, float, int]]:
    for name, value_s in (
        ("ttft", latency.ttft_s(record)),
        ("tpot", latency.tpot_s(record)),
        ("e2e", latency.e2e_s(record)),
    ):
        if value_s is not None:
            yield name, value_s, 1
    for gap_s, number in latency.gaps(record):
        yield "gap", gap_s, 1
        yield "itl", gap_s / number, number
