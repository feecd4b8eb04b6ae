"""Pages to host memory and back: bit for bit, in order, and only where the tier is on."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.errors import CapacityError
from jaxserve.host_pages import SwapCosts
from jaxserve.metrics import Metrics
from jaxserve.plan import PageIn, PageOut
from jaxserve.runner.batch import SWAP_WIDTH
from jaxserve.runner.buckets import Reach
from jaxserve.runner.host_store import HostStore
from jaxserve.runner.runner import Runner
from jaxserve.runner.spec import KvDtypeName
from tests.runner.driver import (
    CONFIG,
    MODEL,
    NUM_PAGES,
    PAGE_SIZE,
    Driver,
    oracle_tokens,
    prompt_of,
    tiny_params,
)

PAGE_BYTES = 2 * 2 * 2 * PAGE_SIZE * 8 * 4  # layers, K and V, heads, rows, head size, float32
NUM_HOST_PAGES = 40


def build(dtype: KvDtypeName = "float32", **tier: object) -> Runner:
    values = CONFIG.model_dump()
    values["kv"]["dtype"] = dtype
    values["scheduler"]["max_seqs"] = 2
    values["buckets"] |= {"chunk_tokens": [24], "capture": False}
    values["host_tier"] = {"enabled": True, "max_bytes": NUM_HOST_PAGES * PAGE_BYTES + 1} | tier
    config = Config.model_validate(values)
    return Runner(tiny_params(), MODEL, config, metrics=Metrics())


@pytest.fixture(scope="module")
def runner() -> Runner:
    return build()


def fill(runner: Runner, seed: int = 0) -> None:
    """Gives every number of the pool a value of its own."""
    rng = np.random.default_rng(seed)
    runner._kv = jax.tree.map(
        lambda pool: jax.device_put(np.abs(30 * rng.normal(size=pool.shape)).astype(pool.dtype)),
        runner._kv,
    )


def read_pages(runner: Runner, pages: Sequence[int]) -> bytes:
    pools = jax.tree.leaves(runner._kv)
    return b"".join(np.asarray(pool)[list(pages)].tobytes() for pool in pools)


def page_of(runner: Runner, number: float) -> Any:  # noqa: ANN401
    """Returns one page, layer by layer, in numpy's arrays."""
    return jax.tree.map(lambda pool: np.full((1, *pool.shape[1:]), number, pool.dtype), runner._kv)


def outs(pages: Sequence[int], host_pages: Sequence[int]) -> tuple[PageOut, ...]:
    pairs = zip(pages, host_pages, strict=True)
    return tuple(PageOut(page=page, host_page=host_page) for page, host_page in pairs)


