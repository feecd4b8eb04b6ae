"""Traces kept between starts: read in place of tracing, never a stale or a broken one."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jaxserve
from jaxserve.config import Config
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl
from jaxserve.metrics import Metrics
from jaxserve.plan import Bucket
from jaxserve.runner import kept_traces, steps
from jaxserve.runner.buckets import OutputBucket
from jaxserve.runner.cache_entries import CacheEntries
from jaxserve.runner.compile_cache import persistent_cache
from jaxserve.runner.kept_traces import lower_or_read
from jaxserve.runner.lowering import ProgramKey, build_source, lower
from jaxserve.runner.programs import Programs, program_keys
from jaxserve.runner.sizing import size_runner
from jaxserve.runner.spec import DtypeName, KvDtypeName
from tests.runner.driver import CONFIG, MODEL

# As native products want it: columns in panels of 32.
WIDE = dataclasses.replace(MODEL, head_dim=16, mlp_size=64)
STEPS = ("forward_step", "output_step", "full_output_step", "score_step", "copy_pages")


def _keys(
    dtype: DtypeName = "float32",
    kv_dtype: KvDtypeName = "float32",
    kernels: Kernels = Kernels(),  # noqa: B008  # frozen
) -> tuple[ProgramKey, ...]:
    values = CONFIG.model_dump()
    values["host_tier"] |= {"enabled": True}
    sizes = size_runner(
        WIDE,
        Config.model_validate(values),
        dtypes=(dtype, kv_dtype),
        kernels=kernels,
        programs=Programs(Metrics()),
        compile_keys=lambda keys: None,
    )
    return program_keys(sizes.spec, sizes.scheme, has_host_tier=True)


def _one_of_each_kind(keys: Iterable[ProgramKey]) -> list[ProgramKey]:
    kinds = {
        (key.kind, key.bucket.variant if isinstance(key.bucket, OutputBucket) else ""): key
        for key in keys
    }
    return list(kinds.values())


def _results(lowered: jax.stages.Lowered) -> tuple[object, list[object]]:
    return _form(lowered.out_info)


def _form(tree: object) -> tuple[object, list[object]]:
    return jax.tree.structure(tree), jax.tree.leaves(tree)


def _forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()

    def forbid(name: str) -> Callable[..., object]:
        def traced(*arguments: object, **static: object) -> object:
            raise AssertionError(f"{name} was traced")

        traced.__name__ = name
        return traced

    for name in STEPS:
        monkeypatch.setattr(steps, name, forbid(name))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "kernels"),
    [
        ("float32", "float32", Kernels()),
        ("bfloat16", "int8", Kernels(attention="reference", sampling="passes")),
        ("bfloat16", "bfloat16", Kernels(attention="native", matmul="native")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_kept_is_what_would_be_traced(
    dtype: DtypeName, kv_dtype: KvDtypeName, kernels: Kernels, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    entries = CacheEntries(tmp_path)
    keys = _one_of_each_kind(_keys(dtype, kv_dtype, kernels))
    assert {key.kind for key in keys} >= {"init", "score", "page_copy", "page_out", "page_in"}
    traced = [lower(key) for key in keys]
    for key in keys:
        lower_or_read(key, entries)
    _forbid_tracing(monkeypatch)
    for key, told in zip(keys, traced, strict=True):
        kept = lower_or_read(key, entries)
        assert _results(kept) == _results(told)
        assert _form(kept.args_info) == _form(told.args_info)


def test_a_kept_program_computes_the_same_bits_in_place(tmp_path: Path) -> None:
    entries = CacheEntries(tmp_path)
    keys = [
        key
        for key in _one_of_each_kind(_keys())
        if key.kind in ("forward", "output", "score", "page_copy")
    ]
    for key in keys:
        lower_or_read(key, entries)
        kept, told = lower_or_read(key, entries).compile(), lower(key).compile()
        memory, usual = kept.memory_analysis(), told.memory_analysis()
        assert memory is not None
        assert usual is not None
        assert memory.alias_size_in_bytes == usual.alias_size_in_bytes
        results = [jax.tree.leaves(run(*_build_arguments(key))) for run in (kept, told)]
        for one, other in zip(*results, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), key.name


def _build_arguments(key: ProgramKey) -> tuple[object, ...]:
    """Returns random arguments; small integers, which are ids, rows and lengths."""
    rng = np.random.default_rng(5)

    def build(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 4, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    arguments: tuple[object, ...] = jax.tree.map(build, build_source(key).arguments)
    return arguments


@pytest.fixture
def forward() -> ProgramKey:
    return next(key for key in _keys() if isinstance(key.bucket, Bucket))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_another_version_of_the_package_is_traced_again(
    forward: ProgramKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = CacheEntries(tmp_path)
    lower_or_read(forward, entries)
    monkeypatch.setattr(kept_traces, "_digest_of_package", lambda: "another")
    lower_or_read(forward, entries)
    assert len(_names(tmp_path)) == 2


def test_every_source_file_is_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    monkeypatch.setattr(kept_traces, "_IMPORTED_S", math.inf)
    for content in ("a = 1", "a = 2"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "__init__.py").touch()
        (tmp_path / "deep" / "file.py").write_text(content)
        monkeypatch.setattr(jaxserve, "__file__", str(tmp_path / "__init__.py"))
        digests.add(kept_traces._digest_of_package.__wrapped__())
    assert len(digests) == 2


def test_without_source_files_nothing_is_kept(
    forward: ProgramKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, cache = tmp_path / "jaxserve.zip", tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(jaxserve, "__file__", str(package / "jaxserve" / "__init__.py"))
    digest = functools.cache(kept_traces._digest_of_package.__wrapped__)
    monkeypatch.setattr(kept_traces, "_digest_of_package", digest)
    lower_or_read(forward, CacheEntries(cache))
    assert not _names(cache)


def test_sources_that_change_while_a_start_runs_are_not_what_it_traces(
    forward: ProgramKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    package, cache = tmp_path / "package", tmp_path / "cache"
    package.mkdir()
    cache.mkdir()
    (package / "__init__.py").touch()  # later than the import
    monkeypatch.setattr(jaxserve, "__file__", str(package / "__init__.py"))
    digest = functools.cache(kept_traces._digest_of_package.__wrapped__)
    monkeypatch.setattr(kept_traces, "_digest_of_package", digest)
    lowered = [lower_or_read(forward, CacheEntries(cache)) for _ in range(2)]
    assert not _names(cache)
    assert caplog.text.count("traces are not kept, a source file has changed") == 1
    assert _results(lowered[1]) == _results(lower(forward))


def test_a_folder_that_was_moved_is_read_as_before(
    forward: ProgramKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with persistent_cache(old) as entries:
        told = lower_or_read(forward, entries)
    old.rename(new)
    with persistent_cache(new) as entries:
        _forbid_tracing(monkeypatch)
        assert _results(lower_or_read(forward, entries)) == _results(told)


def test_another_setting_of_jax_is_traced_again(forward: ProgramKey, tmp_path: Path) -> None:
    entries = CacheEntries(tmp_path)
    lower_or_read(forward, entries)
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        lower_or_read(forward, entries)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert len(_names(tmp_path)) == 2


def test_another_model_or_bucket_is_another_trace(forward: ProgramKey, tmp_path: Path) -> None:
    entries = CacheEntries(tmp_path)
    model = dataclasses.replace(WIDE, norm_eps=1e-6)
    others = [
        dataclasses.replace(forward, spec=dataclasses.replace(forward.spec, model=model)),
        next(key for key in _keys() if key.bucket != forward.bucket and key.kind == "forward"),
    ]
    for key in (forward, *others):
        lower_or_read(key, entries)
    assert len(_names(tmp_path)) == 3


def test_one_that_cannot_be_read_is_said_and_replaced(
    forward: ProgramKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = CacheEntries(tmp_path)
    lower_or_read(forward, entries)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    name = path.name.removesuffix("-cache")
    for broken in (b"", b"not a trace" * 100, whole[: len(whole) // 2]):
        entries.put(name, broken)  # whole as an entry
        caplog.clear()
        lowered = lower_or_read(forward, entries)
        assert "kept trace unusable" in caplog.text
        assert _results(lowered) == _results(lower(forward))
        assert path.read_bytes() == whole


@pytest.mark.parametrize("attention", ["triton_interpret", "mosaic_interpret"])
def test_kernels_that_call_python_are_not_kept(attention: Impl, tmp_path: Path) -> None:
    key = next(key for key in _keys(kernels=Kernels(attention=attention)) if key.kind == "init")
    lower_or_read(key, CacheEntries(tmp_path))
    assert not _names(tmp_path)


def test_nothing_is_kept_without_a_folder(forward: ProgramKey) -> None:
    assert _results(lower_or_read(forward, None)) == _results(lower(forward))
