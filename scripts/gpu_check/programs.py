"""Every program of the step, from the engine's own code: what it takes, and that one captured graph
holds all of it."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import jax

from jaxserve.config import Config
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import MIN_ROWS, WANTED_PROGRAMS
from jaxserve.kernels.paged_attention.xla import BLOCK_TOKENS
from jaxserve.kernels.pool import empty_pool
from jaxserve.model.config import MAX_EOS_IDS, ModelConfig
from jaxserve.plan import Bucket
from jaxserve.runner.batch import COPY_WIDTH, SCORE_WIDTH, num_attention_rows
from jaxserve.runner.buckets import OutputBucket, build_scheme
from jaxserve.runner.capture import read_capture
from jaxserve.runner.kernel_choice import choose_sampling
from jaxserve.runner.lowering import ProgramKey, lower
from jaxserve.runner.programs import compiler_options, program_keys
from jaxserve.runner.spec import KvDtypeName, RunnerSpec
from scripts.gpu_check import h200
from scripts.gpu_check.dump import Compiled, Coverage, read_coverage
from scripts.gpu_check.faults import Fault, Kind, Limits, find_faults
from scripts.gpu_report import make_config

MAX_MODEL_TOKENS = 2048
HAS_POOL = ("forward", "page_copy", "page_in", "page_out")
KV_DTYPES: tuple[KvDtypeName, ...] = ("bfloat16", "int8", "float8_e4m3fn")


def build_spec(
    model: ModelConfig, *, attention: Impl, kv_dtype: KvDtypeName = "bfloat16"
) -> tuple[RunnerSpec, tuple[ProgramKey, ...]]:
    """Returns what runs a model by the default configuration, and its programs."""
    config = Config()
    scheme = build_scheme(config, max_model_tokens=MAX_MODEL_TOKENS, min_rows=2)
    pages_per_seq = -(-MAX_MODEL_TOKENS // config.kv.page_size)
    spec = RunnerSpec(
        model=model,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        page_size=config.kv.page_size,
        pages_per_seq=pages_per_seq,
        num_pages=1 + config.scheduler.max_seqs * pages_per_seq,
        max_seqs=config.scheduler.max_seqs,
        max_step_tokens=scheme.max_tokens,
        chunk_tile=config.buckets.chunk_tile,
        max_chunks=config.scheduler.max_chunks,
        max_logit_bias=config.limits.max_logit_bias,
        max_ban_ids=config.limits.max_stop_token_ids + MAX_EOS_IDS,
        max_logprobs=config.limits.max_logprobs,
        kernels=Kernels(attention=attention, sampling=choose_sampling(config, platform="gpu")),
        batch_invariant=False,
        command_buffers=True,
    )
    return spec, program_keys(spec, scheme, has_host_tier=True)


def find_keys(
    model: str, attention: Impl, *, kv_dtype: KvDtypeName, has_all: bool
) -> Iterator[ProgramKey]:
    """Yields the programs of one model to check. Outputs and the rest have no attention: they are
    checked with triton's. Of pools of one byte, which no kernel but attention's differs with, the
    demo model's programs alone, and those that have the pool.

    Args:
      has_all: else one or two buckets of each kind; what all models share, of the demo model.
    """
    spec, keys = build_spec(make_config(model), attention=attention, kv_dtype=kv_dtype)
    for key in keys:
        if attention != "triton" and key.kind != "forward":
            continue
        if kv_dtype != "bfloat16" and (model != "135m" or key.kind not in HAS_POOL):
            continue
        match key.bucket:
            case Bucket() as bucket:
                is_chosen = bucket.decode_seqs == spec.max_seqs and (
                    bucket.num_tokens in (spec.max_seqs, spec.max_step_tokens)
                )
                # few rows, whose keys are shared out: another form of the kernel
                is_chosen |= attention != "xla" and bucket == min(
                    key.bucket for key in keys if isinstance(key.bucket, Bucket)
                )
            case OutputBucket() as output:
                is_chosen = output.rows == spec.max_seqs
            case None:
                is_chosen = model == "135m"
        if has_all or is_chosen:
            yield key


def find_limits(key: ProgramKey) -> Limits:
    """Returns what a program may take; the numbers are of jax 0.11.2, rounded up by a fifth.

    Temporaries of a forward: rows of the widest activation in float32. XLA without timing sums a
    product of few rows in up to eight parts: ten rows a token, but no more than 1,024 and two a
    token. Then what attention keeps: triton the partial sums of its programs; xla a block of K and
    V of each row, and its loop's sums, which every layer has a buffer of. Of an output: its
    logits, for `full` with two digits of mass and keys five times; of `score` logits and keys.

    Launches of an output are bounded, because they are what small kernels cost: `full` has three
    for each of 22 passes, and two for each id of the log-probabilities.

    Distinct kernels, however many layers: they share theirs. A layer has about 11, of which a chunk
    takes some of its own, and xla's loop 10 for each of its two calls; the rest are of the first
    and the last layer and of the step's arrays. `full` has each part of the sampler once or twice.
    """
    spec, model = key.spec, key.spec.model
    loops, conditions, kernels, launches, temp_bytes = 0, 0, 28, None, 1 << 20
    match key.kind, key.bucket:
        case "forward", Bucket() as bucket:
            T, heads_size = bucket.num_tokens, model.num_heads * model.head_dim
            has_chunks = bucket.chunk_tokens > 0
            widest = max(model.mlp_size, heads_size, model.hidden_size)
            temp_bytes += min(10 * T, 1024 + 2 * T) * widest * 4
            if spec.kernels.attention in ("triton", "mosaic"):
                temp_bytes += WANTED_PROGRAMS * MIN_ROWS * (model.head_dim + 1) * 4
                kernels = 36 if has_chunks else 28
            else:
                rows = num_attention_rows(bucket, spec.chunk_tile)
                temp_bytes += rows * BLOCK_TOKENS * 2 * model.num_kv_heads * model.head_dim * 4
                temp_bytes += model.num_layers * T * heads_size * 4
                loops = model.num_layers * (2 if has_chunks else 1)
                kernels = 64 if has_chunks else 42
        case "output", OutputBucket() as output:
            copies, launches = 1, 28
            if output.variant == "full":
                # filter_passes.py: top-k and top-p, each if a row has it; log-probabilities too
                conditions, kernels, launches, copies = 3, 90, 180, 5
            temp_bytes += copies * output.rows * model.padded_vocab_size * 4
        case "score", None:
            temp_bytes += 2 * SCORE_WIDTH * model.padded_vocab_size * 4
        case "page_copy", None:  # all pages are read before any is written
            temp_bytes += COPY_WIDTH * spec.page_bytes
    return Limits(
        temp_bytes=temp_bytes,
        kernels=kernels,
        launches=launches,
        loops=loops,
        conditions=conditions,
        pool_shapes=find_pool_shapes(spec) if key.kind in HAS_POOL else (),
    )


def find_pool_shapes(spec: RunnerSpec) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the arrays of a layer's pool."""
    layer = jax.eval_shape(functools.partial(empty_pool, spec.kv_shape, spec.kv_dtype))
    return tuple(array.shape for array in jax.tree.leaves(layer))


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Checked:
    """A program, compiled and judged."""

    key: ProgramKey
    compiled: Compiled
    coverage: Coverage
    limits: Limits
    faults: tuple[Fault, ...]

    @property
    def row(self) -> str:
        """Its line of the table."""
        compiled, coverage = self.compiled, self.coverage
        cells = (
            self.key.name,
            f"{compiled.lower_s:.1f} + {compiled.compile_s:.1f}",
            f"{compiled.temp_bytes / 2**20:.1f} of {self.limits.temp_bytes / 2**20:.1f}",
            f"{compiled.alias_bytes / 2**20:.0f} of {compiled.donated_bytes / 2**20:.0f}",
            coverage.num_graphs,
            ", ".join(coverage.outside) or "nothing",
            f"{len(coverage.kernels)} of {self.limits.kernels}",
            coverage.num_launches,
            coverage.loops,
            sum(kernel.spill_bytes for kernel in compiled.kernels.values()),
        )
        return " | ".join(map(str, cells))


