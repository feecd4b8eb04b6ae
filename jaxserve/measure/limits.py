"""The latency limits under which an output token counts: how they are written, and who met them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from jaxserve.errors import ConfigError
from jaxserve.measure import latency
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.statistics import Sample

Quantity = Literal["ttft", "itl", "gap", "tpot", "e2e", "deadline"]

PATTERN: Final = re.compile(r"(ttft|tpot|e2e|(?:itl|gap)_(?:p(\d{1,2}(?:\.\d+)?)|max))=(.+)")
ROUNDING_S: Final = 1e-9  # what differences of two times may be off by
USAGE: Final = (
    "write ttft=S, tpot=S, e2e=S, itl_pN=S, itl_max=S, gap_pN=S, gap_max=S with S in seconds, such "
    "as ttft=0.5 or itl_p95=0.1, or deadline"
)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Limit:
    """One limit that each request must keep.

    Attributes:
      text: as it is written and printed.
      share: of itl and gap, the quantile over the request's own values; else None.
      max_s: seconds; None for the deadline, which is each request's own.
    """

    text: str
    quantity: Quantity
    share: float | None = None
    max_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Returns whether the request kept it.

        A request without a token keeps no ttft. Where there is nothing to compare, as the gaps of
        an output of one message or the deadline of a request that has none, the limit is kept.
        """
        match self.quantity:
            case "ttft":
                return self._holds(latency.ttft_s(record), absent=False)
            case "tpot":
                return self._holds(latency.tpot_s(record), absent=True)
            case "e2e":
                return self._holds(latency.e2e_s(record), absent=False)
            case "deadline":
                deadline_s = record.deadline_s
                return deadline_s is None or latency.e2e_s(record) <= deadline_s + ROUNDING_S
            case "itl":
                sample = Sample()
                for value_s, count in latency.inter_token_s(record):
                    sample.add(value_s, count)
            case "gap":
                sample = Sample()
                for value_s, _ in latency.gaps(record):
                    sample.add(value_s)
        assert self.share is not None
        return not len(sample) or self._holds(sample.quantiles([self.share])[0], absent=True)

    def _holds(self, value_s: float | None, *, absent: bool) -> bool:
        assert self.max_s is not None
        return absent if value_s is None else value_s <= self.max_s + ROUNDING_S


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """The limits of every prompt class; a class's own replace common ones of the same quantity.

    Attributes:
      common: of all requests.
      classes: by prompt class; the merged ones.
    """

    common: tuple[Limit, ...] = ()
    classes: Mapping[str, tuple[Limit, ...]] = dataclasses.field(default_factory=dict)

    def of(self, record: RequestRecord) -> tuple[Limit, ...]:
        return self.classes.get(record.prompt_class, self.common)

    def as_json(self) -> dict[str, object]:
        """Returns them as they are written; equal for equal limits, in whatever order given."""
        return {
            "all": [limit.text for limit in self.common],
            "classes": {
                name: [limit.text for limit in limits]
                for name, limits in sorted(self.classes.items())
            },
        }


def read_limits(
    texts: Iterable[str], promised: Mapping[str, Iterable[str]] | None = None
) -> Limits:
    """Returns the limits of a command line, over those that a workload promises its classes.

    Args:
      texts: `ttft=0.5`, or `CLASS:ttft=0.5` for one class.
      promised: by prompt class, likewise; a common limit of the same quantity gives way to it.

    Raises:
      ConfigError: one is not a limit, or is given twice.
    """
    common: dict[str, Limit] = {}
    classes: dict[str, dict[str, Limit]] = {}
    for name, words in (promised or {}).items():
        for word in words:
            _put(classes.setdefault(name, {}), parse_limit(word), word)
    given: dict[str, dict[str, Limit]] = {}
    for text in texts:
        name, colon, word = text.rpartition(":")
        _put(given.setdefault(name, {}) if colon else common, parse_limit(word), text)
    for name, limits in given.items():
        classes[name] = classes.get(name, {}) | limits
    return Limits(
        common=_ordered(common),
        classes={name: _ordered(common | limits) for name, limits in classes.items()},
    )


def parse_limit(text: str) -> Limit:
    """Returns one limit.

    Raises:
      ConfigError: it is not one.
    """
    if text == "deadline":
        return Limit(text=text, quantity="deadline")
    found = PATTERN.fullmatch(text)
    max_s = _seconds(found[3]) if found else None
    if found is None or max_s is None:
        raise ConfigError(f"limit {text!r} is not one; {USAGE}")
    name, _, spread = found[1].partition("_")
    share = None
    if spread == "max":
        share = 1.0
    elif spread:
        share = float(found[2]) / 100
        spread = f"p{_say(float(found[2]))}"
    return Limit(
        text=f"{'_'.join(filter(None, (name, spread)))}={_say(max_s)}",
        quantity=name,  # type: ignore[arg-type]  # one of the pattern's words
        share=share,
        max_s=max_s,
    )


def _put(limits: dict[str, Limit], limit: Limit, text: str) -> None:
    name = limit.text.partition("=")[0]
    if name in limits:
        raise ConfigError(f"limit {text!r} is the second one of {name}; leave one out")
    limits[name] = limit


def _ordered(limits: Mapping[str, Limit]) -> tuple[Limit, ...]:
    return tuple(limit for _, limit in sorted(limits.items()))


def _say(number: float) -> str:
    """Returns the number with all its digits: results are compared by the text of their limits."""
    return repr(number).removesuffix(".0")


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None
