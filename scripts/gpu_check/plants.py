"""Regressions put in on purpose: each has to turn the check red, for its own reason.

They are compiled at the demo model's shape with few layers, beside the same shape without any.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxserve.kernels.paged_attention import Impl, paged_attention, triton
from jaxserve.kernels.paged_attention.launch import Launch, find_launch
from jaxserve.kernels.pool import Pool
from jaxserve.model import filter_passes, filters, layers, transformer
from jaxserve.model.batch import TokenBatch
from jaxserve.model.config import ModelConfig
from jaxserve.model.params import Params
from jaxserve.model.transformer import embed
from jaxserve.plan import Bucket
from jaxserve.runner import programs, runner, steps
from jaxserve.runner.batch import unpack
from jaxserve.runner.buckets import OutputBucket
from jaxserve.runner.capture import COMMAND_KINDS
from scripts.gpu_check import programs as checked
from scripts.gpu_check.faults import Fault, Kind
from scripts.gpu_check.kernels import Call, check_kernels
from scripts.gpu_check.programs import build_spec, check_program
from scripts.gpu_check.step import check_step
from scripts.gpu_report import make_config

NUM_LAYERS = 4
Find = Callable[[jax.sharding.Mesh], list[Fault]]

# What the regressions stand in for. Their arguments are passed on as they come.
_unpack: Callable[..., tuple[jax.Array, TokenBatch]] = unpack
_layer: Callable[..., tuple[jax.Array, jax.Array]] = transformer.layer
_write_kv: Callable[..., Pool] = layers.write_kv
_attend: Callable[..., jax.Array] = paged_attention
_find_launch: Callable[..., Launch] = find_launch


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Plant:
    """A regression.

    Attributes:
      put_in: the engine has it inside.
      find: the part of the check that is to find it.
      reason: a fault that it must cause, among others.
    """

    put_in: Callable[[], contextlib.AbstractContextManager[object]]
    find: Find
    reason: Kind


def check_forward(
    mesh: jax.sharding.Mesh, *, attention: Impl = "triton", num_layers: int = NUM_LAYERS
) -> list[Fault]:
    """Returns the faults of the largest forward."""
    model = make_config("135m")
    model = dataclasses.replace(model, layers=model.layers[:num_layers])
    _, keys = build_spec(model, attention=attention)
    largest = next(key for key in keys if isinstance(key.bucket, Bucket))
    return list(check_program(largest, mesh).faults)


def check_output(mesh: jax.sharding.Mesh) -> list[Fault]:
    """Returns the faults of the output that samples with filters."""
    _, keys = build_spec(make_config("135m"), attention="triton")
    full = next(
        key
        for key in keys
        if isinstance(key.bucket, OutputBucket)
        and (key.bucket.variant, key.bucket.rows) == ("full", key.spec.max_seqs)
    )
    return list(check_program(full, mesh).faults)


def scanned_forward(
    params: Params,
    kv: tuple[jax.Array, ...],
    batch: TokenBatch,
    *,
    config: ModelConfig,
    **options: object,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`transformer.forward` as a scan over its layers (without RoPE's tables, which change nothing
    of what is looked at)."""

    def step(x_TD: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kv_C2KRH, x_TD = _layer(
            *layer, x_TD, batch=batch, rope=None, config=config, layer_config=config.layers[0],
            **options,
        )  # fmt: skip
        return x_TD, kv_C2KRH

    x_TD = embed(params, batch.token_ids_T, config=config)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"].values())
    x_TD, kv_LC2KRH = lax.scan(step, x_TD, (stacked, jnp.stack(kv)))
    return tuple(kv_LC2KRH), x_TD


def searching_unpack(*arguments: object, **options: object) -> tuple[jax.Array, TokenBatch]:
    """`batch.unpack`, with the row of each token searched for."""
    page_table_BP, batch = _unpack(*arguments, **options)
    T = batch.token_ids_T.shape[0]
    ends_X = jnp.cumsum(batch.q_lens_X, dtype=jnp.int32)
    row_T = jnp.searchsorted(ends_X, jnp.arange(T, dtype=jnp.int32)).astype(jnp.int32)
    positions_T = jnp.minimum(batch.positions_T, batch.q_starts_X[row_T] + T)
    return page_table_BP, dataclasses.replace(batch, positions_T=positions_T)


@contextlib.contextmanager
def reading_old_kv() -> Iterator[None]:
    """Every layer looks at the pool from before its write once more, after it."""
    old: list[Pool] = []

    def remembering_write(kv_C2KRH: Pool, *arguments: object, **options: object) -> Pool:
        old.append(kv_C2KRH)
        return _write_kv(kv_C2KRH, *arguments, **options)

    def attending_twice(
        q_TNH: jax.Array, kv_C2KRH: Pool, *arguments: object, **options: object
    ) -> jax.Array:
        out_TNH = _attend(q_TNH, kv_C2KRH, *arguments, **options)
        return _attend(out_TNH, old.pop(), *arguments, **options)

    with (
        mock.patch.object(layers, "write_kv", remembering_write),
        mock.patch.object(layers, "paged_attention", attending_twice),
    ):
        yield


def layers_apart() -> contextlib.AbstractContextManager[object]:
    """Every layer has a constant of its own, and so kernels of its own."""
    counter = itertools.count(1)

    def own_layer(*arguments: object, config: ModelConfig, **options: object) -> object:
        config = dataclasses.replace(config, norm_eps=config.norm_eps * next(counter))
        return _layer(*arguments, config=config, **options)

    return mock.patch.object(transformer, "layer", own_layer)


def narrow_launch() -> contextlib.AbstractContextManager[object]:
    """Twice the rows for as many threads: more than their registers hold."""

    def find(*arguments: object, **options: object) -> Launch:
        return dataclasses.replace(_find_launch(*arguments, **options), rows=128, num_warps=4)

    return mock.patch.object(triton, "find_launch", find)


def forward_twice() -> contextlib.AbstractContextManager[object]:
    run = runner.Runner._run_forward

    def run_twice(self: runner.Runner, bucket: Bucket, packed_I: np.ndarray) -> jax.Array:
        run(self, bucket, packed_I)
        return run(self, bucket, packed_I)

    return mock.patch.object(runner.Runner, "_run_forward", run_twice)


_WIDE_CHUNK = Call(backend="triton", num_queries=16, heads=(32, 2), head_dim=256)

PLANTS = {
    "scan": Plant(
        put_in=lambda: mock.patch.object(steps, "forward", scanned_forward),
        find=check_forward,
        reason=Kind.LOOPS,
    ),
    "searchsorted": Plant(
        put_in=lambda: mock.patch.object(steps, "unpack", searching_unpack),
        find=check_forward,
        reason=Kind.LOOPS,
    ),
    "old_kv": Plant(put_in=reading_old_kv, find=check_forward, reason=Kind.POOL_COPY),
    "uncaptured": Plant(
        put_in=lambda: mock.patch.object(
            programs, "COMMAND_KINDS", tuple(kind for kind in COMMAND_KINDS if kind != "WHILE")
        ),
        find=functools.partial(check_forward, attention="xla"),
        reason=Kind.NOT_ONE_GRAPH,
    ),
    "layers_apart": Plant(
        put_in=layers_apart,
        find=functools.partial(check_forward, num_layers=12),
        reason=Kind.MANY_KERNELS,
    ),
    "narrow_launch": Plant(
        put_in=narrow_launch,
        find=lambda mesh: list(check_kernels([_WIDE_CHUNK], mesh)),
        reason=Kind.SPILLS,
    ),
    "row_by_row": Plant(
        put_in=lambda: mock.patch.object(checked, "choose_sampling", return_value="candidates"),
        find=check_output,
        reason=Kind.LOOPS,
    ),
    "sorted": Plant(
        put_in=lambda: mock.patch.object(filter_passes, "find_best_ids", filters.find_best_ids),
        find=check_output,
        reason=Kind.SORTS,
    ),
    "forward_twice": Plant(
        put_in=forward_twice, find=lambda _: list(check_step()), reason=Kind.MANY_PROGRAMS
    ),
}


def find_planted(name: str, mesh: jax.sharding.Mesh) -> list[Fault]:
    """Returns what the check finds while the regression is in."""
    plant = PLANTS[name]
    jax.clear_caches()  # or what was traced without it would be compiled again
    try:
        with plant.put_in(), contextlib.redirect_stdout(io.StringIO()):
            return plant.find(mesh)
    finally:
        jax.clear_caches()
