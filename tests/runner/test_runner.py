"""Steps on the device: tokens equal a cache-free oracle's, however they are batched."""

import gc
import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.metrics import Metrics
from jaxserve.model.params import Params
from jaxserve.plan import Bucket, PageCopy, StepPlan
from jaxserve.request import SamplingParams
from jaxserve.runner.runner import Runner
from tests.runner.driver import GREEDY, PAGE_SIZE, Driver, oracle_tokens, prompt_of


def _bucket(decode_seqs: int, chunk_tokens: int = 0) -> Bucket:
    return Bucket(decode_seqs=decode_seqs, verify_tokens=1, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 9])
def test_decoding_equals_the_oracle_in_every_bucket(
    driver: Driver, params: Params, num_seqs: int
) -> None:
    rows = [driver.row(n, prompt_of(3 + n, salt=n)) for n in range(num_seqs)]
    driver.generate(*rows, num_tokens=6)
    for row in rows:
        assert row.output == oracle_tokens(params, row.prompt, 6)


@pytest.mark.parametrize("chunk_len", [1, 2, 3, 4, 5, 7, 8, 9, 17, 24])
def test_chunking_a_prompt_changes_nothing(driver: Driver, params: Params, chunk_len: int) -> None:
    row = driver.row(4, prompt_of(23))
    driver.generate(row, num_tokens=3, chunk_len=chunk_len)
    assert row.output == oracle_tokens(params, row.prompt, 3)


def test_chunks_of_several_sequences_run_beside_decoding_rows(
    driver: Driver, params: Params
) -> None:
    decoding = driver.row(8, prompt_of(5))
    first, second = driver.row(0, prompt_of(9, salt=1)), driver.row(3, prompt_of(6, salt=2))
    driver.step((decoding, 5))
    driver.step((decoding, 1), (first, 6), (second, 2))  # a chunk's tail is padding of its tile
    result = driver.step((decoding, 1), (first, 3), (second, 4))
    assert result.bucket == _bucket(2, 8)
    assert set(result.token_ids) == {decoding.id, first.id, second.id}
    driver.generate(decoding, first, second, num_tokens=5)
    for row in (decoding, first, second):
        assert row.output == oracle_tokens(params, row.prompt, 5)


def test_a_mixed_step_beyond_the_small_decode_size_takes_the_large_one(driver: Driver) -> None:
    rows = [driver.row(n, prompt_of(2, salt=n)) for n in range(4)]
    driver.generate(*rows[:3], num_tokens=1)
    result = driver.step(*((row, 1) for row in rows[:3]), (rows[3], 2))
    assert result.bucket == _bucket(9, 8)


def test_a_step_launched_before_the_last_result_reads_its_token_on_the_device(
    driver: Driver, params: Params
) -> None:
    row, mate = driver.row(1, prompt_of(6)), driver.row(2, prompt_of(11, salt=3))
    flights = [driver.launch((row, 6), (mate, 11))]
    for _ in range(5):
        flights.append(driver.launch((row, 1), (mate, 1)))
        driver.retire(flights.pop(0), row, mate)
    driver.retire(flights.pop(0), row, mate)
    assert row.output == oracle_tokens(params, row.prompt, 6)
    assert mate.output == oracle_tokens(params, mate.prompt, 6)


def test_tokens_from_the_device_and_from_the_host_give_the_same(driver: Driver) -> None:
    on_device, from_host = driver.row(0, prompt_of(5)), driver.row(1, prompt_of(5))
    flights = [driver.launch((on_device, 5)), *(driver.launch((on_device, 1)) for _ in range(4))]
    for flight in flights:
        driver.retire(flight, on_device)
    for num_tokens in (5, 1, 1, 1, 1):  # every token is known when its step is launched
        driver.step((from_host, num_tokens))
    assert on_device.output == from_host.output


def test_a_step_that_samples_nothing_has_an_empty_result(driver: Driver) -> None:
    row = driver.row(0, prompt_of(9))
    result = driver.step((row, 5))
    assert result.token_ids == {}
    assert result.not_finite == frozenset()


