"""Choices of one request: rows forked from one hidden state, over shared and copied pages."""

import itertools

import pytest

from jaxserve.model.params import Params
from jaxserve.request import SamplingParams
from tests.runner.driver import GREEDY, PAGE_SIZE, Driver, Row, oracle_tokens, prompt_of

PLAIN = SamplingParams(temperature=1.5)
FULL = SamplingParams(
    temperature=1.5, repetition_penalty=1.8, frequency_penalty=0.7, top_p=0.95, min_tokens=2
)
LENGTHS = [1, 3, 4, 5, 8, 11]  # around pages of four


def family(
    driver: Driver, length: int, sampling: SamplingParams, *, num_forks: int = 3
) -> list[Row]:
    """Returns a sequence and its forks, in rows apart."""
    parent = driver.row(0, prompt_of(length), sampling=sampling, seed=9, stop_ids=(1, 2))
    return [parent, *(driver.fork(parent, 8 - n) for n in range(num_forks))]


def alone(driver: Driver, row: Row, num_tokens: int) -> list[int | None]:
    """Returns the output of the same choice, computed as a sequence of its own."""
    single = driver.row(
        row.row,
        row.prompt,
        sampling=row.sampling,
        seed=row.seed,
        stop_ids=row.stop_ids,
        choice=row.choice,
    )
    driver.generate(single, num_tokens=num_tokens)
    return single.output


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, FULL], ids=["greedy", "plain", "full"])
@pytest.mark.parametrize("length", LENGTHS)
def test_each_choice_writes_what_it_writes_alone(
    driver: Driver, length: int, sampling: SamplingParams
) -> None:
    rows = family(driver, length, sampling)
    driver.step((rows[0], length))
    assert [len(row.output) for row in rows] == [1] * 4
    driver.generate(*rows, num_tokens=7)
    for row in rows:
        assert row.output == alone(driver, row, 7)
    if sampling is not GREEDY:
        assert len({tuple(row.output) for row in rows}) == 4


@pytest.mark.parametrize("length", LENGTHS)
def test_full_pages_are_shared_and_the_last_one_is_not(driver: Driver, length: int) -> None:
    rows = family(driver, length, PLAIN)
    before = driver.runner._metrics.value("kv_page_copies_total")
    driver.step((rows[0], length))
    driver.generate(*rows, num_tokens=6)
    num_full = length // PAGE_SIZE
    for one, other in itertools.pairwise(rows):
        assert one.pages[:num_full] == other.pages[:num_full]
        assert not set(one.pages[num_full:]) & set(other.pages[num_full:])
    num_copies = 3 if length % PAGE_SIZE else 0
    assert driver.runner._metrics.value("kv_page_copies_total") == before + num_copies


@pytest.mark.parametrize("sampling", [PLAIN, FULL], ids=["plain", "full"])
def test_choices_go_on_from_the_device_before_a_result_is_read(
    driver: Driver, sampling: SamplingParams
) -> None:
    rows = family(driver, 6, sampling)
    flights = [driver.launch((rows[0], 6))]
    for _ in range(4):
        flights.append(driver.launch(*((row, 1) for row in rows)))
        driver.retire(flights.pop(0), rows[0])
    driver.retire(flights.pop(0), rows[0])
    for row in rows:
        assert row.output == alone(driver, row, 5)


def test_a_prompt_in_chunks_forks_at_its_end(driver: Driver) -> None:
    rows = family(driver, 23, PLAIN)
    driver.generate(rows[0], num_tokens=1, chunk_len=5)
    driver.generate(*rows, num_tokens=4)
    for row in rows:
        assert row.output == alone(driver, row, 4)


def test_as_many_rows_are_sampled_as_there_are(driver: Driver, params: Params) -> None:
    rows = family(driver, 5, GREEDY, num_forks=8)
    result = driver.step((rows[0], 5))
    assert result.token_ids.keys() == {row.id for row in rows}
    driver.generate(*rows, num_tokens=4)
    wanted = oracle_tokens(params, rows[0].prompt, 4)
    assert [row.output for row in rows] == [wanted] * 9


def test_forks_of_two_requests_beside_a_decoding_row(driver: Driver) -> None:
    first = driver.row(0, prompt_of(9, salt=1), sampling=PLAIN, seed=3)
    second = driver.row(1, prompt_of(6, salt=2), sampling=FULL, seed=4)
    forks = [driver.fork(first, 2), driver.fork(second, 3), driver.fork(second, 4)]
    mate = driver.row(8, prompt_of(7), sampling=PLAIN, seed=5)
    driver.step((mate, 7))
    driver.step((mate, 1), (first, 9), (second, 6))
    rows = [first, second, *forks, mate]
    driver.generate(*rows, num_tokens=5)
    for row in rows:
        assert row.output == alone(driver, row, 5)


def test_a_choice_that_lost_its_pages_is_on_its_own(driver: Driver) -> None:
    rows = family(driver, 10, FULL)
    driver.step((rows[0], 10))
    driver.generate(*rows, num_tokens=3)
    driver.preempt(rows[0])  # the others still read the pages that it had
    driver.generate(*rows[1:], num_tokens=4)
    driver.preempt(rows[2])
    driver.generate(*rows, num_tokens=7)
    for row in rows:
        assert row.output == alone(driver, row, 7)


def test_choices_end_one_by_one(driver: Driver) -> None:
    rows = family(driver, 7, PLAIN)
    driver.step((rows[0], 7))
    for num_ended in range(4):
        driver.generate(*rows[num_ended:], num_tokens=2 + num_ended)
    for num_ended, row in enumerate(rows):
        assert row.output == alone(driver, row, 2 + num_ended)