def check_program(key: ProgramKey, mesh: jax.sharding.Mesh) -> Checked:
    compiled = h200.compile_for(
        lambda: lower(key, h200.place_on(mesh)),
        mesh,
        compiler_options(key.spec, "gpu"),
    )
    coverage, limits = read_coverage(compiled.thunk_sequence), find_limits(key)
    faults = tuple(find_faults(compiled, coverage, limits))
    if (told := read_capture(compiled.hlo).num_graphs) != coverage.num_graphs:
        text = f"metrics would say {told} graphs, where XLA has {coverage.num_graphs}"
        faults += (Fault(kind=Kind.GRAPHS_MISREAD, text=text),)
    return Checked(key=key, compiled=compiled, coverage=coverage, limits=limits, faults=faults)


def check_programs(
    models: Iterable[str], attentions: Iterable[Impl], mesh: jax.sharding.Mesh, *, has_all: bool
) -> Iterator[Fault]:
    """Prints a table of the models' programs, and yields what is wrong with them."""
    print(
        "| model, attention, program | seconds | temporaries MiB | in place MiB | graphs | outside "
        "| kernels | launched | loops | spills |\n|" + " --- |" * 10
    )
    for model, attention, kv_dtype in itertools.product(models, attentions, KV_DTYPES):
        jax.clear_caches()  # two models may have one program: compiled before, it leaves no dump
        for key in find_keys(model, attention, kv_dtype=kv_dtype, has_all=has_all):
            checked = check_program(key, mesh)
            named = f"{model}, {attention}" if key.kind == "forward" else model
            if kv_dtype != "bfloat16":
                named += f", {kv_dtype}"
            print(f"| {named}, {checked.row} |", flush=True)
            for fault in checked.faults:
                text = f"{model}, {attention}, {kv_dtype}, {key.name}: {fault.text}"
                yield dataclasses.replace(fault, text=text)
