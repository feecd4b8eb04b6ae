"""Log-probabilities of output and prompt: those of a cache-free float64 oracle."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.model.params import Params
from jaxserve.plan import TokenLogprobs
from jaxserve.request import SamplingParams
from jaxserve.runner.buckets import Reach
from jaxserve.runner.runner import Runner
from tests.fakes import build_mask
from tests.runner.driver import CONFIG, MODEL, Driver, Row, oracle_logits, prompt_of

# Logits of a few units, in float32 after two layers, against float64.
TOLERANCE = 2e-5
NUM_TOP = 6


def oracle_logprobs(params: Params, tokens: Sequence[int]) -> np.ndarray:
    logits_V = oracle_logits(params, tokens)
    shifted_V = logits_V - logits_V.max()
    result_V: np.ndarray = shifted_V - np.log(np.exp(shifted_V).sum())
    return result_V


def check(got: TokenLogprobs, token_id: int, wanted_V: np.ndarray, num_top: int) -> None:
    order = np.argsort(-wanted_V, kind="stable")
    assert got.token_id == token_id
    assert got.logprob == pytest.approx(wanted_V[token_id], abs=TOLERANCE)
    assert got.rank == order.tolist().index(token_id) + 1
    assert got.top_ids == tuple(order[:num_top].tolist())
    np.testing.assert_allclose(got.top_logprobs, wanted_V[order[:num_top]], atol=TOLERANCE)


def check_output(params: Params, row: Row) -> None:
    assert row.num_top is not None
    assert len(row.logprobs) == len(row.output)
    output = [token for token in row.output if token is not None]
    for index, got in enumerate(row.logprobs):
        wanted_V = oracle_logprobs(params, [*row.prompt, *output[:index]])
        check(got, output[index], wanted_V, row.num_top)


def check_prompt(params: Params, row: Row) -> None:
    assert row.num_prompt_top is not None
    assert len(row.prompt_logprobs) == len(row.prompt) - 1
    for index, got in enumerate(row.prompt_logprobs, 1):
        wanted_V = oracle_logprobs(params, row.prompt[:index])
        check(got, row.prompt[index], wanted_V, row.num_prompt_top)


OUTPUTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=3.0),
    SamplingParams(temperature=2.0, top_k=40, frequency_penalty=1.5, repetition_penalty=2.0),
    SamplingParams(temperature=0.0, logit_bias={3: 50.0}),  # not among the best by far
    SamplingParams(temperature=0.0, min_tokens=9),
]


@pytest.mark.parametrize("sampling", OUTPUTS)
@pytest.mark.parametrize("num_top", [0, 2, NUM_TOP])
def test_an_output_token_has_the_models_own_log_probability(
    driver: Driver, params: Params, sampling: SamplingParams, num_top: int
) -> None:
    row = driver.row(1, prompt_of(5), sampling=sampling, seed=3, stop_ids=(1, 2))
    row.num_top = num_top
    driver.generate(row, num_tokens=4)
    check_output(params, row)


def test_mates_that_want_none_get_none(driver: Driver, params: Params) -> None:
    rows = [driver.row(n, prompt_of(4 + n, salt=n), sampling=OUTPUTS[n], seed=n) for n in range(5)]
    rows[1].num_top, rows[4].num_top = 3, 0
    driver.generate(*rows, num_tokens=3)
    for row in rows:
        if row.num_top is None:
            assert row.logprobs == []
        else:
            check_output(params, row)


def test_forks_have_their_own(driver: Driver, params: Params) -> None:
    parent = driver.row(0, prompt_of(6), sampling=OUTPUTS[1], seed=8)
    parent.num_top = 2
    rows = [parent, driver.fork(parent, 3), driver.fork(parent, 5)]
    driver.step((parent, 6))
    driver.generate(*rows, num_tokens=3)
    assert len({row.output[0] for row in rows}) > 1
    for row in rows:
        check_output(params, row)


def test_a_mask_changes_no_log_probability(driver: Driver, params: Params) -> None:
    row = driver.row(2, prompt_of(7))
    mask_W = build_mask([105], MODEL.vocab_size)
    row.num_top, row.mask = 4, lambda output: mask_W
    driver.generate(row, num_tokens=3)
    assert row.output == [105] * 3
    check_output(params, row)


@pytest.mark.parametrize("chunk_len", [1, 2, 5, 8, 24])
def test_a_prompt_is_scored_however_it_is_cut(
    driver: Driver, params: Params, chunk_len: int
) -> None:
    row = driver.row(4, prompt_of(17))
    row.num_prompt_top = 3
    driver.generate(row, num_tokens=1, chunk_len=chunk_len)
    check_prompt(params, row)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_short_prompts_are_scored(driver: Driver, params: Params, length: int) -> None:
    row = driver.row(0, prompt_of(length))
    row.num_prompt_top = row.num_top = NUM_TOP
    driver.generate(row, num_tokens=2)
    check_prompt(params, row)
    check_output(params, row)


def test_prompts_are_scored_beside_each_other_and_decoding_rows(
    driver: Driver, params: Params, metrics: Metrics
) -> None:
    before = metrics.value("scored_tokens_total")
    decoding = driver.row(8, prompt_of(3))
    driver.step((decoding, 3))
    rows = [driver.row(n, prompt_of(5 + 3 * n, salt=n)) for n in range(3)]
    rows[0].num_prompt_top, rows[2].num_prompt_top, rows[1].num_top = 2, 0, 1
    driver.generate(decoding, *rows, num_tokens=3)
    for row in rows[::2]:
        check_prompt(params, row)
    assert rows[1].prompt_logprobs == []
    check_output(params, rows[1])
    assert metrics.value("scored_tokens_total") == before + 4 + 10


def test_a_prompt_whose_logits_are_not_finite_is_told(driver: Driver, params: Params) -> None:
    """Also where nothing is sampled yet; and its mates are scored."""
    sick, well = driver.row(0, prompt_of(14)), driver.row(1, prompt_of(14, salt=1))
    sick.num_prompt_top = well.num_prompt_top = 1
    driver.step((sick, 6), (well, 6))
    page, kv = sick.pages[0], driver.runner._kv
    driver.runner._kv = (kv[0].at[page, 1, :, 0].set(jnp.nan), *kv[1:])
    result = driver.step((sick, 4), (well, 4))
    assert result.not_finite == {sick.id}
    assert result.prompt_logprobs.keys() == {well.id}
    sick.num_prompt_top, sick.num_top = None, 1
    result = driver.step((sick, 4), (well, 4))
    assert result.not_finite == {sick.id}
    assert result.logprobs == {}
    check_prompt(params, well)
    driver.runner._kv = tuple(pool.at[page].set(0.0) for pool in driver.runner._kv)


LONG = 90  # more places than one run of the score program takes


@pytest.fixture(scope="module")
def long_runner(params: Params) -> Runner:
    """Compiled for one request with three choices that is scored, and for nothing else."""
    values = CONFIG.model_dump()
    values["buckets"]["chunk_tokens"] = [LONG + 2]
    return Runner(
        params,
        dataclasses.replace(MODEL, max_position=2 * LONG),
        Config.model_validate(values),
        metrics=Metrics(),
        reach=Reach(prompt_len=LONG, max_tokens=4, variant="full", num_choices=3, has_scoring=True),
    )


def test_a_long_prompt_is_scored_in_runs_and_its_choices_go_on(
    long_runner: Runner, params: Params
) -> None:
    driver = Driver(long_runner)
    parent = driver.row(0, prompt_of(LONG), sampling=OUTPUTS[1], seed=8)
    parent.num_prompt_top, parent.num_top = 1, 0
    rows = [parent, driver.fork(parent, 1), driver.fork(parent, 2)]
    driver.step((parent, LONG))
    driver.generate(*rows, num_tokens=3)
    check_prompt(params, parent)
    for row in rows:
        check_output(params, row)
    assert long_runner._metrics.value("recompiles_total") == 0
