"""Bundles: what goes in comes out, all of it or nothing."""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoint import convert as conversion
from jaxserve.checkpoint import manifest as manifests
from jaxserve.checkpoint import orbax
from jaxserve.checkpoint.convert import DtypeName, convert
from jaxserve.checkpoint.load import flatten
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.orbax import OrbaxSource
from jaxserve.checkpoint.registry import find_model
from jaxserve.checkpoint.safetensors import HfFolderSource
from jaxserve.errors import CheckpointError
from jaxserve.model.aligned import ALIGNMENT_BYTES
from tests.checkpoint.writers import T1, GgufRecipe, make_weights, write_gguf, write_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_hf(tmp_path_factory.mktemp("models") / "tiny", T1, make_weights(T1))
    (path / "generation_config.json").write_text('{"top_k": 7, "eos_token_id": [1, 5]}')
    return path


def test_a_bundle_says_what_the_model_says(tmp_path: Path, folder: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", T1, make_weights(T1), GgufRecipe())
    for model, name in ((folder, "of-hf"), (gguf, "of-gguf")):
        source = find_model(str(model))
        convert(source, tmp_path / name)
        bundle = find_model(str(tmp_path / name))
        assert isinstance(bundle, OrbaxSource)
        theirs, ours = source.load_header(), bundle.load_header()
        assert ours.config == theirs.config
        assert (ours.name, ours.architecture) == (theirs.name, theirs.architecture)
        assert (ours.eos_ids, ours.defaults) == (theirs.eos_ids, theirs.defaults)
        assert ours.tokenizer.digest == theirs.tokenizer.digest
        assert ours.tokenizer.encode("abc </s> déjà") == theirs.tokenizer.encode("abc </s> déjà")
        assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
        assert ours.quantization == "F32"
        for dtype in (np.float32, ml_dtypes.bfloat16):
            wanted, got = (flatten(s.load_params(dtype)) for s in (source, bundle))
            assert wanted.keys() == got.keys()
            for path, array in wanted.items():
                np.testing.assert_array_equal(got[path], array, err_msg=path)
                assert got[path].dtype == array.dtype
                assert got[path].ctypes.data % ALIGNMENT_BYTES == 0


def test_the_digest_is_of_the_weights_and_not_of_the_files(tmp_path: Path, folder: Path) -> None:
    digests = []
    dtypes: dict[str, DtypeName] = {"a": "float32", "b": "float32", "c": "bfloat16"}
    for name, dtype in dtypes.items():
        digests.append(
            convert(find_model(str(folder)), tmp_path / name, dtype=dtype).weights_digest
        )
        assert find_model(str(tmp_path / name)).load_header().digest == digests[-1]
    again = convert(find_model(str(tmp_path / "a")), tmp_path / "d")  # of a bundle
    assert again.weights_digest == digests[0] == digests[1] != digests[2]


def test_auto_loses_nothing(tmp_path: Path) -> None:
    weights = make_weights(T1)
    for stored, wanted in ((np.float32, "float32"), (ml_dtypes.bfloat16, "bfloat16")):
        rounded = {name: array.astype(stored) for name, array in weights.items()}
        source = HfFolderSource(write_hf(tmp_path / f"hf-{wanted}", T1, rounded))
        assert convert(source, tmp_path / wanted).dtype == wanted


def test_a_large_model_is_several_checkpoints(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "PART_BYTES", 80_000)
    seen: list[tuple[str, int, int]] = []
    source = find_model(str(folder))
    manifest = convert(source, tmp_path / "b", progress=lambda *step: seen.append(step))
    parts = {tensor.part for tensor in manifest.tensors.values()}
    assert len(parts) > 3
    assert [step for step in seen if step[0] == "verify"][-1] == ("verify", len(parts), len(parts))
    bundle = find_model(str(tmp_path / "b"))
    some = bundle.load_params(np.float32, only=["layers/1/q_DNH"])
    wanted = source.load_params(np.float32)["layers"]["1"]["q_DNH"]
    assert flatten(some).keys() == {"layers/1/q_DNH"}
    np.testing.assert_array_equal(some["layers"]["1"]["q_DNH"], wanted)
    progress: list[tuple[int, int]] = []
    bundle.load_params(np.float32, progress=lambda done, total: progress.append((done, total)))
    assert progress[-1][0] == progress[-1][1]


def test_a_target_that_cannot_be_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "there").mkdir()
    source = find_model(str(folder))
    for target, message in (
        (tmp_path / "there", "there exists; remove it"),
        (folder, "is the model itself"),
        (tmp_path / "b.converting", "did not finish; give one without .converting"),
        (tmp_path / "no" / "where", r"no folder .*no; make it"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(source, target)
    assert list((tmp_path / "there").iterdir()) == []


def test_two_conversions_to_one_place_do_not_mix(tmp_path: Path, folder: Path) -> None:
    unfinished = tmp_path / "b.converting"
    unfinished.mkdir()
    (unfinished / "theirs").write_text("")
    held = os.open(unfinished, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another conversion is writing"):
        convert(find_model(str(folder)), tmp_path / "b")
    assert (unfinished / "theirs").exists()
    os.close(held)  # as when its process is killed
    convert(find_model(str(folder)), tmp_path / "b")
    assert not unfinished.exists()


def test_what_was_written_is_read_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_part = orbax.read_part

    def read_wrong(part: Path) -> dict[str, np.ndarray]:
        params = read_part(part)
        params["layers/1/q_DNH"][3, 2, 1] += 1
        return params

    monkeypatch.setattr(conversion, "read_part", read_wrong)
    with pytest.raises(CheckpointError, match=r"layers/1/q_DNH was read back .* another content"):
        convert(find_model(str(folder)), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_it_is_filled(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs 4\d{5} bytes, but .* has 1000 free"):
        convert(find_model(str(folder)), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_arrays_too_large_to_hash_twice_have_a_sum(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax, "SMALL_FILE_BYTES", 9000)
    convert(find_model(str(folder)), tmp_path / "b")
    bundle = tmp_path / "b"
    array = find_model(str(bundle)).load_params(np.float32)["layers"]["1"]["down_FD"]
    wanted = np.ascontiguousarray(array).tobytes()[:64]
    (holder,) = [file for file in bundle.rglob("d/*") if wanted in file.read_bytes()]
    content = bytearray(holder.read_bytes())
    content[content.find(wanted)] ^= 1
    holder.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"layers/1/down_FD.*does not have the sum"):
        find_model(str(bundle)).load_params(np.float32)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from jaxserve.checkpoint import convert as conversion, manifest
from jaxserve.checkpoint.registry import find_model
import jaxserve.model.params, orbax.checkpoint

source, target = Path(sys.argv[1]), Path(sys.argv[2])
conversion.PART_BYTES = 80_000

def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after(calls, function):
    def run(*arguments, **named):
        nonlocal calls
        result = function(*arguments, **named)
        calls -= 1
        return result if calls else die()
    return run

POINTS = {
    "first part": lambda: setattr(conversion, "write_part", die),
    "third part": lambda: setattr(conversion, "write_part", die_after(2, conversion.write_part)),
    "tokenizer": lambda: setattr(conversion, "describe_files", die),
    "sync": lambda: setattr(conversion, "_sync", die),
    "verify": lambda: setattr(conversion, "_verify", die),
    "manifest": lambda: setattr(conversion, "dump_manifest", die),
    "half a manifest": lambda: setattr(
        conversion, "_sync_path", lambda path: path.suffix == ".new" and die()
    ),
    "rename": lambda: setattr(Path, "rename", die_after(2, Path.rename)),
}
for name, prepare in POINTS.items():
    child = os.fork()
    if child == 0:
        prepare()
        conversion.convert(find_model(str(source)), target)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(json.dumps([name, os.waitstatus_to_exitcode(status), target.exists(),
                      sorted(file.name for file in target.parent.iterdir())]), flush=True)
"""


def test_a_killed_conversion_leaves_no_model(tmp_path: Path, folder: Path) -> None:
    target = tmp_path / "b"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(folder), str(target)],
        check=True, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    states = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(states) == 8
    for name, code, exists, beside in states[:-1]:
        assert (code, exists, beside) == (-9, False, ["b.converting"]), name
    assert states[-1][1:] == [-9, True, ["b"]]  # killed after it had its name: it is whole
    read_manifest(target)
    find_model(str(target)).load_params(np.float32)


@pytest.mark.parametrize("has_manifest", [False, True])
def test_what_a_killed_conversion_leaves_is_no_model_and_is_replaced(
    tmp_path: Path, folder: Path, has_manifest: bool
) -> None:
    left = tmp_path / "b.converting"
    convert(find_model(str(folder)), tmp_path / "whole")
    (tmp_path / "whole").rename(left)
    if not has_manifest:
        (left / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"did not finish|no manifest"):
        find_model(str(left))
    convert(find_model(str(folder)), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.update(format_version=2), "format_version is 2, but .* reads 1"),
        (lambda fields: fields["model"].pop("qk_norm"), "missing or unknown: model.qk_norm"),
        (lambda fields: fields["model"]["layers"][1].update(x=1), "unknown: model.layers.1.x"),
        (lambda fields: fields["model"].update(qkv_bias="no"), "model.qkv_bias: .*boolean"),
        (lambda fields: fields.pop("eos_ids"), "eos_ids: Field required"),
        (lambda fields: fields["model"].update(norm_eps=0.0), r"norm_eps is 0\.0"),
        (lambda fields: fields["model"].update(embedding_scale=-3.0), "embedding_scale is -3"),
        (lambda fields: fields["model"]["layers"][1].update(mlp="experts"), "there are none"),
        (lambda fields: fields["model"]["layers"][1]["rope"].update(rotary_dim=7), "turns 7 dim"),
        (lambda fields: fields["model"]["layers"][1]["rope"].update(kind="yarn"), "is None, but"),
    ],
)
def test_a_signed_manifest_must_still_make_sense(
    tmp_path: Path, folder: Path, change: object, message: str
) -> None:
    convert(find_model(str(folder)), tmp_path / "b")
    path = tmp_path / "b" / "manifest.json"
    fields = json.loads(path.read_text())
    del fields[manifests.DIGEST_KEY]
    assert callable(change)
    change(fields)
    path.write_text(json.dumps(manifests.sign(fields)))
    with pytest.raises(CheckpointError, match=message):
        find_model(str(tmp_path / "b")).load_header()


def test_what_the_librarys_tasks_say_behind_a_failed_write_is_dropped_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("asyncio")
    monkeypatch.setattr(log, "filters", [])  # a failed write before this one leaves its own
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    theirs = "Task exception was never retrieved\nfuture: <Task coro=<f() at x/orbax/y.py:1>>"
    ours = "Task exception was never retrieved\nfuture: <Task coro=<f() at jaxserve/y.py:1>>"

    def said() -> list[str]:
        caplog.clear()
        log.error(theirs)
        log.error(ours)
        return [record.getMessage() for record in caplog.records]

    with orbax.quiet_orbax():
        assert said() == [ours]
    assert said() == [theirs, ours]
    with pytest.raises(OSError, match="full"), orbax.quiet_orbax():
        raise OSError("full")
    assert said() == [ours]
