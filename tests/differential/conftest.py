"""Compiled E0 runners for the directory: compiling is what its tests cost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.metrics import Metrics
from jaxserve.runner.runner import Runner
from tests.differential import small
from tests.differential.stage import MODEL, tiny_params
from tests.differential.test_windows_and_lengths import MODEL as WINDOWS
from tests.differential.test_windows_and_lengths import SMALL, params


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="session")
def _compiled_small(small_cache: Path) -> Runner:
    return Runner(tiny_params(), MODEL, small.CONFIG, metrics=Metrics(), cache_dir=small_cache)


@pytest.fixture(scope="session")
def windows_runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """With windows of 6, and a RoPE that follows the length beyond 16."""
    cache_dir = tmp_path_factory.mktemp("windows")
    return Runner(params(), WINDOWS, SMALL, metrics=Metrics(), cache_dir=cache_dir)


@pytest.fixture
def small_runner(_compiled_small: Runner) -> Iterator[Runner]:
    """The runner, with its own parameters again after the test."""
    params, head = _compiled_small._params, _compiled_small._head
    yield _compiled_small
    _compiled_small._params, _compiled_small._head = params, head
