"""The packed arrays of a step: layout, padding, and what the device makes of them."""

import random

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.model.batch import TokenBatch
from jaxserve.plan import Bucket, Chunk, StepPlan
from jaxserve.runner import batch
from jaxserve.runner.buckets import OutputBucket
from tests.runner.driver import MODEL, NUM_PAGES, PAGE_SIZE, tiny_sizes

SIZES = tiny_sizes()
SPEC, B, V = SIZES.spec, SIZES.spec.max_seqs, MODEL.padded_vocab_size
BUCKET = Bucket(decode_seqs=3, verify_tokens=1, chunk_tokens=16)


def _chunk(row: int, start: int, token_ids: tuple[int, ...] | None, **fields: object) -> Chunk:
    values: dict[str, object] = {
        "sequence_id": row,
        "row": row,
        "start": start,
        "num_tokens": len(token_ids or (0,)),
        "token_ids": token_ids,
        "samples": True,
        "output_index": 0,
        "prompt_len": 40 + row,
    }
    return Chunk(**(values | fields))  # type: ignore[arg-type]  # a test's shorthand


# The drawing in batch.py's docstring.
PLAN = StepPlan(
    step_id=1,
    chunks=(
        _chunk(7, 9, None, output_index=4, new_pages=(50,), num_pages_before=2),
        _chunk(2, 0, (11,)),
        _chunk(4, 8, (21, 22, 23, 24, 25), samples=False, new_pages=(8, 9), num_pages_before=2),
        _chunk(0, 0, (31, 32), output_index=1),
    ),
)


def test_the_drawn_step_is_laid_out_as_drawn() -> None:
    packed_I = batch.build_packed(PLAN, BUCKET, SPEC)
    rows_X, starts_X, lens_X, prompt_lens_X = packed_I[:28].reshape(4, 7)
    rest = packed_I[28:]
    assert rows_X.tolist() == [7, 2, B, 4, 4, 0, B]
    assert starts_X.tolist() == [9, 0, 0, 8, 12, 0, 0]
    assert lens_X.tolist() == [1, 1, 0, 4, 1, 2, 0]
    assert prompt_lens_X.tolist() == [47, 42, 0, 44, 44, 40, 0]
    tiles = [21, 22, 23, 24, 25, 0, 0, 0, 31, 32, 0, 0, 0, 0, 0, 0]
    assert rest[:19].tolist() == [V, 11, 0, *tiles]
    deltas_3D = rest[19:].reshape(3, -1)
    assert deltas_3D[:, :3].tolist() == [[7, 4, 4], [2, 2, 3], [50, 8, 9]]
    assert (deltas_3D[0, 3:] == B).all()
    assert (deltas_3D[1:, 3:] == 0).all()


def test_output_rows_point_at_last_tokens() -> None:
    output = OutputBucket(rows=4, variant="greedy")
    rows_3R = batch.build_output_rows(PLAN, BUCKET, output, SPEC)
    assert rows_3R.tolist() == [[0, 1, 3 + 8 + 1, 0], [7, 2, 0, B], [4, 0, 1, 0]]


def _unpack(plan: StepPlan, page_table_BP: np.ndarray) -> tuple[jax.Array, TokenBatch]:
    return batch.unpack(
        jnp.asarray(batch.build_packed(plan, BUCKET, SPEC)),
        jnp.asarray(page_table_BP),
        jnp.arange(B, dtype=jnp.int32) + 60,
        bucket=BUCKET,
        spec=SPEC,
    )


def test_the_device_unpacks_positions_pages_and_tokens() -> None:
    page_table_BP = np.zeros((B, SPEC.pages_per_seq), np.int32)
    page_table_BP[7, :2] = 40, 41
    page_table_BP[2, :1] = 30
    page_table_BP[0, :1] = 20
    new_table_BP, tokens = _unpack(PLAN, page_table_BP)
    assert new_table_BP[7, :4].tolist() == [40, 41, 50, 0]
    assert new_table_BP[4, :5].tolist() == [0, 0, 8, 9, 0]
    no_page = NUM_PAGES
    singles = [67, 11, 0]  # the first is read from its row
    tiles = [21, 22, 23, 24, 25, 0, 0, 0, 31, 32, 0, 0, 0, 0, 0, 0]
    assert tokens.token_ids_T.tolist() == singles + tiles
    positions = [9, 0, 0, 8, 9, 10, 11, 12, 0, 0, 0, 0, 1, *[0] * 6]
    assert tokens.positions_T.tolist() == positions
    pages = [50, 30, no_page, 8, 8, 8, 8, 9, *[no_page] * 3, 20, 20, *[no_page] * 6]
    assert tokens.write_pages_T.tolist() == pages
    assert tokens.write_rows_T.tolist() == [position % PAGE_SIZE for position in positions]
    assert tokens.q_lens_X.tolist() == [1, 1, 0, 4, 1, 2, 0]
    assert tokens.prompt_lens_X.tolist() == [47, 42, 0, 44, 44, 40, 0]
    assert (tokens.page_table_XP[2] == 0).all()


def test_no_packed_array_holds_a_negative_number_or_an_index_of_another() -> None:
    rng = random.Random(0)
    for _ in range(200):
        plan, bucket = _random_plan(rng)
        packed_I = batch.build_packed(plan, bucket, SPEC)
        assert packed_I.shape == (batch.packed_len(bucket, SPEC),)
        assert packed_I.min() >= 0
        X = batch.num_attention_rows(bucket, SPEC.chunk_tile)
        rows_X, lens_X = packed_I[:X], packed_I[2 * X : 3 * X]
        assert rows_X.max() <= B
        assert ((rows_X == B) == (lens_X == 0)).all()
        assert lens_X.sum() == plan.num_tokens
        output = OutputBucket(rows=B, variant="full")
        rows_3R = batch.build_output_rows(plan, bucket, output, SPEC)
        assert rows_3R.min() >= 0
        assert rows_3R[0].max() < bucket.num_tokens
        real = rows_3R[1][rows_3R[1] < B].tolist()
        assert real == [chunk.row for chunk in plan.chunks if chunk.samples]


def _random_plan(rng: random.Random) -> tuple[StepPlan, Bucket]:
    rows = rng.sample(range(B), B)
    room = SIZES.scheme.limits.max_chunk_tokens
    chunks = [_random_chunk(rng, row, 1) for row in rows[: rng.randrange(1, B)]]
    for row in rows[B - rng.randrange(1, SPEC.max_chunks + 1) :]:
        length = rng.randrange(2, 12)
        if room >= (tiles := -(-length // SPEC.chunk_tile) * SPEC.chunk_tile):
            chunks.append(_random_chunk(rng, row, length))
            room -= tiles
    # A row is in one chunk only.
    plan = StepPlan(step_id=0, chunks=tuple({chunk.row: chunk for chunk in chunks}.values()))
    ordered = sorted(plan.chunks, key=lambda chunk: chunk.num_tokens > 1)
    plan = StepPlan(step_id=0, chunks=tuple(ordered))
    return plan, batch.find_plan_bucket(plan, SIZES.scheme)


def _random_chunk(rng: random.Random, row: int, length: int) -> Chunk:
    start = rng.randrange(0, MODEL.max_position - length)
    before = -(-start // PAGE_SIZE)
    num_new = -(-(start + length) // PAGE_SIZE) - before
    return _chunk(
        row,
        start,
        tuple(rng.randrange(MODEL.vocab_size) for _ in range(length)),
        samples=rng.random() < 0.5,
        new_pages=tuple(rng.randrange(1, NUM_PAGES) for _ in range(num_new)),
        num_pages_before=before,
    )
