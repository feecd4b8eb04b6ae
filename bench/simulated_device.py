"""A device that takes a fixed time a step: what a runner's programs are on it."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.metrics import Metrics
from jaxserve.runner.buckets import OutputBucket
from jaxserve.runner.lowering import ProgramKey, lower
from jaxserve.runner.programs import Programs, Progress

RESULT_TOKEN: Final = 0  # columns of a result row, as runner/results.py has them
RESULT_IS_FINITE: Final = 1


class SimulatedDevice:
    """Runs what is launched in the order of launch, each part for its time.

    Attributes:
      busy_s: time it had work.
      gap_s: time between the end of all that it had and the next launch: exposed host time.
      waited_s: time that the host waited for it.
      num_steps: forwards.
    """

    def __init__(self, *, forward_s: float, output_s: float, tokens: np.ndarray) -> None:
        """Args:
        tokens: what rows sample, each from a place of its own on.
        """
        self._seconds = {"forward": forward_s, "output": output_s}
        self._tokens = tokens
        self._free_s = 0.0
        self.reset()

    def reset(self) -> None:
        self.busy_s = self.gap_s = self.waited_s = 0.0
        self.num_steps = 0

    def launch(self, kind: str) -> float:
        """Returns when a program that is launched now is done."""
        now_s, seconds = time.perf_counter(), self._seconds[kind]
        self.gap_s += max(0.0, now_s - self._free_s)
        self.busy_s += seconds
        self.num_steps += kind == "forward"
        self._free_s = max(now_s, self._free_s) + seconds
        return self._free_s

    def sample(self, rows_4R: np.ndarray, mask_RW: np.ndarray | None) -> np.ndarray:
        """Returns the tokens of a step's rows: text, or what their masks allow."""
        _, row_R, output_index_R, _ = rows_4R
        token_R: np.ndarray = self._tokens[(row_R * 61 + output_index_R) % len(self._tokens)]
        if mask_RW is not None:
            token_R = _allowed(token_R, mask_RW)
        return token_R

    def wait(self, ready_s: float) -> None:
        """Returns when it is as late as that."""
        started_s = time.perf_counter()
        if ready_s > started_s:
            time.sleep(ready_s - started_s)
        self.waited_s += time.perf_counter() - started_s


def _allowed(token_R: np.ndarray, mask_RW: np.ndarray) -> np.ndarray:
    """Returns each row's token where its mask has it, else the next above it that it has."""
    rows_R = np.arange(len(token_R))
    has_R = mask_RW[rows_R, token_R // 32] >> (token_R % 32).astype(np.uint32) & 1
    (rows_N,) = np.nonzero(has_R == 0)
    if len(rows_N):  # a few; the simulation shall take little time
        has_NW = mask_RW[rows_N] != 0
        above_NW = has_NW & (np.arange(mask_RW.shape[1]) > token_R[rows_N, None] // 32)
        words_N = np.where(above_NW.any(1), above_NW.argmax(1), has_NW.argmax(1))
        bits_N = mask_RW[rows_N, words_N]
        token_R[rows_N] = 32 * words_N + np.log2(bits_N & -bits_N).astype(np.int32)
    return token_R


class Delayed:
    """What stands for an array that the device will have filled at a time."""

    def __init__(self, device: SimulatedDevice, kind: str, read: Callable[[], np.ndarray]) -> None:
        self._device = device
        self._ready_s = device.launch(kind)
        self._read = read
        self._array: np.ndarray | None = None

    def copy_to_host_async(self) -> None:
        return None

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._ready_s

    def block_until_ready(self) -> "Delayed":
        if self._array is None:
            self._array = self._read()
        self._device.wait(self._ready_s)
        return self

    def __array__(self) -> np.ndarray:
        assert self._array is not None
        return self._array


class SimulatedPrograms(Programs):
    """Programs that take and give the arrays of the real ones, and compute nothing.

    They are compiled and called by JAX, so a launch costs the host what it costs with a device. The
    results of a step are the simulated device's.
    """

    def __init__(self, metrics: Metrics, device: SimulatedDevice) -> None:
        super().__init__(metrics)
        self._device = device
        self._calls: dict[ProgramKey, Callable[..., Any]] = {}

    def __getitem__(self, key: ProgramKey) -> Any:  # noqa: ANN401  # as the real ones are called
        return self._calls[key]

    def __contains__(self, key: ProgramKey) -> bool:
        return key in self._calls

    def compile_all(
        self,
        keys: Iterable[ProgramKey],
        *,
        num_threads: int,
        cache_dir: Path | None,
        progress: Progress | None = None,
    ) -> None:
        for key in keys:
            self._calls[key] = self._build(key)

    def _build(self, key: ProgramKey) -> Callable[..., Any]:
        if key.kind == "init":
            return lower(key).compile()
        run = build_idle(lower(key))
        if key.kind == "forward":
            return self._time_forward(run)
        if isinstance(key.bucket, OutputBucket):
            return self._time_output(run)
        return run

    def _time_forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        device = self._device

        def forward(*arguments: object) -> object:
            *rest, _ = run(*arguments)
            return *rest, Delayed(device, "forward", lambda: np.zeros((), np.int32))

        return forward

    def _time_output(self, run: Callable[..., Any]) -> Callable[..., Any]:
        device = self._device

        def output(*arguments: Any) -> object:  # noqa: ANN401  # as above
            *rest, result_RI = run(*arguments)
            rows_4R, *masks = arguments[4:]

            def read() -> np.ndarray:
                mask_RW = np.asarray(masks[0]) if masks else None
                full_RI = np.zeros(result_RI.shape, np.int32)
                full_RI[:, RESULT_IS_FINITE] = 1
                full_RI[:, RESULT_TOKEN] = device.sample(np.asarray(rows_4R), mask_RW)
                return full_RI

            return *rest, Delayed(device, "output", read)

        return output


def build_idle(lowered: jax.stages.Lowered) -> Callable[..., Any]:
    """Returns a program with a real one's arguments and results, which gives back what it is given
    to replace, and zeros for the rest."""
    arguments, _ = lowered.args_info
    leaves = jax.tree.leaves(arguments)
    results, form = jax.tree.flatten(lowered.out_info)
    donated = [place for place, leaf in enumerate(leaves) if leaf.donated]
    sources: list[int | None] = []
    for result in results:
        same = (p for p in donated if leaves[p].shape == result.shape)
        source = next((p for p in same if leaves[p].dtype == result.dtype), None)
        if source is not None:
            donated.remove(source)
        sources.append(source)

    def idle(*given: object) -> object:
        flat = jax.tree.leaves(given)
        return jax.tree.unflatten(
            form,
            [
                jnp.zeros(result.shape, result.dtype) if source is None else flat[source]
                for result, source in zip(results, sources, strict=True)
            ],
        )

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    replaced = tuple(
        place
        for place, argument in enumerate(arguments)
        if any(leaf.donated for leaf in jax.tree.leaves(argument))
    )
    return jax.jit(idle, donate_argnums=replaced, keep_unused=True).lower(*shapes).compile()
