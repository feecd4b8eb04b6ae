"""The sampler against a reference that sorts, and the promises it makes row by row."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.errors import ShapeError
from jaxserve.model import filters
from jaxserve.model.sampling import Variant, adjust, record, sample
from tests.model.reference_sampler import Row, adjusted, kept_ids, reference_token
from tests.model.sampling_rows import build_rows, run, run_sample, tokens

V11 = 11
WIDE = 8192  # 128 chunks: more than there are candidates, so chunk maxima are used
B = 64


def random_logits(num: int, vocab_size: int, *, stddev: float, seed: int = 0) -> np.ndarray:
    normal = np.random.default_rng(seed).standard_normal((num, vocab_size))
    return (stddev * normal).astype(np.float32)


def random_row(rng: np.random.Generator) -> Row:
    """Any values, each parameter off half of the time."""

    def maybe[T](value: T, off: T) -> T:
        return value if rng.random() < 0.5 else off

    def ids(num: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.choice(V11, num, replace=False))

    return Row(
        seed=int(rng.integers(0, 2**63)) * 2 + 1,
        choice=int(rng.integers(0, 3)),
        output_index=int(rng.integers(0, 9)),
        temperature=float(rng.choice([0.0, 1e-5, 1e-3, 0.3, 1.0, 5.0])),
        top_k=maybe(int(rng.integers(1, 13)), 0),
        top_p=maybe(float(rng.uniform(0.02, 0.999)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 1.0)), 0.0),
        presence=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition=maybe(float(rng.uniform(0.3, 2.5)), 1.0),
        bias=maybe(tuple((v, float(rng.uniform(-9, 9))) for v in ids(3)), ()),
        bans=maybe(ids(2), ()),
        min_tokens=int(rng.integers(0, 9)),
        prompt=tuple(int(v) for v in rng.integers(0, V11, 4)),
        output=tuple(int(v) for v in rng.integers(0, V11, 5)),
    )


def test_every_parameter_does_what_the_reference_does() -> None:
    rng = np.random.default_rng(1)
    for seed in range(20):
        rows = [random_row(rng) for _ in range(B)]
        logits_BV = random_logits(B, V11, stddev=2.0, seed=seed)
        wanted = [reference_token(l_V, row) for l_V, row in zip(logits_BV, rows, strict=True)]
        assert tokens(logits_BV, rows) == wanted


def test_penalties_count_as_worked_out_by_hand() -> None:
    logits = np.full((3, V11), -1.0, np.float32)
    logits[:, [5, 9, 2]] = [4.0, -2.0, 1.0]
    # Prompt [5, 5, 9]; then 2 is output, then 5.
    outputs: list[tuple[int, ...]] = [(), (2,), (2, 5)]
    by_hand = {
        "repetition": [  # prompt and output, each once: 4 / 2, -2 * 2, and 1 / 2 from step 2 on
            {5: 2.0, 9: -4.0, 2: 1.0},
            {5: 2.0, 9: -4.0, 2: 0.5},
            {5: 2.0, 9: -4.0, 2: 0.5},
        ],
        "presence": [  # output only
            {5: 4.0, 9: -2.0, 2: 1.0},
            {5: 4.0, 9: -2.0, 2: -1.0},
            {5: 2.0, 9: -2.0, 2: -1.0},
        ],
        "frequency": [
            {5: 4.0, 9: -2.0, 2: 1.0},
            {5: 4.0, 9: -2.0, 2: -1.0},
            {5: 2.0, 9: -2.0, 2: -1.0},
        ],
        "all": [  # repetition first, then 2 + 2 for an id that was output once
            {5: 2.0, 9: -4.0, 2: 1.0},
            {5: 2.0, 9: -4.0, 2: -3.5},
            {5: -2.0, 9: -4.0, 2: -3.5},
        ],
    }
    for name, wanted in by_hand.items():
        penalties = dict.fromkeys(("repetition", "presence", "frequency"), 2.0)
        chosen = penalties if name == "all" else {name: 2.0}
        rows = [Row(prompt=(5, 5, 9), output=output, **chosen) for output in outputs]  # type: ignore[arg-type]  # a table of floats
        padded = jnp.asarray(np.pad(logits, ((0, 0), (0, 64 - V11))))
        got = adjust(padded, build_rows(rows, padded_vocab_size=64), jnp.zeros(3, jnp.int32))
        for step in range(3):
            for v in range(V11):
                assert float(got[step, v]) == wanted[step].get(v, -1.0), (name, step, v)
            assert adjusted(logits[step], rows[step])[5] == wanted[step][5]


def test_frequency_counts_each_time_and_the_counts_follow_the_tokens() -> None:
    counts_BV = jnp.zeros((3, 64), jnp.int32).at[1, 5].set(1)  # 5 is in row 1's prompt
    for _ in range(2):
        counts_BV = record(counts_BV, jnp.array([1, 3], jnp.int32), jnp.array([5, 7], jnp.int32))
    wanted = np.zeros((3, 64), np.int32)
    wanted[1, 5] = 1 + 2 * 2  # and row 3, past the end, changed nothing
    np.testing.assert_array_equal(counts_BV, wanted)
    rows = dataclasses.replace(
        build_rows([Row(frequency=1.5)] * 3, padded_vocab_size=64), counts_BV=counts_BV
    )
    got = adjust(jnp.zeros((3, 64), jnp.float32), rows, jnp.zeros(3, jnp.int32))
    assert float(got[1, 5]) == -3.0


def test_neutral_values_change_no_token_whatever_the_variant() -> None:
    logits_BV = random_logits(B, WIDE, stddev=3.0)
    rows = [Row(seed=s, output_index=s % 7, temperature=[0.0, 0.7, 1.0][s % 3]) for s in range(B)]
    plain, full = run(logits_BV, rows, variant="plain"), run(logits_BV, rows)
    np.testing.assert_array_equal(plain.token_B, full.token_B)
    greedy = run(logits_BV, rows, variant="greedy").token_B
    np.testing.assert_array_equal(greedy, logits_BV.argmax(1))
    np.testing.assert_array_equal(np.asarray(plain.token_B)[::3], np.asarray(greedy)[::3])
    assert (np.asarray(plain.token_B) != np.asarray(greedy)).sum() > B // 3
    assert not plain.used_fallback
    assert full.used_fallback  # rows without filters draw from all ids
    padded = build_rows([Row(prompt=(1, 2), output=(3,))] * B, padded_vocab_size=WIDE)
    adjusted_BV = adjust(jnp.asarray(logits_BV), padded, jnp.zeros(B, jnp.int32))
    np.testing.assert_array_equal(adjusted_BV, logits_BV)  # not a bit


FILTERS = [
    Row(top_k=1),
    Row(top_k=50),
    Row(top_k=64),
    Row(top_k=65),
    Row(top_k=66),
    Row(top_k=700),
    Row(top_p=0.05),
    Row(top_p=0.6),
    Row(top_p=0.999),
    Row(min_p=0.3),
    Row(min_p=1e-4),
    Row(top_k=40, top_p=0.8),
    Row(top_k=300, top_p=0.9, min_p=0.01),
    Row(top_p=0.9, min_p=0.2),
    Row(top_k=100, min_p=0.5),
    Row(top_k=WIDE + 1),
]


@pytest.mark.parametrize("stddev", [0.5, 2.5, 8.0], ids=["flat", "middling", "peaked"])
def test_candidates_and_the_search_keep_the_same_ids(stddev: float) -> None:
    # Values on a coarse grid as well, so that many ids tie at the thresholds.
    exact = random_logits(B // 2, WIDE, stddev=stddev)
    logits_BV = np.concatenate([exact, np.round(exact * 4) / 4])
    rows = [
        dataclasses.replace(row, seed=index, output_index=index)
        for index, row in enumerate(FILTERS * (B // len(FILTERS)))
    ]
    score_BV = jnp.asarray(logits_BV - logits_BV.max(1, keepdims=True))
    packed = build_rows(rows, padded_vocab_size=WIDE)
    near_B, _ = jax.jit(filters.find_thresholds)(
        score_BV,
        jax.jit(filters.find_candidates)(score_BV),
        top_k_B=packed.top_k_B,
        top_p_B=packed.top_p_B,
        min_p_B=packed.min_p_B,
        is_greedy_B=jnp.zeros(B, jnp.bool),
    )
    search = jax.jit(filters.search_threshold)
    key_BV = np.asarray(filters.key_of(score_BV))
    for b, row in enumerate(rows):
        top_k = row.top_k if 0 < row.top_k < WIDE else WIDE
        found = search(score_BV[b], top_k=jnp.int32(top_k), top_p=jnp.float32(row.top_p))
        least = row.min_p and filters.key_of(jnp.log(jnp.float32(row.min_p)))
        searched = np.nonzero(key_BV[b] >= max(int(found), int(least)))[0]
        kept = np.nonzero(key_BV[b] >= int(near_B[b]))[0]
        np.testing.assert_array_equal(kept, searched, err_msg=str(row))
        # A mass within rounding of top_p may fall either way in the float64 reference.
        wanted = kept_ids(np.asarray(score_BV[b], np.float64), row)
        assert abs(len(wanted) - len(kept)) <= (row.top_p > 0.99), row


@pytest.mark.parametrize("row", [Row(top_k=50), Row(top_k=65), Row(top_k=50, top_p=0.2)])
def test_ids_that_tie_with_the_last_candidate_are_kept_too(row: Row) -> None:
    # 40 different scores, then 200 equal ones, of which only 25 can be candidates.
    logits_V = np.full(WIDE, -50.0, np.float32)
    places = np.random.default_rng(3).permutation(WIDE)
    logits_V[places[:40]] = -np.arange(40) / 100
    logits_V[places[40:240]] = -0.5
    rows = [dataclasses.replace(row, seed=s) for s in range(B)]
    sampled = run(np.tile(logits_V, (B, 1)), rows)
    assert sampled.used_fallback
    assert list(sampled.token_B) == [reference_token(logits_V, row) for row in rows]


def test_a_mate_that_needs_the_fallback_changes_no_token() -> None:
    logits_BV = random_logits(B, WIDE, stddev=6.0)
    rows = [
        dataclasses.replace(row, seed=index)
        for index, row in enumerate(
            [Row(top_k=50), Row(top_k=64), Row(min_p=0.3), Row(top_k=20, top_p=0.9)] * (B // 4)
        )
    ]
    near = run(logits_BV, rows)
    assert not near.used_fallback
    for needy in (Row(), Row(top_k=1000), Row(top_p=0.9999)):
        mixed = run(logits_BV, [needy, *rows[1:]])
        assert mixed.used_fallback
        np.testing.assert_array_equal(mixed.token_B[1:], near.token_B[1:])


def test_greedy_rows_do_not_start_the_fallback() -> None:
    logits_BV = random_logits(B, WIDE, stddev=1.0)
    sampled = run(logits_BV, [Row(temperature=0.0, top_p=0.9, top_k=999)] * B)
    assert not sampled.used_fallback
    np.testing.assert_array_equal(sampled.token_B, logits_BV.argmax(1))
    level = run(np.zeros((B, WIDE), np.float32), [Row(temperature=0.0)] * B)
    np.testing.assert_array_equal(level.token_B, 0)  # of equals, the lowest id


@pytest.mark.parametrize("variant", ["plain", "full"])
def test_tiny_temperatures_are_finite_and_take_the_best(variant: Variant) -> None:
    logits_BV = random_logits(B, V11, stddev=4000.0)
    logits_BV[::3, 4:] = -np.inf
    logits_BV[1] = np.linspace(-1e4, 1e4, V11)
    for temperature in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        rows = [Row(seed=s, temperature=temperature, top_p=0.9) for s in range(B)]
        rows[5] = Row(seed=5, temperature=1.5)  # a mixed batch
        sampled = run(logits_BV, rows, variant=variant)
        assert np.asarray(sampled.is_finite_B).all()
        best_B, got_B = logits_BV.argmax(1), np.asarray(sampled.token_B)
        others = np.arange(B) != 5
        np.testing.assert_array_equal(got_B[others], best_B[others])
        assert logits_BV[5, got_B[5]] > -np.inf


def test_a_gap_of_a_hundredth_decides_up_to_a_temperature_of_a_ten_thousandth() -> None:
    best_B = np.arange(B) % V11
    logits_BV = np.full((B, V11), 7.0, np.float32)
    logits_BV[np.arange(B), best_B] += 0.011
    for temperature in (0.0, 1e-8, 1e-6, 1e-5, 1.1e-5, 1e-4):
        rows = [Row(seed=s, temperature=temperature) for s in range(B)]
        assert tokens(logits_BV, rows) == list(best_B)
    hot = tokens(logits_BV, [Row(seed=s, temperature=1e-2) for s in range(B)])
    assert hot != list(best_B)


def test_a_masked_id_is_never_drawn() -> None:
    logits_BV = np.full((B, V11), -np.inf, np.float32)
    logits_BV[:, [3, 7]] = [-5.0, -6.0]
    for row in (Row(temperature=100.0), Row(top_p=0.99), Row(top_k=5), Row(min_p=1e-9)):
        rows = [dataclasses.replace(row, seed=s) for s in range(B)]
        assert set(tokens(logits_BV, rows)) == {3, 7}


def test_bans_hold_until_enough_tokens_are_out() -> None:
    logits_BV = np.zeros((4, V11), np.float32)
    logits_BV[:, 2] = 9.0
    row = Row(temperature=0.0, bans=(2, 10), min_tokens=3)
    rows = [dataclasses.replace(row, output_index=i) for i in range(4)]
    assert tokens(logits_BV, rows) == [0, 0, 0, 2]


# Six requests, six ways of sampling.
REQUESTS = [
    Row(temperature=0.0),
    Row(temperature=0.3, top_k=2),
    Row(top_p=0.5),
    Row(repetition=1.8, prompt=(1, 2), output=(3, 3)),
    Row(bias=((3, 5.0),)),
    Row(min_p=0.3),
]


def test_a_rows_token_depends_on_neither_its_place_nor_its_mates() -> None:
    logits_BV = random_logits(6, V11, stddev=1.5)
    for index in range(10):
        rows = [
            dataclasses.replace(row, seed=40 + b, output_index=index)
            for b, row in enumerate(REQUESTS)
        ]
        alone = [tokens(logits_BV[[b]], [rows[b]])[0] for b in range(6)]
        for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
            got = tokens(logits_BV[list(order)], [rows[b] for b in order])
            assert got == [alone[b] for b in order]


@pytest.mark.parametrize("variant", ["greedy", "plain", "full"])
@pytest.mark.parametrize("garbage", [-1, np.nan])
def test_what_padding_rows_hold_changes_no_bit_of_the_others(
    variant: Variant, garbage: float
) -> None:
    logits_BV = random_logits(8, V11, stddev=1.5)
    rows = [dataclasses.replace(row, seed=b) for b, row in enumerate([*REQUESTS, Row(), Row()])]
    wanted = tokens(logits_BV, rows, variant=variant)
    packed = build_rows(rows, padded_vocab_size=64)

    def spoil(value: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        fill = garbage if is_float else np.array(-1).astype(value.dtype)
        return value.at[6:].set(fill)

    padded = np.pad(logits_BV, ((0, 0), (0, 64 - V11)))
    padded[6:] = garbage
    got = run_sample(
        jnp.asarray(padded),
        jax.tree.map(spoil, packed),
        jnp.array([0] * 6 + [-1] * 2, jnp.int32),
        vocab_size=V11,
        variant=variant,
    )
    assert [int(v) for v in got.token_B[:6]] == wanted[:6]
    assert ((np.asarray(got.token_B) >= 0) & (np.asarray(got.token_B) < V11)).all()


@pytest.mark.parametrize("variant", ["greedy", "plain", "full"])
def test_logits_that_are_not_finite_are_told_row_by_row(variant: Variant) -> None:
    logits_BV = random_logits(6, V11, stddev=1.0)
    wanted = tokens(logits_BV, [Row()] * 6, variant=variant)
    logits_BV[1, 4] = np.nan
    logits_BV[2, 10] = np.inf
    logits_BV[3] = -np.inf
    logits_BV[4, wanted[4] - 1] = -np.inf  # partly masked is fine
    sampled = run(logits_BV, [Row()] * 6, variant=variant)
    assert list(np.asarray(sampled.is_finite_B)) == [True, False, False, False, True, True]
    for b in (0, 4, 5):
        assert int(sampled.token_B[b]) == wanted[b]


def test_logits_that_a_parameter_makes_infinite_are_told() -> None:
    row = Row(repetition=1e-38, prompt=(3,))
    logits_BV = np.full((2, V11), 10.0, np.float32)
    assert list(np.asarray(run(logits_BV, [row, Row()]).is_finite_B)) == [False, True]


@pytest.mark.parametrize("variant", ["plain", "full"])
def test_ids_beyond_the_vocabulary_are_never_drawn(variant: Variant) -> None:
    logits_BV = np.full((500, 131), -5.0, np.float32)
    seen: set[int] = set()
    rows = [Row(seed=s, temperature=5.0) for s in range(500)]
    for index in range(200):
        seen |= set(tokens(logits_BV, rows, variant=variant, output_index=index))
    assert seen == set(range(131))


# Upper 0.1 % points of the chi-square distribution by degrees of freedom.
CHI_SQUARE = {3: 16.27, 10: 29.59}


@pytest.mark.parametrize(
    ("row", "variant"),
    [
        (Row(), "plain"),
        (Row(temperature=0.7), "plain"),
        (Row(), "full"),
        (Row(top_k=4), "full"),
        (Row(temperature=2.0, top_p=0.5), "full"),
    ],
)
def test_draws_follow_the_distribution(row: Row, variant: Variant) -> None:
    logits_V = random_logits(1, V11, stddev=1.0, seed=4)[0].astype(np.float64)
    scaled_V = (logits_V - logits_V.max()) / row.temperature
    kept = kept_ids(scaled_V, row)
    share = np.exp(scaled_V[kept]) / np.exp(scaled_V[kept]).sum()
    num, counts = 20 * 500, np.zeros(V11)
    rows = [dataclasses.replace(row, seed=s) for s in range(500)]
    for index in range(20):
        drawn = tokens(np.tile(logits_V, (500, 1)), rows, variant=variant, output_index=index)
        counts += np.bincount(drawn, minlength=V11)
    assert counts[kept].sum() == num
    distance = ((counts[kept] - num * share) ** 2 / (num * share)).sum()
    freedom = min(f for f in CHI_SQUARE if f >= len(kept) - 1)
    assert distance < CHI_SQUARE[freedom]


def test_eight_seeds_give_more_than_one_text() -> None:
    logits_BV = np.zeros((8, V11), np.float32)
    assert len(set(tokens(logits_BV, [Row(seed=s) for s in range(8)], variant="plain"))) > 1


def test_odd_shapes_are_refused_by_name() -> None:
    rows = build_rows([Row()], padded_vocab_size=64)
    index_B = jnp.zeros(1, jnp.int32)
    with pytest.raises(ShapeError, match="logits_BV has 11 ids, not a multiple of 64"):
        sample(jnp.zeros((1, 11)), rows, index_B, vocab_size=11, variant="plain", impl="passes")
    with pytest.raises(ShapeError, match=r"output_index_B: B is 1 in \(1,\), expected 2"):
        sample(jnp.zeros((2, 64)), rows, index_B, vocab_size=11, variant="plain", impl="passes")
