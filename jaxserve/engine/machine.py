"""What this process runs on: CPU, memory, devices."""

import os
import platform
from pathlib import Path
from typing import Final

CPU_INFO: Final = Path("/proc/cpuinfo")
NVIDIA_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def read_machine() -> dict[str, object]:
    """Returns facts by name; bytes are ints, and what is not known is None."""
    from jaxserve.runner.host_memory import machine_bytes, read_host_memory_bytes

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": read_cpu_model(),
        "cores": count_cores(),
        "memory_bytes": machine_bytes(),
        "usable_memory_bytes": read_host_memory_bytes(),
        "nvidia_gpus": read_gpus(),
    }


def read_devices() -> list[dict[str, object]]:
    """Returns JAX's devices.

    Raises:
      RuntimeError: there are none, or JAX cannot be used here.
    """
    try:
        import jax

        devices = jax.devices()
    except (ImportError, AssertionError) as error:  # jax asserts where one platform is unknown
        raise RuntimeError(str(error) or "none of the kind that JAX_PLATFORMS names") from error
    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in devices
    ]


def read_cpu_model(path: Path = CPU_INFO) -> str | None:
    """Returns the CPU's name as the kernel or the system tells it."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def read_gpus(folder: Path = NVIDIA_GPUS) -> list[str]:
    """Returns the NVIDIA GPUs that the driver sees, whether JAX can use them or not."""
    names = []
    for path in sorted(folder.glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return names


def count_cores() -> int | None:
    """Returns the processors that this process may use; None where that is not known."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
