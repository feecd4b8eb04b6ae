"""Writes tables.npz: cos and sin of the cases' positions as HF transformers computes them.

Run it where torch and transformers are: ``python tests/model/rope_golden/make_tables.py``. The
file stands in the repository so that the tests need neither.

torch's vectorized power rounds the last digit of three frequencies in a hundred the wrong way, and
which they are depends on the processor and on where in an array a frequency stands. At position
60000 that turns a pair by 5e-4. Here torch works element by element, with the C library's power,
which is right nearly always and on every machine: so the tables show HF's formulas, not its luck.
"""

import os
import pathlib
import sys
from typing import Any

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read when torch is imported

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import cases  # type: ignore[import-not-found]  # noqa: E402  # on the path only now


def main() -> None:
    arrays: dict[str, Any] = {}
    for name, case in cases.CASES.items():
        config = transformers.LlamaConfig(
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=case.head_dim,
            hidden_size=case.head_dim,
            max_position_embeddings=case.max_position,
            rope_parameters=dict(case.parameters),
        )
        tables = [table_at(config, position, case.prompt_len) for position in cases.POSITIONS]
        arrays[f"{name}/cos"] = np.stack([cos for cos, _ in tables])
        arrays[f"{name}/sin"] = np.stack([sin for _, sin in tables])
        arrays[f"{name}/inverse_frequencies"] = initial(config)
    np.savez_compressed(HERE / "tables.npz", **arrays)


def table_at(
    config: transformers.LlamaConfig, position: int, prompt_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """A fresh embedding reads the prompt, then the position alone if it lies beyond it."""
    embedding = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    x = torch.zeros(1, 1, 1)
    cos, sin = embedding(x, torch.arange(prompt_len)[None])
    row = position
    if position >= prompt_len:
        cos, sin = embedding(x, torch.tensor([[position]]))
        row = 0
    half = cos.shape[-1] // 2
    return cos[0, row, :half].numpy(), sin[0, row, :half].numpy()


def initial(config: transformers.LlamaConfig) -> np.ndarray:
    kind = config.rope_parameters["rope_type"]
    plain = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding
    find = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS.get(
        kind, plain.compute_default_rope_parameters
    )
    frequencies: np.ndarray = find(config)[0].numpy()
    return frequencies


if __name__ == "__main__":
    main()
