"""Where a decode step of the demo model's shape goes on a CPU, by XLA's kernels and native ones.

``python -m bench.cpu_kernels [--rows 1 8 32] [--kv-len 192] [--kv-dtypes bfloat16] [--rounds 15]``
prints, for each number of sequences and both kinds, the median milliseconds of a step's parts, and
beside each its floor: the larger of the bytes that must be read over the bandwidth and the
operations over the rate, both measured just before. The kinds, and the K/V dtypes, take turns, so
that a busy moment hits all.

weights (native: with the activation that is inside its product), attention, head and sampling
(greedy) are programs of their own that do nothing else. step is the runner's, from its plan to its
result, nothing overlapped. rest is what its forward program takes beyond weights and attention:
norms, rotations, K/V writes; host is what the step takes beyond its two programs. A rest below 0
says that parts alone were slower than in the step.

Weights and K/V are random; weights are bfloat16.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.config import Config, default_cache_dir, load_config
from jaxserve.kernels.dot import MatmulImpl, project, project_silu
from jaxserve.kernels.paged_attention import paged_attention
from jaxserve.kernels.pool import LARGEST, Pool, QuantizedPool, quantize
from jaxserve.metrics import Metrics
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.packing import pack_params
from jaxserve.model.params import Params, init_params, num_param_bytes
from jaxserve.model.sampling import Sampled, sample
from jaxserve.model.transformer import logits
from jaxserve.plan import Bucket, Chunk, RowLoad, StepPlan
from jaxserve.request import SamplingParams
from jaxserve.runner.batch import build_output_rows, build_packed, find_sampled_rows
from jaxserve.runner.buckets import OutputBucket
from jaxserve.runner.device import Device
from jaxserve.runner.kernel_choice import choose_kernels
from jaxserve.runner.lowering import ProgramKey, head_params
from jaxserve.runner.programs import Programs
from jaxserve.runner.runner import Runner
from jaxserve.runner.sizing import RunnerSizes, size_runner
from jaxserve.runner.spec import DtypeName, KvDtypeName, RunnerSpec, bytes_of_page
from jaxserve.runner.state import gather_sampling

MODEL: Final = ModelConfig(
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
KINDS: Final[tuple[MatmulImpl, ...]] = ("xla", "native")
KV_DTYPES: Final[tuple[KvDtypeName, ...]] = get_args(KvDtypeName)
READ_BYTES: Final = 2**29  # beyond any cache
GREEDY: Final = SamplingParams(temperature=0.0)

Run = Callable[[], object]


class Variant(NamedTuple):
    """What takes turns with others."""

    kind: MatmulImpl
    kv_dtype: KvDtypeName


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kv-len", type=int, default=192, help="keys that each row sees")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--kv-dtypes", choices=KV_DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--attention-only", action="store_true", help="measure no other part")
    options = parser.parse_args()
    bytes_per_ms, operations_per_ms = measure_bandwidth() / 1e3, measure_rate() / 1e3
    print(
        f"read bandwidth {bytes_per_ms / 1e6:.1f} GB/s, bfloat16 {operations_per_ms / 1e6:.0f} "
        "GFLOP/s"
    )
    print(f"{'rows':>4}  {'part':14} {'K/V':13}", end=" ")
    print(*(f"{f'{kind} ms':>10}" for kind in options.kinds), end="")
    print(f" {'floor ms':>10} {'from':>9}", *(f"{f'{kind} /floor':>14}" for kind in options.kinds))
    variants = [Variant(*both) for both in itertools.product(options.kinds, options.kv_dtypes)]
    build = build_attention_alone if options.attention_only else build_parts
    for num_rows in options.rows:
        medians = measure(build(variants, num_rows, kv_len=options.kv_len), options.rounds)
        lines = medians if options.attention_only else summarize(medians)
        for (part, ms), kv_dtype in itertools.product(lines.items(), options.kv_dtypes):
            values = [ms[Variant(kind, kv_dtype)] for kind in options.kinds]
            line = f"{num_rows:4}  {part:14} {kv_dtype:13} "
            line += " ".join(f"{value:10.2f}" for value in values)
            costs = count_costs(num_rows, kv_len=options.kv_len, kv_dtype=kv_dtype)
            if part in costs:
                num_bytes, operations = costs[part]
                floor = max(num_bytes / bytes_per_ms, operations / operations_per_ms)
                source = "memory" if floor == num_bytes / bytes_per_ms else "operations"
                line += f" {floor:10.2f} {source:>9}"
                line += "".join(f" {value / floor:14.2f}" for value in values)
            print(line, flush=True)


def measure_bandwidth() -> float:
    """Returns bytes per second, as all of the process's cores read them together."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    parts = np.array_split(np.ones(READ_BYTES // 4, np.int32), num_threads)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        return READ_BYTES / min(_seconds_of(lambda: list(threads.map(np.max, parts)), 9))