class Heard:
    """Laps as they come; steps are asked whether they are ready at each."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def lap(self, phase: str) -> None:
        self.phases.append(phase)


def test_a_step_tells_its_laps(driver: Driver) -> None:
    """Row loads and their counts, then the step; and its result."""
    heard, penalties = Heard(), SamplingParams(temperature=0.0, presence_penalty=0.5)
    flight = driver.launch((driver.row(0, prompt_of(9), sampling=penalties), 9), laps=heard)
    assert heard.phases == ["build", "dispatch"] * 3
    flight.result()
    assert heard.phases[6:] == ["wait", "readback"]
    assert flight.is_ready()


def test_whether_a_step_is_ready_is_asked_without_waiting_and_true_in_the_end(
    driver: Driver,
) -> None:
    flights = [driver.launch((driver.row(row, prompt_of(16)), 16)) for row in range(4)]
    while not flights[-1].is_ready():  # hangs, were it never ready by itself
        pass
    assert all(flight.is_ready() for flight in flights)
    for flight in flights:
        flight.result()


def test_a_result_can_be_read_once(driver: Driver) -> None:
    flight = driver.launch((driver.row(0, prompt_of(3)), 3))
    flight.result()
    with pytest.raises(AssertionError, match="only once"):
        flight.result()


def test_an_empty_plan_cannot_be_launched(runner: Runner) -> None:
    with pytest.raises(AssertionError, match="empty plan"):
        runner.launch(StepPlan(step_id=0))


def test_nine_rows_are_loaded_in_one_step(driver: Driver) -> None:
    """In two runs of eight. What a row must sample is in its load alone."""
    biases = [SamplingParams(temperature=0.0, logit_bias={20 + n: 100.0}) for n in range(9)]
    rows = [driver.row(8 - n, prompt_of(1), sampling=bias) for n, bias in enumerate(biases)]
    driver.step(*((row, 1) for row in rows))
    assert [row.output for row in rows] == [[20 + n] for n in range(9)]


def test_a_row_keeps_nothing_of_its_last_owner(driver: Driver, params: Params) -> None:
    loud = SamplingParams(
        temperature=0.0, repetition_penalty=5.0, logit_bias={3: 100.0}, min_tokens=2
    )
    driver.generate(driver.row(0, prompt_of(20), sampling=loud, stop_ids=(7,)), num_tokens=4)
    # A neighbour that needs the full variant lets the row's own leftovers show.
    quiet, mate = driver.row(0, prompt_of(4)), driver.row(1, prompt_of(4), sampling=loud)
    driver.generate(quiet, mate, num_tokens=5)
    assert quiet.output == oracle_tokens(params, quiet.prompt, 5)
    # and with penalties of its own, the leftover counts
    penalized = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    driver.generate(driver.row(0, prompt_of(20), sampling=penalized), num_tokens=8)
    after, fresh = (driver.row(n, prompt_of(4, salt=1), sampling=penalized) for n in (0, 8))
    driver.generate(after, fresh, num_tokens=8)
    assert after.output == fresh.output


def test_penalties_count_prompt_and_output(driver: Driver, params: Params) -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.7)
    row = driver.row(5, prompt_of(12), sampling=sampling)
    driver.generate(row, num_tokens=8, chunk_len=5)

    def penalize(logits_V: np.ndarray, output: list[int]) -> np.ndarray:
        logits_V = logits_V.copy()
        for token in {*row.prompt, *output}:
            logits_V[token] *= 1.8 if logits_V[token] < 0 else 1 / 1.8
        for token in output:
            logits_V[token] -= 0.7
        return logits_V

    assert row.output == oracle_tokens(params, row.prompt, 8, change=penalize)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.9), SamplingParams(presence_penalty=1.5, top_k=9)],
    ids=["greedy", "plain", "full"],
)
def test_a_resumed_sequence_goes_on_as_if_never_preempted(
    driver: Driver, sampling: SamplingParams
) -> None:
    whole = driver.row(0, prompt_of(7), sampling=sampling, seed=5)
    driver.generate(whole, num_tokens=9)
    row = driver.row(2, prompt_of(7), sampling=sampling, seed=5)
    for num_tokens in (3, 6):
        driver.generate(row, num_tokens=num_tokens)
        driver.preempt(row)
        row.row += 3
    driver.generate(row, num_tokens=9)
    assert row.output == whole.output


MIXED = (
    GREEDY,
    SamplingParams(temperature=0.3, top_k=2),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.8),
    SamplingParams(logit_bias={3: 5.0}),
    SamplingParams(min_p=0.3, min_tokens=4),
)


def test_sampling_state_follows_its_sequence_through_any_order_of_rows(driver: Driver) -> None:
    def sequences(order: tuple[int, ...]) -> list[list[int | None]]:
        rows = [
            driver.row(row, prompt_of(4 + n, salt=n), sampling=MIXED[n], seed=n, stop_ids=(1, 2))
            for n, row in enumerate(order)
        ]
        # Joins mid-way, and finishes: the first two are alone at first, the last two at the end.
        driver.generate(*(rows[n] for n in (0, 1)), num_tokens=2)
        driver.generate(*rows, num_tokens=3)
        driver.generate(*(rows[n] for n in (4, 5)), num_tokens=6)
        return [row.output for row in rows]

    want = []
    for n, sampling in enumerate(MIXED):
        alone = driver.row(8, prompt_of(4 + n, salt=n), sampling=sampling, seed=n, stop_ids=(1, 2))
        driver.generate(alone, num_tokens=6 if n >= 4 else 3)
        want.append(alone.output)
    orders = list(itertools.permutations(range(6)))
    rng = np.random.default_rng(0)
    for index in rng.choice(len(orders), 12, replace=False):
        assert sequences(orders[index]) == want


def test_banned_ids_wait_for_min_tokens(driver: Driver, params: Params) -> None:
    free = oracle_tokens(params, prompt_of(5), 1)
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    row = driver.row(0, prompt_of(5), sampling=sampling, stop_ids=(free[0],))
    driver.generate(row, num_tokens=1)
    assert row.output != free


def test_padding_writes_to_no_page(runner: Runner, params: Params) -> None:
    last_page = runner.num_pages - 1
    owner = Driver(runner, first_page=last_page - 1).row(0, prompt_of(PAGE_SIZE))
    driver = Driver(runner, first_page=last_page - 1)
    driver.step((owner, PAGE_SIZE))
    assert owner.pages == [last_page]
    before = [np.array(kv_C2KRH) for kv_C2KRH in runner._kv]  # copies: a view would follow
    other = Driver(runner)
    rows = [other.row(1 + n, prompt_of(5 + n, salt=n)) for n in range(3)]
    other.generate(*rows, num_tokens=4)  # padding rows, padding tokens, padding tiles
    touched = sorted({page for row in rows for page in row.pages})
    untouched = np.setdiff1d(np.arange(runner.num_pages), touched)
    for old_C2KRH, new_C2KRH in zip(before, jax.device_get(runner._kv), strict=True):
        np.testing.assert_array_equal(new_C2KRH[untouched], old_C2KRH[untouched])
    driver.generate(owner, num_tokens=3)
    assert owner.output == oracle_tokens(params, owner.prompt, 3)


@pytest.mark.parametrize("poison", [np.nan, -1.0])
def test_what_unused_state_rows_hold_changes_nothing(driver: Driver, poison: float) -> None:
    def run() -> list[list[int | None]]:
        rows = [driver.row(n, prompt_of(5, salt=n), sampling=MIXED[2 + n], seed=n) for n in (0, 1)]
        driver.generate(*rows, num_tokens=4)
        return [row.output for row in rows]

    want = run()
    held = driver.runner._state
    rows = held.sampling
    dirty = {
        name: leaf.at[2:].set(jnp.asarray(poison).astype(leaf.dtype))
        for name, leaf in vars(rows).items()
        if leaf.ndim == 1 or name == "bias_values_BE"
    }
    driver.runner._state = held.replace(sampling=rows.replace(**dirty))
    assert run() == want


def test_nan_ends_up_in_its_own_sequence_only(
    driver: Driver, params: Params, metrics: Metrics
) -> None:
    sick, well = driver.row(0, prompt_of(6)), driver.row(1, prompt_of(6, salt=1))
    driver.step((sick, 6), (well, 6))
    page, kv = sick.pages[0], driver.runner._kv
    driver.runner._kv = (kv[0].at[page, 1, :, 0].set(jnp.nan), *kv[1:])
    result = driver.step((sick, 1), (well, 1))
    assert result.not_finite == {sick.id}
    driver.generate(well, num_tokens=5)
    assert well.output == oracle_tokens(params, well.prompt, 5)
    driver.runner._kv = tuple(pool.at[page].set(0.0) for pool in driver.runner._kv)


def test_pages_are_copied_before_the_forward(driver: Driver, params: Params) -> None:
    row = driver.row(0, prompt_of(40))
    driver.step((row, 24))
    old = list(row.pages)
    moved = [page + 60 for page in old]
    driver.launch((driver.row(8, prompt_of(1)), 1)).result()
    row.pages[:] = moved
    row.is_loaded = False  # the next step loads the whole new table
    copies = tuple(PageCopy(source=s, target=t) for s, t in zip(old, moved, strict=True))
    # Thirty copies are two runs; the surplus ones copy a page onto itself.
    padding = tuple(PageCopy(source=90 + n, target=90 + n) for n in range(24))
    before = driver.runner._metrics.value("kv_page_copies_total")
    flight = driver.launch((row, 16), copies=copies + padding)
    driver.retire(flight, row)
    assert row.output == oracle_tokens(params, row.prompt, 1)
    assert driver.runner._metrics.value("kv_page_copies_total") == before + 30


def test_buffers_are_replaced_in_place_step_after_step(driver: Driver) -> None:
    runner = driver.runner
    sampling = SamplingParams(temperature=0.5, presence_penalty=0.1)
    rows = [driver.row(n, prompt_of(2, salt=n), sampling=sampling) for n in range(2)]
    driver.generate(*rows, num_tokens=1)
    gc.collect()
    held = _live_bytes()
    kv, hidden_TD = runner._kv, runner._hidden_TD
    counts_BV, last_token_B = runner._state.sampling.counts_BV, runner._state.last_token_B
    page_table_BP = runner._state.page_table_BP
    driver.generate(*rows, num_tokens=2)
    for array in (*kv, hidden_TD, counts_BV, last_token_B, page_table_BP):
        assert array.is_deleted()
    del kv, hidden_TD, counts_BV, last_token_B, page_table_BP
    for _ in range(20):
        driver.generate(*rows, num_tokens=50)
        for row in rows:
            row.output.clear()
            driver.preempt(row)
        gc.collect()
        assert _live_bytes() == held


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_steps_are_counted_by_bucket(driver: Driver, metrics: Metrics) -> None:
    def counts() -> list[float]:
        names = ("steps_total", "step_real_tokens_total", "step_padded_tokens_total")
        values = [metrics.value(name, bucket="2x1+8") for name in names]
        values.append(metrics.value("output_programs_total", variant="greedy"))
        return [*values, metrics.value("bucketed_steps_total")]

    before = counts()
    driver.step((driver.row(0, prompt_of(6)), 6))
    assert [new - old for new, old in zip(counts(), before, strict=True)] == [1, 6, 4, 1, 1]


def test_filters_that_need_every_id_are_counted(driver: Driver, metrics: Metrics) -> None:
    before = metrics.value("sampler_fallbacks_total")
    wide = SamplingParams(temperature=100.0, top_p=0.99)
    driver.generate(driver.row(0, prompt_of(3), sampling=wide), num_tokens=1)
    assert metrics.value("sampler_fallbacks_total") == before + 1
