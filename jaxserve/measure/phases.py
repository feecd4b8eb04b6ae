"""What an engine's steps cost, read from its counters: the phases of docs/metrics.md."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from jaxserve.metrics import Metrics
from jaxserve.plan import HOST_PHASES, HostPhase


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StepCosts:
    """Seconds since an engine's start, or between two moments.

    Attributes:
      host_s: the engine thread's, by phase.
      device_s: device busy.
      gap_s: device without work while there were requests.
      num_steps: launched.
    """

    host_s: Mapping[HostPhase, float]
    device_s: float
    gap_s: float
    num_steps: int

    @classmethod
    def of(cls, metrics: Metrics) -> Self:
        """Reads the counters; while steps run they are up to a tenth of a second old."""
        return cls(
            host_s={
                phase: metrics.value("step_host_seconds_total", phase=phase)
                for phase in HOST_PHASES
            },
            device_s=metrics.value("step_device_seconds_total"),
            gap_s=metrics.value("step_gap_seconds_total"),
            num_steps=round(metrics.value("step_tokens_count")),
        )

    def since(self, before: Self) -> Self:
        """Returns what came after an earlier reading."""
        return dataclasses.replace(
            self,
            host_s={phase: self.host_s[phase] - before.host_s[phase] for phase in HOST_PHASES},
            device_s=self.device_s - before.device_s,
            gap_s=self.gap_s - before.gap_s,
            num_steps=self.num_steps - before.num_steps,
        )

    @property
    def busy_s(self) -> float:
        """The loop's time without idle."""
        return sum(self.host_s.values()) - self.host_s["idle"]

    @property
    def host_shares(self) -> Mapping[HostPhase, float]:
        """Shares of `busy_s`, the largest first; empty where there was nothing to do."""
        if not self.busy_s:
            return {}
        shares = {
            phase: seconds / self.busy_s
            for phase, seconds in self.host_s.items()
            if phase != "idle"
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def host_gap_share(self) -> float | None:
        """None where no step is known."""
        known_s = self.gap_s + self.device_s
        return self.gap_s / known_s if known_s else None
