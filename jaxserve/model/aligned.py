"""Host arrays that the CPU backend of JAX takes as they are; others it copies."""

import math
from typing import Final

import numpy as np

ALIGNMENT_BYTES: Final = 64


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of arbitrary values whose first byte is at a multiple of 64."""
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    first = -room.ctypes.data % ALIGNMENT_BYTES
    return room[first : first + num_bytes].view(dtype).reshape(shape)
