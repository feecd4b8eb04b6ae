"""How long a step takes: a base for each program and a slope over the K/V its attention reads."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Self

from jaxserve.errors import ConfigError
from jaxserve.plan import Bucket, StepPlan

# What attention's time grows with: the longest sequence of a step where it loops over padded rows
# (xla), the tokens of all of them where each row is its own length (native, triton, mosaic).
KvCost = Literal["longest", "all"]

FORMAT: Final = 1
WARM_UP: Final = 8  # steps of a program whose median starts its fit
WINDOW: Final = 512  # steps of a program after which an old one counts half or less
CLIP: Final = 3.0  # mean absolute deviations a step may pull the fit
MAX_GROWTH: Final = 5.0  # deviations that one step may widen the deviation by
PRIOR_STEPS: Final = 16.0  # that the common slope counts in a program's own
PRIOR_KV: Final = 256.0  # spread of K/V lengths of those steps
NUM_RATIOS: Final = 256  # last steps of a program whose deviation is remembered
NUM_QUANTILES: Final = 33
MAX_NUMBER: Final = 1e18
REFRESH: Final = 16  # steps after which the common slope is worked out again


def kv_cost_of(attention: str) -> KvCost:
    """Returns what the time of an attention implementation grows with."""
    return "longest" if attention in ("xla", "reference") else "all"


class StepWork(NamedTuple):
    """What a plan asks of a program.

    Attributes:
      longest: tokens of the longest sequence, what it computes in this step with them.
      all: tokens of all sequences together.
    """

    longest: int
    all: int


def measure_work(plan: StepPlan) -> StepWork:
    """Returns the K/V that a plan's attention reads."""
    kv_lens = [chunk.start + chunk.num_tokens for chunk in plan.others]
    if plan.decodes:
        ends_N = plan.decodes.starts_N + 1
        return StepWork(max([int(ends_N.max()), *kv_lens]), int(ends_N.sum()) + sum(kv_lens))
    return StepWork(max(kv_lens, default=0), sum(kv_lens))


