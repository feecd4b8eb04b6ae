"""A row's numbers depend on neither batch nor bucket beyond rounding (C25)."""

import logging
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxserve.model.params import Params
from jaxserve.model.transformer import logits
from jaxserve.runner.runner import Runner
from tests.runner.driver import MODEL, Driver, oracle_logits, prompt_of

# Units in the last place of the row's largest logit. The sums of a matrix product may be taken in
# another order when it has other sizes; two layers of 48 and the head add up to a few.
MAX_ULP = 16

logger = logging.getLogger(__name__)

head_logits = jax.jit(logits, static_argnames=("config", "matmul"))


def logits_of(runner: Runner, places: list[int], num_rows: int) -> np.ndarray:
    """Returns logits [len(places), V] of the last step's tokens, computed in `num_rows` rows."""
    hidden_TD = np.array(runner._hidden_TD)
    index = (places * num_rows)[:num_rows]
    out_BV = head_logits(runner._head, jax.device_put(hidden_TD[index]), config=MODEL, matmul="xla")
    return np.array(out_BV)[: len(places), : MODEL.vocab_size]


def decode(driver: Driver, num_rows: int) -> tuple[np.ndarray, str]:
    """Decodes the same sequence, last of so many; returns its hidden state and the bucket."""
    mates = [driver.row(n, prompt_of(2 + n, salt=n)) for n in range(num_rows - 1)]
    row = driver.row(8, prompt_of(13, salt=99))
    for each in (*mates, row):
        driver.step((each, len(each.prompt)))
    bucket = driver.step(*((each, 1) for each in (*mates, row))).bucket
    places = [num_rows - 1]
    return logits_of(driver.runner, places, bucket.decode_seqs)[0], str(bucket)


def prefill(driver: Driver, num_decoding: int, num_before: int) -> tuple[np.ndarray, str]:
    """Prefills the same chunk beside decoding rows and after a chunk of another prompt."""
    mates = [driver.row(n, prompt_of(3, salt=n)) for n in range(num_decoding)]
    for each in mates:
        driver.step((each, 3))
    row, other = driver.row(8, prompt_of(7, salt=99)), driver.row(7, prompt_of(num_before))
    work = [(each, 1) for each in mates]
    work += [(other, num_before), (row, 7)] if num_before else [(row, 7)]
    bucket = driver.step(*work).bucket
    tiles_before = -(-num_before // 4) * 4
    places = [bucket.decode_seqs + tiles_before + 6]
    return logits_of(driver.runner, places, 2)[0], str(bucket)


def ulps(got_V: np.ndarray, wanted_V: np.ndarray) -> float:
    assert got_V.dtype == np.float32
    return float(np.abs(got_V - wanted_V).max() / np.spacing(np.abs(wanted_V).max()))


def runs(driver: Driver) -> Iterator[tuple[str, np.ndarray, str]]:
    for num_rows in (1, 2, 4, 8):
        yield "decode", *decode(driver, num_rows)
    for num_decoding in (0, 1, 2, 3, 6):
        for num_before in (0, 5, 13):
            yield "prefill", *prefill(driver, num_decoding, num_before)


def test_a_rows_logits_are_the_same_in_every_batch_and_bucket(
    driver: Driver, params: Params
) -> None:
    first: dict[str, np.ndarray] = {}
    largest = dict.fromkeys(("decode", "prefill"), 0.0)
    buckets = set()
    for kind, got_V, bucket in runs(driver):
        wanted_V = first.setdefault(kind, got_V)
        largest[kind] = max(largest[kind], ulps(got_V, wanted_V))
        buckets.add(bucket)
    for kind, most in largest.items():
        logger.info("kind=%s max_ulp=%.2f", kind, most)
        assert most <= MAX_ULP, kind
    assert buckets == {str(bucket) for bucket in driver.runner._scheme.forwards}
    wanted_V = oracle_logits(params, prompt_of(7, salt=99))
    assert np.abs(first["prefill"] - wanted_V).max() < 1e-4  # the rows were the right ones


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 9])
def test_a_rows_logits_are_the_same_in_every_output_size(driver: Driver, num_rows: int) -> None:
    driver.step((driver.row(0, prompt_of(7, salt=99)), 7))
    place = driver.runner._scheme.find_bucket(0, 8).decode_seqs + 6
    alone_V = logits_of(driver.runner, [place], 2)[0]
    most = ulps(logits_of(driver.runner, [place], num_rows)[0], alone_V)
    logger.info("num_rows=%d max_ulp=%.2f", num_rows, most)
    assert most <= MAX_ULP


def test_the_measure_sees_a_change_of_one_part_in_a_hundred_thousand(runner: Runner) -> None:
    row_V = np.linspace(-3, 5, MODEL.vocab_size, dtype=np.float32)
    assert ulps(row_V, row_V) == 0
    assert ulps(row_V * np.float32(1 + 1e-5), row_V) > MAX_ULP
