"""The packed arrays of a step: layout, padding, and what the device makes of them."""

import dataclasses
import random
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.model.batch import TokenBatch
from jaxserve.plan import Bucket, Chunk, Decodes, Fork, PromptScoring, StepMasks, StepPlan
from jaxserve.runner import batch
from jaxserve.runner.buckets import OutputBucket
from jaxserve.scheduler.step_time import StepWork, measure_work
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
    others=(
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


def _output_rows(plan: StepPlan, bucket: Bucket, rows: int) -> np.ndarray:
    sampled = batch.find_sampled_rows(plan, bucket, SPEC)
    return batch.build_output_rows(sampled, OutputBucket(rows=rows, variant="full"), SPEC)


def test_output_rows_point_at_last_tokens() -> None:
    last = 3 + 8 + 1
    wanted = [[0, 1, last, 0], [7, 2, 0, B], [4, 0, 1, 0], [0, 0, 0, 0]]
    assert _output_rows(PLAN, BUCKET, 4).tolist() == wanted


def test_decodes_by_column_are_laid_out_like_chunks() -> None:
    """Before the four of the drawing; scored, too, behind them."""
    scoring = PromptScoring(first=9, targets=(3, 4), num_top=1)
    decodes = Decodes(
        sequence_ids=[5, 1],
        rows_N=np.array([5, 1], np.int32),
        starts_N=np.array([60, 41], np.int32),
        prompt_lens_N=np.array([45, 41], np.int32),
        is_masked_N=np.array([True, False]),
    )
    others = (*PLAN.others[:2], dataclasses.replace(PLAN.others[2], scoring=scoring))
    plan = dataclasses.replace(PLAN, decodes=decodes, others=others)
    as_chunks = dataclasses.replace(PLAN, others=plan.chunks)
    assert plan.chunks[:2] == (
        _chunk(5, 60, None, output_index=16, is_masked=True),
        _chunk(1, 41, None, output_index=1, prompt_len=41),
    )
    bucket = Bucket(decode_seqs=5, verify_tokens=1, chunk_tokens=16)
    builds: list[Callable[[StepPlan], np.ndarray]] = [
        lambda plan: batch.build_packed(plan, bucket, SPEC),
        lambda plan: _output_rows(plan, bucket, 6),
        lambda plan: next(batch.build_score_rows(plan, bucket, SPEC)),
    ]
    for build in builds:
        np.testing.assert_array_equal(build(plan), build(as_chunks))
    assert plan.masked_ids == as_chunks.masked_ids == [5]
    for each in (plan, as_chunks):
        sampled = batch.find_sampled_rows(each, bucket, SPEC)
        assert sampled.is_masked_S.tolist() == [True, *[False] * 3]
    names = ("num_chunks", "num_tokens", "num_rows", "longer", "scored", "masked_ids", "chunks")
    for name in names:
        assert getattr(plan, name) == getattr(as_chunks, name), name
    assert measure_work(plan) == measure_work(as_chunks) == StepWork(61, 61 + 42 + 10 + 1 + 13)
    assert batch.find_sampled_rows(plan, bucket, SPEC).sequence_ids == [5, 1, 7, 2]


def test_forks_are_sampled_from_the_hidden_state_of_their_chunk() -> None:
    """Each kind of chunk with two forks, and one that only asks for log-probabilities."""
    forks = (Fork(sequence_id=11, row=1), Fork(sequence_id=13, row=3))
    single = dataclasses.replace(PLAN.chunks[1], forks=forks[:1], is_masked=True)
    longer = dataclasses.replace(PLAN.chunks[3], forks=forks[1:], num_top=0)
    plan = dataclasses.replace(PLAN, others=(PLAN.chunks[0], single, PLAN.chunks[2], longer))
    sampled = batch.find_sampled_rows(plan, BUCKET, SPEC)
    assert sampled.sequence_ids == [7, 2, 11, 0, 13]
    assert sampled.is_masked_S.tolist() == [False, True, True, False, False]
    last = 3 + 8 + 1
    assert _output_rows(plan, BUCKET, 6).tolist() == [
        [0, 1, 1, last, last, 0],
        [7, 2, 1, 0, 3, B],
        [4, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 0],
    ]


def test_a_chunk_that_samples_nothing_has_no_forks() -> None:
    chunk = dataclasses.replace(PLAN.chunks[2], forks=(Fork(sequence_id=11, row=1),))
    with pytest.raises(AssertionError, match="forks of a chunk that samples nothing"):
        batch.find_sampled_rows(dataclasses.replace(PLAN, others=(chunk,)), BUCKET, SPEC)


def test_masks_are_copied_into_their_rows_and_all_else_is_ones() -> None:
    plan = dataclasses.replace(
        PLAN, others=tuple(dataclasses.replace(c, is_masked=True) for c in PLAN.chunks)
    )
    sampled = batch.find_sampled_rows(plan, BUCKET, SPEC)
    output = OutputBucket(rows=4, variant="full")
    mask_W = np.arange(1, 6, dtype=np.uint32)  # of 131 ids; the padding has a sixth word
    masks = StepMasks(sequence_ids=[0], masks_NV=mask_W[None])
    mask_RW = batch.build_masks(sampled, masks, output, SPEC)
    ones = np.full(V // 32, 0xFFFFFFFF, np.uint32)
    np.testing.assert_array_equal(mask_RW, [ones, ones, [1, 2, 3, 4, 5, 0], ones])
    assert not np.shares_memory(mask_RW, mask_W)
    both = StepMasks(sequence_ids=[0, 7], masks_NV=np.stack([mask_W, mask_W + 9]))
    mask_RW = batch.build_masks(sampled, both, output, SPEC)  # by id, in whatever order they come
    np.testing.assert_array_equal(
        mask_RW, [[10, 11, 12, 13, 14, 0], ones, [1, 2, 3, 4, 5, 0], ones]
    )
    for wrong in (mask_W[None, 1:], mask_W[None].astype(np.int32), np.stack([mask_W] * 2)):
        with pytest.raises(AssertionError, match="masks "):
            batch.build_masks(sampled, dataclasses.replace(masks, masks_NV=wrong), output, SPEC)
    with pytest.raises(AssertionError, match=r"masks of \{4\}, which the step does not mask"):
        batch.build_masks(  # it samples nothing
            sampled, dataclasses.replace(masks, sequence_ids=[4]), output, SPEC
        )


def test_scored_tokens_are_looped_over_in_runs() -> None:
    """Three chunks, of which two are scored, in 40 and 30 places: a run of 64 and one of 6."""
    bucket = Bucket(decode_seqs=3, verify_tokens=1, chunk_tokens=88)

    def scored(row: int, start: int, length: int, first: int, end: int) -> Chunk:
        scoring = PromptScoring(first=first, targets=tuple(range(first + 1, end + 1)), num_top=2)
        return _chunk(row, start, tuple(range(length)), scoring=scoring)

    chunks = (_chunk(2, 0, (11, 12)), scored(4, 8, 43, 9, 49), scored(6, 0, 30, 0, 30))
    runs = list(batch.build_score_rows(StepPlan(step_id=1, others=chunks), bucket, SPEC))
    assert [rows_2W.shape for rows_2W in runs] == [(2, 64)] * 2
    places_2W = np.concatenate(runs, axis=1)
    second, third = 3 + 4, 3 + 4 + 44
    wanted = [*range(second + 1, second + 41), *range(third, third + 30)]
    assert places_2W[0, :70].tolist() == wanted
    assert places_2W[1, :70].tolist() == [*range(10, 50), *range(1, 31)]
    assert (places_2W[:, 70:] == 0).all()
    assert list(batch.build_score_rows(PLAN, BUCKET, SPEC)) == []


@pytest.mark.parametrize("num", [1, 63, 64, 65, 127, 128, 129])
def test_no_scored_token_is_lost_at_the_edge_of_a_run(num: int) -> None:
    """Of chunks of at most 39: the widest one leaves one to the next run, or none."""
    bucket = Bucket(decode_seqs=3, verify_tokens=1, chunk_tokens=160)
    sizes = [min(39, num - first) for first in range(0, num, 39)]
    chunks = []
    for row, size in enumerate(sizes):
        scoring = PromptScoring(first=0, targets=(row + 1,) * size, num_top=0)
        chunks.append(_chunk(row, 0, (0,) * (size + 1), scoring=scoring))
    runs = list(batch.build_score_rows(StepPlan(step_id=1, others=tuple(chunks)), bucket, SPEC))
    assert len(runs) == -(-num // batch.SCORE_WIDTH)
    tokens = np.concatenate(runs, axis=1)[1]
    assert tokens[:num].tolist() == [row + 1 for row, size in enumerate(sizes) for _ in range(size)]
    assert (tokens[num:] == 0).all()


@pytest.mark.parametrize(("first", "num"), [(7, 1), (8, 4), (11, 1)])
def test_what_lies_outside_a_chunk_cannot_be_scored(first: int, num: int) -> None:
    scoring = PromptScoring(first=first, targets=(1,) * num, num_top=0)
    plan = StepPlan(step_id=1, others=(_chunk(4, 8, (21, 22, 23), scoring=scoring),))
    with pytest.raises(AssertionError, match="scored beyond the chunk"):
        list(batch.build_score_rows(plan, BUCKET, SPEC))


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
        rows_4R = _output_rows(plan, bucket, B)
        assert rows_4R.min() >= 0
        assert rows_4R[0].max() < bucket.num_tokens
        real = rows_4R[1][rows_4R[1] < B].tolist()
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
    plan = StepPlan(step_id=0, others=tuple({chunk.row: chunk for chunk in chunks}.values()))
    ordered = sorted(plan.chunks, key=lambda chunk: chunk.num_tokens > 1)
    plan = StepPlan(step_id=0, others=tuple(ordered))
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
