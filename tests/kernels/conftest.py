"""Native kernels are known to XLA before a test of them."""

import pytest

from jaxserve.config import default_cache_dir
from jaxserve.runner.native_build import LIBRARIES, load_native


@pytest.fixture(autouse=True)
def native(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("native"):
        load_native(default_cache_dir(), LIBRARIES)