@dataclasses.dataclass(slots=True, kw_only=True)
class ProgramTimes:
    """One program's fit: weighted sums of what was seen, older steps counting less.

    Attributes:
      num_steps: that were seen.
      mean_kv, mean_s: weighted means.
      kv_kv, kv_s: weighted sums of squares and products around them.
      deviation_s: mean absolute deviation of a step from the fit.
      ratios: measured by predicted, of the last steps.
      first: steps until there are enough for a median.
    """

    num_steps: int = 0
    weight: float = 0.0
    mean_kv: float = 0.0
    mean_s: float = 0.0
    kv_kv: float = 0.0
    kv_s: float = 0.0
    deviation_s: float = 0.0
    ratios: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=NUM_RATIOS)
    )
    first: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def slope(self, prior: float) -> float:
        """Returns seconds a token of K/V, never below 0; `prior` until enough was seen."""
        weight = PRIOR_STEPS * PRIOR_KV * PRIOR_KV
        return max(0.0, (self.kv_s + weight * prior) / (self.kv_kv + weight))

    def predict(self, kv: float, prior: float) -> float:
        """Returns seconds; at least a tenth of the mean, however far `kv` is from all that was
        seen."""
        if not self.weight:
            return statistics.median(seconds for _, seconds in self.first)
        seconds = self.mean_s + self.slope(prior) * (kv - self.mean_kv)
        return max(seconds, 0.1 * self.mean_s)

    def observe(self, kv: float, seconds: float, prior: float) -> None:
        """Takes a step in. One far from the fit is taken as if it were nearer."""
        self.num_steps += 1
        if not self.weight:
            self.first.append((kv, seconds))
            if len(self.first) == WARM_UP:
                self._begin()
            return
        predicted = self.predict(kv, prior)
        residual = seconds - predicted
        self.ratios.append(seconds / predicted)
        bound = CLIP * self.deviation_s
        self._add(kv, predicted + min(max(residual, -bound), bound))
        seen = min(abs(residual), MAX_GROWTH * self.deviation_s)
        self.deviation_s += (seen - self.deviation_s) / min(self.num_steps, WINDOW // 8)
        self.deviation_s = max(self.deviation_s, 1e-3 * self.mean_s)

    def _begin(self) -> None:
        middle = statistics.median(seconds for _, seconds in self.first)
        off = [abs(seconds - middle) for _, seconds in self.first]
        self.deviation_s = max(statistics.median(off), 1e-3 * middle)
        bound = CLIP * self.deviation_s
        for kv, seconds in self.first:
            self._add(kv, min(max(seconds, middle - bound), middle + bound))
            self.ratios.append(seconds / middle)
        self.first.clear()

    def _add(self, kv: float, seconds: float) -> None:
        keep = 1 - 1 / WINDOW
        self.weight = keep * self.weight + 1
        share = 1 / self.weight
        off_kv, off_s = kv - self.mean_kv, seconds - self.mean_s
        self.mean_kv += share * off_kv
        self.mean_s += share * off_s
        self.kv_kv = keep * self.kv_kv + (1 - share) * off_kv * off_kv
        self.kv_s = keep * self.kv_s + (1 - share) * off_kv * off_s


class StepTimes:
    """The times of all programs, fitted to steps as they retire and asked about those to come.

    seconds = base of the program + slope · K/V tokens. A program's slope leans on a common one,
    which is by token of its shape, so that a program seen at one length only has a slope too. The
    fit is robust: a step's pull is bounded by the usual deviation (Huber's, by winsorizing), a
    lasting change wins all the same, as the deviation grows with it.

    A program that was never seen is taken to lie between those that were, by its tokens.
    """

    def __init__(self, kv_cost: KvCost = "longest") -> None:
        self.kv_cost = kv_cost
        self.programs: dict[Bucket, ProgramTimes] = {}
        self.common_slope = 0.0  # seconds a token of K/V and token of the shape
        self._num_until_refresh = REFRESH

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.programs)

    def observe(self, bucket: Bucket, work: StepWork, seconds: float) -> float | None:
        """Takes a step in.

        Args:
          seconds: from the result before it, or from its own planning where that came later, to
            its result.

        Returns:
          |predicted − measured| / measured, of the prediction before; None where there was none.
        """
        predicted = self.predict(bucket, work)
        program = self.programs.get(bucket)
        if program is None:
            program = self.programs[bucket] = ProgramTimes()
        program.observe(self._kv(work), seconds, self._prior(bucket))
        self._num_until_refresh -= 1
        if not self._num_until_refresh:
            self._refresh()
        if predicted is None or seconds <= 0:
            return None
        return abs(predicted - seconds) / seconds

    def predict(self, bucket: Bucket, work: StepWork) -> float | None:
        """Returns the seconds of a step; None while nothing is known."""
        program = self.programs.get(bucket)
        if program is not None:
            return program.predict(self._kv(work), self._prior(bucket))
        if not self.programs:
            return None
        return self._between(bucket, work)

    def find_bucket(self, num_rows: int, chunk_tokens: int) -> Bucket | None:
        """Returns the smallest program that was seen and holds this; the largest where none does;
        None while nothing is known."""
        fitting = [
            bucket
            for bucket in self.programs
            if bucket.decode_seqs >= num_rows and bucket.chunk_tokens >= chunk_tokens
        ]
        if fitting:
            return min(fitting, key=lambda bucket: bucket.num_tokens)
        return max(self.programs, key=lambda bucket: bucket.num_tokens, default=None)

    def ratio_quantiles(self, bucket: Bucket) -> Sequence[float]:
        """Returns evenly spaced quantiles of measured by predicted times; (1.0,) if unknown.

        Where there are more steps than quantiles, the outermost are left out: one is a stall of the
        whole machine as often as not, and would stand for all steps of its part.
        """
        program = self.programs.get(bucket)
        ratios = sorted(program.ratios) if program else []
        if not ratios:
            return (1.0,)
        if len(ratios) > NUM_QUANTILES:
            num_cut = -(-len(ratios) // (2 * NUM_QUANTILES))
            ratios = ratios[num_cut:-num_cut]
        places = (int((i + 0.5) / NUM_QUANTILES * len(ratios)) for i in range(NUM_QUANTILES))
        return tuple(ratios[place] for place in places)

    def ratio_at(self, bucket: Bucket, share: float) -> float:
        """Returns what measured by predicted times are at most, for such a share of the steps."""
        quantiles = self.ratio_quantiles(bucket)
        return quantiles[min(int(share * len(quantiles)), len(quantiles) - 1)]

    def as_json(self) -> dict[str, Any]:
        """Returns what was seen often enough for a fit; `from_json` predicts the same by it."""
        self._refresh()
        return {
            "format": FORMAT,
            "kv_cost": self.kv_cost,
            "common_slope_s": self.common_slope,
            "programs": [
                _program_facts(bucket, program, self.ratio_quantiles(bucket))
                for bucket, program in sorted(self.programs.items())
                if program.weight
            ],
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], *, source: str) -> Self:
        """Returns what `as_json` wrote.

        Args:
          source: what the facts were read from, for the error.

        Raises:
          ConfigError: they are no step times of this format.
        """
        problem = _find_problem(facts)
        if problem:
            raise ConfigError(
                f"step times {source}: {problem}; give a step_times.json of `jaxserve bench run`"
            )
        times = cls(facts["kv_cost"])
        times.common_slope = float(facts["common_slope_s"])
        for row in facts["programs"]:
            bucket = Bucket(**{name: int(row[name]) for name in _SHAPE})
            program = ProgramTimes(num_steps=int(row["num_steps"]))
            for name in _FIT:
                setattr(program, name, float(row[name]))
            program.ratios.extend(float(ratio) for ratio in row["ratios"])
            times.programs[bucket] = program
        return times

    def _kv(self, work: StepWork) -> int:
        return work.longest if self.kv_cost == "longest" else work.all

    def _prior(self, bucket: Bucket) -> float:
        if self.kv_cost == "all":
            return self.common_slope
        return self.common_slope * bucket.num_tokens

    def _refresh(self) -> None:
        """Works the common slope out of all programs' sums: least squares of one factor."""
        self._num_until_refresh = REFRESH
        up = down = 0.0
        for bucket, program in self.programs.items():
            size = 1 if self.kv_cost == "all" else bucket.num_tokens
            up += size * program.kv_s
            down += size * size * program.kv_kv
        self.common_slope = max(0.0, up / down) if down else 0.0

    def _between(self, bucket: Bucket, work: StepWork) -> float:
        """Returns the seconds of a program nobody has seen: on the line between its neighbours by
        tokens; in proportion to the tokens beyond the largest, and the smallest's below it."""
        kv, size = self._kv(work), bucket.num_tokens
        known = [
            (other.num_tokens, program.predict(kv, self._prior(other)))
            for other, program in sorted(self.programs.items(), key=lambda item: item[0].num_tokens)
        ]
        if size <= known[0][0]:
            return known[0][1]
        for (size_1, seconds_1), (size_2, seconds_2) in itertools.pairwise(known):
            if size <= size_2:
                share = (size - size_1) / (size_2 - size_1) if size_2 > size_1 else 1.0
                return seconds_1 + share * (seconds_2 - seconds_1)
        return known[-1][1] * size / known[-1][0]


