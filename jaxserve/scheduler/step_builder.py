"""One step in the making: what of its limits is left, and the plan that comes out."""

from collections.abc import Iterable
from typing import Literal

from jaxserve.host_pages import MAX_SWAP_IN
from jaxserve.plan import (
    NO_DECODES,
    Chunk,
    Decodes,
    Fork,
    PageCopy,
    PageIn,
    PageOut,
    PromptScoring,
    RowLoad,
    StepLimits,
    StepPlan,
)
from jaxserve.request import Sequence

RetireReason = Literal["pages", "rows", "results", "prefill"]


class StepBuilder:
    """Keeps within the runner's limits and the token budget.

    Attributes:
      num_decoding: running sequences not looked at yet that owe one token; the budget keeps a
        token for each, so that a long prompt does not stall them.
      pages_are_short: an older sequence waits for pages, so no younger one may take any.
      waits_for: what a launched step would bring, where something could not be planned.
      num_promised: pages that the running prompts will still need.
      num_restrained: prompt tokens of tenants that are ahead, in tiles.
      made_room_for: who waits and others were preempted for.
      takes_decodes: whether nobody has to give way in it, so that who decodes may be planned by
        column.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        step_id: int,
        max_tokens: int,
        max_chunks: int,
        max_chunk_tokens: int | None = None,
    ) -> None:
        """Args:
        max_chunk_tokens: less than the limit, rounded to tiles.
        """
        self.step_id = step_id
        self.num_decoding = 0
        self.pages_are_short = False
        self.waits_for: RetireReason | None = None
        self.num_promised = 0
        self.num_restrained = 0
        self.made_room_for: Sequence | None = None
        self.takes_decodes = False
        self.num_chunked_prompts = 0
        self.num_recomputed = 0
        self._tile = limits.chunk_tile
        self._tokens_left = max_tokens
        self._rows_left = limits.max_rows
        self._chunks_left = max_chunks
        self._chunk_tokens_left = max_chunk_tokens or limits.max_chunk_tokens
        self._is_cut = self._chunk_tokens_left < limits.max_chunk_tokens
        self._decodes = NO_DECODES
        self._singles: list[Chunk] = []
        self._longer: list[Chunk] = []
        self._row_loads: list[RowLoad] = []
        self._copies: list[PageCopy] = []
        self._swap_in: list[PageIn] = []

    @property
    def has_row(self) -> bool:
        """Whether there is room for one token more."""
        return self._tokens_left > 0 and self._rows_left > 0

    @property
    def num_chunks(self) -> int:
        return len(self._decodes) + len(self._singles) + len(self._longer)

    @property
    def is_limited(self) -> bool:
        """Whether its prompts took all of a `max_chunk_tokens` below the limit."""
        return self._is_cut and bool(self._longer) and self._chunk_tokens_left < self._tile

    @property
    def is_mixed(self) -> bool:
        return bool((self._decodes or self._singles) and self._longer)

    def room_for(self, num_owed: int, split: bool) -> int:
        """Returns how many of a sequence's owed tokens this step can take.

        Args:
          split: whether less than all is of any use.
        """
        room = min(num_owed, self._tokens_left)
        if num_owed > 1:
            room = min(room, self._tokens_left - self.num_decoding)
        if room > 1:
            tiles_left = self._chunk_tokens_left // self._tile if self._chunks_left else 0
            room = min(room, tiles_left * self._tile)
        if room == 1 and not self._rows_left:
            room = 0
        if room < num_owed and not split:
            room = 0
        return max(room, 0)

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        new_pages: tuple[int, ...] = (),
        num_pages_before: int = 0,
        forks: Iterable[Sequence] = (),
    ) -> None:
        """Plans a sequence's next tokens and moves it on.

        Args:
          new_pages: of its page table, from `num_pages_before` on, where no row load carries it.
          forks: other choices, loaded by this step, that sample their first token with it.
        """
        assert sequence.row is not None
        request, start = sequence.request, sequence.num_computed
        end = start + num_tokens
        num_known = len(request.prompt) + len(sequence.output)
        pays_all = end == sequence.num_tokens
        samples = pays_all and request.max_tokens > 0
        chunk = Chunk(
            sequence_id=sequence.id,
            row=sequence.row,
            start=start,
            num_tokens=num_tokens,
            token_ids=sequence.token_ids(start, end) if end <= num_known else None,
            samples=samples,
            output_index=len(sequence.output) + sequence.num_in_flight if samples else 0,
            prompt_len=len(request.prompt),
            new_pages=new_pages,
            num_pages_before=num_pages_before,
            forks=tuple(map(_fork, forks)),
            is_masked=request.is_masked and samples,
            num_top=request.sampling.logprobs if samples else None,
            scoring=None
            if request.sampling.prompt_logprobs is None
            else _score(sequence, start, end),
        )
        self._spend(chunk)
        is_first = start == request.num_cached and not sequence.num_preemptions
        if is_first and not pays_all:
            self.num_chunked_prompts += 1
        if start < sequence.num_lost:
            self.num_recomputed += min(end, sequence.num_lost) - start
        sequence.num_computed = end
        sequence.num_in_flight += samples

    def add_token(
        self, sequence: Sequence, start: int, num_sampled: int, new_pages: tuple[int, ...]
    ) -> None:
        """Plans the next token of a sequence that decodes and moves it on: what `add` does, where
        nothing else is to be thought of. Nearly all calls are this one.

        Args:
          start: its tokens that are computed.
          num_sampled: its output, and what is in flight.
          new_pages: put behind its last; empty where there is a place for one more in those it has.
        """
        request, row = sequence.request, sequence.row
        assert row is not None
        num_in_flight = sequence.num_in_flight
        num_pages_before = len(sequence.pages)
        if new_pages:
            sequence.pages += new_pages
        self._singles.append(
            Chunk(
                sequence.id,
                row,
                start,
                1,
                None if num_in_flight else sequence.token_ids(start, start + 1),
                True,
                num_sampled,
                len(request.prompt),
                new_pages,
                num_pages_before,
                (),
                request.is_masked,
                None if request.is_followed else request.sampling.logprobs,
            )
        )
        self._tokens_left -= 1
        self._rows_left -= 1
        sequence.num_computed = start + 1
        sequence.num_in_flight = num_in_flight + 1
        sequence.last_step = self.step_id

    def add_decodes(self, decodes: Decodes, *, num_promised: int) -> None:
        """Adds tokens that were planned already.

        Args:
          num_promised: pages that their next ones need.
        """
        self._decodes = decodes
        self._tokens_left -= len(decodes)
        self._rows_left -= len(decodes)
        self.num_promised += num_promised

    def copy_page(self, source: int, target: int) -> None:
        """Plans a copy that is made before this step writes anything."""
        self._copies.append(PageCopy(source=source, target=target))

    def has_room_to_swap_in(self, num_pages: int) -> bool:
        """Whether so many pages more can come back with this step."""
        return len(self._swap_in) + num_pages <= MAX_SWAP_IN

    def swap_in(self, host_pages: Iterable[int], pages: Iterable[int]) -> None:
        """Plans that pages of host memory come back, into the first of a sequence's new pages."""
        self._swap_in += [
            PageIn(host_page=host_page, page=page)
            for host_page, page in zip(host_pages, pages, strict=False)
        ]

    def load_row(self, sequence: Sequence) -> None:
        """Plans the filling of the row a sequence has just been given; its pages are in it, and
        those of what it need not compute are written."""
        assert sequence.row is not None
        request = sequence.request
        is_counted = request.sampling.has_penalties
        self._row_loads.append(
            RowLoad(
                sequence_id=sequence.id,
                row=sequence.row,
                pages=tuple(sequence.pages),
                num_cached=sequence.num_computed,
                sampling=request.sampling,
                seed=request.seed,
                choice=sequence.choice,
                stop_ids=tuple(request.stop_ids),
                prompt=request.prompt if is_counted else (),
                output=tuple(sequence.output) if is_counted else (),
            )
        )

    def build(self, preempted: tuple[int, ...], swap_out: tuple[PageOut, ...]) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            decodes=self._decodes,
            others=(*self._singles, *self._longer),
            row_loads=tuple(self._row_loads),
            copies=tuple(self._copies),
            swap_out=swap_out,
            swap_in=tuple(self._swap_in),
            preempted=preempted,
        )

    def _spend(self, chunk: Chunk) -> None:
        self._tokens_left -= chunk.num_tokens
        if chunk.num_tokens == 1:
            self._rows_left -= 1
            self._singles.append(chunk)
            return
        self._chunks_left -= 1
        self._chunk_tokens_left -= -(-chunk.num_tokens // self._tile) * self._tile
        self._longer.append(chunk)


def _fork(sequence: Sequence) -> Fork:
    assert sequence.row is not None
    return Fork(sequence_id=sequence.id, row=sequence.row)


def _score(sequence: Sequence, start: int, end: int) -> PromptScoring | None:
    """Returns what a chunk is to score: the prompt's tokens after those in it, where they have not
    been before a preemption."""
    request, prompt = sequence.request, sequence.request.prompt
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    first, last = max(start, request.num_scored), min(end, len(prompt) - 1)
    if first >= last:
        return None
    return PromptScoring(first=first, targets=prompt[first + 1 : last + 1], num_top=num_top)
