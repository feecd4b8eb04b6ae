"""What the runner's device is, as far as a choice depends on it."""

import dataclasses

import jax

from jaxserve.errors import CapacityError


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    """The one device that programs run on.

    Attributes:
      platform: such as "cpu".
      kind: its maker's name, such as "NVIDIA H200".
      compute_capability: CUDA's, such as "9.0"; None where there is none.
    """

    platform: str
    kind: str = ""
    compute_capability: str | None = None


def find_device() -> Device:
    """Returns what JAX runs on.

    Raises:
      CapacityError: JAX finds no device of the kind that it was told to use.
    """
    try:
        platform, device = jax.default_backend(), jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # jax asserts where one platform is unknown
        raise CapacityError(
            f"JAX has no device to run on: {str(error) or 'none was found'}; unset JAX_PLATFORMS, "
            "or install the jax plugin it names"
        ) from error
    return Device(
        platform=platform,
        kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
    )
