"""The parameters' way from the host to the device."""

import jax

from jaxserve.model.params import Params


def place_params(params: Params) -> Params:
    """Replaces each host array of a tree by one of the device, and returns the tree.

    One after the other, so that the host's copy of all is never held beside the device's. The CPU
    backend takes an array that begins at a multiple of 64 bytes as it is.
    """
    for name, value in params.items():
        params[name] = place_params(value) if isinstance(value, dict) else jax.device_put(value)
    return params
