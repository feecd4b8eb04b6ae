"""Outputs under masks: launched after the forward, on their own, before the next step."""

import numpy as np
import pytest

from jaxserve.metrics import Metrics
from jaxserve.model.params import Params
from jaxserve.plan import TokenMask
from jaxserve.request import SamplingParams
from jaxserve.runner.runner import Runner
from tests.fakes import build_mask, stack_masks
from tests.runner.driver import GREEDY, MODEL, Driver, oracle_tokens, prompt_of
from tests.runner.test_runner import Heard

ONES = np.full(-(-MODEL.vocab_size // 32), 0xFFFFFFFF, np.uint32)


def mask_of(is_allowed_V: np.ndarray) -> TokenMask:
    return build_mask(np.flatnonzero(is_allowed_V), MODEL.vocab_size)


def every_third(output: list[int | None], *, salt: int = 0) -> np.ndarray:
    """Other ids after each token."""
    is_allowed_V: np.ndarray = (np.arange(MODEL.vocab_size) + len(output) + salt) % 3 == 0
    return is_allowed_V


def masked_oracle(params: Params, prompt: tuple[int, ...], n: int, *, salt: int = 0) -> list[int]:
    def change(logits_V: np.ndarray, output: list[int]) -> np.ndarray:
        return np.where(every_third([*output], salt=salt), logits_V, -np.inf)

    return oracle_tokens(params, prompt, n, change=change)


def test_a_masked_row_samples_what_its_mask_leaves(driver: Driver, params: Params) -> None:
    row, mate = driver.row(0, prompt_of(6)), driver.row(5, prompt_of(9, salt=1))
    row.mask = lambda output: mask_of(every_third(output))
    driver.generate(row, mate, num_tokens=6)
    assert row.output == masked_oracle(params, row.prompt, 6)
    assert row.output != oracle_tokens(params, row.prompt, 6)
    assert mate.output == oracle_tokens(params, mate.prompt, 6)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.9), SamplingParams(frequency_penalty=1.5, top_k=9)],
    ids=["greedy", "plain", "full"],
)
def test_a_mask_of_ones_changes_no_token(driver: Driver, sampling: SamplingParams) -> None:
    free = driver.row(1, prompt_of(6), sampling=sampling, seed=5)
    driver.generate(free, num_tokens=8)
    row = driver.row(2, prompt_of(6), sampling=sampling, seed=5)
    row.mask = lambda output: ONES
    driver.generate(row, num_tokens=8)
    assert row.output == free.output


def test_one_allowed_token_is_sampled(driver: Driver) -> None:
    row = driver.row(3, prompt_of(4), sampling=SamplingParams(temperature=3.0), seed=1)
    wanted = [130, 0, 64, 31, 32]
    row.mask = lambda output: mask_of(np.arange(MODEL.vocab_size) == wanted[len(output)])
    driver.generate(row, num_tokens=5)
    assert row.output == wanted


def test_a_masked_row_without_a_mask_may_sample_anything(driver: Driver, params: Params) -> None:
    row = driver.row(4, prompt_of(5))
    row.mask = lambda output: ONES
    flight = driver.launch((row, 5))
    flight.launch_output(stack_masks({}, MODEL.vocab_size))
    driver.retire(flight, row)
    assert row.output == oracle_tokens(params, row.prompt, 1)


def test_the_next_forward_reads_the_token_of_a_late_output(driver: Driver, params: Params) -> None:
    """As an engine runs it: a forward, then the result before it, then the output."""
    row, mate = driver.row(0, prompt_of(6)), driver.row(2, prompt_of(11, salt=3))
    row.mask = lambda output: mask_of(every_third(output))
    older = driver.launch((row, 6), (mate, 11))
    older.launch_output(driver.masks_of(row, mate))
    for _ in range(5):
        flight = driver.launch((row, 1), (mate, 1))  # the token is on the device only
        driver.retire(older, row, mate)
        flight.launch_output(driver.masks_of(row, mate))
        older = flight
    driver.retire(older, row, mate)
    assert row.output == masked_oracle(params, row.prompt, 6)
    assert mate.output == oracle_tokens(params, mate.prompt, 6)


