"""Distributions of lengths in tokens, as they are written on a command line."""

import bisect
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jaxserve.errors import ConfigError, WorkloadError
from jaxserve.measure.workload.draws import Draws, exp, log
from jaxserve.measure.workload.values import MAX_COUNT

USAGE: Final = "write N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX] or file:PATH"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Uniform:
    """Every length from low to high is as likely; low = high is a fixed one."""

    low: int
    high: int

    def draw(self, draws: Draws) -> int:
        return self.low + draws.below(self.high - self.low + 1)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Lognormal:
    """exp of a normal of this deviation, times the median; at least 1, cut at most_tokens."""

    median: float
    sigma: float
    most_tokens: int = MAX_COUNT

    def draw(self, draws: Draws) -> int:
        length = self.median * exp(self.sigma * draws.normal())
        return max(1, min(int(length + 0.5), self.most_tokens))


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Empirical:
    """One of these lengths, each as likely as any other, again and again."""

    lengths: tuple[int, ...]

    def draw(self, draws: Draws) -> int:
        return self.lengths[draws.below(len(self.lengths))]


Lengths = Uniform | Lognormal | Empirical


class Weighted:
    """Draws the place of a weight in a list, as often as the weight says."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._sums: list[float] = []
        total = 0.0
        for weight in weights:
            total += weight
            self._sums.append(total)

    def draw(self, draws: Draws) -> int:
        place = bisect.bisect_right(self._sums, draws.uniform() * self._sums[-1])
        return min(place, len(self._sums) - 1)


def zipf_weights(num: int, exponent: float) -> list[float]:
    """Returns 1/1^s, 1/2^s, …; exponent 0 makes all of them equal."""
    return [exp(-exponent * log(float(rank))) for rank in range(1, num + 1)]


def parse_lengths(text: str, name: str) -> Lengths:
    """Returns the distribution.

    Args:
      name: what is set, for the message: `--prompt-tokens`, say.

    Raises:
      ConfigError: it is none, or its numbers will not do.
      WorkloadError: its file cannot be read.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return _read_lengths(Path(rest))
    words = rest.split(":") if rest else []
    try:
        match kind, words:
            case "uniform", [low, high] if 1 <= int(low) <= int(high) <= MAX_COUNT:
                return Uniform(low=int(low), high=int(high))
            case "lognormal", [median, sigma, *most] if len(most) <= 1:
                return _lognormal(float(median), float(sigma), int(most[0]) if most else MAX_COUNT)
            case _, [] if 1 <= int(kind) <= MAX_COUNT:
                return Uniform(low=int(kind), high=int(kind))
    except ValueError:
        pass
    raise ConfigError(f"{name} {text!r} is no distribution of lengths ≥ 1; {USAGE}")


def describe(lengths: Lengths, text: str) -> dict[str, object]:
    """Returns what a header says of it: the text, and of a file what its path cannot tell."""
    if not isinstance(lengths, Empirical):
        return {"lengths": text}
    listed = ",".join(map(str, lengths.lengths)).encode()
    return {
        "lengths": f"file:{Path(text.partition(':')[2]).name}",
        "num": len(lengths.lengths),
        "sha256": hashlib.sha256(listed).hexdigest(),
    }


def _lognormal(median: float, sigma: float, most_tokens: int) -> Lognormal:
    if not (0.5 <= median <= MAX_COUNT and 0 <= sigma <= 10 and 1 <= most_tokens <= MAX_COUNT):
        raise ValueError("out of range")
    return Lognormal(median=median, sigma=sigma, most_tokens=most_tokens)


def _read_lengths(path: Path) -> Empirical:
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    lengths = []
    for place, word in enumerate(words, 1):
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= MAX_COUNT):
            raise WorkloadError(
                f"{path}: its value {place} is {word[:40]!r}, but must be a whole number of at "
                "least 1"
            )
        lengths.append(int(word))
    if not lengths:
        raise WorkloadError(f"{path} is empty, but must hold lengths, one a line")
    return Empirical(lengths=tuple(lengths))
