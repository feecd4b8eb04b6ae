"""One compiled runner for the whole directory: compiling is what these tests cost."""

import jax
import numpy as np
import pytest

from jaxserve.metrics import Metrics
from jaxserve.model.params import Params
from jaxserve.runner.runner import Runner
from tests.runner.driver import CONFIG, MODEL, Driver, tiny_params


@pytest.fixture(scope="session")
def params() -> Params:
    host: Params = jax.tree.map(np.asarray, tiny_params())
    return host


@pytest.fixture(scope="session")
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(scope="session")
def runner(params: Params, metrics: Metrics) -> Runner:
    return Runner(params, MODEL, CONFIG, metrics=metrics)


@pytest.fixture
def driver(runner: Runner) -> Driver:
    return Driver(runner)
