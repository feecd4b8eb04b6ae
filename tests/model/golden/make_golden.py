"""Writes logits.npz: what HF transformers computes in float32 for the models of weights.py.

Run it where torch and transformers are: ``python tests/model/golden/make_golden.py``. The file
stands in the repository so that the tests need neither.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import weights  # type: ignore[import-not-found]  # noqa: E402  # on the path only now


def main() -> None:
    arrays = {}
    for name, options in weights.MODELS.items():
        theta = options["rope_theta"]
        rest = {key: value for key, value in options.items() if key != "rope_theta"}
        config = transformers.LlamaConfig(
            **weights.SIZES,
            **rest,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                random = weights.random_tensor(path, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(random))
            logits = model(torch.tensor([weights.TOKEN_IDS])).logits[0]
        arrays[f"{name}/logits"] = logits.numpy()
        arrays[f"{name}/inverse_frequencies"] = model.model.rotary_emb.inv_freq.numpy()
    np.savez(HERE / "logits.npz", **arrays)


if __name__ == "__main__":
    main()
