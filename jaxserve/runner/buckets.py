"""The bounded list of padded shapes that are compiled, and the choice among them."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Protocol, get_args

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.model.sampling import Variant
from jaxserve.plan import Bucket, StepLimits, StepPlan

# From the least the sampler can do to the most: each can stand in for those before it.
VARIANTS: tuple[Variant, ...] = get_args(Variant)


class _HasTokens(Protocol):
    @property
    def num_tokens(self) -> int: ...


@dataclasses.dataclass(slots=True, frozen=True, order=True, kw_only=True)
class OutputBucket:
    """The padded shape of an output program: rows to sample, and how much the sampler can do."""

    rows: int
    variant: Variant

    @property
    def num_tokens(self) -> int:
        return self.rows


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Reach:
    """All that one request alone can ask of the runner: what `generate` has to compile.

    Attributes:
      num_choices: sequences that it becomes.
      has_scoring: it asks for its prompt's log-probabilities.
    """

    prompt_len: int
    max_tokens: int
    variant: Variant
    num_choices: int = 1
    has_scoring: bool = False


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class BucketScheme:
    """The shapes of the forward and the output programs.

    Within `limits` every step fits one of them: the largest forward bucket is at least as large
    as any other in both dimensions.
    """

    forwards: tuple[Bucket, ...]
    outputs: tuple[OutputBucket, ...]
    limits: StepLimits

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step: rows of the hidden-state buffer."""
        return max(bucket.num_tokens for bucket in self.forwards)

    def find_bucket(self, num_rows: int, tile_tokens: int) -> Bucket:
        """Returns the smallest forward bucket for these one-token rows and tile-rounded tokens."""
        return _smallest(
            (
                bucket
                for bucket in self.forwards
                if bucket.decode_seqs >= num_rows and bucket.chunk_tokens >= tile_tokens
            ),
            f"{num_rows} one-token rows and {tile_tokens} chunk tokens",
            self.limits,
        )

    def find_output(self, num_rows: int, variant: Variant) -> OutputBucket:
        """Returns the smallest output bucket whose variant does at least `variant`."""
        able = VARIANTS[VARIANTS.index(variant) :]
        fitting = [b for b in self.outputs if b.rows >= num_rows and b.variant in able]
        simplest = min((able.index(b.variant) for b in fitting), default=0)
        return _smallest(
            (b for b in fitting if b.variant == able[simplest]),
            f"{num_rows} rows to sample with {variant!r}",
            self.limits,
        )

    def is_largest(self, bucket: Bucket) -> bool:
        """Whether no bucket of the same kind (with or without chunks) is larger."""
        same_kind = (b for b in self.forwards if (b.chunk_tokens > 0) == (bucket.chunk_tokens > 0))
        return bucket.num_tokens == max(b.num_tokens for b in same_kind)

    def is_fallback(self, bucket: Bucket, plan: StepPlan) -> bool:
        """Whether a bucket is larger than the plan's rows and chunks ask for, each by itself: the
        two sizes together were not compiled."""
        num_rows, tile_tokens = plan_shape(plan, tile=self.limits.chunk_tile)
        return any(
            num_rows <= other.decode_seqs < bucket.decode_seqs
            or tile_tokens <= other.chunk_tokens < bucket.chunk_tokens
            for other in self.forwards
        )

    def reachable(self, reach: Reach, *, max_step_tokens: int | None) -> "BucketScheme":
        """Returns the part of the scheme that a single request can reach, and its limits.

        A prompt within the step's budget is one chunk; a longer one may be cut anywhere, so it
        reaches every smaller chunk bucket too. Of several choices one may compute a chunk once
        more while the others decode.
        """
        forwards = set()
        if reach.max_tokens > 1 or reach.prompt_len == 1:
            forwards.add(self.find_bucket(reach.num_choices, 0))
        if reach.prompt_len > 1:
            forwards |= self._reachable_chunks(reach, max_step_tokens)
        largest = max(forwards, key=lambda bucket: bucket.chunk_tokens)
        return BucketScheme(
            forwards=tuple(sorted(forwards)),
            outputs=(self.find_output(reach.num_choices, reach.variant),),
            limits=dataclasses.replace(
                self.limits,
                max_rows=reach.num_choices,
                max_chunk_tokens=largest.chunk_tokens,
                max_seqs=reach.num_choices,
            ),
        )

    def _reachable_chunks(self, reach: Reach, max_step_tokens: int | None) -> set[Bucket]:
        prompt_len, num_beside = reach.prompt_len, reach.num_choices - 1
        budget = min(self.limits.max_chunk_tokens, max_step_tokens or self.limits.max_chunk_tokens)
        tile = self.limits.chunk_tile
        largest = self.find_bucket(num_beside, round_up(min(prompt_len, budget), tile))
        if prompt_len <= budget:
            return {largest}
        # The last piece may be one token: a one-token row, alone in its step.
        sizes = range(tile, largest.chunk_tokens + 1, tile)
        smaller = {self.find_bucket(num_beside, n) for n in sizes}
        return smaller | {self.find_bucket(reach.num_choices, 0)}


