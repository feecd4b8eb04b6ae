"""A device that takes the time a model says, and computes nothing."""

import random
from collections.abc import Sequence

from jaxserve.plan import Bucket, StepLimits, StepPlan, StepResult
from jaxserve.scheduler.step_time import StepTimes, measure_work


class VirtualDevice:
    """Runs steps one after the other in virtual time; every sampled token is 0.

    Attributes:
      free_s: when the last step launched is done.
    """

    def __init__(
        self,
        times: StepTimes,
        *,
        limits: StepLimits,
        buckets: Sequence[Bucket],
        jitter: random.Random | None = None,
    ) -> None:
        """Args:
        buckets: the programs there are.
        jitter: draws each step's deviation from those that were measured; None has none.
        """
        assert times, "a device without any step time"
        self.limits = limits
        self.free_s = 0.0
        self._times = times
        self._buckets = sorted(buckets, key=lambda bucket: bucket.num_tokens)
        self._tile = limits.chunk_tile
        self._jitter = jitter
        self._chosen: dict[tuple[int, int], Bucket] = {}
        self._ratios = {bucket: times.ratio_quantiles(bucket) for bucket in buckets}

    def launch(self, plan: StepPlan, now_s: float) -> tuple[float, StepResult]:
        """Returns when a step is done, and its result."""
        num_rows = tile_tokens = 0
        token_ids: dict[int, int] = {}
        for chunk in plan.chunks:
            if chunk.num_tokens == 1:
                num_rows += 1
            else:
                tile_tokens += -(-chunk.num_tokens // self._tile) * self._tile
            if chunk.samples:
                token_ids[chunk.sequence_id] = 0
                for fork in chunk.forks:
                    token_ids[fork.sequence_id] = 0
        bucket = self._find_bucket(num_rows, tile_tokens)
        seconds = self._times.predict(bucket, measure_work(plan))
        assert seconds is not None, "there are step times"
        if self._jitter is not None:
            ratios = self._ratios[bucket]
            seconds *= ratios[int(self._jitter.random() * len(ratios))]
        self.free_s = max(now_s, self.free_s) + seconds
        result = StepResult(token_ids=token_ids, not_finite=frozenset(), bucket=bucket)
        return self.free_s, result

    def _find_bucket(self, num_rows: int, tile_tokens: int) -> Bucket:
        found = self._chosen.get((num_rows, tile_tokens))
        if found is None:
            found = next(
                bucket
                for bucket in self._buckets
                if bucket.decode_seqs >= num_rows and bucket.chunk_tokens >= tile_tokens
            )
            self._chosen[num_rows, tile_tokens] = found
        return found
