"""The arrays of one step: packed on the host into flat int32, unpacked inside the programs.

Everything the forward program must be told is one array of six parts, so a step costs one
transfer. X counts attention rows (one-token rows, then tiles), T tokens, D page-table entries:

    rows_X | starts_X | lens_X | prompt_lens_X | token_ids_T | deltas_3D

Two one-token rows, then a chunk of 5 tokens from position 8 and one of 2 from 0, with tiles of 4,
decode bucket 3 and chunk bucket 16 (``B`` is one past the last state row):

    rows_X    row row B | row row  row  B       tiles: [8..11] [12] [0..1] []
    starts_X  pos pos 0 |  8   12    0  0
    lens_X     1   1  0 |  4    1    2  0
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jax import Array
from jax import numpy as jnp

from jaxserve.model.masks import num_words
from jaxserve.model.transformer import TokenBatch
from jaxserve.plan import Bucket, Chunk, Fork, PageCopy, StepMasks, StepPlan
from jaxserve.runner.buckets import BucketScheme, OutputBucket, plan_shape
from jaxserve.runner.spec import RunnerSpec
from jaxserve.shapes import check_shapes

COPY_WIDTH = 16  # pages of one run of the copy program
SWAP_WIDTH = 16  # and of those to and from host memory
SCORE_WIDTH = 64  # tokens of one run of the score program
_ALL_BITS = np.uint32(0xFFFFFFFF)


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclasses.dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class SampledRows:
    """The tokens that a step samples: a chunk's, and then those of its forks. An entry of each
    column is a token's; ``S`` of them, int32 where it is an array, `is_masked_S` bool.

    Attributes:
      hidden_indices_S: where the hidden state lies that it is sampled from; forks share it.
      num_top: alternatives to report with its log-probability; None reports none.
    """

    sequence_ids: list[int] = dataclasses.field(default_factory=list)
    rows_S: np.ndarray = dataclasses.field(default_factory=_nothing)
    hidden_indices_S: np.ndarray = dataclasses.field(default_factory=_nothing)
    output_indices_S: np.ndarray = dataclasses.field(default_factory=_nothing)
    num_top: list[int | None] = dataclasses.field(default_factory=list)
    is_masked_S: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))

    def __len__(self) -> int:
        return len(self.sequence_ids)


def find_plan_bucket(plan: StepPlan, scheme: BucketScheme) -> Bucket:
    """Returns the smallest forward bucket that holds the plan."""
    return scheme.find_bucket(*plan_shape(plan, tile=scheme.limits.chunk_tile))


def num_attention_rows(bucket: Bucket, tile: int) -> int:
    return bucket.decode_seqs + bucket.chunk_tokens // tile


def max_deltas(bucket: Bucket, spec: RunnerSpec) -> int:
    """Returns how many page-table entries a step of this shape can add: n tokens touch at most
    ceil(n / page_size) new pages."""
    chunk_pages = -(-bucket.chunk_tokens // spec.page_size) + spec.max_chunks
    return bucket.decode_seqs + (chunk_pages if bucket.chunk_tokens else 0)


def packed_len(bucket: Bucket, spec: RunnerSpec) -> int:
    """Returns the ints of a packed forward array."""
    X = num_attention_rows(bucket, spec.chunk_tile)
    return 4 * X + bucket.num_tokens + 3 * max_deltas(bucket, spec)


def build_packed(plan: StepPlan, bucket: Bucket, spec: RunnerSpec) -> np.ndarray:
    """Returns the forward's array. Padding: row `max_seqs` and page-table row `max_seqs` (one past
    the end, so that nothing is read or written), length 0, everything else 0. A token that only
    the device knows is `padded_vocab_size`, one past the last id: it is read from its state row.
    """
    packed_I = np.zeros(packed_len(bucket, spec), np.int32)
    rows_X, starts_X, lens_X, prompt_lens_X, token_ids_T, deltas_3D = _split(packed_I, bucket, spec)
    rows_X[:] = spec.max_seqs
    deltas_3D[0] = spec.max_seqs
    decodes, singles = plan.decodes, plan.singles
    D, N, unknown = len(decodes), plan.num_rows, spec.model.padded_vocab_size
    rows_X[:N] = _join(decodes.rows_N, [chunk.row for chunk in singles])
    starts_X[:N] = _join(decodes.starts_N, [chunk.start for chunk in singles])
    lens_X[:N] = 1
    prompt_lens_X[:N] = _join(decodes.prompt_lens_N, [chunk.prompt_len for chunk in singles])
    token_ids_T[:D] = unknown
    token_ids_T[D:N] = [unknown if c.token_ids is None else c.token_ids[0] for c in singles]
    tile = spec.chunk_tile
    for chunk, x, t in _lay_out_longer(plan, bucket, tile):
        num_tiles = -(-chunk.num_tokens // tile)
        rows_X[x : x + num_tiles] = chunk.row
        starts_X[x : x + num_tiles] = range(chunk.start, chunk.start + num_tiles * tile, tile)
        prompt_lens_X[x : x + num_tiles] = chunk.prompt_len
        lens_X[x : x + num_tiles] = tile
        lens_X[x + num_tiles - 1] = chunk.num_tokens - (num_tiles - 1) * tile
        assert chunk.token_ids is not None, f"only one token can be on the device: {chunk}"
        token_ids_T[t : t + chunk.num_tokens] = chunk.token_ids
    deltas = [
        (chunk.row, index, page)
        for chunk in plan.others
        if chunk.new_pages
        for index, page in enumerate(chunk.new_pages, chunk.num_pages_before)
    ]
    if deltas:
        deltas_3D[:, : len(deltas)] = np.array(deltas, np.int32).T
    return packed_I


def find_sampled_rows(plan: StepPlan, bucket: Bucket, spec: RunnerSpec) -> SampledRows:
    """Returns what the plan samples, chunk by chunk, each with its forks after it."""
    decodes, chunks = plan.decodes, plan.others
    D = len(decodes)
    places = list(range(D, plan.num_rows))
    places += [t + c.num_tokens - 1 for c, _, t in _lay_out_longer(plan, bucket, spec.chunk_tile)]
    choices: Sequence[Chunk | Fork] = chunks
    uneven = [chunk for chunk in chunks if chunk.forks or not chunk.samples]
    if uneven:
        chunks, choices, places = _spread(chunks, places)
    return SampledRows(
        sequence_ids=decodes.sequence_ids + [choice.sequence_id for choice in choices],
        rows_S=_join(decodes.rows_N, [choice.row for choice in choices]),
        hidden_indices_S=_join(np.arange(D), places),
        output_indices_S=_join(
            decodes.starts_N + 1 - decodes.prompt_lens_N, [chunk.output_index for chunk in chunks]
        ),
        num_top=[*[None] * D, *[chunk.num_top for chunk in chunks]],
        is_masked_S=np.append(
            decodes.is_masked_N, np.array([chunk.is_masked for chunk in chunks], bool)
        ),
    )


def _join(decodes_N: np.ndarray, others: Sequence[int]) -> np.ndarray:
    """Returns a column of a plan's decodes, and behind it that of other chunks; int32."""
    return np.concatenate([decodes_N, np.array(others, np.int32)], dtype=np.int32)


