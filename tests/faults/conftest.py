"""One tiny model, and one cache that the first process fills."""

import pytest

from tests.faults.processes import Place, make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("faults"))
