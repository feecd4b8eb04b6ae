"""Times whole steps of a runner that holds random weights. Part of scripts/gpu_report.py."""

import dataclasses
import statistics
import time
from typing import Final

from jaxserve.plan import Chunk, RowLoad, StepPlan
from jaxserve.request import SamplingParams
from jaxserve.runner.runner import Runner

NUM_STEPS: Final = 40
NUM_WARM_UP: Final = 8


def pages_for(kv_len: int, page_size: int) -> int:
    """Returns the pages of a row that holds `kv_len` tokens at first."""
    return -(-(kv_len + NUM_STEPS + NUM_WARM_UP + 2) // page_size)


@dataclasses.dataclass(kw_only=True)
class StepTimes:
    """Seconds.

    Attributes:
      step_s: from one result to the next.
      launch_s: of the host in `launch`.
      device_s: of a step where the host is far ahead and reads no result.
    """

    step_s: float
    launch_s: float
    device_s: float


class Driver:
    """Plans steps for rows that hold `kv_len` tokens."""

    def __init__(self, runner: Runner, *, kv_len: int, page_size: int) -> None:
        self._runner = runner
        self._kv_len = kv_len
        self._pages_per_row = pages_for(kv_len, page_size)
        self._next_step = 1

    def decode(self, num_rows: int, sampling: SamplingParams) -> StepTimes:
        """Runs steps of one token for each row, the next launched before the last is read."""
        loads = tuple(
            RowLoad(
                sequence_id=row,
                row=row,
                pages=tuple(1 + row * self._pages_per_row + i for i in range(self._pages_per_row)),
                sampling=sampling,
                seed=row,
                choice=0,
                stop_ids=(),
            )
            for row in range(num_rows)
        )
        in_flight = self._runner.launch(self._plan(0, num_rows, loads))
        steps, launches = [], []
        for i in range(1, NUM_STEPS + NUM_WARM_UP):
            start = time.perf_counter()
            following = self._runner.launch(self._plan(i, num_rows, ()))
            launches.append(time.perf_counter() - start)
            in_flight.result()
            steps.append(time.perf_counter() - start)
            in_flight = following
        in_flight.result()
        start = time.perf_counter()
        ahead = [self._runner.launch(self._plan(i, num_rows, ())) for i in range(1, NUM_STEPS)]
        for one in ahead:
            one.result()
        device_s = (time.perf_counter() - start) / len(ahead)
        return StepTimes(
            step_s=statistics.median(steps[NUM_WARM_UP:]),
            launch_s=statistics.median(launches[NUM_WARM_UP:]),
            device_s=device_s,
        )

    def prefill(self, num_tokens: int) -> float:
        """Returns the median seconds of a step with one chunk, from launch to result."""
        times = []
        for i in range(NUM_WARM_UP + 10):
            chunk = Chunk(
                sequence_id=0,
                row=0,
                start=0,
                num_tokens=num_tokens,
                token_ids=(5,) * num_tokens,
                samples=True,
                output_index=0,
                prompt_len=num_tokens,
            )
            start = time.perf_counter()
            self._runner.launch(StepPlan(step_id=self._take_step(), others=(chunk,))).result()
            if i >= NUM_WARM_UP:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _plan(self, index: int, num_rows: int, loads: tuple[RowLoad, ...]) -> StepPlan:
        chunks = tuple(
            Chunk(
                sequence_id=row,
                row=row,
                start=self._kv_len + index,
                num_tokens=1,
                token_ids=(5,) if loads else None,
                samples=True,
                output_index=index,
                prompt_len=self._kv_len,
            )
            for row in range(num_rows)
        )
        return StepPlan(step_id=self._take_step(), others=chunks, row_loads=loads)

    def _take_step(self) -> int:
        self._next_step += 1
        return self._next_step - 1
