"""What this engine's programs cost on the device of this machine; prints a table and one JSON line.

    python -m scripts.gpu_report [--model 8b] [--kv-len 512] [--rows 1 16 64 256]
    JAX_PLATFORMS=cpu python -m scripts.gpu_report --model tiny --rows 2 4 --kv-len 64 \\
        --attention-rows 2 --attention-kv-len 64 --attention xla triton_interpret

Three parts: attention alone, checked against the reference and then timed for rows, lengths and
splits; whole steps, for each implementation of attention; the same shapes in torch, where an
interpreter has it (`--torch-python`). Weights are random: times depend on shapes alone. Each decode
figure stands beside the machine's own limit, measured in the same run: the time to read the weights
and the batch's K/V once, at the speed of a pass over memory. It runs on a CPU too, to be tried, and
needs no network.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax import numpy as jnp

from jaxserve.config import Config
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.pool import LARGEST
from jaxserve.metrics import Metrics
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import init_params, num_param_bytes
from jaxserve.request import SamplingParams
from jaxserve.runner.runner import Runner
from scripts import gpu_attention
from scripts.gpu_steps import Driver, pages_for

MODELS = {
    "tiny": (131, 48, 3, 8, 2, 16, 112),
    "135m": (49152, 576, 30, 9, 3, 64, 1536),
    "1b": (128256, 2048, 16, 32, 8, 64, 8192),
    "8b": (128256, 4096, 32, 32, 8, 128, 14336),
}
MAX_ERROR = 1.2e-2  # of attention in bfloat16: weights and output are rounded to 8 bits
SPLITS = (1, 4, 16)
ROOT = Path(__file__).parents[1]


def make_config(name: str) -> ModelConfig:
    vocab, hidden, layers, heads, kv_heads, head_dim, mlp = MODELS[name]
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        max_position=8192,
        norm_eps=1e-5,
        layers=(LayerConfig(rope=RopeConfig(theta=10000.0)),) * layers,
        tied_head=hidden < 4096,
    )


def measure_copy_bytes_per_s() -> float:
    """Returns bytes moved a second by a pass over 1 GiB in place: each is read and written."""
    array = jnp.ones(1 << 28, jnp.float32)
    negate = jax.jit(jnp.negative, donate_argnums=0)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        array = negate(array)
        array.block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * array.nbytes / statistics.median(times)


def report(
    name: str,
    *,
    attention: str,
    sampling: str,
    dtype: str,
    kv_dtype: str,
    kv_len: int,
    rows: list[int],
    copy_bytes_per_s: float,
) -> dict[str, object]:
    """Prints and returns what steps of a model take with an implementation of attention."""
    model = make_config(name)
    page_size = 16
    pages_per_row = pages_for(kv_len, page_size)
    most_rows = max(*rows, 2)
    config = Config.model_validate(
        {
            "model": {"dtype": dtype, "max_model_tokens": pages_per_row * page_size},
            "kv": {
                "page_size": page_size,
                "dtype": kv_dtype,
                "num_pages": 1 + most_rows * pages_per_row,
            },
            "scheduler": {"max_seqs": most_rows},
            # what is measured, and no more: each is a program to compile
            "buckets": {
                "decode_seqs": sorted({*rows, most_rows}),
                "chunk_tokens": [256],
                "chunk_decode_seqs": [most_rows],
            },
            # the interpreted kernels have no name there: a CPU gives no other
            "runner": {
                "attention": attention.removesuffix("_interpret"),
                "sampling": sampling,
            },
        }
    )
    seconds = {}
    params = init_params(model, jax.random.key(0), dtype, stddev=0.02)
    with tempfile.TemporaryDirectory() as cache_dir:
        for start_kind in ("cold", "warm"):
            jax.clear_caches()  # the second start has the persistent cache alone
            metrics = Metrics()
            start = time.perf_counter()
            runner = Runner(params, model, config, metrics=metrics, cache_dir=Path(cache_dir))
            seconds[start_kind] = time.perf_counter() - start
            num_compiles = metrics.total("compiles_total")
            num_programs = num_compiles + metrics.total("compile_cache_hits_total")
            print(f"  {start_kind} start {seconds[start_kind]:.1f} s, {num_compiles:.0f} compiles")
            if start_kind == "cold":
                del runner  # its pool would crowd the next one's
    driver = Driver(runner, kv_len=kv_len, page_size=page_size)
    weight_bytes = num_param_bytes(model, dtype)
    token_bytes = runner.spec.page_bytes // page_size
    table: list[dict[str, object]] = []
    for num_rows in rows:
        for kind, params_of_row in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("top_p", SamplingParams(temperature=0.8, top_p=0.95, seed=1)),
        ):
            times = driver.decode(num_rows, params_of_row)
            limit_s = (weight_bytes + num_rows * kv_len * token_bytes) / copy_bytes_per_s
            exposed = max(0.0, 1.0 - times.device_s / times.step_s)
            table.append(
                {
                    "rows": num_rows,
                    "sampling": kind,
                    "step_ms": 1e3 * times.step_s,
                    "launch_ms": 1e3 * times.launch_s,
                    "device_ms": 1e3 * times.device_s,
                    "host_exposed": exposed,
                    "limit_ms": 1e3 * limit_s,
                    "share_of_limit": limit_s / times.step_s,
                }
            )
            print(
                f"  decode rows={num_rows:<3} {kind:<7} step {1e3 * times.step_s:8.3f} ms, "
                f"host launch {1e3 * times.launch_s:6.3f} ms, exposed {100 * exposed:.0f} %, "
                f"limit {1e3 * limit_s:7.3f} ms ({100 * limit_s / times.step_s:.0f} %)"
            )
    chunk = min(runner.limits.max_chunk_tokens, kv_len)
    prefill_s = driver.prefill(chunk)
    print(f"  chunk of {chunk} tokens: {1e3 * prefill_s:.2f} ms, {chunk / prefill_s:.0f} tokens/s")
    return {
        "model": name,
        "attention": runner.spec.kernels.attention,
        "sampling": runner.spec.kernels.sampling,
        "dtype": dtype,
        "kv_dtype": runner.spec.kv_dtype,
        "kv_len": kv_len,
        "programs": num_programs,
        "start_s": seconds,
        "decode": table,
        "chunk_tokens": chunk,
        "chunk_ms": 1e3 * prefill_s,
    }


def report_torch(python: str, name: str, *, rows: Sequence[int], kv_len: int) -> object:
    """Prints and returns what torch takes for the same; says so where there is no torch.

    In a process of its own, which must have ended before this one takes the device's memory.
    """
    command = [python, "-m", "scripts.gpu_torch", "--kv-len", str(kv_len), "--shape"]
    command += [*map(str, MODELS[name]), "--rows", *map(str, rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"  torch: not measured: {reason}")
        return {"absent": reason}
    found = json.loads(done.stdout)
    for row in found["decode"]:
        print(f"  torch {found['torch']} rows={row['rows']:<3} step {row['step_ms']:8.3f} ms")
    return found


def report_attention(
    options: argparse.Namespace, impls: list[Impl], copy_bytes_per_s: float
) -> Iterator[dict[str, object]]:
    model = make_config(options.model[0])
    shape = gpu_attention.Shape(
        heads=(model.num_heads, model.num_kv_heads),
        head_dim=model.head_dim,
        kv_dtype=options.kv_dtype if options.kv_dtype in LARGEST else "bfloat16",
    )
    print(
        f"attention of {options.model[0]}: {shape.heads} heads of {shape.head_dim}, bfloat16, "
        f"K/V {shape.kv_dtype}"
    )
    yield from gpu_attention.report(
        impls,
        shape,
        rows=options.attention_rows,
        kv_lens=options.attention_kv_len,
        splits=SPLITS,
        copy_bytes_per_s=copy_bytes_per_s,
        max_error=MAX_ERROR,
    )


def count(text: str) -> int:
    """Returns a number of things of which there is at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["8b"],
                        help="shapes, of the first also attention alone (default: 8b)")  # fmt: skip
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument(
        "--kv-dtype", choices=["auto", "float32", "bfloat16", *LARGEST], default="auto"
    )
    parser.add_argument("--kv-len", type=count, default=512, help="tokens each row holds")
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--attention", nargs="+", metavar="IMPL",
                        help="(default: xla and triton on a GPU, else xla)")  # fmt: skip
    parser.add_argument("--sampling", choices=["auto", "candidates", "passes"], default="auto")
    parser.add_argument("--attention-rows", type=count, nargs="+", default=[1, 16, 64])
    parser.add_argument("--attention-kv-len", type=count, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH",
                        help="an interpreter that has torch (default: this one)")  # fmt: skip
    parser.add_argument("--part", nargs="+", choices=["torch", "attention", "steps"],
                        default=["torch", "attention", "steps"])  # fmt: skip
    return parser.parse_args()


