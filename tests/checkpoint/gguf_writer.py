"""Writes tensors of every stored type for tests, also of those the gguf library cannot write."""

import zlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType

# Where a block of the library's read-only types holds its float16 scales.
K_SCALES = {
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}


def quantize(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The rows in a stored type, one row a row.

    For K-quants, which the library only reads, random blocks of the same shape: equal rows give
    equal blocks, and values are around 0.1.
    """
    if kind not in K_SCALES:
        return gguf.quants.quantize(rows, kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(rows).tobytes()))
    blocks = rng.integers(0, 256, size=(rows.size // block_size, block_bytes), dtype=np.uint8)
    for offset in K_SCALES[kind]:
        scales = rng.uniform(1e-4, 3e-4, size=(len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*rows.shape[:-1], -1)
