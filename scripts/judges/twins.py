"""Tiny GGUF files of every architecture: this engine's logits against llama.cpp's.

llama.cpp is the only reference for what stands in its code and not in the files: windows and their
patterns, soft-caps, scales, which RoPE a layer has. `scripts/judges/twins` runs the parts, each
under the interpreter that has what it needs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.checkpoint.twins import Twin

NUM_TOKENS = 40
# llama.cpp computes SiLU, products and RoPE in float32, in another order. Its GELU is a table of
# float16 values (ggml-cpu/vec.h), whose errors grow over Gemma's 46 and 62 layers. A wrong scale or
# window changes Gemma's logits by 0.25 and more.
BOUND, GELU_BOUND, DEEP_GELU_BOUND = 1e-3, 1e-2, 3e-2
Cases = dict[str, tuple["Twin", dict[str, Any]]]


def write_and_run(folder: Path) -> None:
    """Writes the files, and our logits of each."""
    from jaxserve.checkpoint.gguf import GgufSource
    from tests.checkpoint.twins import make_twin_weights, write_twin_gguf
    from tests.model.paged import PagedModel, run_in_chunks

    cases = make_cases()
    ids = np.random.default_rng(1).integers(0, 260, size=NUM_TOKENS).tolist()
    logits = []
    for index, (twin, keys) in enumerate(cases.values()):
        path = folder / f"{index}.gguf"
        weights = make_twin_weights(twin)
        source = GgufSource(write_twin_gguf(path, twin, weights, keys=keys))
        model = PagedModel(source.load_params(np.float32), source.load_header().config)
        logits.append(
            run_in_chunks(
                model,
                ids,
                chunks=[12, 12, 12, 1, 1, 1, 1],
                pages=range(NUM_TOKENS // 4),
                prompt_len=NUM_TOKENS,
            )
        )
    np.save(folder / "jaxserve.npy", np.stack(logits))
    (folder / "cases.json").write_text(json.dumps({"ids": ids, "names": list(cases)}))


def make_cases() -> Cases:
    """Returns each file's model, and its keys over what the converter writes; None removes one."""
    from tests.checkpoint.twins import TWINS

    cases: Cases = {name: (twin, {}) for name, twin in TWINS.items()}
    for name, (twin, keys) in list(cases.items()):
        if "attention.sliding_window" in twin.keys:  # which llama.cpp does not follow here
            keys["attention.sliding_window"] = None
        if twin.architecture == "phi3":
            keys["attention.sliding_window"] = 0
        if name == "phi3 longrope":  # llama.cpp picks short or long by the room it makes, 256
            cases["phi3 longrope, short"] = (
                twin,
                {**keys, "rope.scaling.original_context_length": 512},
            )
    gemma2, gemma3 = TWINS["gemma2"], TWINS["gemma3"]
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    cases |= {
        "gemma2, keys absent": (
            gemma2,
            dict.fromkeys([window, "attn_logit_softcapping", "final_logit_softcapping"]),
        ),
        "gemma2, of 27B": (gemma2.with_layers(46), {}),
        "gemma3, of 27B": (gemma3.with_layers(62), {}),
        "gemma3, no window": (gemma3, {window: None}),
        "gemma3, listed": (gemma3, {pattern: [True, False] * 3 + [True]}),
        "gemma3, every third": (gemma3, {pattern: 3, "rope.freq_base_swa": 2000.0}),
        "gemma3, final cap": (gemma3, {"final_logit_softcapping": 3.0}),
        "llama, old linear key": (TWINS["llama"], {"rope.scale_linear": 4.0}),
        "llama, no scaling": (
            TWINS["llama"],
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        ),
    }
    return cases


def run_llamacpp(folder: Path) -> None:
    """Writes llama.cpp's logits of each file."""
    import llama_cpp

    cases = json.loads((folder / "cases.json").read_text())
    ids, logits = cases["ids"], []
    for index in range(len(cases["names"])):
        llama = llama_cpp.Llama(
            str(folder / f"{index}.gguf"),
            n_ctx=256,
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            flash_attn=False,
            verbose=False,
        )
        llama.eval(ids)
        logits.append(np.array(llama.scores[: len(ids)]))
        llama.close()
    np.save(folder / "llamacpp.npy", np.stack(logits))


def compare(folder: Path) -> int:
    """Prints the largest difference of each file; returns how many are beyond their bound."""
    names = json.loads((folder / "cases.json").read_text())["names"]
    ours, theirs = np.load(folder / "jaxserve.npy"), np.load(folder / "llamacpp.npy")
    faults = 0
    for name, error in zip(names, np.abs(ours - theirs).max(axis=(1, 2)), strict=True):
        bound = GELU_BOUND if name.startswith("gemma") else BOUND
        bound = DEEP_GELU_BOUND if name.endswith("27B") else bound
        is_fault = not error <= bound
        faults += is_fault
        print(f"{name:24} {error:.1e} of {bound:.0e} {'FAULT' if is_fault else ''}")
    print(f"jaxserve against llamacpp: {len(names) - faults} equal, {faults} faults")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["jaxserve", "llamacpp", "compare"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    match arguments.part:
        case "jaxserve":
            write_and_run(arguments.folder)
        case "llamacpp":
            run_llamacpp(arguments.folder)
        case "compare":
            return int(compare(arguments.folder) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
