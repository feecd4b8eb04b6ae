"""Threefry against published vectors, python integers and jax; the noise at its ends."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.extend import random as jax_random

from jaxserve.model.threefry import gumbel_of_bits, threefry2x32, token_noise
from tests.model import reference_sampler
from tests.model.reference_sampler import Row

# Random123's kat_vectors, threefry2x32 with 20 rounds: counter, key, result.
VECTORS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), VECTORS)
def test_the_published_vectors_come_out(
    counter: tuple[int, int], key: tuple[int, int], wanted: tuple[int, int]
) -> None:
    words = [jnp.uint32(word) for word in (*key, *counter)]
    got = threefry2x32((words[0], words[1]), (words[2], words[3]))
    assert tuple(int(word) for word in got) == wanted
    assert reference_sampler.threefry(key, counter) == wanted


def test_it_is_jaxs_own_threefry() -> None:
    words_4N = np.random.default_rng(0).integers(0, 2**32, (4, 64), dtype=np.uint32)
    key, counter = (words_4N[0, 0], words_4N[1, 0]), words_4N[2:]
    got = threefry2x32(
        (jnp.full(64, key[0]), jnp.full(64, key[1])),
        (jnp.asarray(counter[0]), jnp.asarray(counter[1])),
    )
    wanted = jax_random.threefry_2x32(jnp.array(key), jnp.asarray(counter.reshape(-1)))
    np.testing.assert_array_equal(np.concatenate(got), wanted)


def test_noise_is_finite_and_falls_as_the_bits_rise() -> None:
    bits = np.array([0, 1, 2, 2**8, 2**16, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = np.asarray(gumbel_of_bits(jnp.asarray(bits)))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert noise[0] == pytest.approx(22.87, abs=0.01)  # -log(2^-33)
    assert noise[-1] == pytest.approx(-2.81, abs=0.01)  # -log(24 log 2)
    wanted = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))
    np.testing.assert_allclose(noise[:6], wanted[:6], rtol=3e-6)


def test_the_noise_of_an_id_does_not_depend_on_the_ids_beside_it() -> None:
    rows = [Row(seed=2**63 + 5, output_index=7, choice=1), Row(seed=3)]
    ids = np.array([[4, 0, 2**17], [9, 4, 4]], np.int32)
    noise = jax.jit(token_noise)(
        jnp.array([[row.seed >> 32, row.seed & 0xFFFFFFFF] for row in rows], jnp.uint32),
        output_index_B=jnp.array([row.output_index for row in rows], jnp.int32),
        choice_B=jnp.array([row.choice for row in rows], jnp.uint32),
        token_BV=jnp.asarray(ids),
    )
    wanted = [
        [reference_sampler.gumbel(row, int(v)) for v in ids_V]
        for row, ids_V in zip(rows, ids, strict=True)
    ]
    np.testing.assert_allclose(noise, wanted, rtol=1e-5, atol=1e-6)


def test_each_part_of_the_counter_changes_the_noise() -> None:
    base = Row(seed=5, output_index=2, choice=1)
    others = [
        Row(seed=5 + (1 << 32), output_index=2, choice=1),
        Row(seed=6, output_index=2, choice=1),
        Row(seed=5, output_index=3, choice=1),
        Row(seed=5, output_index=2, choice=0),
    ]
    values = {reference_sampler.gumbel(row, 8) for row in [base, *others]}
    assert len(values) == 5
    assert reference_sampler.gumbel(base, 9) not in values
