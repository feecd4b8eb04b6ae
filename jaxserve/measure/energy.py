"""Energy of a run, from the machine's own counters: RAPL for the processor, NVML for GPUs.

What cannot be read is said with the reason; it is never taken for zero.
"""

# ruff: noqa: N802  # the names of NVML are its own

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from jaxserve.engine.machine import read_gpus

POWERCAP: Final = Path("/sys/class/powercap")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Energy:
    """What was used since a meter was made.

    Attributes:
      parts: joules of each part that can be read: "cpu", "gpu".
      missing: the other parts, with the reason.
    """

    parts: Mapping[str, float]
    missing: Mapping[str, str]

    @property
    def joules(self) -> float | None:
        """Of the parts together; None where none can be read."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def reason(self) -> str:
        """What is missing and why; "" where nothing is."""
        return "; ".join(f"{part}: {why}" for part, why in self.missing.items())

    def per_token(self, num_tokens: int) -> float | None:
        """Returns joules by token; None where energy is not known, or no token was paid for."""
        joules = self.joules
        return None if joules is None or not num_tokens else joules / num_tokens


class NotReadableError(Exception):
    """A counter cannot be read; the message says why."""


class Counter(Protocol):
    """A counter of one part: RAPL's, NVML's, or a test's."""

    def read(self) -> float:
        """Returns the joules since the counter was made.

        Raises:
          NotReadableError: it cannot be read (any more).
        """
        ...


class EnergyMeter:
    """Adds up what each part used since it was made. A part that fails once stays missing.

    To be read at least every half minute, even where only the end matters: a processor's counter
    goes round (65 kJ on some), and two rounds between readings cannot be told from one.
    """

    def __init__(self, counters: Mapping[str, Counter], missing: Mapping[str, str]) -> None:
        """Args:
        missing: parts without a counter, with the reason.
        """
        self._counters = dict(counters)
        self._missing = dict(missing)

    def read(self) -> Energy:
        parts: dict[str, float] = {}
        for part, counter in list(self._counters.items()):
            try:
                parts[part] = counter.read()
            except NotReadableError as error:
                self._missing[part] = f"not readable: {error}"
                del self._counters[part]
        return Energy(parts=parts, missing=dict(self._missing))


def start_meter(powercap: Path = POWERCAP) -> EnergyMeter:
    """Returns a meter of all that this machine lets be read; it counts from now."""
    counters: dict[str, Counter] = {}
    missing: dict[str, str] = {}
    try:
        counters["cpu"] = RaplCounter(powercap)
    except NotReadableError as error:
        missing["cpu"] = f"not readable: {error}"
    try:
        if not read_gpus():
            raise NotReadableError("this machine has no NVIDIA GPU")
        counters["gpu"] = NvmlCounter(_load_nvml())
    except NotReadableError as error:
        missing["gpu"] = f"not readable: {error}"
    return EnergyMeter(counters, missing)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Zone:
    """One RAPL domain; its counter goes from 0 to `range_uj` and begins again."""

    path: Path
    range_uj: int
    last_uj: int
    used_uj: int = 0


class RaplCounter:
    """Processor packages and their memory, by Linux's powercap files.

    https://www.kernel.org/doc/html/latest/power/powercap/powercap.html. The zone `psys` holds the
    packages too, and cores and graphics are within theirs: those are left out.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        """Raises NotReadableError where there is no zone, or none that may be read."""
        paths = [path for path in sorted(powercap.glob("intel-rapl:*")) if _is_counted(path)]
        if not paths:
            raise NotReadableError(f"no RAPL counters in {powercap}")
        self._zones = [
            _Zone(
                path=path,
                range_uj=_read_number(path / "max_energy_range_uj"),
                last_uj=_read_number(path / "energy_uj"),
            )
            for path in paths
        ]

    def read(self) -> float:
        for zone in self._zones:
            now_uj = _read_number(zone.path / "energy_uj")
            used_uj = now_uj - zone.last_uj
            zone.used_uj += used_uj if used_uj >= 0 else used_uj + zone.range_uj
            zone.last_uj = now_uj
        return sum(zone.used_uj for zone in self._zones) / 1e6


def _is_counted(zone: Path) -> bool:
    try:
        name = (zone / "name").read_text().strip()
    except OSError:
        return False
    return name.startswith("package") or name == "dram"


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError as error:
        raise NotReadableError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise NotReadableError(f"{path}: {error}") from error


class Nvml(Protocol):
    """What is used of the package nvidia-ml-py."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int: ...


class NvmlCounter:
    """All GPUs of the machine together, in millijoules since their driver was loaded."""

    def __init__(self, nvml: Nvml) -> None:
        """Raises NotReadableError where there is no driver, no GPU, or one without a counter."""
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._devices = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]
        except nvml.NVMLError as error:
            raise NotReadableError(f"NVML: {error}") from error
        if not self._devices:
            raise NotReadableError("NVML sees no GPU")
        self._first_mj = self._read_mj()

    def read(self) -> float:
        now_mj = self._read_mj()
        if any(now < first for now, first in zip(now_mj, self._first_mj, strict=True)):
            raise NotReadableError("a GPU's counter went back: its driver was loaded again")
        return (sum(now_mj) - sum(self._first_mj)) / 1e3

    def _read_mj(self) -> Sequence[int]:
        try:
            return [
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in self._devices
            ]
        except self._nvml.NVMLError as error:
            raise NotReadableError(f"NVML: {error}") from error


def _load_nvml() -> Nvml:
    try:
        nvml: Nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise NotReadableError(
            "nvidia-ml-py is not installed; pip install 'jaxserve[nvidia]'"
        ) from error
    return nvml
