"""RoPE settings under HF's names, for `make_tables.py` (torch) and for the test (jax) alike."""

import dataclasses
from typing import Any

POSITIONS = (0, 1, 7, 100, 8191, 8192, 60000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One rotary embedding: `parameters` is HF's `rope_parameters`.

    Attributes:
      prompt_len: of a sequence that is read at once; each later position comes alone.
    """

    parameters: dict[str, Any]
    head_dim: int = 64
    max_position: int = 131072
    prompt_len: int = 1


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.07 * i for i in range(24)],
    "long_factor": [1.1 + 1.37 * i for i in range(24)],
    "partial_rotary_factor": 0.75,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}

CASES = {
    "default": Case(parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "partial": Case(
        parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        head_dim=80,
    ),
    "linear": Case(
        parameters={"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}, head_dim=256
    ),
    "linear, factor 3": Case(
        parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    ),
    "dynamic, alone": Case(parameters=DYNAMIC, max_position=2048),
    "dynamic, long prompt": Case(parameters=DYNAMIC, max_position=2048, prompt_len=8192),
    "dynamic, factor 3.3": Case(
        parameters=DYNAMIC | {"factor": 3.3, "rope_theta": 1000000.0}, max_position=4096
    ),
    "llama3": Case(
        parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        head_dim=128,
    ),
    "llama3, factor 32": Case(
        parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": Case(parameters=YARN, head_dim=128),
    "yarn, all set": Case(
        parameters=YARN
        | {
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 0.8,
            "rope_theta": 150000.0,
            "original_max_position_embeddings": 4096,
            "factor": 32.0,
        },
    ),
    "yarn, mscale": Case(
        parameters=YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.7, "partial_rotary_factor": 0.5, "factor": 40.0},
    ),
    # Both bounds clip to pair 0: HF then makes the ramp 0.001 wide.
    "yarn, no ramp": Case(parameters=YARN | {"original_max_position_embeddings": 6}),
    "longrope, alone": Case(parameters=LONGROPE, head_dim=64),
    "longrope, long prompt": Case(parameters=LONGROPE, head_dim=64, prompt_len=8192),
    "longrope, factor set": Case(
        parameters=LONGROPE | {"attention_factor": 1.3, "partial_rotary_factor": 0.75},
        head_dim=64,
    ),
}