_SHAPE: Final = ("decode_seqs", "verify_tokens", "chunk_tokens")
_FIT: Final = ("weight", "mean_kv", "mean_s", "kv_kv", "kv_s", "deviation_s")


def _program_facts(
    bucket: Bucket, program: ProgramTimes, ratios: Iterable[float]
) -> dict[str, object]:
    facts: dict[str, object] = {"bucket": bucket.name}
    facts |= {name: getattr(bucket, name) for name in _SHAPE}
    facts["num_steps"] = program.num_steps
    facts |= {name: getattr(program, name) for name in _FIT}
    return {**facts, "ratios": list(ratios)}


def _find_problem(facts: object) -> str | None:
    """Returns why the facts are not those of `as_json`."""
    if not isinstance(facts, Mapping) or facts.get("format") != FORMAT:
        return f"it is not of format {FORMAT}"
    if facts.get("kv_cost") not in ("longest", "all"):
        return f"kv_cost is {facts.get('kv_cost')!r}, not longest or all"
    if not _is_number(facts.get("common_slope_s")):
        return "common_slope_s is no number"
    rows = facts.get("programs")
    if not isinstance(rows, list) or not rows:
        return "it has no programs that ran often enough; measure a longer run"
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            return f"program {place} is no object"
        for name in (*_SHAPE, "num_steps", *_FIT):
            if not _is_number(row.get(name)):
                return f"program {place} has no number {name}"
        sizes = [row[name] for name in _SHAPE]
        if not all(float(number).is_integer() for number in (*sizes, row["num_steps"])):
            return f"program {place} has a size or a count that is not whole"
        if min(*sizes, row["mean_kv"], row["kv_kv"], row["deviation_s"]) < 0:
            return f"program {place} has a number below 0"
        if min(max(sizes), row["num_steps"], row["weight"], row["mean_s"]) <= 0:
            return f"program {place} has a size or a time that is not above 0"
        ratios = row.get("ratios")
        if not isinstance(ratios, list) or not ratios or not all(map(_is_number, ratios)):
            return f"program {place} has no list of numbers ratios"
        if min(ratios) < 0:
            return f"program {place} has a ratio below 0"
    return None


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_NUMBER  # type: ignore[arg-type]