def test_a_late_output_counts_its_tokens(driver: Driver, params: Params) -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.7)
    row = driver.row(5, prompt_of(12), sampling=sampling)
    row.mask = lambda output: mask_of(every_third(output))
    driver.generate(row, num_tokens=8)

    def change(logits_V: np.ndarray, output: list[int]) -> np.ndarray:
        logits_V = logits_V.copy()
        for token in {*row.prompt, *output}:
            logits_V[token] *= 1.8 if logits_V[token] < 0 else 1 / 1.8
        for token in output:
            logits_V[token] -= 0.7
        return np.where(every_third([*output]), logits_V, -np.inf)

    assert row.output == oracle_tokens(params, row.prompt, 8, change=change)


def test_forks_are_masked_each_by_its_own(driver: Driver, params: Params) -> None:
    parent = driver.row(0, prompt_of(7))
    forks = [driver.fork(parent, 4), driver.fork(parent, 6)]
    for salt, row in enumerate((parent, *forks)):
        row.mask = lambda output, salt=salt: mask_of(every_third(output, salt=salt))
    driver.step((parent, 7))
    driver.generate(parent, *forks, num_tokens=5)
    for salt, row in enumerate((parent, *forks)):
        assert row.output == masked_oracle(params, parent.prompt, 5, salt=salt)


def test_a_mask_may_be_written_again_once_the_output_is_launched(
    driver: Driver, params: Params
) -> None:
    row, mask = driver.row(0, prompt_of(6)), mask_of(every_third([]))
    row.mask = lambda output: mask
    flight = driver.launch((row, 6))
    flight.launch_output(stack_masks({row.id: mask}, MODEL.vocab_size))
    mask[:] = 0
    driver.retire(flight, row)
    assert row.output == masked_oracle(params, row.prompt, 1)


def test_no_step_comes_between_a_forward_and_its_output(driver: Driver) -> None:
    row, mate = driver.row(0, prompt_of(6)), driver.row(1, prompt_of(3))
    row.mask = lambda output: ONES
    flight = driver.launch((row, 6))
    with pytest.raises(AssertionError, match=r"output of step \d+ comes before step"):
        driver.launch((mate, 3))
    with pytest.raises(AssertionError, match="masks come before its result"):
        flight.result()
    assert not flight.is_ready()
    flight.launch_output(stack_masks({row.id: ONES}, MODEL.vocab_size))
    with pytest.raises(AssertionError, match="launched once"):
        flight.launch_output(stack_masks({row.id: ONES}, MODEL.vocab_size))
    driver.retire(flight, row)
    assert flight.is_ready()
    free = driver.launch((driver.row(1, prompt_of(3)), 3))
    with pytest.raises(AssertionError, match="only under masks"):
        free.launch_output(stack_masks({}, MODEL.vocab_size))
    free.result()


def test_a_chunk_in_the_middle_of_a_masked_prompt_waits_for_nothing(driver: Driver) -> None:
    row = driver.row(0, prompt_of(9))
    row.mask = lambda output: ONES
    assert driver.launch((row, 5)).result().token_ids == {}
    driver.step((row, 4))
    assert len(row.output) == 1


def test_a_masked_step_tells_its_laps_and_moves_no_bytes_it_does_not_name(
    runner: Runner, metrics: Metrics
) -> None:
    heard, driver = Heard(), Driver(runner)
    row = driver.row(0, prompt_of(9))
    row.mask = lambda output: ONES
    before = metrics.value("masked_tokens_total"), metrics.value("recompiles_total")
    flight = driver.launch((row, 9), laps=heard)
    heard.phases.clear()
    flight.launch_output(driver.masks_of(row))
    assert heard.phases == ["build", "dispatch"]
    driver.retire(flight, row)
    assert heard.phases[2:] == ["wait", "readback"]
    assert metrics.value("masked_tokens_total") == before[0] + 1
    assert metrics.value("recompiles_total") == before[1]
