"""Runs the paged forward over whole sequences, in whatever pieces a test asks for."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import numpy as jnp

from jaxserve.kernels.choice import Kernels
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params
from jaxserve.model.transformer import TokenBatch, forward, logits
from tests.kernels.ragged import empty_rows

# T1: an odd vocabulary, head_dim * heads that is not the hidden size, N = 4K, an untied head.
T1 = ModelConfig(
    architecture="llama",
    vocab_size=131,
    hidden_size=48,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=112,
    max_position=256,
    norm_eps=1e-5,
    layers=(LayerConfig(rope=RopeConfig()),) * 3,
    tied_head=False,
)

NUM_SINGLE_ROWS, NUM_TILES, TILE, WIDTH, NUM_PAGES, PAGE = 2, 3, 4, 16, 32, 4
NUM_TOKENS = NUM_SINGLE_ROWS + NUM_TILES * TILE

_forward = jax.jit(
    forward,
    static_argnames=("config", "num_single_rows", "tile", "kernels"),
    donate_argnames="kv",
)
XLA = Kernels()

_logits = jax.jit(logits, static_argnames=("config", "matmul"))


@dataclasses.dataclass
class Piece:
    """Some tokens of one sequence: positions [start, start + len(token_ids))."""

    pages: Sequence[int]
    start: int
    token_ids: Sequence[int]
    prompt_len: int = 0


class PagedModel:
    """A pool and the forward over it, always in one padded shape."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        *,
        kv_dtype: str = "float32",
        kernels: Kernels = XLA,
    ) -> None:
        self.params, self.config, self.kernels = params, config, kernels
        shape = (NUM_PAGES, 2, config.num_kv_heads, PAGE, config.head_dim)
        pool = jax.tree.map(jnp.asarray, empty_rows(shape, kv_dtype))
        self.kv = tuple(jax.tree.map(jnp.copy, pool) for _ in range(config.num_layers))

    def run(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Returns the logits of each piece's tokens; one-token pieces must come first."""
        batch, places = build_batch(pieces)
        self.kv, hidden_TD = _forward(
            self.params,
            self.kv,
            batch,
            config=self.config,
            num_single_rows=NUM_SINGLE_ROWS,
            tile=TILE,
            kernels=self.kernels,
        )
        logits_TV = np.asarray(
            _logits(self.params, hidden_TD, config=self.config, matmul=self.kernels.matmul)
        )
        return [logits_TV[place, : self.config.vocab_size] for place in places]


def build_batch(pieces: Sequence[Piece]) -> tuple[TokenBatch, list[np.ndarray]]:
    """Returns the step's arrays, and where each piece's tokens lie in T."""
    num_rows = NUM_SINGLE_ROWS + NUM_TILES
    token_ids = np.zeros(NUM_TOKENS, np.int32)
    positions = np.full(NUM_TOKENS, -1, np.int32)
    write_pages = np.full(NUM_TOKENS, NUM_PAGES, np.int32)
    write_rows = np.zeros(NUM_TOKENS, np.int32)
    table = np.zeros((num_rows, WIDTH), np.int32)
    starts, lens = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.int32)
    prompt_lens = np.full(num_rows, -1, np.int32)
    places, single, tile = [], 0, 0
    for piece in pieces:
        n = len(piece.token_ids)
        if n == 1:
            rows, place = [single], np.array([single])
            single += 1
        else:
            rows = list(range(NUM_SINGLE_ROWS + tile, NUM_SINGLE_ROWS + tile + -(-n // TILE)))
            place = NUM_SINGLE_ROWS + tile * TILE + np.arange(n)
            tile += len(rows)
        for index, row in enumerate(rows):
            table[row, : len(piece.pages)] = piece.pages
            starts[row] = piece.start + index * TILE
            lens[row] = min(TILE, n - index * TILE)
            prompt_lens[row] = piece.prompt_len
        positions[place] = piece.start + np.arange(n)
        token_ids[place] = piece.token_ids
        write_pages[place] = np.asarray(piece.pages)[positions[place] // PAGE]
        write_rows[place] = positions[place] % PAGE
        places.append(place)
    assert single <= NUM_SINGLE_ROWS
    assert tile <= NUM_TILES
    return TokenBatch(
        token_ids_T=jnp.asarray(token_ids),
        positions_T=jnp.asarray(positions),
        write_pages_T=jnp.asarray(write_pages),
        write_rows_T=jnp.asarray(write_rows),
        page_table_XP=jnp.asarray(table),
        q_starts_X=jnp.asarray(starts),
        q_lens_X=jnp.asarray(lens),
        prompt_lens_X=jnp.asarray(prompt_lens),
    ), places


def run_in_chunks(
    model: PagedModel,
    token_ids: Sequence[int],
    *,
    chunks: Sequence[int],
    pages: Sequence[int],
    prompt_len: int = 0,
) -> np.ndarray:
    """Returns the logits after each token of one sequence that is computed chunk by chunk."""
    parts, start = [], 0
    for size in chunks:
        parts += model.run([Piece(pages, start, token_ids[start : start + size], prompt_len)])
        start += size
    assert start == len(token_ids)
    return np.concatenate(parts)


compile_forward = functools.partial(
    _forward.lower, num_single_rows=NUM_SINGLE_ROWS, tile=TILE, kernels=XLA
)
