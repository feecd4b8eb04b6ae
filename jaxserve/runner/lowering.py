"""The programs a runner can run: their keys, and what each is made of."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.traverse_util
import jax
from jax import ShapeDtypeStruct
from jax import numpy as jnp

from jaxserve.model.masks import num_words
from jaxserve.model.packing import abstract_packed
from jaxserve.model.params import Params, abstract_params
from jaxserve.plan import Bucket
from jaxserve.runner import steps
from jaxserve.runner.batch import COPY_WIDTH, SCORE_WIDTH, SWAP_WIDTH, packed_len
from jaxserve.runner.buckets import OutputBucket
from jaxserve.runner.spec import RunnerSpec
from jaxserve.runner.state import COUNT_WIDTH, LOAD_WIDTH, add_counts, load_len, load_rows

# What a step may run beside its forward and its output.
SideKind = Literal["score", "row_load", "counts", "page_copy", "page_out", "page_in"]
Kind = Literal["init", "forward", "output"] | SideKind


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ProgramKey:
    """Everything that changes a compiled program: equal keys are the same program."""

    kind: Kind
    spec: RunnerSpec
    bucket: Bucket | OutputBucket | None = None

    @property
    def name(self) -> str:
        return self.kind if self.bucket is None else f"{self.kind} {bucket_name(self.bucket)}"

    @property
    def labels(self) -> dict[str, str]:
        """The metrics' labels of what is counted for each program."""
        return {"kind": self.kind, "bucket": bucket_name(self.bucket) if self.bucket else ""}


def bucket_name(bucket: Bucket | OutputBucket) -> str:
    """Returns the metrics' word for a bucket: `8x1+64` of a forward, `8 greedy` of an output."""
    if isinstance(bucket, OutputBucket):
        return f"{bucket.rows} {bucket.variant}"
    return bucket.name


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ProgramSource:
    """What a program is traced from: a function of arrays, called so.

    Attributes:
      arguments: `ShapeDtypeStruct`s, nested as the arrays are.
      static: what else the function is given; hashable.
      donated: the arguments that the results replace.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    donated: tuple[int, ...] = ()

    def jit(self) -> jax.stages.Wrapped:
        """Returns what traces it. JAX keeps traces by function: one of before is not made again."""
        names = tuple(self.static)
        return jax.jit(self.function, static_argnames=names, donate_argnums=self.donated)


def lower(key: ProgramKey, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Lowered:
    """Returns the traced program, with what it replaces donated.

    Args:
      sharding: where every argument lies; None is the default device.
    """
    source = build_source(key)
    arguments = source.arguments
    if sharding is not None:
        arguments = jax.tree.map(
            lambda leaf: ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
        )
    return source.jit().lower(*arguments, **source.static)


def build_source(key: ProgramKey) -> ProgramSource:
    """Returns what a program is made of; nothing is traced but `init_arrays`, once."""
    spec = key.spec
    shape = functools.partial(ShapeDtypeStruct, dtype=jnp.int32)
    # of the jitted function, whose trace JAX keeps: this is asked for each program
    init_arrays = jax.jit(steps.init_arrays, static_argnames="spec")
    kv, state, hidden_TD = jax.eval_shape(init_arrays, spec=spec)
    arguments: tuple[Any, ...]
    of_spec = {"spec": spec}
    match key.kind, key.bucket:
        case "init", None:
            return ProgramSource(function=steps.init_arrays, static=of_spec)
        case "forward", Bucket() as bucket:
            packed_I = shape((packed_len(bucket, spec),))
            return ProgramSource(
                function=steps.forward_step,
                arguments=(
                    abstract_tree(spec),
                    kv,
                    state.page_table_BP,
                    hidden_TD,
                    state.last_token_B,
                    packed_I,
                ),
                static={"spec": spec, "bucket": bucket},
                donated=(1, 2, 3),
            )
        case "output", OutputBucket() as bucket:
            arguments = (
                head_params(abstract_tree(spec)),
                hidden_TD,
                state.last_token_B,
                state.sampling,
                shape((4, bucket.rows)),
            )
            if bucket.variant == "full":
                words = num_words(spec.model.padded_vocab_size)
                mask_RW = shape((bucket.rows, words), dtype=jnp.uint32)
                return ProgramSource(
                    function=steps.full_output_step,
                    arguments=(*arguments, mask_RW),
                    static=of_spec,
                    donated=(2, 3),
                )
            return ProgramSource(
                function=steps.output_step,
                arguments=arguments,
                static={"spec": spec, "variant": bucket.variant},
                donated=(2,),
            )
        case "score", None:
            rows_2W = shape((2, SCORE_WIDTH))
            arguments = (head_params(abstract_tree(spec)), hidden_TD, rows_2W)
            return ProgramSource(function=steps.score_step, arguments=arguments, static=of_spec)
        case "row_load", None:
            arguments = (state, shape((LOAD_WIDTH, load_len(spec))))
            return ProgramSource(
                function=load_rows, arguments=arguments, static=of_spec, donated=(0,)
            )
        case "counts", None:
            arguments = (state.sampling.counts_BV, shape((3, COUNT_WIDTH)))
            return ProgramSource(function=add_counts, arguments=arguments, donated=(0,))
        case "page_copy", None:
            arguments = (kv, shape((2, COPY_WIDTH)))
            return ProgramSource(function=steps.copy_pages, arguments=arguments, donated=(0,))
        case "page_out", None:
            return ProgramSource(function=steps.page_out, arguments=(kv, shape((SWAP_WIDTH,))))
        case "page_in", None:
            layers = jax.eval_shape(functools.partial(steps.empty_pages, SWAP_WIDTH, spec=spec))
            arguments = (kv, shape((SWAP_WIDTH,)), layers)
            return ProgramSource(function=steps.page_in, arguments=arguments, donated=(0,))
    raise AssertionError(f"no such program: {key}")


def abstract_tree(spec: RunnerSpec) -> Params:
    """Returns the shapes of the parameters, nested as the parameters are."""
    flat = abstract_params(spec.model, spec.dtype)
    shapes = {path: ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat.items()}
    nested: Params = flax.traverse_util.unflatten_dict(shapes, sep="/")
    return abstract_packed(nested, spec.model) if spec.kernels.matmul == "native" else nested


def head_params(params: Params) -> Params:
    """Returns the parameters outside the layers: all that the output programs read."""
    return {name: leaf for name, leaf in params.items() if name != "layers"}
