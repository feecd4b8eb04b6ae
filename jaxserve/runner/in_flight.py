"""A launched step, until its result is read."""

import time

import jax

from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, StepResult


class LaunchedStep:
    """A step on the device. Its result is read once; then the array behind it is gone."""

    def __init__(
        self,
        result: jax.Array,
        *,
        sequence_ids: tuple[int, ...],
        bucket: Bucket,
        launched_s: float,
        metrics: Metrics,
    ) -> None:
        """Holds what the device will fill.

        Args:
          result: `result_R3` of the output program; where nothing is sampled, a scalar that is
            ready when the forward is done.
          sequence_ids: whose token is in each row of the result; the rows after them are padding.
          launched_s: on the clock of `time.perf_counter`.
        """
        self._result: jax.Array | None = result
        self._sequence_ids = sequence_ids
        self._bucket = bucket
        self._launched_s = launched_s
        self._metrics = metrics

    def start_copy(self) -> None:
        """Has the result copied to the host as soon as it is there."""
        assert self._result is not None, "the copy is started before the result is read"
        with jax.transfer_guard_device_to_host("allow"):  # on a GPU this counts as implicit
            self._result.copy_to_host_async()

    def result(self) -> StepResult:
        """Waits for the device and returns the sampled tokens."""
        assert self._result is not None, "a step's result can be read only once"
        with jax.transfer_guard("disallow"):
            result = jax.device_get(self._result)
        device_s = time.perf_counter() - self._launched_s
        self._result = None
        if not self._sequence_ids:
            rows = []
        else:
            rows = result[: len(self._sequence_ids)].tolist()
            self._metrics.sampler_fallbacks.inc(int(result[0, 2]))
        return StepResult(
            token_ids={id_: row[0] for id_, row in zip(self._sequence_ids, rows, strict=True)},
            not_finite=frozenset(
                id_ for id_, row in zip(self._sequence_ids, rows, strict=True) if not row[1]
            ),
            bucket=self._bucket,
            device_s=device_s,
        )
