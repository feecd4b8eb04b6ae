"""Times a decode step of the demo model's shape by XLA's kernels and by the native ones.

``python -m bench.cpu_kernels [--rows 1 2 8 32] [--kv-lens 192] [--rounds 15]`` prints, for each
number of rows and length of K/V, the median milliseconds of the whole step and of its parts by
both, the ratio, and the floor: what the memory takes to give the bytes that must be read, by the
bandwidth measured just before. The two take turns, so that a busy moment hits both.

Weights and K/V are random bfloat16. Parts are timed apart, so that XLA cannot overlap them; the
rest (norms, rotations, writes of K/V, activations) is what the step takes beyond them.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Final

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.config import default_cache_dir
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.dot import project
from jaxserve.kernels.paged_attention import paged_attention
from jaxserve.model.batch import TokenBatch
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params, init_params
from jaxserve.model.transformer import forward, logits
from jaxserve.runner.native_build import load_native

CONFIG: Final = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_size=1536,
    max_position=8192,
    norm_eps=1e-5,
    layers=(LayerConfig(rope=RopeConfig(theta=100000.0)),) * 30,
    tied_head=True,
)
PAGE: Final = 16
KINDS: Final = {"xla": Kernels(), "native": Kernels(attention="native", matmul="native")}
READ_BYTES: Final = 2**29  # beyond any cache

Pool = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step's arguments."""

    params: Params
    kv: Pool
    batch: TokenBatch

    @property
    def num_rows(self) -> int:
        return int(self.batch.token_ids_T.shape[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--kv-lens", type=int, nargs="+", default=[192])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    load_native(default_cache_dir())
    params = init_params(CONFIG, jax.random.key(0), "bfloat16")
    bytes_per_ms = measure_bandwidth() / 1e3
    print(f"read bandwidth {bytes_per_ms / 1e6:.1f} GB/s")
    print("rows  kv_len  part          xla_ms  native_ms  xla/native  floor_ms  native/floor")
    for num_rows in options.rows:
        for kv_len in options.kv_lens:
            step = build_step(params, num_rows, kv_len)
            floors = {part: size / bytes_per_ms for part, size in count_bytes(step, kv_len).items()}
            for part, ms in measure(step, options.rounds).items():
                line = f"{num_rows:4}  {kv_len:6}  {part:10} {ms['xla']:9.2f} {ms['native']:10.2f}"
                line += f" {ms['xla'] / ms['native']:11.2f}"
                if floor := floors.get(part):
                    line += f" {floor:9.2f} {ms['native'] / floor:13.2f}"
                print(line, flush=True)


def measure_bandwidth() -> float:
    """Returns bytes per second, as all of the process's cores read them together."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    parts = np.array_split(np.ones(READ_BYTES // 4, np.int32), num_threads)
    seconds = []
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        for _ in range(7):
            began_s = time.perf_counter()
            list(threads.map(np.max, parts))
            seconds.append(time.perf_counter() - began_s)
    return READ_BYTES / min(seconds)


def build_step(params: Params, num_rows: int, kv_len: int) -> Step:
    """Returns a step whose rows each see `kv_len` keys, the one of this step included."""
    pages = -(-kv_len // PAGE)
    table_XP = 1 + np.arange(num_rows * pages, dtype=np.int32).reshape(num_rows, pages)
    shape = (1 + num_rows * pages, 2, CONFIG.num_kv_heads, PAGE, CONFIG.head_dim)
    keys = jax.random.split(jax.random.key(1), len(CONFIG.layers))
    last = np.full(num_rows, kv_len - 1, np.int32)
    return Step(
        params=params,
        kv=tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys),
        batch=TokenBatch(
            token_ids_T=jnp.arange(num_rows, dtype=jnp.int32),
            positions_T=jnp.asarray(last),
            write_pages_T=jnp.asarray(table_XP[:, -1]),
            write_rows_T=jnp.asarray(last % PAGE),
            page_table_XP=jnp.asarray(table_XP),
            q_starts_X=jnp.asarray(last),
            q_lens_X=jnp.ones(num_rows, jnp.int32),
            prompt_lens_X=jnp.asarray(last),
        ),
    )


def count_bytes(step: Step, kv_len: int) -> dict[str, int]:
    """Returns what must be read for each part, if nothing of it is in a cache."""
    layers = step.params["layers"].values()
    products = sum(leaf.nbytes for layer in layers for leaf in layer.values())
    row_bytes = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    attention = step.num_rows * kv_len * row_bytes * len(CONFIG.layers)
    head = step.params["embedding_VD"].nbytes
    return {
        "step": products + attention + head,
        "attention": attention,
        "products": products,
        "head": head,
    }


def measure(step: Step, num_rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of each part by each kind."""
    parts: dict[str, Callable[[str], Callable[[], object]]] = {
        "step": lambda kind: build_whole(step, KINDS[kind]),
        "attention": lambda kind: build_attention(step, KINDS[kind]),
        "products": lambda kind: build_products(step, KINDS[kind]),
        "head": lambda kind: build_head(step, KINDS[kind]),
    }
    medians = {}
    for part, build in parts.items():
        runs = {kind: build(kind) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for index in range(num_rounds + 2):
            for kind, run in runs.items():
                began_s = time.perf_counter()
                jax.block_until_ready(run())
                if index >= 2:  # the first ones read what is in no cache yet
                    times[kind].append(1e3 * (time.perf_counter() - began_s))
        medians[part] = {kind: statistics.median(some) for kind, some in times.items()}
    whole = medians["step"]
    medians["rest"] = {
        kind: whole[kind] - sum(ms[kind] for part, ms in medians.items() if part != "step")
        for kind in KINDS
    }
    return medians


def build_whole(step: Step, kernels: Kernels) -> Callable[[], object]:
    def run_step(params: Params, kv: Pool, batch: TokenBatch) -> tuple[Pool, jax.Array]:
        kv, hidden_TD = forward(
            params, kv, batch, config=CONFIG, num_single_rows=step.num_rows, tile=16,
            kernels=kernels,
        )  # fmt: skip
        logits_TV = logits(params, hidden_TD, config=CONFIG, matmul=kernels.matmul)
        return kv, logits_TV.argmax(-1)

    kv = tuple(jnp.copy(kv_C2KRH) for kv_C2KRH in step.kv)  # donated step by step
    program = jax.jit(run_step, donate_argnums=1).lower(step.params, kv, step.batch).compile()

    def run() -> object:
        nonlocal kv
        kv, token_ids_T = program(step.params, kv, step.batch)
        return token_ids_T

    return run


def build_attention(step: Step, kernels: Kernels) -> Callable[[], object]:
    @jax.jit
    def attend(q_TNH: jax.Array, kv: Pool, batch: TokenBatch) -> jax.Array:
        for kv_C2KRH in kv:  # each layer's queries are the last one's output, as in a step
            q_TNH = paged_attention(
                q_TNH, kv_C2KRH, batch.page_table_XP, batch.q_starts_X, batch.q_lens_X,
                num_single_rows=step.num_rows, tile=16, scale=0.125, impl=kernels.attention,
            )  # fmt: skip
        return q_TNH

    shape = (step.num_rows, CONFIG.num_heads, CONFIG.head_dim)
    q_TNH = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
    return lambda: attend(q_TNH, step.kv, step.batch)


def build_products(step: Step, kernels: Kernels) -> Callable[[], object]:
    @jax.jit
    def multiply(y_TD: jax.Array, params: Params) -> jax.Array:
        for layer in params["layers"].values():
            q_TNH, k_TKH, v_TKH = project(
                y_TD, layer["q_DNH"], layer["k_DKH"], layer["v_DKH"], impl=kernels.matmul
            )
            q_TF = q_TNH.reshape(step.num_rows, -1)
            q_TF += k_TKH[:1, 0, :1] + v_TKH[:1, 0, :1]  # so that none is left out
            o_FD = layer["o_NHD"].reshape(q_TF.shape[1], -1)
            (y_TD,) = project(q_TF.astype(jnp.bfloat16), o_FD, impl=kernels.matmul)
            gate_TF, up_TF = project(
                y_TD.astype(jnp.bfloat16), layer["gate_DF"], layer["up_DF"], impl=kernels.matmul
            )
            hidden_TF = (gate_TF + up_TF).astype(jnp.bfloat16)
            (y_TD,) = project(hidden_TF, layer["down_FD"], impl=kernels.matmul)
            y_TD = y_TD.astype(jnp.bfloat16)
        return y_TD

    y_TD = jax.random.normal(jax.random.key(3), (step.num_rows, CONFIG.hidden_size), jnp.bfloat16)
    return lambda: multiply(y_TD, step.params)


def build_head(step: Step, kernels: Kernels) -> Callable[[], object]:
    """The final norm, the logits, and the greedy choice."""

    @jax.jit
    def choose(hidden_TD: jax.Array, params: Params) -> jax.Array:
        return logits(params, hidden_TD, config=CONFIG, matmul=kernels.matmul).argmax(-1)

    hidden_TD = jax.random.normal(
        jax.random.key(4), (step.num_rows, CONFIG.hidden_size), jnp.float32
    )
    return lambda: choose(hidden_TD, step.params)


if __name__ == "__main__":
    main()
