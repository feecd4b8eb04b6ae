"""Loads a bundle: our own folder of Orbax checkpoints, a manifest and a tokenizer."""

import concurrent.futures
import contextlib
import functools
import hashlib
import logging
import math
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 from it)
import numpy as np

from jaxserve.checkpoint.checks import check_config, check_tensors, check_vocab
from jaxserve.checkpoint.header import ModelHeader, NumpyParams, Progress, WeightDtype
from jaxserve.checkpoint.load import flatten, nest, num_threads
from jaxserve.checkpoint.manifest import (
    MANIFEST_FILE,
    SMALL_FILE_BYTES,
    FileRecord,
    Manifest,
    digest_tensors,
    read_manifest,
)
from jaxserve.errors import CheckpointError
from jaxserve.model.aligned import empty_aligned
from jaxserve.text.hf_folder import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # half a second that a header need not pay
    import orbax.checkpoint

STORED_NAMES = {"float32": "F32", "bfloat16": "BF16"}
DAMAGED = "the bundle is damaged; convert the model again"


class OrbaxSource:
    """One bundle. Its manifest is read and compared with its files once, and kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load_header(self) -> ModelHeader:
        """Returns the model without weights.

        Raises:
          CheckpointError: a file or an entry of the manifest is missing, left over or damaged.
        """
        manifest = self._manifest
        tokenizer = load_bundle_tokenizer(self.path, manifest)
        return ModelHeader(
            name=manifest.name,
            architecture=manifest.model.architecture,
            config=manifest.model,
            tokenizer=tokenizer,
            eos_ids=check_vocab(manifest.model, tokenizer, str(self.path)),
            defaults=manifest.sampling_defaults,
            quantization=STORED_NAMES[manifest.dtype],
            weight_files=tuple(self.path / file for file in manifest.files),
            known_digest=manifest.weights_digest,
        )

    def load_params(
        self,
        dtype: WeightDtype,
        progress: Progress | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> NumpyParams:
        """Returns the weights in `dtype`, part by part, each array checked against its sum."""
        from jaxserve.model.params import abstract_params

        manifest = self._manifest
        specs = abstract_params(manifest.model, dtype)
        wanted = specs if only is None else {path: specs[path] for path in only}
        parts: dict[str, list[str]] = {}
        for path in wanted:
            parts.setdefault(manifest.tensors[path].part, []).append(path)

        def load_one(part: str) -> dict[str, np.ndarray]:
            stored = read_part(self.path / part)
            loaded = {}
            for path in list(stored):
                array = stored.pop(path)  # freed before the next one is copied
                if path not in wanted:
                    continue
                if zlib.crc32(as_bytes(array)) != manifest.tensors[path].crc32:
                    raise CheckpointError(
                        f"{self.path}: {path}, in {part}, does not have the sum that "
                        f"{MANIFEST_FILE} names; {DAMAGED}"
                    )
                loaded[path] = empty_aligned(array.shape, wanted[path].dtype)
                loaded[path][...] = array
            return loaded

        sizes = {part: sum(_num_bytes(manifest, path) for path in parts[part]) for part in parts}
        order = sorted(parts, key=lambda part: sizes[part], reverse=True)
        flat: dict[str, np.ndarray] = {}
        done = 0
        with (
            quiet_orbax(),
            concurrent.futures.ThreadPoolExecutor(num_threads(), "load-params") as pool,
        ):
            check_parts(self.path, manifest, parts)
            futures = {pool.submit(load_one, part): part for part in order}
            try:
                for future in concurrent.futures.as_completed(futures):
                    flat |= future.result()
                    done += sizes[futures[future]]
                    if progress is not None:
                        progress(done, sum(sizes.values()))
            finally:
                pool.shutdown(cancel_futures=True)
        return nest(flat)

    @functools.cached_property
    def _manifest(self) -> Manifest:
        manifest = read_manifest(self.path)
        check_config(manifest.model, str(self.path / MANIFEST_FILE))
        _check_tree(manifest, self.path)
        if manifest.weights_digest != digest_tensors(manifest.tensors):
            raise CheckpointError(
                f"{self.path / MANIFEST_FILE}: weights_digest is not that of the tensors it lists; "
                f"{DAMAGED}"
            )
        check_files(self.path, manifest.files)
        return manifest


def load_bundle_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Returns the tokenizer of a bundle.

    Raises:
      CheckpointError: it is not the one that the manifest names.
    """
    tokenizer = load_tokenizer(folder, eos_ids=manifest.eos_ids)
    if tokenizer.digest != manifest.tokenizer_digest:
        raise CheckpointError(
            f"{folder}: tokenizer.json and tokenizer_config.json do not make the tokenizer that "
            f"{MANIFEST_FILE} names; {DAMAGED}"
        )
    return tokenizer


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous array's bytes, which hash functions take; a view."""
    return array.reshape(-1).view(np.uint8)


def write_part(folder: Path, params: Mapping[str, np.ndarray]) -> None:
    """Writes parameters as one Orbax checkpoint, nested by their paths.

    Raises:
      OSError: the disk is full, or cannot be written.
    """
    import orbax.checkpoint

    with _open_orbax() as checkpointer:
        try:
            checkpointer.save(
                folder.absolute(), args=orbax.checkpoint.args.PyTreeSave(nest(params))
            )
        except ValueError as error:  # the library's way to say what went wrong with a file
            raise OSError(_find_errno(str(error)), str(error)) from error


