"""Fills a model's parameters from whatever stores them."""

import concurrent.futures
import os
from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.checkpoint.header import NumpyParams, Progress, WeightDtype
from jaxserve.checkpoint.layout import to_param
from jaxserve.model.config import ModelConfig

MAX_THREADS = 8


def load_all(
    config: ModelConfig,
    dtype: WeightDtype,
    *,
    read: Callable[[str], np.ndarray],
    num_bytes: Callable[[str], int],
    progress: Progress | None,
) -> NumpyParams:
    """Returns every parameter of `abstract_params`, nested, contiguous and in its dtype.

    Args:
      read: the stored array of a parameter's path, as floats; called from several threads.
      num_bytes: how much of the progress it is.
    """
    from jaxserve.model.params import abstract_params  # imports jax, which a header does without

    specs = abstract_params(config, dtype)
    total = sum(num_bytes(path) for path in specs)
    flat: dict[str, np.ndarray] = {}

    def load_one(path: str) -> tuple[str, np.ndarray]:
        stored = to_param(read(path), path, config)
        param = stored.astype(specs[path].dtype, order="C", copy=False)
        if not param.flags.writeable:  # still the mapped file, which may change or go away
            param = param.copy()
        assert param.shape == specs[path].shape, f"{path}: {param.shape} != {specs[path].shape}"
        return path, param

    workers = min(MAX_THREADS, os.cpu_count() or 1)
    # Largest first: else the embedding, last in line, keeps one thread busy alone.
    order = sorted(specs, key=num_bytes, reverse=True)
    done = 0
    with concurrent.futures.ThreadPoolExecutor(workers, "load-params") as pool:
        for future in concurrent.futures.as_completed([pool.submit(load_one, p) for p in order]):
            path, flat[path] = future.result()
            done += num_bytes(path)
            if progress is not None:
                progress(done, total)
    return nest(flat)


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