def plan_shape(plan: StepPlan, *, tile: int) -> tuple[int, int]:
    """Returns a plan's one-token rows, and the tile-rounded tokens of its chunks."""
    return plan.num_rows, sum(round_up(chunk.num_tokens, tile) for chunk in plan.longer)


def build_scheme(config: Config, *, max_model_tokens: int, min_rows: int) -> BucketScheme:
    """Returns the shapes that `config` asks for.

    Args:
      max_model_tokens: longest sequence; without chunked prefill the largest chunk bucket holds it.
      min_rows: fewest rows a program may have: 2 where one-row matrix products are slow.
    """
    buckets, scheduler = config.buckets, config.scheduler
    max_rows = max(scheduler.max_seqs, min_rows)
    decode_sizes = _clip(buckets.decode_seqs, low=min_rows, high=max_rows)
    beside_sizes = _clip(buckets.chunk_decode_seqs, low=min_rows, high=max_rows)
    chunk_sizes = _chunk_sizes(config, max_model_tokens)
    if not buckets.capture:
        decode_sizes, beside_sizes, chunk_sizes = (max_rows,), (max_rows,), chunk_sizes[-1:]
    forwards = [_bucket(rows, 0) for rows in decode_sizes]
    forwards += itertools.starmap(_bucket, itertools.product(beside_sizes, chunk_sizes))
    # A second row is free there: the head takes as long as its weights take to come from memory.
    output_sizes = _clip(decode_sizes, low=min(2, max_rows), high=max_rows)
    outputs = list(itertools.product(output_sizes, VARIANTS))
    if config.runner.batch_invariant:  # another shape, or another variant, is another sum
        forwards, outputs = [_bucket(max_rows, chunk_sizes[-1])], [(max_rows, VARIANTS[-1])]
    return BucketScheme(
        forwards=tuple(sorted(forwards)),
        outputs=tuple(OutputBucket(rows=rows, variant=variant) for rows, variant in outputs),
        limits=StepLimits(
            max_rows=max_rows,
            max_chunk_tokens=chunk_sizes[-1],
            chunk_tile=buckets.chunk_tile,
            max_chunks=scheduler.max_chunks,
            max_seqs=scheduler.max_seqs,
        ),
    )


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def _chunk_sizes(config: Config, max_model_tokens: int) -> tuple[int, ...]:
    """Returns tile-rounded chunk sizes; whole prompts double up from the listed sizes."""
    tile, scheduler = config.buckets.chunk_tile, config.scheduler
    listed = {round_up(size, tile) for size in config.buckets.chunk_tokens}
    longest = round_up(max_model_tokens, tile)
    if scheduler.chunked_prefill:
        # No step can hold more than each of its sequences at full length.
        return tuple(sorted({min(size, longest * scheduler.max_chunks) for size in listed}))
    if scheduler.max_step_tokens is not None and scheduler.max_step_tokens < max_model_tokens:
        raise ConfigError(
            f"scheduler.max_step_tokens is {scheduler.max_step_tokens}, but without "
            f"scheduler.chunked_prefill a step must hold a whole sequence of {max_model_tokens} "
            "tokens; raise it, leave it unset, or lower model.max_model_tokens"
        )
    sizes = {size for size in listed if size < longest} | {longest}
    size = max(listed)
    while 2 * size < longest:
        size *= 2
        sizes.add(size)
    return tuple(sorted(sizes))


def _clip(sizes: Iterable[int], *, low: int, high: int) -> tuple[int, ...]:
    """Returns `sizes` within [low, high], with `high` among them."""
    return tuple(sorted({max(size, low) for size in sizes if size <= high} | {high}))


def _bucket(decode_seqs: int, chunk_tokens: int) -> Bucket:
    return Bucket(decode_seqs=decode_seqs, verify_tokens=1, chunk_tokens=chunk_tokens)


def _smallest[B: _HasTokens](fitting: Iterable[B], wanted: str, limits: StepLimits) -> B:
    smallest = min(fitting, key=lambda bucket: bucket.num_tokens, default=None)
    assert smallest is not None, f"no bucket for {wanted}: the plan is beyond {limits}"
    return smallest
