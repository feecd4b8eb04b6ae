"""A launched step, until its result is read."""

import jax

from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket, Laps, StepResult


class LaunchedStep:
    """A step on the device. Its result is read once; then the array behind it is gone."""

    def __init__(
        self,
        result: jax.Array,
        *,
        sequence_ids: tuple[int, ...],
        bucket: Bucket,
        metrics: Metrics,
        laps: Laps,
    ) -> None:
        """Holds what the device will fill.

        Args:
          result: `result_R3` of the output program; where nothing is sampled, a scalar that is
            ready when the forward is done.
          sequence_ids: whose token is in each row of the result; the rows after them are padding.
          laps: told of the wait and the readback.
        """
        self._result: jax.Array | None = result
        self._sequence_ids = sequence_ids
        self._bucket = bucket
        self._metrics = metrics
        self._laps = laps

    def start_copy(self) -> None:
        """Has the result copied to the host as soon as it is there."""
        assert self._result is not None, "the copy is started before the result is read"
        with jax.transfer_guard_device_to_host("allow"):  # on a GPU this counts as implicit
            self._result.copy_to_host_async()

    def is_ready(self) -> bool:
        result = self._result
        return result is None or bool(result.is_ready())  # type: ignore[attr-defined]  # is there

    def result(self) -> StepResult:
        """Waits for the device and returns the sampled tokens."""
        assert self._result is not None, "a step's result can be read only once"
        with jax.transfer_guard("disallow"):
            self._result.block_until_ready()
            self._laps.lap("wait")
            result = jax.device_get(self._result)
        self._result = None
        if not self._sequence_ids:
            rows = []
        else:
            rows = result[: len(self._sequence_ids)].tolist()
            self._metrics.sampler_fallbacks.inc(int(result[0, 2]))
        self._laps.lap("readback")
        return StepResult(
            token_ids={id_: row[0] for id_, row in zip(self._sequence_ids, rows, strict=True)},
            not_finite=frozenset(
                id_ for id_, row in zip(self._sequence_ids, rows, strict=True) if not row[1]
            ),
            bucket=self._bucket,
        )
