"""The steps on the device: launched by a plan, read in the same order."""

import collections
import logging

from jaxserve.engine.step_clock import StepClock
from jaxserve.metrics import Metrics
from jaxserve.plan import InFlight, Runner, StepMasks, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Pipeline:
    """Holds the launched steps, oldest first. The engine thread alone uses it."""

    def __init__(self, runner: Runner, *, depth: int, metrics: Metrics, clock: StepClock) -> None:
        """Args:
        depth: steps launched before the oldest must be read.
        clock: cut at what the runner does.
        """
        self._runner = runner
        self._depth = depth
        self._metrics = metrics
        self._clock = clock
        self._steps: collections.deque[tuple[StepPlan, InFlight]] = collections.deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._depth

    @property
    def is_ready(self) -> bool:
        """Whether the oldest step's result is there."""
        return bool(self._steps) and self._steps[0][1].is_ready()

    def launch(self, plan: StepPlan) -> None:
        """Dispatches a step without waiting for it; without its output, where that needs masks."""
        if self._steps:
            self._metrics.overlapped_steps.inc()
        logger.debug(
            "launched step=%d chunks=%d tokens=%d",
            plan.step_id,
            plan.num_chunks,
            plan.num_tokens,
        )
        in_flight = self._runner.launch(plan, self._clock)
        self._clock.note_launch(plan, in_flight)
        self._steps.append((plan, in_flight))
        self._metrics.step_tokens.observe(plan.num_tokens)

    def launch_output(self, masks: StepMasks) -> None:
        """Dispatches the output of the newest step, all others being retired."""
        ((plan, in_flight),) = self._steps
        assert plan.needs_masks, f"step {plan.step_id} has its output already"
        in_flight.launch_output(masks)
        self._clock.lap("dispatch")

    def retire(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest step and returns what came of it."""
        plan, in_flight = self._steps.popleft()
        result = in_flight.result()
        self._clock.note_result(result)
        return plan, result

    def clear(self) -> None:
        """Forgets them: the device is of no use any more."""
        self._steps.clear()
