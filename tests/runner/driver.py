"""Hand-made plans for the runner: a tiny model, sequences a test moves step by step, an oracle."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxserve.config import Config
from jaxserve.kernels.choice import Kernels
from jaxserve.metrics import Metrics
from jaxserve.model.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.model.params import Params, init_params
from jaxserve.plan import (
    NO_LAPS,
    Chunk,
    Fork,
    InFlight,
    Laps,
    PageCopy,
    PageIn,
    PageOut,
    PromptScoring,
    RowLoad,
    StepMasks,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMask,
)
from jaxserve.request import SamplingParams
from jaxserve.runner.programs import Programs
from jaxserve.runner.runner import Runner
from jaxserve.runner.sizing import RunnerSizes, size_runner
from tests.fakes import stack_masks

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=131,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    max_position=64,
    norm_eps=1e-5,
    layers=(LayerConfig(rope=RopeConfig(theta=10000.0)),) * 2,
    tied_head=True,
)
PAGE_SIZE = 4
NUM_PAGES = 120
CONFIG = Config.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE},
        "scheduler": {"max_seqs": 9, "max_chunks": 3},
        "buckets": {
            "decode_seqs": [2],
            "chunk_tokens": [8, 24],
            "chunk_decode_seqs": [2],
            "chunk_tile": 4,
        },
        "limits": {"max_logit_bias": 5, "max_stop_token_ids": 2, "max_logprobs": 6},
    }
)
GREEDY = SamplingParams(temperature=0.0)


def tiny_params() -> Params:
    return init_params(MODEL, jax.random.key(0), "float32")


def tiny_sizes() -> RunnerSizes:
    return size_runner(
        MODEL,
        CONFIG,
        dtypes=("float32", "float32"),
        kernels=Kernels(),
        programs=Programs(Metrics()),
        compile_keys=lambda keys: None,  # the pool's pages are given, so nothing is measured
    )


def prompt_of(length: int, *, salt: int = 0) -> tuple[int, ...]:
    """Returns a prompt that differs by salt."""
    rng = np.random.default_rng([length, salt])
    return tuple(rng.integers(0, MODEL.vocab_size, length).tolist())


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A sequence in the hands of a test. Output not yet read from the device is None.

    Attributes:
      forks: choices that sample their first token with it, where its prompt ends.
      mask: of the output so far, the mask for the next token.
      num_top, num_prompt_top: alternatives to report with output and prompt; None reports nothing.
      logprobs, prompt_logprobs: as they came back.
    """

    id: int
    row: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    pages: list[int] = dataclasses.field(default_factory=list)
    output: list[int | None] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    is_loaded: bool = False
    forks: list["Row"] = dataclasses.field(default_factory=list)
    mask: Callable[[list[int | None]], TokenMask] | None = None
    num_top: int | None = None
    num_prompt_top: int | None = None
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int | None]:
        return [*self.prompt, *self.output]