def _spread(
    chunks: Sequence[Chunk], places: Sequence[int]
) -> tuple[tuple[Chunk, ...], list[Chunk | Fork], list[int]]:
    """Returns the chunks that sample, their choices and places, each once for each choice."""
    spread: list[tuple[Chunk, Chunk | Fork, int]] = []
    for chunk, place in zip(chunks, places, strict=True):
        if chunk.samples:
            spread.append((chunk, chunk, place))
            spread += [(chunk, fork, place) for fork in chunk.forks]
        else:
            assert not chunk.forks, f"forks of a chunk that samples nothing: {chunk}"
    return tuple([row[0] for row in spread]), [row[1] for row in spread], [row[2] for row in spread]


def build_output_rows(sampled: SampledRows, output: OutputBucket, spec: RunnerSpec) -> np.ndarray:
    """Returns the output program's rows: hidden index, state row, output index of each sampled
    token, and 1 where its log-probability is wanted. Padding: hidden row 0, state row `max_seqs`
    (past the end), output index 0, nothing wanted.
    """
    rows_4R = np.zeros((4, output.rows), np.int32)
    rows_4R[1] = spec.max_seqs
    N = len(sampled)
    rows_4R[0, :N] = sampled.hidden_indices_S
    rows_4R[1, :N] = sampled.rows_S
    rows_4R[2, :N] = sampled.output_indices_S
    rows_4R[3, :N] = [num_top is not None for num_top in sampled.num_top]
    return rows_4R


