"""Fills a model's parameters from whatever stores them, a few rows at a time.

Nothing but the result is ever held whole: a load's peak memory is the parameters and some MiB a
thread, whatever the file's size and type.
"""

import concurrent.futures
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.checkpoint.header import NumpyParams, Progress, WeightDtype
from jaxserve.checkpoint.layout import Sources, StoredPart, as_stored
from jaxserve.errors import CheckpointError
from jaxserve.model.aligned import empty_aligned
from jaxserve.model.config import ModelConfig

MAX_THREADS = 8
# Numbers converted at a time, and the least rows of a matrix among them: fewer make transposing
# slow, more do not stay in the processor's cache.
BLOCK_ELEMENTS, MIN_BLOCK_ROWS = 1 << 18, 128
CACHE_LINE_BYTES = 64


class ReadRows(Protocol):
    """Reads rows [first, end) of a part's tensor, as floats of some kind; from several threads.

    The rows are the tensor's own, not the part's. Rows of a head are never asked for apart.
    """

    def __call__(self, path: str, part: StoredPart, rows: tuple[int, int]) -> np.ndarray: ...


class StoredFile:
    """A file that is read at positions. Unlike a map, it leaves no pages in the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)

    def close(self) -> None:
        self._file.close()

    def read(self, offset: int, num_bytes: int) -> np.ndarray:
        """Returns bytes [offset, offset + num_bytes).

        Raises:
          CheckpointError: the file ends before.
        """
        read = np.empty(num_bytes, np.uint8)
        done = 0
        while done < num_bytes:
            try:
                got = os.preadv(self._file.fileno(), [read[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
            if not got:
                raise CheckpointError(
                    f"{self.path} ends before byte {offset + num_bytes}; it was changed or cut off "
                    "while it was read"
                )
            done += got
        return read


def load_all(
    config: ModelConfig,
    dtype: WeightDtype,
    *,
    sources: Sources,
    read: ReadRows,
    num_bytes: Callable[[StoredPart], int],
    progress: Progress | None,
    only: Collection[str] | None = None,
) -> NumpyParams:
    """Returns every parameter of `abstract_params`, nested, contiguous, aligned and in its dtype.

    Args:
      num_bytes: how much of the progress a part is.
      only: paths of the parameters that are wanted; None is all.
    """
    from jaxserve.model.params import abstract_params  # imports jax, which a header does without

    specs = abstract_params(config, dtype)
    if only is not None:
        specs = {path: specs[path] for path in only}
    sizes = {path: sum(num_bytes(part) for part in sources[path]) for path in specs}
    flat: dict[str, np.ndarray] = {}

    def load_one(path: str) -> tuple[str, np.ndarray]:
        param = empty_aligned(specs[path].shape, specs[path].dtype)
        _fill(param, path, config=config, parts=sources[path], read=read)
        return path, param

    done = 0
    # Largest first: else the embedding, last in line, keeps one thread busy alone.
    order = sorted(specs, key=lambda path: sizes[path], reverse=True)
    with concurrent.futures.ThreadPoolExecutor(num_threads(), "load-params") as pool:
        futures = [pool.submit(load_one, path) for path in order]
        try:
            for future in concurrent.futures.as_completed(futures):
                path, flat[path] = future.result()
                done += sizes[path]
                if progress is not None:
                    progress(done, sum(sizes.values()))
        finally:  # after an error nobody wants the rest
            pool.shutdown(cancel_futures=True)
    return nest(flat)


def num_threads() -> int:
    """Returns how many parameters are read at a time."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def nest(flat: Mapping[str, np.ndarray]) -> NumpyParams:
    """Returns {"a/b": x} as {"a": {"b": x}}."""
    nested: NumpyParams = {}
    for path, array in flat.items():
        *parents, leaf = path.split("/")
        folder = nested
        for part in parents:
            folder = folder.setdefault(part, {})
        folder[leaf] = array
    return nested


def flatten(params: NumpyParams) -> dict[str, np.ndarray]:
    """Returns {"a": {"b": x}} as {"a/b": x}."""
    flat: dict[str, np.ndarray] = {}
    for name, value in params.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{path}": array for path, array in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def _fill(
    param: np.ndarray,
    path: str,
    *,
    config: ModelConfig,
    parts: tuple[StoredPart, ...],
    read: ReadRows,
) -> None:
    """Writes a parameter's parts into it."""
    if path.endswith("_VD"):
        param[config.vocab_size :] = 0
    stored = as_stored(param, path, config)
    for index, part in enumerate(parts):
        target = stored[index] if len(parts) > 1 else stored
        offset = part.rows[0] if part.rows else 0
        for first, end in _blocks(target.shape, config.head_dim):
            rows = read(path, part, (offset + first, offset + end))
            if part.add:
                rows = rows.astype(np.float32) + np.float32(part.add)
            _assign(target[first:end], rows)


def _blocks(shape: tuple[int, ...], head_dim: int) -> Iterator[tuple[int, int]]:
    """Yields [first, end) of a tensor's rows, whole heads at a time."""
    row_elements = max(1, int(np.prod(shape[1:])))
    least = MIN_BLOCK_ROWS if len(shape) < 3 else 1  # a row of three dimensions is a matrix
    num_rows = max(least, BLOCK_ELEMENTS // row_elements)
    if len(shape) < 3:
        num_rows = -(-num_rows // head_dim) * head_dim
    for first in range(0, shape[0], num_rows):
        yield first, min(shape[0], first + num_rows)


def _assign(target: np.ndarray, rows: np.ndarray) -> None:
    """Writes rows into a view of a parameter, in its dtype.

    Where the view is transposed, the rows go through an array whose rows are an odd number of cache
    lines apart. Without that, a column of a matrix with 1024 columns lies in so few sets of the
    cache that each of its lines is fetched anew for every number: five times slower.
    """
    if target.ndim == 3:
        for matrix, matrix_rows in zip(target, rows, strict=True):
            _assign(matrix, matrix_rows)
        return
    if target.ndim == 1 or target.strides[1] == target.itemsize:
        target[...] = rows
        return
    num_rows, num_columns = target.shape
    line = CACHE_LINE_BYTES // target.itemsize
    apart = (-(-num_columns // line) | 1) * line
    spread = np.empty((num_rows, apart), target.dtype)[:, :num_columns]
    spread[...] = rows
    words = np.dtype(f"u{target.itemsize}")  # numpy copies its own types faster
    target.view(words)[...] = spread.view(words)
