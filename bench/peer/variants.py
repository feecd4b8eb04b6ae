"""What is compared: engines, each with weights of one kind."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

Engine = Literal["jaxserve", "llama.cpp", "transformers", "openvino", "vllm"]
ENGINES: Final[tuple[Engine, ...]] = ("jaxserve", "llama.cpp", "openvino", "vllm", "transformers")
ADAPTERS: Final[Mapping[Engine, str]] = {
    engine: f"bench.peer.adapters.{engine.replace('.', '')}" for engine in ENGINES
}
OURS: Final = "jaxserve native bfloat16"  # all ratios are of it
MAX_MODEL_TOKENS: Final = 512


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Variant:
    """One engine with one kind of weights, in a process of its own.

    Attributes:
      options: of its adapter.
      is_lossy: whether its weights hold less than bfloat16 does.
      better_of: variants of one such name are measured once each, and the faster one goes on.
    """

    name: str
    engine: Engine
    options: Mapping[str, Any]
    is_lossy: bool = False
    better_of: str = ""


def build_variants(weights: Path, *, max_seqs: int) -> list[Variant]:
    """Returns all of them; `weights` is the folder that `setup.make_weights` fills."""
    sizes = {"max_seqs": max_seqs, "max_model_tokens": MAX_MODEL_TOKENS}
    ours = [
        Variant(
            name=f"jaxserve {kernels} bfloat16",
            engine="jaxserve",
            options={
                "model": str(weights / "hf"),
                "settings": {
                    "model.dtype": "bfloat16",
                    "model.max_model_tokens": MAX_MODEL_TOKENS,
                    "scheduler.max_seqs": max_seqs,
                    "runner.attention": kernels,
                    "runner.matmul": kernels,
                },
            },
        )
        for kernels in ("native", "xla")
    ]
    llamacpp = [
        Variant(
            name=f"llama.cpp {kind}",
            engine="llama.cpp",
            options={"model": str(weights / f"{kind}.gguf"), **sizes},
            is_lossy=kind != "BF16",
        )
        for kind in ("BF16", "Q8_0", "Q4_0")
    ]
    openvino = [
        Variant(
            name=f"OpenVINO GenAI {dtype}",
            engine="openvino",
            options={"model": str(weights / "F16.gguf"), "precision": hint, **sizes},
            better_of="OpenVINO GenAI",
        )
        for dtype, hint in (("bfloat16", "bf16"), ("float32", "f32"))
    ]
    vllm = Variant(
        name="vLLM bfloat16",
        engine="vllm",
        options={"model": str(weights / "hf"), "dtype": "bfloat16", **sizes},
    )
    transformers = [
        Variant(
            name=f"transformers {dtype}",
            engine="transformers",
            options={"model": str(weights / "hf"), "dtype": dtype},
            better_of="transformers",
        )
        for dtype in ("bfloat16", "float32")
    ]
    return [*ours, *llamacpp, *openvino, vllm, *transformers]
