"""Peak memory and time of loading a 2 GB checkpoint, against reading its file.

    python bench/load.py [--rounds 3] [--case hf-bf16 …] [--folder /tmp]

Each measurement is a fresh process. Memory is VmHWM (which counts mapped file pages) above what the
process held once everything was imported and JAX had its backend; that baseline is printed too.
Time is against `read()` of the same file into fresh memory, both with an empty page cache and with
a full one. Files are written to a temporary folder, which needs 5 GB, and deleted. Linux only.
"""

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers

from jaxserve.checkpoint.layout import gguf_sources, hf_sources, stored_shapes
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig

GB = 1e9
BLOCK = 1 << 22  # numbers written at a time
# Case: layers, stored type, dtype that is loaded. Each makes about 2 GB of file or result.
CASES = {
    "hf-bf16": (12, "BF16", "bfloat16"),
    "hf-f32": (4, "F32", "float32"),
    "hf-f32-to-bf16": (4, "F32", "bfloat16"),
    "gguf-q8_0": (12, "Q8_0", "bfloat16"),
    "bundle-bf16": (12, "BF16", "bfloat16"),
}
ENGINE_FLAGS = {
    "model.max_model_tokens": 256,
    "kv.num_pages": 33,
    "scheduler.max_seqs": 4,
    "buckets.decode_seqs": (4,),
    "buckets.chunk_tokens": (64,),
    "buckets.chunk_decode_seqs": (4,),
}


def build_config(num_layers: int) -> ModelConfig:
    """The sizes of a Llama of 1B parameters, with fewer layers."""
    return ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        max_position=4096,
        norm_eps=1e-5,
        layers=(LayerConfig(rope=RopeConfig(theta=500_000.0)),) * num_layers,
        tied_head=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, path, dtype = arguments.child
        print(json.dumps(CHILDREN[what](Path(path), dtype)))
        return
    for case in arguments.case:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure(case, Path(folder), rounds=arguments.rounds)


def measure(case: str, folder: Path, *, rounds: int) -> None:
    num_layers, stored, dtype = CASES[case]
    config = build_config(num_layers)
    path = write_gguf(folder, config) if stored == "Q8_0" else write_hf(folder, config, stored)
    if case.startswith("bundle"):
        source, path = path, folder / "bundle"
        found = run_child("convert", source, dtype, path)
        report(f"{case} convert", found, num_bytes(weight_files(source)))
        (source / "model.safetensors").unlink()
    files = weight_files(path)
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for what in ("read", "load"):
            evict(files)
            for cache in ("cold", "warm"):
                found = run_child(what, path, dtype)
                spent = found["seconds"], found["cpu_seconds"]
                seconds.setdefault((what, cache), []).append(spent)
                if what == "load":
                    last = found
    report(case, last, num_bytes(files))
    for cache in ("cold", "warm"):
        (read, read_cpu), (load, load_cpu) = (
            min(seconds[what, cache]) for what in ("read", "load")
        )
        print(
            f"  {cache} page cache: read {read:.2f} s ({read_cpu:.2f} of CPU), load {load:.2f} s "
            f"({load_cpu:.2f} of CPU), x{load / read:.2f}"
        )
    report(f"{case} engine", run_child("engine", path, dtype), num_bytes(files))


def report(case: str, found: dict[str, float], file_bytes: int) -> None:
    larger = max(file_bytes, found["result_bytes"])
    print(
        f"{case}: file {file_bytes / GB:.2f} GB, result {found['result_bytes'] / GB:.2f} GB, peak "
        f"{found['peak_bytes'] / GB:.2f} GB over a baseline of "
        f"{found['baseline_bytes'] / GB:.2f} GB, x{found['peak_bytes'] / larger:.2f} of the "
        f"larger, {found['seconds']:.2f} s",
        flush=True,
    )


def run_child(what: str, path: Path, dtype: str, target: Path | None = None) -> dict[str, float]:
    where = f"{path}>{target}" if target else str(path)
    command = [sys.executable, __file__, "--child", what, where, dtype]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=child_environment())
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def child_environment() -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu"}


def weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    return [file for file in path.rglob("*") if file.is_file()]


