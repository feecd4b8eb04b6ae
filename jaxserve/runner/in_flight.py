"""A launched step, until its result is read."""

from collections.abc import Callable, Sequence

import jax

from jaxserve.metrics import Metrics
from jaxserve.plan import Laps, StepMasks, StepResult
from jaxserve.runner.results import ResultLayout, read_result

# Dispatches a step's output under masks and returns its result.
LaunchOutput = Callable[[StepMasks], jax.Array]


def _keep_nothing() -> None:
    return None


class LaunchedStep:
    """A step on the device. Its result is read once; then the arrays behind it are gone."""

    def __init__(
        self,
        forward_done: jax.Array,
        *,
        scores: Sequence[jax.Array],
        layout: ResultLayout,
        metrics: Metrics,
        laps: Laps,
    ) -> None:
        """Holds what the device will fill; what is sampled is told by one of the two methods below.

        Args:
          forward_done: ready when the forward is done.
          scores: of the score program.
          laps: told of the wait and the readback.
        """
        self._arrays: list[jax.Array] | None = [*scores] or [forward_done]
        self._num_scores = len(scores)
        self._layout = layout
        self._keep_pages = _keep_nothing
        self._launch_output: LaunchOutput | None = None
        self._has_output = False
        self._metrics = metrics
        self._laps = laps
        for array in self._arrays:
            _start_copy(array)

    def add_output(self, output_RI: jax.Array) -> None:
        """Takes what the output program will fill."""
        assert self._arrays is not None, "the output is launched before the result is read"
        _start_copy(output_RI)
        self._arrays.append(output_RI)
        self._has_output = True

    def add_page_reads(self, keep_pages: Callable[[], None]) -> None:
        """Takes what is to be done with the pages that this step swaps out, once it is done."""
        self._keep_pages = keep_pages

    def await_masks(self, launch_output: LaunchOutput) -> None:
        """Leaves the output to `launch_output`."""
        self._launch_output = launch_output

    def is_ready(self) -> bool:
        if self._arrays is None:
            return True
        if self._launch_output is not None:
            return False
        return all(array.is_ready() for array in self._arrays)  # type: ignore[attr-defined]  # is there

    def launch_output(self, masks: StepMasks) -> None:
        """Dispatches the output of a step that waits for masks, once. They are copied."""
        launch_output = self._launch_output
        assert launch_output is not None, "a step's output is launched once, and only under masks"
        self._launch_output = None
        self.add_output(launch_output(masks))
        self._laps.lap("dispatch")

    def result(self) -> StepResult:
        """Waits for the device and returns what came of the step."""
        assert self._launch_output is None, "a step's masks come before its result is read"
        assert self._arrays is not None, "a step's result can be read only once"
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(self._arrays)
            self._laps.lap("wait")
            arrays = jax.device_get(self._arrays)
            self._keep_pages()
        self._arrays = None
        output_RI = arrays[-1] if self._has_output else None
        result = read_result(self._layout, output_RI, arrays[: self._num_scores])
        if output_RI is not None:
            self._metrics.sampler_fallbacks.inc(int(output_RI[0, 2]))
        self._laps.lap("readback")
        return result


def _start_copy(array: jax.Array) -> None:
    """Has an array copied to the host as soon as it is there."""
    with jax.transfer_guard_device_to_host("allow"):  # on a GPU this counts as implicit
        array.copy_to_host_async()
