"""`jaxserve`, but the device fails at the step whose number is the first argument."""

import sys
from typing import override

from jaxserve.cli.main import main
from jaxserve.plan import NO_LAPS, Laps, StepPlan
from jaxserve.runner import runner
from jaxserve.runner.in_flight import LaunchedStep

FAILS_AT = int(sys.argv.pop(1))


class BrokenRunner(runner.Runner):
    """A runner that fails once it has run for a while."""

    @override
    def launch(self, plan: StepPlan, laps: Laps = NO_LAPS) -> LaunchedStep:
        if plan.step_id >= FAILS_AT:
            raise RuntimeError("planted: the device is gone")
        return super().launch(plan, laps)


runner.Runner = BrokenRunner  # type: ignore[misc]  # engine/start.py takes it from there
sys.exit(main())