def build_masks(
    sampled: SampledRows, masks: StepMasks, output: OutputBucket, spec: RunnerSpec
) -> np.ndarray:
    """Returns the output program's ``mask_RW``: a copy of the masks, in which nothing of the
    vocabulary's padding is allowed, and all ones elsewhere."""
    N, V = len(masks.sequence_ids), num_words(spec.model.vocab_size)  # of the real vocabulary
    masks_NV = masks.masks_NV
    assert masks_NV.dtype == np.uint32, f"masks are uint32, got {masks_NV.dtype}"
    assert masks_NV.shape == (N, V), f"{N} masks have {V} words each, got shape {masks_NV.shape}"
    is_masked_S = sampled.is_masked_S
    masked_ids = itertools.compress(sampled.sequence_ids, is_masked_S)
    rows = dict(zip(masked_ids, np.flatnonzero(is_masked_S).tolist(), strict=True))
    unknown = set(masks.sequence_ids) - rows.keys()
    assert not unknown, f"masks of {unknown}, which the step does not mask"
    mask_RW = build_no_masks(output, spec)
    rows_N = [rows[sequence_id] for sequence_id in masks.sequence_ids]
    mask_RW[rows_N, :V] = masks_NV
    mask_RW[rows_N, V:] = 0
    return mask_RW


def build_no_masks(output: OutputBucket, spec: RunnerSpec) -> np.ndarray:
    """Returns the ``mask_RW`` of a step that masks nothing."""
    return np.full((output.rows, num_words(spec.model.padded_vocab_size)), _ALL_BITS)


def build_page_copies(copies: Sequence[PageCopy], spec: RunnerSpec) -> Iterator[np.ndarray]:
    """Yields pages and where to copy them, `COPY_WIDTH` at a time. Padding: to past the end."""
    for first in range(0, len(copies), COPY_WIDTH):
        some = copies[first : first + COPY_WIDTH]
        pages_2W = np.zeros((2, COPY_WIDTH), np.int32)
        pages_2W[1] = spec.num_pages
        pages_2W[:, : len(some)] = np.array([(copy.source, copy.target) for copy in some]).T
        yield pages_2W


def build_swap_pages(pages: Sequence[int], spec: RunnerSpec) -> np.ndarray:
    """Returns the pages of one run of the swap programs. Padding: past the end."""
    pages_W = np.full(SWAP_WIDTH, spec.num_pages, np.int32)
    pages_W[: len(pages)] = pages
    return pages_W


def build_score_rows(plan: StepPlan, bucket: Bucket, spec: RunnerSpec) -> Iterator[np.ndarray]:
    """Yields the score program's rows, `SCORE_WIDTH` at a time: hidden index and the token whose
    log-probability is wanted. Padding: hidden row 0, token 0."""
    if not plan.scored:
        return
    pairs: list[tuple[int, int]] = []
    for chunk, t in _lay_out(plan, bucket, spec.chunk_tile):
        if chunk.scoring is None:
            continue
        first, num_scored = chunk.scoring.first - chunk.start, len(chunk.scoring.targets)
        assert 0 <= first <= chunk.num_tokens - num_scored, f"scored beyond the chunk: {chunk}"
        pairs += enumerate(chunk.scoring.targets, t + first)
    for begin in range(0, len(pairs), SCORE_WIDTH):
        some = pairs[begin : begin + SCORE_WIDTH]
        rows_2W = np.zeros((2, SCORE_WIDTH), np.int32)
        rows_2W[:, : len(some)] = np.array(some, np.int32).T
        yield rows_2W


