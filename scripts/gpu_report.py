"""What this engine's programs cost on the device of this machine; prints a table and one JSON line.

    python scripts/gpu_report.py [--model 135m 8b] [--kv-len 512] [--rows 1 8 32]

Weights are random: times depend on shapes alone. Each decode figure stands beside the machine's own
limit, measured in the same run: the time to read the weights and the batch's K/V once, at the
speed of a pass over memory. It runs on a CPU too: set JAX_PLATFORMS=cpu.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
from jax import numpy as jnp

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import init_params, num_param_bytes
from jaxserve.plan import Chunk, RowLoad, StepPlan
from jaxserve.request import SamplingParams
from jaxserve.runner.runner import Runner

MODELS = {
    "tiny": (131, 48, 3, 8, 2, 16, 112),
    "135m": (49152, 576, 30, 9, 3, 64, 1536),
    "1b": (128256, 2048, 16, 32, 8, 64, 8192),
    "8b": (128256, 4096, 32, 32, 8, 128, 14336),
}
NUM_STEPS = 40
NUM_WARM_UP = 8


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


@dataclasses.dataclass(kw_only=True)
class StepTimes:
    """Seconds: from one result to the next, and of the host in `launch`."""

    step_s: float
    launch_s: float


class Driver:
    """Plans steps for rows that hold `kv_len` tokens."""

    def __init__(self, runner: Runner, *, kv_len: int, page_size: int) -> None:
        self._runner = runner
        self._kv_len = kv_len
        self._pages_per_row = -(-(kv_len + NUM_STEPS + NUM_WARM_UP + 2) // page_size)
        self._next_step = 1

    def decode(self, num_rows: int, sampling: SamplingParams) -> StepTimes:
        """Runs steps of one token for each row, the next launched before the last is read."""
        loads = tuple(
            RowLoad(
                sequence_id=row,
                row=row,
                pages=tuple(1 + row * self._pages_per_row + i for i in range(self._pages_per_row)),
                sampling=sampling,
                seed=row,
                choice=0,
                stop_ids=(),
            )
            for row in range(num_rows)
        )
        in_flight = self._runner.launch(self._plan(0, num_rows, loads))
        steps, launches = [], []
        for i in range(1, NUM_STEPS + NUM_WARM_UP):
            start = time.perf_counter()
            following = self._runner.launch(self._plan(i, num_rows, ()))
            launches.append(time.perf_counter() - start)
            in_flight.result()
            steps.append(time.perf_counter() - start)
            in_flight = following
        in_flight.result()
        return StepTimes(
            step_s=statistics.median(steps[NUM_WARM_UP:]),
            launch_s=statistics.median(launches[NUM_WARM_UP:]),
        )

    def prefill(self, num_tokens: int) -> float:
        """Returns the median seconds of a step with one chunk, from launch to result."""
        times = []
        for i in range(NUM_WARM_UP + 10):
            chunk = Chunk(
                sequence_id=0,
                row=0,
                start=0,
                num_tokens=num_tokens,
                token_ids=(5,) * num_tokens,
                samples=True,
                output_index=0,
                prompt_len=num_tokens,
            )
            start = time.perf_counter()
            self._runner.launch(StepPlan(step_id=self._take_step(), chunks=(chunk,))).result()
            if i >= NUM_WARM_UP:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _plan(self, index: int, num_rows: int, loads: tuple[RowLoad, ...]) -> StepPlan:
        chunks = tuple(
            Chunk(
                sequence_id=row,
                row=row,
                start=self._kv_len + index,
                num_tokens=1,
                token_ids=(5,) if loads else None,
                samples=True,
                output_index=index,
                prompt_len=self._kv_len,
            )
            for row in range(num_rows)
        )
        return StepPlan(step_id=self._take_step(), chunks=chunks, row_loads=loads)

    def _take_step(self) -> int:
        self._next_step += 1
        return self._next_step - 1


def report(
    name: str,
    *,
    dtype: str,
    kv_dtype: str,
    kv_len: int,
    rows: list[int],
    copy_bytes_per_s: float,
) -> dict[str, object]:
    model = make_config(name)
    page_size = 16
    pages_per_row = -(-(kv_len + NUM_STEPS + NUM_WARM_UP + 2) // page_size)
    config = Config.model_validate(
        {
            "model": {"dtype": dtype, "max_model_tokens": pages_per_row * page_size},
            "kv": {
                "page_size": page_size,
                "dtype": kv_dtype,
                "num_pages": 1 + max(rows) * pages_per_row,
            },
            "scheduler": {"max_seqs": max(max(rows), 2)},
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
    token_bytes = 2 * model.num_kv_heads * model.head_dim * model.num_layers
    token_bytes *= jnp.dtype(runner.spec.kv_dtype).itemsize
    table: list[dict[str, object]] = []
    for num_rows in rows:
        for kind, sampling in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("top_p", SamplingParams(temperature=0.8, top_p=0.95, seed=1)),
        ):
            times = driver.decode(num_rows, sampling)
            limit_s = (weight_bytes + num_rows * kv_len * token_bytes) / copy_bytes_per_s
            row = {
                "rows": num_rows,
                "sampling": kind,
                "step_ms": 1e3 * times.step_s,
                "launch_ms": 1e3 * times.launch_s,
                "limit_ms": 1e3 * limit_s,
                "share_of_limit": limit_s / times.step_s,
            }
            table.append(row)
            print(
                f"  decode rows={num_rows:<3} {kind:<7} step {row['step_ms']:8.3f} ms, host launch "
                f"{row['launch_ms']:6.3f} ms, limit {row['limit_ms']:7.3f} ms "
                f"({100 * limit_s / times.step_s:.0f} %)"
            )
    chunk = min(runner.limits.max_chunk_tokens, kv_len)
    prefill_s = driver.prefill(chunk)
    print(f"  chunk of {chunk} tokens: {1e3 * prefill_s:.2f} ms, {chunk / prefill_s:.0f} tokens/s")
    return {
        "model": name,
        "dtype": dtype,
        "kv_dtype": runner.spec.kv_dtype,
        "kv_len": kv_len,
        "programs": num_programs,
        "start_s": seconds,
        "decode": table,
        "chunk_tokens": chunk,
        "chunk_ms": 1e3 * prefill_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["135m"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--kv-dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--kv-len", type=int, default=512, help="tokens each row holds")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()

    device = jax.devices()[0]
    copy_bytes_per_s = measure_copy_bytes_per_s()
    print(f"{device.device_kind}, jax {jax.__version__}, copy {copy_bytes_per_s / 1e9:.0f} GB/s")
    reports = []
    for name in arguments.model:
        print(f"{name} {arguments.dtype} kv_len={arguments.kv_len}")
        reports.append(
            report(
                name,
                dtype=arguments.dtype,
                kv_dtype=arguments.kv_dtype,
                kv_len=arguments.kv_len,
                rows=arguments.rows,
                copy_bytes_per_s=copy_bytes_per_s,
            )
        )
    facts = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "copy_bytes_per_s": copy_bytes_per_s,
    }
    print(json.dumps({**facts, "models": reports}))


if __name__ == "__main__":
    main()
