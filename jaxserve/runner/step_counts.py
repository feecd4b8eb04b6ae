"""What the steps of a runner ran, counted by shape."""

from collections.abc import Collection
from typing import Final, get_args

from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, StepPlan
from jaxserve.runner.buckets import BucketScheme, OutputBucket
from jaxserve.runner.lowering import ProgramKey, SideKind, bucket_name
from jaxserve.runner.spec import RunnerSpec

SIDE_KINDS: Final[tuple[SideKind, ...]] = get_args(SideKind)


class _BucketCounters:
    """The counters of one shape: to look a label up takes as long as to count."""

    def __init__(self, metrics: Metrics, bucket: Bucket) -> None:
        name = bucket_name(bucket)
        self.steps = metrics.steps.labels(bucket=name)
        self.real_tokens = metrics.real_tokens.labels(bucket=name)
        self.padded_tokens = metrics.padded_tokens.labels(bucket=name)
        self.fallbacks = metrics.bucket_fallbacks.labels(bucket=name)
        self.captured_steps = metrics.captured_steps.labels(bucket=name)


class StepCounts:
    """Counts on the engine's thread; a shape that never ran shows as 0."""

    def __init__(
        self,
        metrics: Metrics,
        scheme: BucketScheme,
        spec: RunnerSpec,
        *,
        captured: Collection[ProgramKey],
    ) -> None:
        """
        Args:
          captured: the programs that are one CUDA graph each.
        """
        self._metrics = metrics
        self._scheme = scheme
        self._is_invariant = spec.batch_invariant
        self._is_quantized = bool(spec.kv_scales)
        self._captured = {key.bucket for key in captured if key.bucket is not None}
        self._buckets = {bucket: _BucketCounters(metrics, bucket) for bucket in scheme.forwards}
        self._largest = {bucket for bucket in scheme.forwards if scheme.is_largest(bucket)}
        for bucket in scheme.forwards:
            for counter in (metrics.step_device_seconds, metrics.recompiles):
                counter.labels(bucket=bucket_name(bucket))
        self._outputs = {
            output: metrics.output_programs.labels(
                bucket=bucket_name(output), variant=output.variant
            )
            for output in scheme.outputs
        }
        self._side_programs = {kind: metrics.side_programs.labels(kind=kind) for kind in SIDE_KINDS}

    def count_step(self, plan: StepPlan, bucket: Bucket, output: OutputBucket | None) -> None:
        """Counts a step that was launched.

        Args:
          output: None where nothing is sampled.
        """
        metrics, counters, real = self._metrics, self._buckets[bucket], plan.num_tokens
        counters.steps.inc()
        counters.real_tokens.inc(real)
        counters.padded_tokens.inc(bucket.num_tokens - real)
        if plan.scored:
            metrics.scored_tokens.inc(sum(len(scoring.targets) for _, scoring in plan.scored))
        if bucket not in self._largest:
            metrics.bucketed_steps.inc()
        if self._is_invariant:
            metrics.batch_invariant_steps.inc()
        if self._is_quantized:
            metrics.quantized_kv_tokens.inc(real)
        if self._scheme.is_fallback(bucket, plan):
            counters.fallbacks.inc()
        if bucket in self._captured and (output is None or output in self._captured):
            counters.captured_steps.inc()

    def count_output(self, output: OutputBucket) -> None:
        self._outputs[output].inc()

    def count_side(self, kind: SideKind, num_runs: int = 1) -> None:
        """Counts programs that a step ran beside its forward and its output."""
        self._side_programs[kind].inc(num_runs)
