"""The demo model in the forms that peers read; each form is written by the peer's own tools.

PYTHON -m bench.peer.weights hf SOURCE.gguf FOLDER
PYTHON -m bench.peer.weights gguf SOURCE.gguf TARGET.gguf BF16|Q8_0|Q4_0
"""

import sys
from pathlib import Path


def write_hf(source: Path, folder: Path) -> None:
    """Writes a Hugging Face folder in float32, which holds what the source says exactly."""
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved; one with its values does not.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Writes a GGUF file by llama.cpp's quantizer, with its defaults for that kind."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    params.nthread = 0
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise SystemExit(f"llama.cpp did not make {kind} of {source}")


def main() -> None:
    match sys.argv[1:]:
        case ["hf", source, folder]:
            write_hf(Path(source), Path(folder))
        case ["gguf", source, target, kind]:
            write_gguf(Path(source), Path(target), kind)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
