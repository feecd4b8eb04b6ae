"""Token ids out of a recipe: the wanted number, none of them special, new in each run."""

import functools
import hashlib
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from jaxserve.errors import WorkloadError
from jaxserve.measure.workload.entry import Recipe, WorkloadEntry

UInt64s = npt.NDArray[np.uint64]


def materialize(
    entry: WorkloadEntry, *, vocab_size: int, special_ids: Collection[int], run_salt: str
) -> str | tuple[int, ...]:
    """Returns what to send: a text or ids as they stand, or ids made of the recipe.

    The same arguments give the same ids, on any machine. Within a run equal block keys give equal
    ids; another salt gives others.

    Args:
      vocab_size: ids are below it.
      special_ids: never among the ids; EOS and BOS belong here.
      run_salt: of the run, by way of `Header.salt_of`.

    Raises:
      WorkloadError: literal ids that this vocabulary does not have.
    """
    match entry.prompt:
        case str():
            return entry.prompt
        case Recipe():
            allowed = _allowed_ids(vocab_size, frozenset(special_ids))
            return _make(entry.prompt, entry.index, allowed, run_salt)
        case _:
            if max(entry.prompt) >= vocab_size:
                raise WorkloadError(
                    f"entry {entry.index} holds token {max(entry.prompt)}, but the served model's "
                    f"ids end at {vocab_size - 1}; replay it against the model it was made for"
                )
            return entry.prompt


@functools.lru_cache(maxsize=4)
def _allowed_ids(vocab_size: int, special_ids: frozenset[int]) -> UInt64s:
    allowed = np.setdiff1d(
        np.arange(vocab_size, dtype=np.uint64), np.array(sorted(special_ids), dtype=np.uint64)
    )
    if not len(allowed):
        raise WorkloadError(f"all {vocab_size} ids of the vocabulary are special: none is left")
    allowed.setflags(write=False)
    return allowed


def _make(recipe: Recipe, index: int, allowed: UInt64s, run_salt: str) -> tuple[int, ...]:
    token_ids: list[int] = []
    for place, key in enumerate(recipe.blocks, 1):
        num_tokens = recipe.edge(place) - len(token_ids)
        token_ids += _draw(f"{run_salt}\0block\0{key}", num_tokens, allowed)
    token_ids += _draw(f"{run_salt}\0entry\0{index}", recipe.num_tokens - len(token_ids), allowed)
    return tuple(token_ids)


def _draw(name: str, num_tokens: int, allowed: UInt64s) -> list[int]:
    """Returns ids drawn evenly (to 1 in 2^32) by the stream of that name; a prefix of it."""
    stream = hashlib.shake_128(name.encode()).digest(4 * num_tokens)
    words = np.frombuffer(stream, dtype="<u4").astype(np.uint64)
    places = (words * np.uint64(len(allowed))) >> np.uint64(32)
    ids: list[int] = allowed[places].tolist()
    return ids