def measure_rate() -> float:
    """Returns operations per second of XLA's product of two large bfloat16 matrices."""
    size = 2048
    matrix = jnp.ones((size, size), jnp.bfloat16)
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    return 2 * size**3 / min(_seconds_of(lambda: multiply(matrix, matrix).block_until_ready(), 9))


def _seconds_of(run: Run, num_runs: int) -> list[float]:
    seconds = []
    for _ in range(num_runs):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def count_costs(num_rows: int, *, kv_len: int, kv_dtype: KvDtypeName) -> dict[str, tuple[int, int]]:
    """Returns the bytes that must be read for each part, and its operations."""
    head = MODEL.vocab_size * MODEL.hidden_size
    weights = num_param_bytes(MODEL, "bfloat16") // 2 - head
    keys = num_rows * kv_len
    costs = {
        "weights": (2 * weights, 2 * num_rows * weights),
        "attention": (
            keys * bytes_of_page(MODEL, page_size=1, kv_dtype=kv_dtype),
            keys * len(MODEL.layers) * 4 * MODEL.num_heads * MODEL.head_dim,
        ),
        "head": (2 * head, 2 * num_rows * head),
        "sampling": (4 * num_rows * MODEL.vocab_size, 0),
    }
    costs["step"] = (sum(b for b, _ in costs.values()), sum(n for _, n in costs.values()))
    return costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a step of the runner is made of.

    Attributes:
      params: in the form that the kind reads.
    """

    spec: RunnerSpec
    params: Params
    plan: StepPlan
    bucket: Bucket
    output: OutputBucket
    programs: Programs


def build_attention_alone(
    variants: Sequence[Variant], num_rows: int, *, kv_len: int
) -> dict[Variant, dict[str, Run]]:
    """Returns as `build_parts` does, without what has weights."""
    parts: dict[Variant, dict[str, Run]] = {}
    for variant in variants:
        config = build_config(variant, num_rows, kv_len=kv_len)
        sizes = find_sizes(config, Programs(Metrics()), lambda keys: None)
        bucket = sizes.scheme.find_bucket(num_rows, 0)
        parts[variant] = {"attention": build_attention(sizes.spec, bucket, num_rows, kv_len=kv_len)}
    return parts


def build_parts(
    variants: Sequence[Variant], num_rows: int, *, kv_len: int
) -> dict[Variant, dict[str, Run]]:
    """Returns a function for each part by each variant, which returns when the part is done."""
    cache_dir = default_cache_dir()
    params = init_params(MODEL, jax.random.key(0), "bfloat16")
    configs = {variant: build_config(variant, num_rows, kv_len=kv_len) for variant in variants}
    plans: dict[Variant, StepPlan] = {}
    parts: dict[Variant, dict[str, Run]] = {}
    for variant, config in configs.items():
        served = build_served(params, config, num_rows, kv_len=kv_len, cache_dir=cache_dir)
        plans[variant] = served.plan
        parts[variant] = {
            "weights": build_weights(served),
            "attention": build_attention(served.spec, served.bucket, num_rows, kv_len=kv_len),
            "forward": build_forward(served),
            "head": build_head(served),
            "sampling": build_sampling(served),
            "output": build_output(served),
        }
        for run in parts[variant].values():
            run()
    for variant, config in configs.items():  # last: from then on a compile is a fault
        runner = Runner(params, MODEL, config, metrics=Metrics(), cache_dir=cache_dir)
        parts[variant]["step"] = build_step(runner, plans[variant], kv_len=kv_len)
    return parts


def build_config(variant: Variant, num_rows: int, *, kv_len: int) -> Config:
    num_pages = 1 + num_rows * -(-kv_len // PAGE)
    return load_config(
        flags={
            "runner.attention": variant.kind,
            "runner.matmul": variant.kind,
            "model.dtype": "bfloat16",
            "kv.dtype": variant.kv_dtype,
            "kv.page_size": PAGE,
            "kv.num_pages": num_pages,
            "model.max_model_tokens": kv_len,
            "scheduler.max_seqs": num_rows,
            "buckets.decode_seqs": (num_rows,),
            "buckets.chunk_decode_seqs": (num_rows,),
            "buckets.chunk_tokens": (PAGE,),
        }
    )


def find_sizes(
    config: Config, programs: Programs, compile_keys: Callable[[tuple[ProgramKey, ...]], None]
) -> RunnerSizes:
    assert config.kv.dtype != "auto", "as build_config has it"
    dtypes: tuple[DtypeName, KvDtypeName] = ("bfloat16", config.kv.dtype)
    kernels = choose_kernels(
        MODEL, config, dtypes=dtypes, device=Device(platform="cpu"), cache_dir=default_cache_dir()
    )
    return size_runner(
        MODEL, config, dtypes=dtypes, kernels=kernels, programs=programs, compile_keys=compile_keys
    )


def build_served(
    params: Params, config: Config, num_rows: int, *, kv_len: int, cache_dir: Path
) -> Served:
    programs = Programs(Metrics())

    def compile_keys(keys: tuple[ProgramKey, ...]) -> None:
        programs.compile_all(keys, num_threads=2, cache_dir=cache_dir)

    sizes = find_sizes(config, programs, compile_keys)
    spec, scheme = sizes.spec, sizes.scheme
    bucket, output = scheme.find_bucket(num_rows, 0), scheme.find_output(num_rows, "greedy")
    compile_keys(
        (
            ProgramKey(kind="init", spec=spec),
            ProgramKey(kind="forward", spec=spec, bucket=bucket),
            ProgramKey(kind="output", spec=spec, bucket=output),
        )
    )
    params = jax.tree.map(lambda leaf: leaf, params)
    if spec.kernels.matmul == "native":
        pack_params(params, MODEL)
    plan = StepPlan(
        step_id=0,
        others=tuple(
            Chunk(
                sequence_id=row, row=row, start=kv_len - 1, num_tokens=1, token_ids=None,
                samples=True, output_index=0, prompt_len=kv_len - 1,
            )
            for row in range(num_rows)
        ),
    )  # fmt: skip
    return Served(
        spec=spec, params=params, plan=plan, bucket=bucket, output=output, programs=programs
    )


def build_weights(served: Served) -> Run:
    impl, num_rows = served.spec.kernels.matmul, served.bucket.num_tokens

    @jax.jit
    def multiply(y_TD: jax.Array, params: Params) -> jax.Array:
        for layer in params["layers"].values():
            q_TF, k_TF, v_TF = project(
                y_TD, layer["q_DNH"], layer["k_DKH"], layer["v_DKH"], impl=impl
            )
            q_TF += k_TF[:1, :1] + v_TF[:1, :1]  # so that none is left out
            (y_TD,) = project(q_TF.astype(jnp.bfloat16), layer["o_NHD"], impl=impl)
            y_TD = y_TD.astype(jnp.bfloat16)
            if impl == "native":
                hidden_TF = project_silu(y_TD, layer["gate_DF"], layer["up_DF"])
            else:
                gate_TF, up_TF = project(y_TD, layer["gate_DF"], layer["up_DF"], impl=impl)
                hidden_TF = (gate_TF + up_TF).astype(jnp.bfloat16)
            (y_TD,) = project(hidden_TF, layer["down_FD"], impl=impl)
            y_TD = y_TD.astype(jnp.bfloat16)
        return y_TD

    y_TD = jax.random.normal(jax.random.key(3), (num_rows, MODEL.hidden_size), jnp.bfloat16)
    return lambda: multiply(y_TD, served.params).block_until_ready()


def build_attention(spec: RunnerSpec, bucket: Bucket, num_rows: int, *, kv_len: int) -> Run:
    page_table_XP = np.zeros((bucket.decode_seqs, spec.pages_per_seq), np.int32)
    page_table_XP[:num_rows] = _page_table(num_rows, kv_len)
    keys = jax.random.split(jax.random.key(1), len(MODEL.layers))
    kv = [fill_pool(key, spec) for key in keys]

    @jax.jit
    def attend(q_TNH: jax.Array, kv: list[Pool]) -> jax.Array:
        for kv_C2KRH in kv:  # each layer's queries are the last one's output, as in a step
            q_TNH = paged_attention(
                q_TNH,
                kv_C2KRH,
                jnp.asarray(page_table_XP),
                jnp.full(len(page_table_XP), kv_len - 1, jnp.int32),
                jnp.asarray(np.arange(len(page_table_XP)) < num_rows, jnp.int32),
                num_single_rows=bucket.decode_seqs,
                tile=spec.chunk_tile,
                scale=MODEL.scale,
                impl=spec.kernels.attention,
            )
        return q_TNH

    shape = (bucket.decode_seqs, MODEL.num_heads, MODEL.head_dim)
    q_TNH = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
    return lambda: attend(q_TNH, kv).block_until_ready()


@functools.partial(jax.jit, static_argnums=1)
def fill_pool(key: jax.Array, spec: RunnerSpec) -> Pool:
    if spec.kv_dtype not in LARGEST:
        return jax.random.normal(key, spec.kv_shape, spec.kv_dtype)
    heads = jax.random.normal(key, spec.kv_shape, jnp.float32)
    stored_C2KRH, scales_C2KR = quantize(heads, np.dtype(spec.kv_dtype))
    return QuantizedPool(bytes_C2KRH=stored_C2KRH, scales_C2KR=scales_C2KR)


def _page_table(num_rows: int, kv_len: int) -> np.ndarray:
    pages = -(-kv_len // PAGE)
    return 1 + np.arange(num_rows * pages, dtype=np.int32).reshape(num_rows, pages)


def build_head(served: Served) -> Run:
    """The final norm and the logits."""

    @jax.jit
    def multiply(hidden_TD: jax.Array, head: Params) -> jax.Array:
        return logits(head, hidden_TD, config=MODEL, matmul=served.spec.kernels.matmul)

    shape = (served.output.rows, MODEL.hidden_size)
    hidden_TD = jax.random.normal(jax.random.key(4), shape, jnp.float32)
    head = head_params(served.params)
    return lambda: multiply(hidden_TD, head).block_until_ready()


def build_sampling(served: Served) -> Run:
    """The greedy choice."""
    num_rows = served.output.rows
    _, state, _ = served.programs[ProgramKey(kind="init", spec=served.spec)]()

    @jax.jit
    def choose(logits_BV: jax.Array) -> Sampled:
        index_B = jnp.zeros(num_rows, jnp.int32)
        rows = gather_sampling(state.sampling, index_B, padded_vocab=MODEL.padded_vocab_size)
        return sample(
            logits_BV, rows, index_B, vocab_size=MODEL.vocab_size, variant="greedy",
            impl=served.spec.kernels.sampling,
        )  # fmt: skip

    logits_BV = jax.random.normal(jax.random.key(5), (num_rows, MODEL.padded_vocab_size))
    return lambda: jax.block_until_ready(choose(logits_BV))


def build_forward(served: Served) -> Run:
    spec, bucket = served.spec, served.bucket
    run_forward = served.programs[ProgramKey(kind="forward", spec=spec, bucket=bucket)]
    kv, state, hidden_TD = served.programs[ProgramKey(kind="init", spec=spec)]()
    page_table_BP = state.page_table_BP.at[: len(served.plan.chunks)].set(
        _page_table(len(served.plan.chunks), spec.pages_per_seq * PAGE)
    )
    packed_I = jax.device_put(build_packed(served.plan, bucket, spec))

    def run() -> None:
        nonlocal kv, page_table_BP, hidden_TD
        kv, page_table_BP, hidden_TD, done = run_forward(
            served.params, kv, page_table_BP, hidden_TD, state.last_token_B, packed_I
        )
        done.block_until_ready()
        hidden_TD.block_until_ready()

    return run


def build_output(served: Served) -> Run:
    spec, output = served.spec, served.output
    run_output = served.programs[ProgramKey(kind="output", spec=spec, bucket=output)]
    _, state, hidden_TD = served.programs[ProgramKey(kind="init", spec=spec)]()
    sampled = find_sampled_rows(served.plan, served.bucket, spec)
    rows_4R = jax.device_put(build_output_rows(sampled, output, spec))
    head, last_token_B = head_params(served.params), state.last_token_B

    def run() -> None:
        nonlocal last_token_B
        last_token_B, result_RI = run_output(head, hidden_TD, last_token_B, state.sampling, rows_4R)
        result_RI.block_until_ready()

    return run


def build_step(runner: Runner, plan: StepPlan, *, kv_len: int) -> Run:
    table = _page_table(len(plan.chunks), kv_len).tolist()
    loads = tuple(
        RowLoad(
            sequence_id=chunk.sequence_id, row=chunk.row, pages=tuple(table[chunk.row]),
            sampling=GREEDY, seed=0, choice=0, stop_ids=(),
        )
        for chunk in plan.chunks
    )  # fmt: skip
    runner.launch(dataclasses.replace(plan, row_loads=loads)).result()
    return lambda: runner.launch(plan).result()


def measure(
    parts: Mapping[Variant, Mapping[str, Run]], num_rounds: int
) -> dict[str, dict[Variant, float]]:
    """Returns the median milliseconds of each part by each variant."""
    medians = {}
    for part in next(iter(parts.values())):
        times: dict[Variant, list[float]] = {variant: [] for variant in parts}
        for index in range(num_rounds + 2):
            for variant, runs in parts.items():
                (seconds,) = _seconds_of(runs[part], 1)
                if index >= 2:  # the first ones read what is in no cache yet
                    times[variant].append(1e3 * seconds)
        medians[part] = {variant: statistics.median(some) for variant, some in times.items()}
    return medians


def summarize(ms: Mapping[str, Mapping[Variant, float]]) -> dict[str, dict[Variant, float]]:
    """Returns the table's lines, of which all but the last add up to it."""

    def subtract(whole: str, *parts: str) -> dict[Variant, float]:
        return {
            variant: value - sum(ms[part][variant] for part in parts)
            for variant, value in ms[whole].items()
        }

    return {
        "weights": dict(ms["weights"]),
        "attention": dict(ms["attention"]),
        "rest": subtract("forward", "weights", "attention"),
        "head": dict(ms["head"]),
        "sampling": dict(ms["sampling"]),
        "rest of output": subtract("output", "head", "sampling"),
        "host": subtract("step", "forward", "output"),
        "step": dict(ms["step"]),
    }


if __name__ == "__main__":
    main()