def unpack(
    packed_I: Array, page_table_BP: Array, last_token_B: Array, *, bucket: Bucket, spec: RunnerSpec
) -> tuple[Array, TokenBatch]:
    """Returns the page table with this step's new pages, and the tokens of the step.

    Padding tokens have position 0 and write to page `num_pages`, past the end.
    """
    check_shapes(packed_I=packed_I, page_table_BP=page_table_BP, last_token_B=last_token_B)
    rows_X, starts_X, lens_X, prompt_lens_X, token_ids_T, deltas_3D = _split(packed_I, bucket, spec)
    N, tile, R = bucket.decode_seqs, spec.chunk_tile, spec.page_size
    page_table_BP = page_table_BP.at[deltas_3D[0], deltas_3D[1]].set(deltas_3D[2], mode="drop")
    page_table_XP = page_table_BP.at[rows_X].get(mode="fill", fill_value=0)

    num_tiles = bucket.chunk_tokens // tile
    x_T = np.r_[np.arange(N), np.repeat(np.arange(N, N + num_tiles), tile)].astype(np.int32)
    offsets_T = np.r_[np.zeros(N), np.tile(np.arange(tile), num_tiles)].astype(np.int32)
    is_real_T = offsets_T < lens_X[x_T]
    positions_T = jnp.where(is_real_T, starts_X[x_T] + offsets_T, 0)
    pages_T = page_table_XP[x_T, positions_T // R]

    sampled_N = last_token_B.at[rows_X[:N]].get(mode="fill", fill_value=0)
    is_known_N = token_ids_T[:N] < spec.model.padded_vocab_size
    known_N = jnp.where(is_known_N, token_ids_T[:N], sampled_N)
    return page_table_BP, TokenBatch(
        token_ids_T=jnp.concatenate([known_N, token_ids_T[N:]]),
        positions_T=positions_T,
        write_pages_T=jnp.where(is_real_T, pages_T, spec.num_pages),
        write_rows_T=positions_T % R,
        page_table_XP=page_table_XP,
        q_starts_X=starts_X,
        q_lens_X=lens_X,
        prompt_lens_X=prompt_lens_X,
    )


def _split[A: (np.ndarray, Array)](
    packed_I: A, bucket: Bucket, spec: RunnerSpec
) -> tuple[A, A, A, A, A, A]:
    """Returns the parts of a packed array; views, where it is a numpy array."""
    X, T = num_attention_rows(bucket, spec.chunk_tile), bucket.num_tokens
    tokens_end = 4 * X + T
    return (
        packed_I[:X],
        packed_I[X : 2 * X],
        packed_I[2 * X : 3 * X],
        packed_I[3 * X : 4 * X],
        packed_I[4 * X : tokens_end],
        packed_I[tokens_end:].reshape(3, max_deltas(bucket, spec)),
    )


def _lay_out(plan: StepPlan, bucket: Bucket, tile: int) -> Iterator[tuple[Chunk, int]]:
    """Yields each chunk but the decodes with its first token's place."""
    yield from zip(plan.singles, itertools.count(len(plan.decodes)), strict=False)
    for chunk, _, t in _lay_out_longer(plan, bucket, tile):
        yield chunk, t


def _lay_out_longer(plan: StepPlan, bucket: Bucket, tile: int) -> Iterator[tuple[Chunk, int, int]]:
    """Yields each chunk of several tokens with its first attention row and its first token's
    place."""
    x = bucket.decode_seqs
    for chunk in plan.longer:
        yield chunk, x, bucket.decode_seqs + (x - bucket.decode_seqs) * tile
        x += -(-chunk.num_tokens // tile)
