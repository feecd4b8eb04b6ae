"""How parameters reach the device."""

import weakref

import jax
import numpy as np
import pytest

from jaxserve.model.aligned import empty_aligned
from jaxserve.runner import placement


def array(*, offset: int) -> np.ndarray:
    """A float32 array that begins so many bytes after a multiple of 64, and owns its memory."""
    room = empty_aligned((1024 + 64,), np.dtype(np.uint8))[offset : offset + 1024]
    room[:] = 1
    return room.view(np.float32)


def test_a_host_array_is_let_go_before_the_next_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"a": {"x": array(offset=16), "y": array(offset=16)}, "z": array(offset=16)}
    held = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
    alive: list[int] = []
    put = jax.device_put

    def watch(leaf: np.ndarray) -> jax.Array:
        alive.append(sum(ref() is not None for ref in held))
        placed: jax.Array = put(leaf)
        placed.block_until_ready()
        return placed

    monkeypatch.setattr(jax, "device_put", watch)
    placed = placement.place_params(params)
    assert alive == [3, 2, 1]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))


def test_the_cpu_backend_takes_an_aligned_array_as_it_is() -> None:
    leaf = array(offset=0)
    placed = placement.place_params({"x": leaf})
    assert placed["x"].unsafe_buffer_pointer() == leaf.ctypes.data
