"""A copied page is its source, byte for byte, whatever the pool is made of."""

import jax
import pytest

from jaxserve.plan import PageCopy
from jaxserve.runner.batch import COPY_WIDTH
from jaxserve.runner.spec import KvDtypeName
from tests.runner.driver import Driver, prompt_of
from tests.runner.test_swaps import build, fill, read_pages


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_a_copied_page_has_the_bytes_of_its_source(dtype: KvDtypeName) -> None:
    runner = build(dtype, enabled=False)
    fill(runner)
    driver = Driver(runner, first_page=100)
    row = driver.row(0, prompt_of(3))
    count = COPY_WIDTH + 3
    sources, targets, others = range(1, 1 + count), range(40, 40 + count), range(70, 100)
    before, untouched = read_pages(runner, sources), read_pages(runner, others)
    copies = tuple(
        PageCopy(source=source, target=target)
        for source, target in zip(sources, targets, strict=True)
    )
    assert read_pages(runner, targets) != before
    driver.launch((row, 3), copies=copies).result()
    assert read_pages(runner, targets) == read_pages(runner, sources) == before
    assert read_pages(runner, others) == untouched


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_pool_is_copied_into_in_place(dtype: KvDtypeName) -> None:
    runner = build(dtype, enabled=False)
    memory = runner._run["page_copy", None].memory_analysis()
    assert memory is not None
    pool_bytes = sum(pool.nbytes for pool in jax.tree.leaves(runner._kv))
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes <= 3 * COPY_WIDTH * runner.spec.page_bytes
