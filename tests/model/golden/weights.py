"""Random weights under HF's names, for `make_golden.py` (torch) and for the test (jax) alike."""

import zlib
from typing import Any

import numpy as np

TOKEN_IDS = (7, 130, 0, 55, 55, 12, 99, 1, 64, 33, 128, 5, 77, 21, 3, 110, 42, 42, 8)

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 112,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

# Name to what differs from plain: T1 of the test fixtures, and one with all that T1 has not.
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"rope_theta": 10000.0, "tie_word_embeddings": False},
    "tied_biased": {
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns N(0, 0.3), or N(1, 0.3) for norms, float32; a pure function of name and shape.

    RandomState, whose streams numpy keeps for ever.
    """
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    value: np.ndarray = ((1.0 if "norm" in name else 0.0) + 0.3 * normal).astype(np.float32)
    return value