def num_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def evict(files: list[Path]) -> None:
    """Drops the files' pages from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# What a fresh process does.


def read_child(path: Path, dtype: str) -> dict[str, float]:
    files = weight_files(path)
    started_s = time.perf_counter()
    for file in files:
        with file.open("rb") as opened:
            opened.read()
    return {"seconds": time.perf_counter() - started_s, "cpu_seconds": time.process_time()}


def load_child(path: Path, dtype: str) -> dict[str, float]:
    import gguf.quants  # noqa: F401  (a part of the baseline)
    import jax

    from jaxserve.checkpoint.registry import find_model
    from jaxserve.model.params import num_param_bytes

    jax.devices()
    source = find_model(str(path))
    config = source.load_header().config
    with Peak() as peak:
        params = source.load_params(dtype)
    assert len(params["layers"]) == config.num_layers
    return peak.found | {"result_bytes": num_param_bytes(config, dtype)}


def engine_child(path: Path, dtype: str) -> dict[str, float]:
    import gguf.quants  # noqa: F401
    import jax

    import jaxserve.runner.runner  # noqa: F401
    from jaxserve.checkpoint.registry import find_model
    from jaxserve.config import load_config
    from jaxserve.engine.start import load_engine
    from jaxserve.model.params import num_param_bytes

    jax.devices()
    with tempfile.TemporaryDirectory() as cache:
        flags = ENGINE_FLAGS | {"model.dtype": dtype, "runner.cache_dir": cache}
        config = load_config(flags=flags)
        with Peak() as peak:
            engine = load_engine(str(path), config)
        assert engine.model.path
    model = find_model(str(path)).load_header().config
    return peak.found | {"result_bytes": num_param_bytes(model, dtype)}


def convert_child(paths: Path, dtype: str) -> dict[str, float]:
    import gguf.quants  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    from jaxserve.checkpoint.convert import convert
    from jaxserve.checkpoint.registry import find_model
    from jaxserve.model.params import num_param_bytes

    source, target = str(paths).split(">")
    with Peak() as peak:
        convert(find_model(source), Path(target), dtype="bfloat16")
    config = find_model(target).load_header().config
    return peak.found | {"result_bytes": num_param_bytes(config, dtype)}


CHILDREN: dict[str, Callable[[Path, str], dict[str, float]]] = {
    "read": read_child,
    "load": load_child,
    "engine": engine_child,
    "convert": convert_child,
}


class Peak:
    """Measures the seconds of a `with` block, and the most memory the process has in it."""

    def __enter__(self) -> "Peak":
        self.found = {"baseline_bytes": float(read_status("VmRSS"))}
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        self._started_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._started_s
        peak_bytes = read_status("VmHWM") - self.found["baseline_bytes"]
        cpu_seconds = time.process_time() - self._cpu_s
        self.found |= {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes}


def read_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


# The checkpoints. Values do not matter, but are numbers.


def write_hf(folder: Path, config: ModelConfig, stored: str) -> Path:
    dtype = np.dtype(np.float32 if stored == "F32" else ml_dtypes.bfloat16)
    header: dict[str, object] = {}
    end = 0
    for name, shape in stored_shapes(hf_sources(config), config).items():
        first, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    path = folder / "model"
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for block in random_blocks(end // dtype.itemsize):
            file.write(block.astype(dtype).tobytes())
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(settings))
    backend = byte_tokenizer()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_bos_token": false}')
    return path


def write_gguf(folder: Path, config: ModelConfig) -> Path:
    import gguf

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    vocab = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    # All tensors share the memory of the largest: only the file is to be large.
    shapes = stored_shapes(gguf_sources(config), config)
    kind = gguf.GGMLQuantizationType.Q8_0
    largest = max(map(math.prod, shapes.values())) // config.hidden_size
    one = next(random_blocks(1024 * config.hidden_size)).reshape(1024, -1)
    rows = np.tile(gguf.quants.quantize(one, kind), (-(-largest // 1024), 1)).reshape(-1)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        row_bytes = shape[1] // 32 * 34
        stored = rows[: shape[0] * row_bytes].reshape(shape[0], row_bytes)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(num_elements: int) -> Iterator[np.ndarray]:
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    for first in range(0, num_elements, BLOCK):
        yield block[: num_elements - first]


def byte_tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *letters, "ab"]
    model = tokenizers.models.BPE(
        vocab={name: id for id, name in enumerate(names)}, merges=[("a", "b")]
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


if __name__ == "__main__":
    main()
