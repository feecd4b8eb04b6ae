"""Device-free stand-ins: a runner that checks its plans, and the outputs it must give.

`FakeRunner` keeps a pool of pages like the device does and "samples" a hash of the tokens that it
reads back *through the page table*, so a wrong page, a lost write, a page reused too early, a page
shared too long or a copy made too late changes the output. `expected_output` is the same function
of the true tokens: the solo oracle.
"""

import collections
import dataclasses
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
import tokenizers

from jaxserve.plan import (
    NO_LAPS,
    Bucket,
    Chunk,
    Laps,
    RowLoad,
    StepLimits,
    StepMasks,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMask,
)
from jaxserve.request import SamplingParams
from jaxserve.text.token_bytes import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer
from tests.fake_host_pages import FakeHostPages
from tests.fake_logprobs import token_logprobs

FLAVOR: Final = 1 << 20  # what a flavor adds to each token that the fake model keeps
VOCAB_SIZE: Final = 259  # 256 bytes and three special ids

BOS_ID: Final = 256
EOS_ID: Final = 257

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Script = Callable[[tuple[int, ...], int], "int | Literal['not_finite'] | None"]
"""(prompt, output index) → the token to give, "not_finite", or None for the hash. Where a prompt is
scored it is asked too: (its beginning, −1) → whether the logits after that are "not_finite"."""

MaskOf = Callable[[tuple[int, ...]], TokenMask]
"""The output so far → the mask of what may come next."""


