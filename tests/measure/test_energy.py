"""Counters of energy, as files and as a library that the tests make up."""

# ruff: noqa: N802  # the names of NVML are its own

from pathlib import Path

import pytest

from jaxserve.measure import energy
from jaxserve.measure.energy import (
    Counter,
    Energy,
    EnergyMeter,
    NotReadableError,
    NvmlCounter,
    RaplCounter,
    start_meter,
)


def write_zone(folder: Path, zone: str, name: str, energy_uj: int, range_uj: int = 1000) -> None:
    path = folder / zone
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")


def test_packages_and_their_memory_are_added_and_what_is_within_them_is_not(tmp_path: Path) -> None:
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
    }
    for zone, name in zones.items():
        write_zone(tmp_path, zone, name, 100_000_000, 1 << 40)
    counter = RaplCounter(tmp_path)
    assert counter.read() == 0
    for amount, (zone, name) in enumerate(zones.items(), 1):
        write_zone(tmp_path, zone, name, 100_000_000 + amount * 1_000_000, 1 << 40)
    assert counter.read() == 1 + 3 + 4


def test_a_machine_without_a_gpu_is_not_told_to_install_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "read_gpus", list)
    assert start_meter(tmp_path).read().missing["gpu"] == (
        "not readable: this machine has no NVIDIA GPU"
    )


def test_a_counter_that_goes_round_goes_on(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 900)
    counter = RaplCounter(tmp_path)
    read_uj = []
    for energy_uj in (950, 50, 999, 0, 0, 400):  # round twice
        write_zone(tmp_path, "intel-rapl:0", "package-0", energy_uj)
        read_uj.append(round(counter.read() * 1e6))
    assert read_uj == [50, 150, 1099, 1100, 1100, 1500]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda zone: (zone / "energy_uj").unlink(), "energy_uj: No such file"),
        (lambda zone: (zone / "energy_uj").write_text("lots"), "invalid literal"),
        (lambda zone: (zone / "max_energy_range_uj").unlink(), "range_uj: No such file"),
        (lambda zone: (zone / "name").write_text("core"), "no RAPL counters in"),
    ],
)
def test_a_counter_that_cannot_be_read_says_why(tmp_path: Path, damage: object, why: str) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 900)
    assert callable(damage)
    damage(tmp_path / "intel-rapl:0")
    energy = start_meter(tmp_path).read()
    assert energy.missing["cpu"].startswith("not readable: ")
    assert why in energy.missing["cpu"]
    assert "cpu" not in energy.parts


class NvmlFaultError(Exception):
    pass


class FakeNvml:
    """Two GPUs whose counters the test sets."""

    NVMLError: type[Exception] = NvmlFaultError

    def __init__(self, *energies_mj: int, fault: str = "") -> None:
        self.energies_mj = list(energies_mj)
        self.fault = fault

    def nvmlInit(self) -> None:
        if self.fault == "init":
            raise NvmlFaultError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.energies_mj)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        if self.fault == "read":
            raise NvmlFaultError("Not Supported")
        assert isinstance(handle, int)
        return self.energies_mj[handle]


def test_gpus_are_added_from_when_the_counter_was_made() -> None:
    nvml = FakeNvml(5_000, 70_000)
    counter = NvmlCounter(nvml)
    nvml.energies_mj = [6_500, 70_250]
    assert counter.read() == 1.75


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (FakeNvml(1, fault="init"), "Driver Not Loaded"),
        (FakeNvml(1, fault="read"), "Not Supported"),
        (FakeNvml(), "sees no GPU"),
    ],
)
def test_gpus_without_a_counter_say_why(nvml: FakeNvml, why: str) -> None:
    with pytest.raises(NotReadableError, match=why):
        NvmlCounter(nvml)


def test_a_part_that_fails_once_is_missing_from_then_on_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 0, 1 << 40)
    nvml = FakeNvml(9_000)
    counters: dict[str, Counter] = {"cpu": RaplCounter(tmp_path), "gpu": NvmlCounter(nvml)}
    meter = EnergyMeter(counters, {})
    write_zone(tmp_path, "intel-rapl:0", "package-0", 2_000_000, 1 << 40)
    nvml.energies_mj = [12_000]
    both = meter.read()
    assert (both.joules, both.parts, both.reason) == (5.0, {"cpu": 2.0, "gpu": 3.0}, "")
    nvml.energies_mj = [1_000]  # its driver was loaded again
    meter.read()
    nvml.energies_mj = [99_000]
    last = meter.read()
    assert (last.joules, last.parts) == (2.0, {"cpu": 2.0})
    assert last.reason.startswith("gpu: not readable: a GPU's counter went back")


def test_what_is_not_known_is_none_and_never_zero(tmp_path: Path) -> None:
    energy = EnergyMeter({}, {"cpu": "not readable: no"}).read()
    assert energy.joules is None
    assert energy.per_token(10) is None
    assert Energy(parts={"cpu": 5.0}, missing={}).per_token(10) == 0.5
    assert Energy(parts={"cpu": 5.0}, missing={}).per_token(0) is None