class Driver:
    """Makes plans and keeps the sequences' books; a page is never used twice.

    A step is told as (sequence, tokens) pairs; one-token pairs first, as plans must have it.
    """

    def __init__(self, runner: Runner, *, first_page: int = 1) -> None:
        self.runner = runner
        self._pages = itertools.count(first_page)
        self._ids = itertools.count(100)
        self._steps = itertools.count()
        self._copies: list[PageCopy] = []  # for the next plan

    def row(
        self,
        row: int,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        choice: int = 0,
    ) -> Row:
        return Row(
            id=next(self._ids),
            row=row,
            prompt=tuple(prompt),
            sampling=sampling,
            seed=seed,
            stop_ids=stop_ids,
            choice=choice,
        )

    def fork(self, parent: Row, row: int) -> Row:
        """Returns another choice of a sequence, which begins when the parent's prompt is done."""
        fork = self.row(
            row,
            parent.prompt,
            sampling=parent.sampling,
            seed=parent.seed,
            stop_ids=parent.stop_ids,
            choice=len(parent.forks) + 1,
        )
        parent.forks.append(fork)
        return fork

    def launch(
        self,
        *work: tuple[Row, int],
        copies: tuple[PageCopy, ...] = (),
        swap_out: tuple[PageOut, ...] = (),
        swap_in: tuple[PageIn, ...] = (),
        laps: Laps = NO_LAPS,
    ) -> InFlight:
        loads, chunks = [], []
        copies, self._copies = (*self._copies, *copies), []  # those of forks that start now: later
        for sequence, num_tokens in work:
            before = len(sequence.pages)
            pages = self._grow(sequence, num_tokens)
            if not sequence.is_loaded:
                loads.append(self._load(sequence))
            new_pages = pages if sequence.is_loaded else ()
            sequence.is_loaded = True
            chunk = self._chunk(sequence, num_tokens, new_pages, before)
            loads.extend(self._start_fork(sequence, fork.row) for fork in chunk.forks)
            chunks.append(chunk)
        plan = StepPlan(
            step_id=next(self._steps),
            others=tuple(chunks),
            row_loads=tuple(loads),
            copies=copies,
            swap_out=swap_out,
            swap_in=swap_in,
        )
        return self.runner.launch(plan, laps)

    def step(self, *work: tuple[Row, int]) -> StepResult:
        """Launches, fills masks, waits, and books the sampled tokens."""
        flight = self.launch(*work)
        if any(sequence.mask and sequence.output[-1:] == [None] for sequence, _ in work):
            flight.launch_output(self.masks_of(*(sequence for sequence, _ in work)))
        return self.retire(flight, *(sequence for sequence, _ in work))

    def masks_of(self, *sequences: Row) -> StepMasks:
        """Returns the masks for the tokens that the sequences, and their forks, wait for."""
        masks = {
            row.id: row.mask(row.output[:-1])
            for row in _with_forks(sequences)
            if row.mask and row.output[-1:] == [None]
        }
        return stack_masks(masks, MODEL.vocab_size)

    def retire(self, in_flight: InFlight, *sequences: Row) -> StepResult:
        result = in_flight.result()
        for sequence in _with_forks(sequences):
            sequence.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.id, ()))
            if sequence.id in result.logprobs:
                sequence.logprobs.append(result.logprobs[sequence.id])
            if sequence.id in result.token_ids:
                index = sequence.output.index(None)
                sequence.output[index] = result.token_ids[sequence.id]
        return result

    def generate(self, *sequences: Row, num_tokens: int, chunk_len: int = 24) -> None:
        """Runs the sequences together, each to its number of tokens, prompts in chunks of at most
        `chunk_len` that share the step's tiles."""
        while active := [s for s in sequences if len(s.output) < num_tokens]:
            room = self.runner.limits.max_chunk_tokens
            singles: list[tuple[Row, int]] = []
            longer: list[tuple[Row, int]] = []
            for sequence in active:
                length = min(len(sequence.tokens) - sequence.num_computed, chunk_len)
                tiles = -(-length // 4) * 4
                if length == 1:
                    singles.append((sequence, 1))
                elif tiles <= room and len(longer) < self.runner.limits.max_chunks:
                    longer.append((sequence, length))
                    room -= tiles
            self.step(*singles, *longer)

    def preempt(self, sequence: Row) -> None:
        """Takes the row and the pages back: all tokens are to be computed again."""
        sequence.pages, sequence.num_computed, sequence.is_loaded = [], 0, False

    def _start_fork(self, parent: Row, row: int) -> RowLoad:
        """Returns a fork's load: full pages are the parent's, the last one is filled later."""
        (fork,) = (fork for fork in parent.forks if fork.row == row)
        num_full = len(fork.prompt) // PAGE_SIZE
        fork.pages = parent.pages[:num_full]
        fork.num_computed, fork.is_loaded = len(fork.prompt), True
        fork.mask, fork.num_top = fork.mask or parent.mask, parent.num_top
        if len(fork.prompt) % PAGE_SIZE:
            fork.pages.append(self._take_page())
            copy = PageCopy(source=parent.pages[num_full], target=fork.pages[num_full])
            self._copies.append(copy)
        fork.output.append(None)
        return self._load(fork)

    def _take_page(self) -> int:
        return 1 + next(self._pages) % (NUM_PAGES - 1)

    def _grow(self, sequence: Row, num_tokens: int) -> tuple[int, ...]:
        wanted = -(-(sequence.num_computed + num_tokens) // PAGE_SIZE) - len(sequence.pages)
        pages = tuple(self._take_page() for _ in range(wanted))
        sequence.pages.extend(pages)
        return pages

    def _load(self, sequence: Row) -> RowLoad:
        counted = sequence.sampling.has_penalties
        known = tuple(token for token in sequence.output if token is not None)
        return RowLoad(
            sequence_id=sequence.id,
            row=sequence.row,
            pages=tuple(sequence.pages),
            sampling=sequence.sampling,
            seed=sequence.seed,
            choice=sequence.choice,
            stop_ids=sequence.stop_ids,
            prompt=sequence.prompt if counted else (),
            output=known if counted else (),
        )

    def _chunk(
        self, sequence: Row, num_tokens: int, new_pages: tuple[int, ...], num_before: int
    ) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        tokens = sequence.tokens[start:end]
        samples = end == len(sequence.tokens)
        output_index = len(sequence.output) if samples else 0
        sequence.num_computed = end
        forks = sequence.forks if samples and not sequence.output else ()
        if samples:
            sequence.output.append(None)
        targets = sequence.prompt[start + 1 : end + 1]
        scoring = None
        if sequence.num_prompt_top is not None and targets:
            scoring = PromptScoring(first=start, targets=targets, num_top=sequence.num_prompt_top)
        return Chunk(
            sequence_id=sequence.id,
            row=sequence.row,
            start=start,
            num_tokens=num_tokens,
            token_ids=None if None in tokens else tuple(t for t in tokens if t is not None),
            samples=samples,
            output_index=output_index,
            prompt_len=len(sequence.prompt),
            new_pages=new_pages,
            num_pages_before=num_before,
            forks=tuple(Fork(sequence_id=fork.id, row=fork.row) for fork in forks),
            is_masked=sequence.mask is not None,
            num_top=sequence.num_top,
            scoring=scoring,
        )


def _with_forks(sequences: Sequence[Row]) -> Sequence[Row]:
    """Returns each sequence and each fork of one, once."""
    rows = (row for sequence in sequences for row in (sequence, *sequence.forks))
    return tuple({row.id: row for row in rows}.values())


def oracle_logits(params: Params, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits after the last token, in float64 numpy, without a cache."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x_TD = weights["embedding_VD"][list(tokens)]
    T, half = len(tokens), MODEL.head_dim // 2
    rope = MODEL.layers[0].rope
    assert rope is not None
    angles = np.arange(T)[:, None] * rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + MODEL.norm_eps)
        normed: np.ndarray = x / scale * weight
        return normed

    for layer in weights["layers"].values():
        y = norm(x_TD, layer["attn_norm_D"])
        q = rotate(np.einsum("td,dnh->tnh", y, layer["q_DNH"]))
        k = rotate(np.einsum("td,dkh->tkh", y, layer["k_DKH"]))
        v = np.einsum("td,dkh->tkh", y, layer["v_DKH"])
        k, v = (np.repeat(a, MODEL.num_heads // MODEL.num_kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) * MODEL.scale
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights_NTS = np.exp(scores - scores.max(-1, keepdims=True))
        weights_NTS /= weights_NTS.sum(-1, keepdims=True)
        x_TD = x_TD + np.einsum("nts,snh,nhd->td", weights_NTS, v, layer["o_NHD"])
        y = norm(x_TD, layer["mlp_norm_D"])
        gate = y @ layer["gate_DF"]
        x_TD = x_TD + (gate / (1 + np.exp(-gate)) * (y @ layer["up_DF"])) @ layer["down_FD"]
    y_D = norm(x_TD[-1], weights["final_norm_D"])
    logits_V: np.ndarray = np.einsum("d,vd->v", y_D, weights["embedding_VD"])
    return logits_V[: MODEL.vocab_size]


def oracle_tokens(
    params: Params,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    change: Callable[[np.ndarray, list[int]], np.ndarray] = lambda logits_V, output: logits_V,
) -> list[int]:
    """Returns the greedy continuation; `change` edits the logits, given the output so far."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits_V = change(oracle_logits(params, [*prompt, *output]), output)
        output.append(int(logits_V.argmax()))
    return output