def build_byte_tokenizer(
    *, chat_template: str | None = CHAT_TEMPLATE, add_bos: bool = False
) -> Tokenizer:
    """Returns a real tokenizer without merges: ids 0 to 255 are bytes, then <s>, </s>, <pad>."""
    vocab = dict(byte_alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return Tokenizer.from_backend(
        backend,
        bos_id=BOS_ID,
        eos_ids=(EOS_ID,),
        add_bos=add_bos,
        chat_template=chat_template,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


class PlanError(AssertionError):
    """A plan that the device could not run, or that would damage another sequence."""


def say(outputs: Mapping[tuple[int, ...] | None, Sequence[int]]) -> Script:
    """Returns a script: prompt → its forced tokens (None: any other prompt); then the hash."""

    def script(prompt: tuple[int, ...], output_index: int) -> int | None:
        tokens = outputs.get(prompt, outputs.get(None, ()))
        return tokens[output_index] if 0 <= output_index < len(tokens) else None

    return script


def stack_masks(masks: Mapping[int, TokenMask], vocab_size: int = VOCAB_SIZE) -> StepMasks:
    """Returns masks by sequence id as a step's."""
    num_words = -(-vocab_size // 32)
    masks_NV = np.array(list(masks.values()), np.uint32).reshape(-1, num_words)
    return StepMasks(sequence_ids=list(masks), masks_NV=masks_NV)


def build_mask(token_ids: Iterable[int], vocab_size: int = VOCAB_SIZE) -> TokenMask:
    """Returns the mask that allows these tokens."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in token_ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def flavored(tokens: Sequence[int], flavor: int) -> tuple[int, ...]:
    """Returns the tokens as a model of that flavor keeps them: other weights, other K/V."""
    return tuple(token + flavor * FLAVOR for token in tokens)


def plain(tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens as they were written."""
    return tuple(token % FLAVOR for token in tokens)


def sample_token(
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    output_index: int,
    counted: tuple[Sequence[int], Sequence[int]] = ((), ()),
    stop_ids: Sequence[int] = (),
    choice: int = 0,
    mask: TokenMask | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> int | None:
    """Returns a token that depends on every argument the real sampler depends on; None where
    nothing may be sampled.

    Args:
      tokens: all tokens so far, as read from the pool.
      counted: prompt and output ids that the penalties count; used only with penalties.
    """
    mixed = zlib.crc32(array("q", tokens).tobytes())
    if not params.is_greedy:
        mixed = zlib.crc32(b"%d %d %d" % (seed, output_index, choice), mixed)
    if params.has_penalties:
        prompt, output = counted
        mixed = zlib.crc32(array("q", sorted(prompt)).tobytes(), mixed)
        mixed = zlib.crc32(b"|" + array("q", sorted(output)).tobytes(), mixed)
    if params.logit_bias:
        mixed = zlib.crc32(repr(sorted(params.logit_bias.items())).encode(), mixed)
    banned = stop_ids if output_index < params.min_tokens else ()
    for token in ((mixed + offset) % vocab_size for offset in range(vocab_size)):
        is_allowed = mask is None or bool(mask[token // 32] >> token % 32 & 1)
        if is_allowed and token not in banned:
            return token
    return None


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    n: int,
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    choice: int = 0,
    mask_of: MaskOf | None = None,
    vocab_size: int = VOCAB_SIZE,
    script: Script | None = None,
    flavor: int = 0,
) -> list[int]:
    """Returns the first n tokens that a choice alone must get, ends not considered."""
    prompt = tuple(prompt)
    output: list[int] = []
    for index in range(n):
        forced = script(prompt, index) if script else None
        if isinstance(forced, int):
            output.append(forced)
            continue
        token = sample_token(
            flavored((*prompt, *output), flavor),
            params,
            seed=seed,
            output_index=index,
            counted=(prompt, output),
            stop_ids=stop_ids,
            choice=choice,
            mask=mask_of(tuple(output)) if mask_of else None,
            vocab_size=vocab_size,
        )
        assert token is not None, f"nothing is allowed after {output}"
        output.append(token)
    return output


@dataclasses.dataclass(slots=True)
class FakeRow:
    """A state row: what the device knows of the sequence that owns it.

    Attributes:
      mark: unique for each load, so that a cell written by anyone else is seen.
      marks: whose each written cell must be: the first choice's, in the prompt of a forked one.
    """

    load: RowLoad
    mark: int
    table: list[int]
    marks: list[int] = dataclasses.field(default_factory=list)
    last_token: int | None = None
    output: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_written(self) -> int:
        return len(self.marks)


class FakeInFlight:
    """A launched step of the fake: already computed, its result not yet read."""

    def __init__(self, runner: "FakeRunner", plan: StepPlan, *, bucket: Bucket, laps: Laps) -> None:
        self.plan = plan
        self._runner = runner
        self._bucket = bucket
        self._laps = laps
        self._is_read = False
        self.has_output = False
        self.token_ids: dict[int, int] = {}
        self.not_finite: set[int] = set()
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self.writes: list[tuple[int, int, tuple[int, int, int]]] = []
        self.swapped_out: list[tuple[int, list[tuple[int, int, int]]]] = []

    def is_ready(self) -> bool:
        return self._is_read

    def launch_output(self, masks: StepMasks) -> None:
        _require(self.plan.needs_masks, f"step {self.plan.step_id} needs no masks")
        _require(not self.has_output, f"step {self.plan.step_id}: the output is launched already")
        self._runner.sample(self, dict(zip(masks.sequence_ids, masks.masks_NV, strict=True)))

    def result(self) -> StepResult:
        """Its time, in which tests move their clocks, is that of waiting for the device."""
        self._runner.gate.wait()
        _require(not self._is_read, f"step {self.plan.step_id}: result() was called twice")
        _require(self.has_output, f"step {self.plan.step_id} still waits for its masks")
        self._runner.retire(self)
        self._is_read = True
        self._laps.lap("wait")
        self._laps.lap("readback")
        return StepResult(
            token_ids=self.token_ids,
            not_finite=frozenset(self.not_finite),
            bucket=self._bucket,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class FakeRunner:
    """Implements `plan.Runner` without a device, and refuses a plan that breaks a rule.

    Attributes:
      gate: `result()` waits for it; clear it to hold steps on the "device", set it to let go.
      on_launch: called with each plan first; may raise.
      on_result: called with the plan when its result is read; may raise.
      plans: the last plans launched.
    """

    def __init__(
        self,
        *,
        limits: StepLimits,
        num_pages: int,
        page_size: int,
        vocab_size: int = VOCAB_SIZE,
        script: Script | None = None,
        late_writes: bool = False,
        on_launch: Callable[[StepPlan], None] | None = None,
        on_result: Callable[[StepPlan], None] | None = None,
        flavor_of: Callable[[int], int] | None = None,
        host_pages: FakeHostPages | None = None,
    ) -> None:
        """Args:
        script: forces tokens or not-finite logits.
        flavor_of: of a sequence's model; its K/V is its own, and no other's.
        host_pages: host memory; None where there is none.
        late_writes: K/V lands once more when the step retires, as a slow writer's would: a page
          that was given to someone else by then is damaged.
        """
        self.limits = limits
        self.num_pages = num_pages
        self.page_size = page_size
        self.host_pages = host_pages
        self.vocab_size = vocab_size
        self.script = script
        self.late_writes = late_writes
        self.on_launch = on_launch
        self.on_result = on_result
        self.flavor_of = flavor_of
        self.gate = threading.Event()
        self.gate.set()
        self.plans: collections.deque[StepPlan] = collections.deque(maxlen=256)
        self.num_steps = 0
        self._last_step_id: int | None = None
        self._pool = [[(-1, -1, -1)] * page_size for _ in range(num_pages)]
        self._page_owners: dict[int, set[int]] = {}
        self._rows: dict[int, FakeRow] = {}
        self._num_loads = 0
        self._in_flight: list[FakeInFlight] = []
        self._taken: set[int] = set()  # pages that became somebody's with the last plan

    def launch(self, plan: StepPlan, laps: Laps = NO_LAPS) -> FakeInFlight:
        if self.on_launch:
            self.on_launch(plan)
        self._check_shape(plan)
        _require(
            all(step.has_output for step in self._in_flight),
            "a step before this one still waits for its masks",
        )
        self._taken.clear()
        forks = {fork.sequence_id for chunk in plan.chunks for fork in chunk.forks}
        self._load_rows(plan, forks)
        for chunk in plan.chunks:
            self._grow_table(chunk)
        in_flight = FakeInFlight(self, plan, bucket=self._bucket(plan), laps=laps)
        self._swap_pages(plan, in_flight)
        self._copy_pages(plan, in_flight)
        self._adopt_cached(plan, in_flight)
        for chunk in plan.chunks:
            self._check_table(chunk)
        for chunk in plan.chunks:
            self._write(chunk, in_flight)
        for chunk in plan.chunks:
            self._fork_rows(chunk, plan)
            self._score(chunk, in_flight)
        if not plan.needs_masks:
            self.sample(in_flight, {})
        self._in_flight.append(in_flight)
        self.plans.append(plan)
        self.num_steps += 1
        laps.lap("dispatch")
        return in_flight

    def sample(self, step: FakeInFlight, masks: Mapping[int, TokenMask]) -> None:
        """The output program; called by the step where there are masks."""
        for chunk in step.plan.chunks:
            if not chunk.samples:
                continue
            tokens = self._read_back(self._rows[chunk.row])  # the forks' hidden state too
            for row in (chunk.row, *(fork.row for fork in chunk.forks)):
                self._sample(chunk, self._rows[row], tokens, step=step, masks=masks)
        step.has_output = True

    def read_page(self, page: int) -> list[tuple[int, int, int]]:
        """Returns what a page holds: token, position, and a mark of who wrote it."""
        return list(self._pool[page])

    def retire(self, step: FakeInFlight) -> None:
        """Called by `FakeInFlight.result`."""
        _require(step is self._in_flight[0], "results must be read in launch order")
        self._in_flight.pop(0)
        if self.late_writes:
            for page, place, cell in step.writes:
                self._pool[page][place] = cell
        for host_page, cells in step.swapped_out:
            assert self.host_pages is not None
            self.host_pages.store(host_page, cells)
        if self.on_result:
            self.on_result(step.plan)

    def _check_shape(self, plan: StepPlan) -> None:
        limits = self.limits
        _require(plan.has_work and plan.retire_first is None, "a launched plan has work")
        wanted = plan.step_id if self._last_step_id is None else self._last_step_id + 1
        _require(plan.step_id == wanted, f"step_id is {plan.step_id}, must be {wanted}")
        self._last_step_id = plan.step_id
        lens = [chunk.num_tokens for chunk in plan.chunks]
        singles = [n for n in lens if n == 1]
        longer = [n for n in lens if n > 1]
        _require(lens == singles + longer, "one-token chunks come first")
        _require(all(n >= 1 for n in lens), "a chunk has tokens")
        _require(len(singles) <= limits.max_rows, f"{len(singles)} one-token rows")
        _require(len(longer) <= limits.max_chunks, f"{len(longer)} chunks")
        _require(len(lens) <= limits.max_seqs, f"{len(lens)} sequences")
        rounded = self._bucket(plan).chunk_tokens
        _require(rounded <= limits.max_chunk_tokens, f"{rounded} tile-rounded chunk tokens")
        forks = [fork for chunk in plan.chunks for fork in chunk.forks]
        ids = [chunk.sequence_id for chunk in plan.chunks] + [fork.sequence_id for fork in forks]
        _require(len(set(ids)) == len(ids), "a sequence is in a plan once")
        rows = [chunk.row for chunk in plan.chunks] + [fork.row for fork in forks]
        _require(len(set(rows)) == len(rows), "a row is in a plan once")
        loaded = {load.sequence_id for load in plan.row_loads}
        _require(loaded <= set(ids), "a loaded row computes in the same step")
        kept = (set(plan.preempted) & set(ids)) - loaded
        _require(not kept, f"sequences {kept} lost their rows and run without a load")
        not_loaded = {fork.sequence_id for fork in forks} - loaded
        _require(not not_loaded, f"forks {not_loaded} have no row load")
        for chunk in plan.chunks:
            _check_chunk(chunk)

    def _bucket(self, plan: StepPlan) -> Bucket:
        tile = self.limits.chunk_tile
        longer = [chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1]
        return Bucket(
            decode_seqs=len(plan.chunks) - len(longer),
            verify_tokens=1,
            chunk_tokens=sum(-(-n // tile) * tile for n in longer),
        )

    def _load_rows(self, plan: StepPlan, forks: set[int]) -> None:
        for sequence_id in plan.preempted:
            for row in [r for r, s in self._rows.items() if s.load.sequence_id == sequence_id]:
                del self._rows[row]
        returning = {move.page for move in plan.swap_in}
        for load in plan.row_loads:
            _require(0 <= load.row < self.limits.max_seqs, f"row {load.row}")
            if load.sequence_id not in forks:
                num_cached = load.num_cached // self.page_size
                shared = [page for page in load.pages[:num_cached] if page not in returning]
                new = [page for page in load.pages if page not in shared]
                self._take_pages(load.sequence_id, new)
                for page in shared:
                    self._page_owners[page].add(load.sequence_id)
                self._load_row(load)

    def _load_row(self, load: RowLoad) -> FakeRow:
        _require(len(set(load.pages)) == len(load.pages), f"a page twice in {load.pages}")
        self._num_loads += 1
        row = self._rows[load.row] = FakeRow(
            load=load, mark=self._num_loads, table=list(load.pages), output=list(load.output)
        )
        return row

    def _fork_rows(self, chunk: Chunk, plan: StepPlan) -> None:
        """A fork begins with the pages of the prompt, the first choice's, and any of its own."""
        first = self._rows[chunk.row]
        num_shared = -(-chunk.prompt_len // self.page_size)
        for fork in chunk.forks:
            load = next(load for load in plan.row_loads if load.sequence_id == fork.sequence_id)
            _require(load.row == fork.row, f"fork {fork} is loaded into row {load.row}")
            name, shared = f"fork {fork.sequence_id}", list(load.pages[:num_shared])
            _require(shared == first.table[:num_shared], f"{name} begins with pages {shared}")
            self._take_pages(fork.sequence_id, load.pages[num_shared:])
            for page in shared:
                self._page_owners[page].add(fork.sequence_id)
            self._load_row(load).marks = list(first.marks)

    def _adopt_cached(self, plan: StepPlan, step: FakeInFlight) -> None:
        """What a row load calls cached is there, each cell at its position, and no step that is
        still on the "device" wrote it."""
        written = {(page, place) for other in self._in_flight for page, place, _ in other.writes}
        for load in plan.row_loads:
            row = self._rows.get(load.row)
            if not load.num_cached or row is None or row.load is not load:
                continue
            _require(not row.marks, f"sequence {load.sequence_id} is forked, not cached")
            for position in range(load.num_cached):
                page, place = row.table[position // self.page_size], position % self.page_size
                name = f"token {position} of sequence {load.sequence_id}, in page {page},"
                _, written_at, mark = self._pool[page][place]
                _require(written_at == position, f"{name} is not there: {self._pool[page]}")
                _require((page, place) not in written, f"{name} is written by a step in flight")
                row.marks.append(mark)

    def _swap_pages(self, plan: StepPlan, step: FakeInFlight) -> None:
        """All that leaves is read before anything is written; it is in host memory when the step
        retires."""
        pages = self.host_pages
        if pages is None:
            _require(not (plan.swap_out or plan.swap_in), "there is no host memory")
            return
        written = {page for other in self._in_flight for page, _, _ in other.writes}
        filled = {host_page for other in self._in_flight for host_page, _ in other.swapped_out}
        for move in plan.swap_out:
            _require(0 < move.page < self.num_pages, f"{move}")
            _require(0 <= move.host_page < pages.num_pages, f"{move}")
            _require(move.page not in written, f"{move} of a page a step in flight still writes")
            _require(move.host_page not in filled, f"{move} to where another is on its way")
            filled.add(move.host_page)
            step.swapped_out.append((move.host_page, list(self._pool[move.page])))
        targets = [move.page for move in plan.swap_in]
        _require(len(set(targets)) == len(targets), "two pages come back to one place")
        for back in plan.swap_in:
            _require(back.page in self._taken, f"{back} into a page that is new to nobody")
            _require(pages.is_intact(back.host_page), f"{back} is not what it was")
            cells = pages.read(back.host_page)
            self._pool[back.page] = cells
            step.writes += [(back.page, place, cell) for place, cell in enumerate(cells)]

    def _copy_pages(self, plan: StepPlan, step: FakeInFlight) -> None:
        num_tokens = {  # that the target keeps; after them it is written by its owner
            page: chunk.start - index * self.page_size
            for chunk in plan.chunks
            for index, page in enumerate(chunk.new_pages, chunk.num_pages_before)
        }
        for load in plan.row_loads:
            num_full, num_copied = divmod(load.num_cached, self.page_size)
            if num_copied:
                num_tokens[load.pages[num_full]] = num_copied
        copied = [(copy, list(self._pool[copy.source])) for copy in plan.copies]
        for copy, cells in copied:
            _require(copy.target in num_tokens, f"{copy} is to a page that is new to nobody")
            _require(copy.source not in self._taken, f"{copy} is from a page given to another")
            self._pool[copy.target] = cells
            kept = cells[: num_tokens[copy.target]]
            step.writes += [(copy.target, place, cell) for place, cell in enumerate(kept)]

    def _take_pages(self, sequence_id: int, pages: Sequence[int]) -> None:
        """A page must be real, and no step on the "device" may still use it."""
        written = {page for step in self._in_flight for page, _, _ in step.writes}
        read = {copy.source for step in self._in_flight for copy in step.plan.copies}
        for page in pages:
            _require(0 < page < self.num_pages, f"page {page} of sequence {sequence_id}")
            _require(page not in written, f"page {page} is still written by a step in flight")
            _require(page not in read, f"page {page} is still copied by a step in flight")
            self._page_owners[page] = {sequence_id}
            self._taken.add(page)

    def _grow_table(self, chunk: Chunk) -> None:
        row = self._rows.get(chunk.row)
        name = f"sequence {chunk.sequence_id}"
        if row is None or row.load.sequence_id != chunk.sequence_id:
            raise PlanError(f"{name} does not own row {chunk.row}")
        if chunk.new_pages:
            before, num_new = chunk.num_pages_before, len(chunk.new_pages)
            _require(before <= len(row.table), f"{name} has {len(row.table)} pages, not {before}")
            self._take_pages(chunk.sequence_id, chunk.new_pages)
            row.table[before : before + num_new] = chunk.new_pages
            _require(len(set(row.table)) == len(row.table), f"{name} has a page twice")

    def _check_table(self, chunk: Chunk) -> None:
        row, name = self._rows[chunk.row], f"sequence {chunk.sequence_id}"
        wanted = f"{name} has {row.num_written} tokens written, chunk starts at {chunk.start}"
        _require(chunk.start == row.num_written, wanted)
        end = chunk.start + chunk.num_tokens
        _require(end <= len(row.table) * self.page_size, f"{name} has no page for {end} tokens")
        for page in row.table:
            owners = self._page_owners[page]
            whose = ", ".join(map(str, sorted(owners)))
            _require(chunk.sequence_id in owners, f"{name} uses page {page} of sequence {whose}")

    def _write(self, chunk: Chunk, step: FakeInFlight) -> None:
        row = self._rows[chunk.row]
        token_ids = chunk.token_ids
        if token_ids is None:
            _require(chunk.num_tokens == 1, "only a one-token chunk may leave its token out")
            if row.last_token is None:
                raise PlanError(f"sequence {chunk.sequence_id}: nothing was sampled into its row")
            token_ids = (row.last_token,)
        _require(len(token_ids) == chunk.num_tokens, "as many token ids as tokens")
        _require(all(0 <= t < self.vocab_size for t in token_ids), f"token ids {token_ids}")
        flavor = self.flavor_of(chunk.sequence_id) if self.flavor_of else 0
        for position, token in enumerate(token_ids, start=chunk.start):
            page, place = row.table[position // self.page_size], position % self.page_size
            cell = (token + flavor * FLAVOR, position, row.mark)
            self._pool[page][place] = cell
            step.writes.append((page, place, cell))
        row.marks += [row.mark] * chunk.num_tokens

    def _score(self, chunk: Chunk, step: FakeInFlight) -> None:
        if chunk.scoring is None:
            return
        scoring, tokens = chunk.scoring, self._read_back(self._rows[chunk.row])
        positions = range(scoring.first, scoring.first + len(scoring.targets))
        if self.script and "not_finite" in [
            self.script(plain(tokens[: p + 1]), -1) for p in positions
        ]:
            step.not_finite.add(chunk.sequence_id)
            return
        step.prompt_logprobs[chunk.sequence_id] = tuple(
            token_logprobs(
                tokens[: position + 1],
                target,
                num_top=scoring.num_top,
                vocab_size=self.vocab_size,
            )
            for position, target in zip(positions, scoring.targets, strict=True)
        )

    def _sample(
        self,
        chunk: Chunk,
        row: FakeRow,
        tokens: list[int],
        *,
        step: FakeInFlight,
        masks: Mapping[int, TokenMask],
    ) -> None:
        load, sequence_id = row.load, row.load.sequence_id
        prompt_len = len(tokens) - chunk.output_index
        _require(prompt_len >= 1, f"output_index {chunk.output_index} of {len(tokens)} tokens")
        token: int | str | None = None
        if self.script:
            token = self.script(plain(tokens[:prompt_len]), chunk.output_index)
        if token is None:
            token = sample_token(
                tokens,
                load.sampling,
                seed=load.seed,
                choice=load.choice,
                output_index=chunk.output_index,
                counted=(load.prompt, row.output),
                stop_ids=load.stop_ids,
                mask=masks.get(sequence_id) if chunk.is_masked else None,
                vocab_size=self.vocab_size,
            )
        if not isinstance(token, int):
            step.not_finite.add(sequence_id)
            token = 0
        row.last_token = token
        row.output.append(token)
        step.token_ids[sequence_id] = token
        if chunk.num_top is not None:
            step.logprobs[sequence_id] = token_logprobs(
                tokens, token, num_top=chunk.num_top, vocab_size=self.vocab_size
            )

    def _read_back(self, row: FakeRow) -> list[int]:
        """The sequence's tokens as attention would see them; a foreign cell reads as −2."""
        tokens = []
        for position in range(row.num_written):
            page = self._pool[row.table[position // self.page_size]]
            token, written_at, mark = page[position % self.page_size]
            tokens.append(token if (written_at, mark) == (position, row.marks[position]) else -2)
        return tokens


def _check_chunk(chunk: Chunk) -> None:
    """What a chunk says of itself agrees."""
    end = chunk.start + chunk.num_tokens
    if chunk.forks:
        is_prompt_end = chunk.samples and end == chunk.prompt_len and chunk.output_index == 0
        _require(is_prompt_end, "choices are forked where the prompt ends and is sampled from")
    for what in ("is_masked", "num_top"):
        _require(chunk.samples or not getattr(chunk, what), f"{what} of a chunk without a sample")
    scoring = chunk.scoring
    if scoring is None:
        return
    last = scoring.first + len(scoring.targets)
    _require(chunk.start <= scoring.first < last <= end, f"{scoring} is outside of the chunk")
    _require(last < chunk.prompt_len, f"{scoring} ends behind the prompt of {chunk.prompt_len}")
    known = (chunk.token_ids or ())[scoring.first + 1 - chunk.start :]
    pairs = zip(known, scoring.targets, strict=False)
    _require(all(a == b for a, b in pairs), "the targets are the prompt's next tokens")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise PlanError(what)