def ins(host_pages: Sequence[int], pages: Sequence[int]) -> tuple[PageIn, ...]:
    pairs = zip(host_pages, pages, strict=True)
    return tuple(PageIn(host_page=host_page, page=page) for host_page, page in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_pages_come_back_as_they_went(dtype: KvDtypeName) -> None:
    runner = build(dtype)
    metrics, page_bytes = runner._metrics, runner.spec.page_bytes
    for number, count in enumerate((1, SWAP_WIDTH, 2 * SWAP_WIDTH + 5)):
        fill(runner, seed=number)
        driver = Driver(runner, first_page=NUM_PAGES - 10)
        row = driver.row(0, prompt_of(3))
        pages, host_pages = range(1, 1 + count), list(range(NUM_HOST_PAGES))[-count:]
        before = read_pages(runner, pages)
        flight = driver.launch((row, 3), swap_out=outs(pages, host_pages))
        driver.retire(flight, row)
        assert runner.host_pages is not None
        assert all(map(runner.host_pages.is_intact, host_pages))
        targets = range(60, 60 + count)
        others = [*range(1, 60), *range(60 + count, 105)]
        untouched = read_pages(runner, others)
        assert read_pages(runner, targets) != before
        driver.retire(driver.launch((row, 1), swap_in=ins(host_pages, targets)), row)
        assert read_pages(runner, targets) == before
        assert read_pages(runner, others) == untouched
    num_pages = 1 + SWAP_WIDTH + 2 * SWAP_WIDTH + 5
    for way in ("out", "in"):
        assert metrics.value(f"host_tier_pages_{way}_total") == num_pages
        assert metrics.value(f"host_tier_bytes_{way}_total") == num_pages * page_bytes
    assert metrics.value("recompiles_total") == 0


def test_a_page_goes_out_as_it_was_before_its_step_wrote_over_it(runner: Runner) -> None:
    fill(runner)
    driver = Driver(runner, first_page=20)
    row, other = driver.row(0, prompt_of(24)), driver.row(1, prompt_of(8))
    pages = range(21, 27)  # those that the row is given
    before, elsewhere = read_pages(runner, pages), read_pages(runner, range(40, 46))
    flight = driver.launch((row, 24), swap_out=outs(pages, range(6)))
    later = driver.launch((other, 8))
    assert row.pages == list(pages)
    driver.retire(flight, row)
    driver.retire(later, other)
    assert read_pages(runner, pages) != before
    driver.launch((row, 1), swap_in=ins(range(6), range(50, 56))).result()
    assert read_pages(runner, range(50, 56)) == before
    assert read_pages(runner, range(40, 46)) == elsewhere


def test_a_page_may_go_out_and_another_come_into_its_place(runner: Runner) -> None:
    fill(runner)
    driver = Driver(runner, first_page=90)
    row = driver.row(0, prompt_of(3))
    first, second = read_pages(runner, [7]), read_pages(runner, [8])
    driver.launch((row, 3), swap_out=outs([7], [0])).result()
    driver.launch((row, 1), swap_out=outs([8], [1]), swap_in=ins([0], [8])).result()
    assert read_pages(runner, [8]) == first
    driver.launch((row, 1), swap_in=ins([1], [9])).result()
    assert read_pages(runner, [9]) == second


def test_a_host_page_may_be_written_over_by_the_step_that_brings_it_back(runner: Runner) -> None:
    fill(runner)
    driver = Driver(runner, first_page=90)
    row = driver.row(0, prompt_of(3))
    first, second = read_pages(runner, [7]), read_pages(runner, [8])
    driver.launch((row, 3), swap_out=outs([7], [0])).result()
    driver.launch((row, 1), swap_out=outs([8], [0]), swap_in=ins([0], [10])).result()
    driver.launch((row, 1), swap_in=ins([0], [11])).result()
    assert read_pages(runner, [10]) == first
    assert read_pages(runner, [11]) == second


def test_a_sequence_goes_on_from_pages_that_came_back(runner: Runner) -> None:
    prompt = prompt_of(25)
    driver = Driver(runner)
    row = driver.row(0, prompt)
    driver.step((row, 24))
    driver.launch((driver.row(1, prompt_of(2)), 2), swap_out=outs(row.pages, range(6))).result()
    fill(runner)  # all that was in the pool is gone
    again = driver.row(0, prompt)
    again.pages, again.num_computed = list(range(100, 106)), 24
    flight = driver.launch((again, 1), swap_in=ins(range(6), again.pages))
    driver.retire(flight, again)
    assert again.output == oracle_tokens(tiny_params(), prompt, 1)


@pytest.mark.parametrize("place", [0, -1], ids=["the first byte", "the last"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_damaged_page_and_one_never_stored_are_told(dtype: KvDtypeName, place: int) -> None:
    runner = build(dtype)
    store = HostStore(4, runner.spec)
    assert not store.is_intact(0)
    page = page_of(runner, 1.0)
    store.store([2], page)
    assert store.is_intact(2)
    store._bytes[2, place, place] ^= 1
    assert not store.is_intact(2)
    store.store([2], page)
    assert store.is_intact(2)


def test_what_is_read_is_a_copy(runner: Runner) -> None:
    store = HostStore(4, runner.spec)
    page = page_of(runner, 1.0)
    store.store([1], page)
    read = store.read([1])
    store.store([1], page_of(runner, 2.0))
    for array, kept in zip(jax.tree.leaves(read), jax.tree.leaves(page), strict=True):
        assert array[0].tobytes() == kept[0].tobytes()
        assert not array[1:].any()


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_both_programs_use_the_pool_in_place(dtype: KvDtypeName) -> None:
    runner = build(dtype)
    page_bytes = runner.spec.page_bytes
    pool_bytes = sum(pool.nbytes for pool in jax.tree.leaves(runner._kv))
    assert pool_bytes == NUM_PAGES * page_bytes
    out, into = runner._run["page_out", None], runner._run["page_in", None]
    for program, alias in ((out, 0), (into, pool_bytes)):
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == alias
        assert memory.temp_size_in_bytes <= 2 * SWAP_WIDTH * page_bytes


def test_what_a_copy_costs_is_measured_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = build()
    store = runner.host_pages
    assert store is not None
    assert (store.num_pages, store.page_bytes) == (NUM_HOST_PAGES, PAGE_BYTES)
    assert 0 < store.costs.run_s < 10
    assert 0 < store.costs.token_s < 10
    break_even = store.costs.break_even_tokens(PAGE_SIZE)
    assert runner._metrics.value("host_tier_break_even_tokens") == break_even
    (line,) = (message for message in caplog.messages if message.startswith("host tier"))
    assert f"pages={NUM_HOST_PAGES} bytes={NUM_HOST_PAGES * PAGE_BYTES} out_bytes_per_s=" in line
    assert line.endswith(f"break_even_tokens={break_even:.1f}")
    assert runner._metrics.total("steps_total") == 0
    driver = Driver(runner)
    driver.generate(row := driver.row(0, prompt_of(9)), num_tokens=3)
    assert row.output == oracle_tokens(tiny_params(), row.prompt, 3)


@pytest.mark.parametrize(
    ("run_s", "worth", "break_even"),
    [
        (16.0, {1: False, 4: False, 5: True, 16: True, 17: True}, 16.0),
        (64.0, {1: False, 16: False, 17: False, 160: False}, math.inf),
        (3.9, {1: True, 17: True}, 3.9),
    ],
)
def test_from_where_on_a_copy_is_worth_it(
    run_s: float, worth: dict[int, bool], break_even: float
) -> None:
    costs = SwapCosts(run_pages=16, run_s=run_s, token_s=1.0)
    assert {n: costs.is_worth(n, page_size=4) for n in worth} == worth
    assert costs.break_even_tokens(4) == break_even


def test_without_the_tier_there_is_nothing_of_it() -> None:
    off = build(enabled=False)
    assert off.host_pages is None
    assert not {"page_in", "page_out"} & {kind for kind, _ in off._run}


def test_one_request_alone_has_no_tier() -> None:
    config = CONFIG.model_copy(
        update={"host_tier": CONFIG.host_tier.model_copy(update={"enabled": True})}
    )
    reach = Reach(prompt_len=5, max_tokens=4, variant="greedy")
    runner = Runner(tiny_params(), MODEL, config, metrics=Metrics(), reach=reach)
    assert runner.host_pages is None


@pytest.mark.parametrize(
    ("max_bytes", "message"),
    [
        (PAGE_BYTES - 1, f"max_bytes is {PAGE_BYTES - 1}, but a KV page has {PAGE_BYTES} bytes"),
        (1 << 60, "but the machine has"),
    ],
)
def test_a_budget_for_no_page_or_beyond_the_machine_is_refused(
    max_bytes: int, message: str
) -> None:
    with pytest.raises(CapacityError, match=message):
        build(max_bytes=max_bytes)
