"""Makes a bundle of any model that can be loaded, part by part, all of it or nothing."""

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

import jaxserve
from jaxserve.checkpoint.header import ModelHeader, ModelSource
from jaxserve.checkpoint.load import flatten
from jaxserve.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    UNFINISHED_SUFFIX,
    Manifest,
    SourceRecord,
    TensorRecord,
    digest_tensors,
    dump_manifest,
)
from jaxserve.checkpoint.orbax import (
    as_bytes,
    check_parts,
    describe_files,
    load_bundle_tokenizer,
    quiet_orbax,
    read_part,
    write_part,
)
from jaxserve.errors import CheckpointError

DtypeName = Literal["float32", "bfloat16"]
# Called with a phase ("convert", "verify"), the MiB of it that are done, and all of them.
Progress = Callable[[str, int, int], None]

# Of an Orbax checkpoint. A load holds two of these a thread beside its result; each costs 40 ms.
PART_BYTES = 32 << 20
MIB = 1 << 20
MAX_REMOVALS, REMOVAL_PAUSE_S = 20, 0.05


def convert(
    source: ModelSource,
    target: Path,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    progress: Progress | None = None,
) -> Manifest:
    """Writes a bundle, reads it again, and only then gives it its name.

    Whatever ends it before leaves `target` absent; what is left beside it, under another name, has
    no manifest, and the next conversion to `target` removes it.

    Args:
      target: must not exist.
      dtype: of the weights; "auto" is bfloat16 for a source of bfloat16, else float32, so that the
        bundle gives what the source gives.

    Raises:
      CheckpointError: the source is damaged, or the target cannot be written.
    """
    _check_target(source.path, target)
    header = source.load_header()
    chosen: DtypeName = dtype if dtype != "auto" else _natural_dtype(header)
    try:
        with quiet_orbax(), _open_unfinished(target) as folder:
            _check_room(header, chosen, folder)
            manifest = _write(source, header, chosen, folder, progress or _no_progress)
            _sync(folder)
            _verify(manifest, folder, progress or _no_progress)
            _write_manifest(manifest, folder)
            folder.rename(target)  # atomic; fails if something came to be there
            _sync_path(target.parent)
    except OSError as error:
        raise CheckpointError(_explain(error, target)) from error
    return manifest


def _check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target} is the model itself; give another path for the bundle")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; remove it, or give another path for the bundle")
    if target.name.endswith(UNFINISHED_SUFFIX):
        raise CheckpointError(
            f"{target} is the name of what a conversion did not finish; give one without "
            f"{UNFINISHED_SUFFIX}"
        )
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no folder {target.parent}; make it first")


def _natural_dtype(header: ModelHeader) -> DtypeName:
    return "bfloat16" if header.quantization == "BF16" else "float32"


@contextlib.contextmanager
def _open_unfinished(target: Path) -> Iterator[Path]:
    """Gives an empty folder beside the target, which is removed at the end unless renamed.

    The lock is the system's and ends with the process: what a killed one left is removed here, and
    what a running one writes is not touched.
    """
    folder = target.with_name(target.name + UNFINISHED_SUFFIX)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another conversion is writing {folder}; wait for it, or give another path"
            ) from error
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield folder
        finally:
            _remove(folder)
    finally:
        os.close(held)


def _remove(folder: Path) -> None:
    """Removes a folder, into which writes may still be going on after one has failed."""
    for _ in range(MAX_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        time.sleep(REMOVAL_PAUSE_S)


def _check_room(header: ModelHeader, dtype: DtypeName, folder: Path) -> None:
    """Refuse a disk that the weights cannot fit, before an hour of writing."""
    from jaxserve.model.params import num_param_bytes

    needed, free = num_param_bytes(header.config, dtype), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"the bundle needs {needed} bytes, but the disk of {folder.parent} has {free} free; "
            "free space there, or give a path on another disk"
        )


def _write(
    source: ModelSource, header: ModelHeader, dtype: DtypeName, folder: Path, progress: Progress
) -> Manifest:
    """Writes all but the manifest, which it returns."""
    parts = _plan_parts(header, dtype)
    total = sum(parts.values())
    tensors: dict[str, TensorRecord] = {}
    done = 0
    (folder / "params").mkdir()
    for index, (paths, num_bytes) in enumerate(parts.items()):
        part = f"params/{index:04}"
        params = flatten(source.load_params(dtype, only=paths))
        for path, array in params.items():
            tensors[path] = TensorRecord(
                part=part,
                shape=array.shape,
                dtype=array.dtype.name,
                crc32=zlib.crc32(as_bytes(array)),
                sha256=_sha256(array),
            )
        write_part(folder / part, params)
        done += num_bytes
        progress("convert", done // MIB, total // MIB)
    for name, text in header.tokenizer.as_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return Manifest(
        format_version=FORMAT_VERSION,
        name=header.name,
        dtype=dtype,
        model=header.config,
        tensors=tensors,
        files=describe_files(folder),
        weights_digest=digest_tensors(tensors),
        tokenizer_digest=header.tokenizer.digest,
        eos_ids=tuple(sorted(header.tokenizer.eos_ids)),
        sampling_defaults=header.defaults,
        source=SourceRecord(
            files=tuple(file.name for file in header.weight_files),
            digest=header.digest,
            quantization=header.quantization,
            converter=f"jaxserve {jaxserve.__version__}",
        ),
    )


def _plan_parts(header: ModelHeader, dtype: DtypeName) -> dict[tuple[str, ...], int]:
    """Returns the paths of each part, with their bytes: neighbours, up to PART_BYTES."""
    from jaxserve.model.params import abstract_params

    parts: dict[tuple[str, ...], int] = {}
    paths: list[str] = []
    num_bytes = 0
    for path, spec in abstract_params(header.config, dtype).items():
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if paths and num_bytes + size > PART_BYTES:
            parts[tuple(paths)] = num_bytes
            paths, num_bytes = [], 0
        paths.append(path)
        num_bytes += size
    parts[tuple(paths)] = num_bytes
    return parts


def _verify(manifest: Manifest, folder: Path, progress: Progress) -> None:
    """Reads what was written and compares it with what was to be written."""
    parts = sorted({tensor.part for tensor in manifest.tensors.values()})
    check_parts(folder, manifest, parts)
    for index, part in enumerate(parts):
        for path, array in read_part(folder / part).items():
            if _sha256(array) != manifest.tensors[path].sha256:
                raise CheckpointError(
                    f"{path} was read back from {folder / part} with another content; check the "
                    "disk and convert again"
                )
        progress("verify", index + 1, len(parts))
    load_bundle_tokenizer(folder, manifest)


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    unnamed = folder / f"{MANIFEST_FILE}.new"
    unnamed.write_text(dump_manifest(manifest), encoding="utf-8")
    _sync_path(unnamed)
    unnamed.rename(folder / MANIFEST_FILE)
    _sync_path(folder)


def _sync(folder: Path) -> None:
    """Brings a folder to the disk, and out of memory, so that it is read from there next."""
    for path in [*folder.rglob("*"), folder]:
        _sync_path(path)


def _sync_path(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
        if path.is_file():
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(as_bytes(array)).hexdigest()


def _explain(error: OSError, target: Path) -> str:
    reason = os.strerror(error.errno) if error.errno else error.strerror
    return (
        f"cannot write {target}: {reason}; nothing is left of it; free space on the disk, or give "
        "a path on another"
    )


def _no_progress(phase: str, num_done: int, num_all: int) -> None:
    return None