def report_steps(
    options: argparse.Namespace, impls: list[Impl], copy_bytes_per_s: float
) -> Iterator[dict[str, object]]:
    for name in options.model:
        for impl in impls:
            print(f"{name} {options.dtype} kv_len={options.kv_len} attention={impl}")
            try:
                yield report(
                    name,
                    attention=impl,
                    sampling=options.sampling,
                    dtype=options.dtype,
                    kv_dtype=options.kv_dtype,
                    kv_len=options.kv_len,
                    rows=options.rows,
                    copy_bytes_per_s=copy_bytes_per_s,
                )
            except gpu_attention.REFUSALS as refusal:
                yield gpu_attention.fail(refusal, model=name, attention=impl)


def main() -> int:
    options = read_options()
    in_torch = {}
    if "torch" in options.part:
        for name in options.model:
            print(f"{name} in torch, kv_len={options.kv_len}")
            in_torch[name] = report_torch(
                options.torch_python, name, rows=options.rows, kv_len=options.kv_len
            )
    device = jax.devices()[0]
    impls = options.attention or (["xla", "triton"] if device.platform == "gpu" else ["xla"])
    copy_bytes_per_s = measure_copy_bytes_per_s()
    print(f"{device.device_kind}, jax {jax.__version__}, copy {copy_bytes_per_s / 1e9:.0f} GB/s")
    alone: list[dict[str, object]] = []
    steps: list[dict[str, object]] = []
    if "attention" in options.part:
        alone = list(report_attention(options, impls, copy_bytes_per_s))
        # of a kernel that is wrong, what a step takes says nothing
        impls = [impl for impl in impls if not any(is_failed(impl, one) for one in alone)]
    if "steps" in options.part:
        steps = list(report_steps(options, impls, copy_bytes_per_s))
    num_failed = sum("failed" in one for one in (*alone, *steps))
    facts = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "copy_bytes_per_s": copy_bytes_per_s,
        "attention": alone,
        "models": steps,
        "torch": in_torch,
        "num_failed": num_failed,
    }
    print(json.dumps(facts))
    return min(num_failed, 1)


def is_failed(impl: Impl, line: dict[str, object]) -> bool:
    """Returns whether the line says that the implementation is wrong or refused as such."""
    return line["impl"] == impl and "failed" in line and "kv_len" not in line


if __name__ == "__main__":
    sys.exit(main())