def read_part(folder: Path) -> dict[str, np.ndarray]:
    """Returns the parameters of an Orbax checkpoint by their paths.

    Raises:
      CheckpointError: it is damaged.
    """
    import orbax.checkpoint

    tree = nest(dict.fromkeys(describe_part(folder), np.zeros(0)))
    as_numpy = orbax.checkpoint.RestoreArgs(restore_type=np.ndarray)
    with _open_orbax() as checkpointer:
        try:
            restored = checkpointer.restore(
                folder.absolute(),
                args=orbax.checkpoint.args.PyTreeRestore(
                    tree, restore_args=nest(dict.fromkeys(flatten(tree), as_numpy))
                ),
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {folder}: {error}; {DAMAGED}") from error
    return flatten(restored)


def describe_part(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of what an Orbax checkpoint holds, by path; no array is read.

    Raises:
      CheckpointError: it is damaged.
    """
    with _open_orbax() as checkpointer:
        try:
            metadata = checkpointer.metadata(folder.absolute()).item_metadata
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {folder}: {error}; {DAMAGED}") from error
    if metadata is None:  # the library's way to say that this is no checkpoint
        raise CheckpointError(f"{folder} is no Orbax checkpoint; {DAMAGED}")
    found = flatten(metadata.tree)
    return {path: (tuple(array.shape), np.dtype(array.dtype).name) for path, array in found.items()}


def check_parts(folder: Path, manifest: Manifest, parts: Collection[str]) -> None:
    """Compare tree, shapes and dtypes of Orbax checkpoints with the manifest.

    Raises:
      CheckpointError: names every tensor at fault.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    wanted = {path: t for path, t in manifest.tensors.items() if t.part in parts}
    misplaced: list[str] = []
    for part in parts:
        held = describe_part(folder / part)
        found |= held
        misplaced += [
            f"{path} is in {part} instead of {wanted[path].part}"
            for path in held
            if path in wanted and wanted[path].part != part
        ]
    dtypes = [
        f"{path} is {found[path][1]} instead of {tensor.dtype}"
        for path, tensor in wanted.items()
        if path in found and found[path][1] != tensor.dtype
    ]
    check_tensors(
        {path: shape for path, (shape, _) in found.items()},
        {path: tensor.shape for path, tensor in wanted.items()},
        where=str(folder),
        other_problems=dtypes + misplaced,
    )


def check_files(folder: Path, wanted: Mapping[str, FileRecord]) -> None:
    """Compare a bundle's files with the manifest: names, sizes, and the content of small ones.

    Raises:
      CheckpointError: names every file at fault.
    """
    found = describe_files(folder)
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is not a part of it" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(found.keys() & wanted.keys()):
        got, want = found[name], wanted[name]
        if got.num_bytes != want.num_bytes:
            problems.append(f"{name} has {got.num_bytes} bytes instead of {want.num_bytes}")
        elif got.sha256 != want.sha256:
            problems.append(f"{name} has another content")
    if problems:
        raise CheckpointError(
            f"the files of {folder} are not those {MANIFEST_FILE} lists: {'; '.join(problems)}; "
            f"{DAMAGED}"
        )


def describe_files(folder: Path) -> dict[str, FileRecord]:
    """Returns what the manifest is to say of the files of a bundle."""
    records = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == MANIFEST_FILE:
            continue
        num_bytes = path.stat().st_size
        is_small = num_bytes <= SMALL_FILE_BYTES
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else None
        records[name] = FileRecord(num_bytes=num_bytes, sha256=digest)
    return records


def _check_tree(manifest: Manifest, folder: Path) -> None:
    """Compare the manifest's tensors with what its model is made of."""
    from jaxserve.model.params import abstract_params  # imports jax

    specs = abstract_params(manifest.model, manifest.dtype)
    dtypes = [
        f"{path} is {manifest.tensors[path].dtype} instead of {spec.dtype.name}"
        for path, spec in specs.items()
        if path in manifest.tensors and manifest.tensors[path].dtype != spec.dtype.name
    ]
    check_tensors(
        {path: tensor.shape for path, tensor in manifest.tensors.items()},
        {path: spec.shape for path, spec in specs.items()},
        where=str(folder / MANIFEST_FILE),
        other_problems=dtypes,
    )


def _num_bytes(manifest: Manifest, path: str) -> int:
    tensor = manifest.tensors[path]
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps the library's log to itself: what goes wrong is raised, and said once.

    After a failed write, those that were under way report to an event loop that is gone, or fail
    too with nobody to ask them; Python would print each. They come from the library's threads, at
    any time, so that from the first failure on the process goes on to drop them.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    tasks_log, level = logging.getLogger("asyncio"), log.level

    def drop_late(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    def is_not_its(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text.startswith("Task exception was never retrieved") and "/orbax/" in text)

    log.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = drop_late
    tasks_log.addFilter(is_not_its)
    try:
        yield
        sys.unraisablehook = hook
        tasks_log.removeFilter(is_not_its)
    finally:
        log.setLevel(level)


def _open_orbax() -> "orbax.checkpoint.Checkpointer":
    """Returns what reads and writes checkpoints; the files hold the arrays' bytes as they are."""
    import orbax.checkpoint

    return orbax.checkpoint.Checkpointer(
        orbax.checkpoint.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=True, use_compression=False
        )
    )


def _find_errno(message: str) -> int | None:
    """Returns the system's error number that TensorStore puts into a message."""
    _, _, rest = message.partition("os_error_code='")
    number = rest.partition("'")[0]
    return int(number) if number.isdecimal() else None
