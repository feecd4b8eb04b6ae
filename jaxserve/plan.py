"""What one step will do and what came of it: the only words between scheduler and runner.

Both are values: ids, counts and page moves, never a live `Request`.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

import numpy as np

from jaxserve.host_pages import HostPages
from jaxserve.request import SamplingParams


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StepLimits:
    """The largest step the runner's programs can take.

    Chunks are laid out in tiles of `chunk_tile` tokens, each tile one sequence's, so a chunk of n
    tokens uses `chunk_tile * ceil(n / chunk_tile)` of `max_chunk_tokens`.

    Attributes:
      max_rows: one-token rows of a step.
      max_chunk_tokens: tile-rounded tokens of all chunks of a step.
      max_chunks: sequences with more than one token in a step.
      max_seqs: state rows, so the most sequences that run at once.
    """

    max_rows: int
    max_chunk_tokens: int
    chunk_tile: int
    max_chunks: int
    max_seqs: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Fork:
    """Another choice of a chunk's request, which samples its first token from the same state.

    Its row is filled by a `RowLoad` of the same plan. Its page table holds the pages of the prompt,
    shared; whoever writes first into the last one, half full, does so in a copy.
    """

    sequence_id: int
    row: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PromptScoring:
    """Prompt tokens whose log-probabilities a chunk yields.

    Attributes:
      first: position of the first token that predicts one; in the chunk.
      targets: the prompt's tokens from `first` + 1 on, one for each position scored.
      num_top: alternatives wanted with each.
    """

    first: int
    targets: tuple[int, ...]
    num_top: int


@dataclasses.dataclass(slots=True)
class Chunk:
    """One sequence's tokens in one step: positions [start, start + num_tokens). Nobody changes it;
    it is not frozen, and its fields have places, because that costs nine times as much to make.

    Attributes:
      row: the sequence's state row.
      token_ids: the tokens, where the host knows them; None when `num_tokens` is 1 and the token
        is the one last sampled into the state row.
      samples: whether this chunk pays all that is owed, so that a token is sampled after it.
      output_index: index in the output of the token to be sampled; 0 where none is.
      new_pages: pages this step puts into the sequence's page table: behind its last, or one in the
        place of a page that other choices read too, whose `PageCopy` is in the same plan; empty
        when a `RowLoad` of the same plan carries the whole table.
      num_pages_before: entries of the page table before `new_pages`.
      prompt_len: length of the sequence's prompt, without outputs; also after a preemption.
      forks: the request's other choices, where this chunk ends its prompt; they sample too.
      is_masked: what is sampled, by the forks too, needs a mask of allowed tokens.
      num_top: alternatives to report with each sampled token; None reports no log-probability.
      scoring: the prompt's log-probabilities to report; None for none.
    """

    sequence_id: int
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    samples: bool
    output_index: int
    prompt_len: int
    new_pages: tuple[int, ...] = ()
    num_pages_before: int = 0
    forks: tuple[Fork, ...] = ()
    is_masked: bool = False
    num_top: int | None = None
    scoring: PromptScoring | None = None


@dataclasses.dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class Decodes:
    """By column, those of a step's one-token chunks of which nothing else is to be said: the token
    is on the device, what is sampled after it is `output[start + 1 - prompt_len]`, and no pages,
    forks or log-probabilities go with it. Nobody changes it.

    Attributes:
      sequence_ids, rows_N, starts_N, prompt_lens_N, is_masked_N: of each, as in `Chunk`; the
        arrays are int32, the last one bool.
    """

    sequence_ids: list[int]
    rows_N: np.ndarray
    starts_N: np.ndarray
    prompt_lens_N: np.ndarray
    is_masked_N: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def chunk(self, place: int) -> Chunk:
        """The same of one of them."""
        start, prompt_len = int(self.starts_N[place]), int(self.prompt_lens_N[place])
        return Chunk(
            sequence_id=self.sequence_ids[place],
            row=int(self.rows_N[place]),
            start=start,
            num_tokens=1,
            token_ids=None,
            samples=True,
            output_index=start + 1 - prompt_len,
            prompt_len=prompt_len,
            is_masked=bool(self.is_masked_N[place]),
        )


_NONE: Final = np.zeros(0, np.int32)
NO_DECODES: Final = Decodes(
    sequence_ids=[],
    rows_N=_NONE,
    starts_N=_NONE,
    prompt_lens_N=_NONE,
    is_masked_N=np.zeros(0, bool),
)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RowLoad:
    """Fill a state row before this step's forward: at admission and at resume.

    Attributes:
      pages: the sequence's whole page table, with this step's new pages.
      num_cached: leading tokens whose K/V is in them already, once this step's copies are made.
      stop_ids: banned until `sampling.min_tokens` outputs exist.
      prompt: for the penalties' counts; empty when the request has no penalties.
      output: likewise: the tokens sampled before a preemption.
    """

    sequence_id: int
    row: int
    pages: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    choice: int
    stop_ids: tuple[int, ...]
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    num_cached: int = 0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PageCopy:
    """Copy one whole pool page to another, before the forward: which may write into either.

    The target is new with this plan, in a chunk's `new_pages` or in a row load's table.
    """

    source: int
    target: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PageOut:
    """Copy one pool page to host memory, as it is before this step writes anything. The host page
    holds it once the step's result has been read."""

    page: int
    host_page: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PageIn:
    """Copy a page of host memory to one of the pool, before the forward.

    The host page is read by `launch`, which may give it another content later. The target is new
    with this plan, in a row load's table.
    """

    host_page: int
    page: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The work of one step; order: swap-out, swap-in, copies, forward.

    The chunks are three groups, in this order: `decodes`, the other `singles`, and `longer` ones.

    Attributes:
      step_id: rises by one with each plan that has work.
      decodes: chunks by column: nearly all, while all decode.
      others: one-token chunks first, then longer ones.
      row_loads: state rows to fill first.
      copies: page copies to do first.
      swap_out, swap_in: pages to and from host memory, before the copies.
      preempted: ids of sequences that lost their row and pages in this step's planning.
      retire_first: why nothing could be planned until a launched step retires; None otherwise.
    """

    step_id: int
    decodes: Decodes = NO_DECODES
    others: tuple[Chunk, ...] = ()
    row_loads: tuple[RowLoad, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    swap_out: tuple[PageOut, ...] = ()
    swap_in: tuple[PageIn, ...] = ()
    preempted: tuple[int, ...] = ()
    retire_first: str | None = None

    @property
    def has_work(self) -> bool:
        return self.num_chunks > 0

    @property
    def num_chunks(self) -> int:
        return len(self.decodes) + len(self.others)

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All of them, at most one a sequence. For who is in no hurry."""
        decodes = self.decodes
        return (*map(decodes.chunk, range(len(decodes))), *self.others)

    @functools.cached_property
    def singles(self) -> tuple[Chunk, ...]:
        """The one-token chunks that are not in `decodes`."""
        return tuple([chunk for chunk in self.others if chunk.num_tokens == 1])

    @functools.cached_property
    def longer(self) -> tuple[Chunk, ...]:
        """The chunks of more tokens."""
        return self.others[len(self.singles) :]

    @functools.cached_property
    def scored(self) -> tuple[tuple[int, PromptScoring], ...]:
        """Sequence ids with what of their prompts is scored, in the order of the chunks."""
        return tuple([(c.sequence_id, c.scoring) for c in self.others if c.scoring is not None])

    @property
    def num_rows(self) -> int:
        """Chunks of one token."""
        return len(self.decodes) + len(self.singles)

    @functools.cached_property
    def num_tokens(self) -> int:
        return self.num_rows + sum(chunk.num_tokens for chunk in self.longer)

    @functools.cached_property
    def masked_ids(self) -> list[int]:
        """Sequences that sample under masks, forks too."""
        decodes = self.decodes
        ids = list(itertools.compress(decodes.sequence_ids, decodes.is_masked_N))
        for chunk in self.others:
            if chunk.is_masked and chunk.samples:
                ids += (chunk.sequence_id, *(fork.sequence_id for fork in chunk.forks))
        return ids

    @property
    def needs_masks(self) -> bool:
        """Whether the output waits for `InFlight.launch_output`."""
        return bool(self.masked_ids)


