"""Programs that are kept whole: found by what they were made from, and by nothing else."""

import importlib.metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jaxserve
from jaxserve.runner.cache_entries import CacheEntries
from jaxserve.runner.program_store import ProgramStore


@pytest.fixture
def program() -> jax.stages.Compiled:
    """Doubles an array that it is given for good."""
    double = jax.jit(lambda tree: {"doubled": tree["x"] * 2}, donate_argnums=0)
    return double.lower({"x": jax.ShapeDtypeStruct((64,), jnp.float32)}).compile()


def open_store(folder: Path) -> ProgramStore:
    return ProgramStore(CacheEntries(folder))


def test_a_kept_program_does_what_it_did_and_takes_what_it_is_given(
    tmp_path: Path, program: jax.stages.Compiled
) -> None:
    open_store(tmp_path).keep("forward", "key", program)
    found = open_store(tmp_path).find("forward", "key")
    assert found is not None
    x = jnp.arange(64, dtype=jnp.float32)
    np.testing.assert_array_equal(found({"x": x})["doubled"], np.arange(64) * 2.0)
    assert x.is_deleted()  # donated


def test_another_key_and_another_kind_find_nothing(
    tmp_path: Path, program: jax.stages.Compiled
) -> None:
    store = open_store(tmp_path)
    store.keep("forward", "key", program)
    assert store.find("forward", "another") is None
    assert store.find("output", "key") is None


def change_flags(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")


def change_settings(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    settings = {**jax.config.values, "jax_enable_x64": not jax.config.values["jax_enable_x64"]}
    monkeypatch.setattr(type(jax.config), "values", settings)


def change_versions(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 99")


def change_code(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "layers.py").write_text("# changed\n")
    monkeypatch.setattr(jaxserve, "__file__", str(folder / "__init__.py"))


@pytest.mark.parametrize(
    "change",
    [change_flags, change_settings, change_versions, change_code],
    ids=lambda f: f.__name__,
)
def test_what_was_made_from_anything_else_is_not_found_and_is_replaced(
    change: object, tmp_path: Path, program: jax.stages.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, code = tmp_path / "entries", tmp_path / "code"
    entries.mkdir()
    code.mkdir()
    open_store(entries).keep("forward", "key", program)
    with monkeypatch.context() as context:
        change(context, code)  # type: ignore[operator]  # one of the above
        store = open_store(entries)
        assert store.find("forward", "key") is None
        store.keep("forward", "key", program)
        assert store.find("forward", "key") is not None
    assert open_store(entries).find("forward", "key") is None
    assert len(list(entries.iterdir())) == 1


def test_where_programs_are_kept_is_no_part_of_what_they_are(
    tmp_path: Path, program: jax.stages.Compiled
) -> None:
    open_store(tmp_path).keep("forward", "key", program)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "elsewhere"))
    try:
        assert open_store(tmp_path).find("forward", "key") is not None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_damaged_entry_is_never_looked_into(
    tmp_path: Path, program: jax.stages.Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(tmp_path).keep("forward", "key", program)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert open_store(tmp_path).find("forward", "key") is None
    assert "its checksum is wrong" in caplog.text
