"""Writes logits.npz and hf_families.{npz,json}: what HF transformers computes in float32.

Run it where torch and transformers are: ``python tests/model/golden/make_golden.py``. The files
stand in the repository so that the tests need neither. Made with transformers 5.24.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import hf_families  # type: ignore[import-not-found]  # noqa: E402
import weights  # type: ignore[import-not-found]  # noqa: E402


def make_llama() -> None:
    """Writes logits.npz, for the models of weights.py."""
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


def make_families() -> None:
    """Writes hf_families.npz and hf_families.json, for the models of hf_families.py.

    A folder with the case's config.json is loaded twice: for the names and shapes that the library
    stores, and again with the case's own tensors under those names.
    """
    arrays: dict[str, Any] = {}
    saved = {}
    for name, case in hf_families.CASES.items():
        with tempfile.TemporaryDirectory() as path:
            folder = pathlib.Path(path)
            (folder / "config.json").write_text(json.dumps(case.config))
            config = transformers.AutoConfig.from_pretrained(folder)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            saved[name] = json.loads((folder / "config.json").read_text())
            with safetensors.safe_open(folder / "model.safetensors", "np") as file:
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            tensors = {key: case.tensor(key, shape) for key, shape in shapes.items()}
            safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            (folder / "config.json").write_text(json.dumps(case.config))
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not any(loaded[fault] for fault in ("missing_keys", "unexpected_keys"))
        with torch.no_grad():
            logits = compute_logits(model.eval(), case)
        arrays[name] = logits[:, :: case.columns]
    np.savez_compressed(HERE / "hf_families.npz", **arrays)
    (HERE / "hf_families.json").write_text(json.dumps(saved, indent=1) + "\n")


def compute_logits(model: transformers.PreTrainedModel, case: hf_families.Case) -> np.ndarray:
    """Returns logits [tokens, vocabulary]: the prompt at once, then token by token."""
    done = model(torch.tensor([hf_families.TOKEN_IDS[: case.prompt_len]]), use_cache=True)
    rows = [done.logits[0]]
    for token_id in hf_families.TOKEN_IDS[case.prompt_len :]:
        past = done.past_key_values
        done = model(torch.tensor([[token_id]]), past_key_values=past, use_cache=True)
        rows.append(done.logits[0])
    logits: np.ndarray = torch.cat(rows).numpy()
    return logits


if __name__ == "__main__":
    make_llama()
    make_families()
