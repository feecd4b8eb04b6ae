"""What the steps of a runner ran, counted by shape."""

from collections.abc import Collection
from typing import Final, get_args

from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, StepPlan
from jaxserve.runner.buckets import BucketScheme, OutputBucket
from jaxserve.runner.programs import ProgramKey, SideKind, bucket_name
from jaxserve.runner.spec import RunnerSpec

SIDE_KINDS: Final[tuple[SideKind, ...]] = get_args(SideKind)


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
        for bucket in scheme.forwards:
            name = bucket_name(bucket)
            for counter in (
                metrics.steps, metrics.real_tokens, metrics.padded_tokens,
                metrics.step_device_seconds, metrics.bucket_fallbacks, metrics.captured_steps,
                metrics.recompiles,
            ):  # fmt: skip
                counter.labels(bucket=name)
        for output in scheme.outputs:
            metrics.output_programs.labels(bucket=bucket_name(output), variant=output.variant)
        self._side_programs = {kind: metrics.side_programs.labels(kind=kind) for kind in SIDE_KINDS}

    def count_step(self, plan: StepPlan, bucket: Bucket, output: OutputBucket | None) -> None:
        """Counts a step that was launched.

        Args:
          output: None where nothing is sampled.
        """
        metrics, name, real = self._metrics, bucket_name(bucket), plan.num_tokens
        metrics.steps.labels(bucket=name).inc()
        metrics.real_tokens.labels(bucket=name).inc(real)
        metrics.padded_tokens.labels(bucket=name).inc(bucket.num_tokens - real)
        scored = (chunk.scoring.targets for chunk in plan.chunks if chunk.scoring)
        metrics.scored_tokens.inc(sum(map(len, scored)))
        if not self._scheme.is_largest(bucket):
            metrics.bucketed_steps.inc()
        if self._is_invariant:
            metrics.batch_invariant_steps.inc()
        if self._is_quantized:
            metrics.quantized_kv_tokens.inc(real)
        if self._scheme.is_fallback(bucket, plan):
            metrics.bucket_fallbacks.labels(bucket=name).inc()
        if bucket in self._captured and (output is None or output in self._captured):
            metrics.captured_steps.labels(bucket=name).inc()

    def count_output(self, output: OutputBucket) -> None:
        labels = {"bucket": bucket_name(output), "variant": output.variant}
        self._metrics.output_programs.labels(**labels).inc()

    def count_side(self, kind: SideKind, num_runs: int = 1) -> None:
        """Counts programs that a step ran beside its forward and its output."""
        self._side_programs[kind].inc(num_runs)
