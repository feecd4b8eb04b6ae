"""What is told of the device, and of its absence."""

import types

import jax
import pytest

from jaxserve.errors import CapacityError
from jaxserve.runner.device import Device, find_device


def test_a_platform_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_as_jax_does() -> str:
        raise AssertionError

    monkeypatch.setattr(jax, "default_backend", assert_as_jax_does)
    with pytest.raises(CapacityError, match="no device to run on: none was found; unset JAX_PLAT"):
        find_device()


def test_a_gpu_has_a_name_and_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert find_device() == Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")


def test_another_device_has_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="cpu")])
    assert find_device() == Device(platform="cpu", kind="cpu")
