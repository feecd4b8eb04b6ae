"""`[buckets]` and `[runner]`: what is compiled, and how it runs."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic

from jaxserve.config.section import Section


def _expand_geometric(sizes: object) -> object:
    """`{first = 2, last = 32, ratio = 2}` stands for [2, 4, 8, 16, 32]."""
    match sizes:
        case {"first": int(first), "last": int(last), "ratio": int(ratio), **rest}:
            if rest or first < 1 or ratio < 2 or last < first:
                raise ValueError("a geometric list needs 1 ≤ first ≤ last, ratio ≥ 2, no more")
            steps = range(last.bit_length())  # ratio is at least 2
            return [first * ratio**n for n in steps if first * ratio**n <= last]
        case dict():
            raise ValueError("a geometric list has the integers first, last and ratio")
    return sizes


def _check_rising(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not sizes or any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError("must be a rising list of sizes ≥ 1, such as [2, 8, 32]")
    return sizes


# A list of sizes; in a file, a variable or a flag also `{first = 2, last = 32, ratio = 2}`.
Sizes = Annotated[
    tuple[int, ...],
    pydantic.BeforeValidator(_expand_geometric),
    pydantic.AfterValidator(_check_rising),
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
                {
                    "type": "object",
                    "description": "Geometric: first, first * ratio, … up to last.",
                    "properties": {
                        "first": {"type": "integer", "minimum": 1},
                        "last": {"type": "integer", "minimum": 1},
                        "ratio": {"type": "integer", "minimum": 2},
                    },
                    "required": ["first", "last", "ratio"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class BucketsSection(Section):
    """The padded shapes that are compiled at start-up."""

    decode_seqs: Sizes = pydantic.Field(
        (1, 2, 4, 8, 16, 32),
        description="One-token rows; max_seqs is always added, and 1 is 2 where one row is slower.",
    )
    chunk_tokens: Sizes = pydantic.Field(
        (16, 32, 64, 128, 256),
        description="Prompt tokens of a step; the largest is the chunk size.",
    )
    chunk_decode_seqs: Sizes = pydantic.Field(
        (8,), description="Decode sizes that chunks are combined with; max_seqs is always added."
    )
    chunk_tile: int = pydantic.Field(
        16, ge=1, le=256, description="Chunks are laid out in tiles of this many tokens."
    )
    capture: bool = pydantic.Field(
        True, description="Off: one maximal bucket of each kind (ablation)."
    )


class RunnerSection(Section):
    """How steps reach the device."""

    overlap: bool = pydantic.Field(
        True, description="Launch step n+1 before step n's result is read."
    )
    attention: Literal["auto", "reference", "xla", "native", "triton", "mosaic"] = pydantic.Field(
        "auto",
        description="Attention implementation; auto is native on a CPU with a C++ compiler, else "
        "xla. triton and mosaic are for a GPU; on a CPU their kernels are interpreted, slowly.",
    )
    matmul: Literal["auto", "xla", "native"] = pydantic.Field(
        "auto",
        description="Products with bfloat16 weights; auto as for attention.",
    )
    sampling: Literal["auto", "candidates", "passes"] = pydantic.Field(
        "auto",
        description="How filters and the most likely ids are found: among a few candidates where "
        "they do (auto on a CPU), or in passes over all ids (auto on a GPU). Tokens are the same.",
    )
    command_buffers: Literal["auto", "off"] = pydantic.Field(
        "auto",
        description="auto: on a GPU, programs are replayed as CUDA graphs (XLA's command buffers); "
        "a CPU has none. off: the host launches each kernel (ablation).",
    )
    batch_invariant: bool = pydantic.Field(
        False,
        description="Every step in one shape, every token by the same operations: outputs are the "
        "same bit for bit whatever runs beside them (docs/performance.md has the cost).",
    )
    compile_threads: int = pydantic.Field(2, ge=1, le=64, description="Threads that compile.")
    cache_dir: Path | None = pydantic.Field(
        None, description="Compilation cache. Unset: jaxserve/ in the user's cache folder."
    )
    forbid_recompile: bool = pydantic.Field(
        False, description="Raise where a program is compiled after warm-up (tests); else counted."
    )