@dataclasses.dataclass(slots=True, frozen=True, order=True, kw_only=True)
class Bucket:
    """The padded shape of a forward program.

    Attributes:
      decode_seqs: one-token rows.
      verify_tokens: tokens of each of those rows; 1 until speculation.
      chunk_tokens: tokens of all chunk tiles; 0 for a step without chunks.
    """

    decode_seqs: int
    verify_tokens: int
    chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.decode_seqs * self.verify_tokens + self.chunk_tokens

    @property
    def name(self) -> str:
        """The metrics' word for it, such as `8x1+64`."""
        return f"{self.decode_seqs}x{self.verify_tokens}+{self.chunk_tokens}"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TokenLogprobs:
    """One token's log-probability by the model's own logits, before anything else touches them.

    Attributes:
      logprob: natural logarithm; finite.
      rank: its place among all tokens by probability; 1 is the most likely.
      top_ids, top_logprobs: the most likely tokens, most likely first; as many as were wanted.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# Bits of the tokens that may be sampled: uint32 words, token v is bit v % 32 of word v // 32;
# ceil(vocabulary / 32) words.
TokenMask = np.ndarray


@dataclasses.dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class StepMasks:
    """What the rows of a step may sample.

    Attributes:
      sequence_ids: whose masks these are; a masked sequence that is not among them may sample
        anything.
      masks_NV: a `TokenMask` of each.
    """

    sequence_ids: Sequence[int]
    masks_NV: np.ndarray


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StepResult:
    """What came back from the device for one plan.

    Attributes:
      token_ids: sequence id to the sampled token, for the chunks that sample.
      not_finite: ids of sequences whose logits held NaN, +inf or nothing but -inf, where they were
        sampled from or the prompt was scored; their token is meaningless, and scores are left out.
      bucket: the forward program that ran.
      compile_s: seconds of the step spent compiling after warm-up, which is a fault.
      logprobs: by sequence id, of the sampled tokens that asked for them.
      prompt_logprobs: by sequence id, of the positions its chunk's `scoring` named, in order.
    """

    token_ids: dict[int, int]
    not_finite: frozenset[int]
    bucket: Bucket
    compile_s: float = 0.0
    logprobs: Mapping[int, TokenLogprobs] = dataclasses.field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = dataclasses.field(
        default_factory=dict
    )


# What the engine thread does with its time; docs/metrics.md defines each.
HostPhase = Literal[
    "idle", "schedule", "build", "dispatch", "mask", "wait", "readback", "detokenize", "commit"
]
HOST_PHASES: Final[tuple[HostPhase, ...]] = typing.get_args(HostPhase)


class Laps(Protocol):
    """Cuts a thread's time into phases."""

    def lap(self, phase: HostPhase) -> None:
        """Gives the time since the last lap to `phase`."""
        ...


class NoLaps:
    """For whoever does not ask where time went."""

    def lap(self, phase: HostPhase) -> None:
        return None


NO_LAPS: Final = NoLaps()


class InFlight(Protocol):
    """A launched step."""

    def is_ready(self) -> bool:
        """Whether the device is done with it; does not wait, and may be asked after `result`."""
        ...

    def launch_output(self, masks: StepMasks) -> None:
        """Dispatch the output of a step whose plan `needs_masks`, once, before `result`.

        No later step may be launched before it. The array is not kept.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the device, once; the arrays behind it are given up."""
        ...


class Runner(Protocol):
    """The seam between host and device. Real sides: `runner.Runner` and the tests' `FakeRunner`.

    Steps run on the device in the order they were launched.
    """

    @property
    def limits(self) -> StepLimits: ...

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the padding page 0 among them."""
        ...

    @property
    def host_pages(self) -> HostPages | None:
        """Host memory for pages that the pool drops; None where there is none."""
        ...

    def launch(self, plan: StepPlan, laps: Laps = NO_LAPS) -> InFlight:
        """Dispatch a step and return without waiting for it; all but the output, where the plan
        `needs_masks`.

        Args:
          laps: told of build and dispatch, and by `result` of wait and readback.
        """
        ...
