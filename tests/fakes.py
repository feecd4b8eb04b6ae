"""Device-free stand-ins: a runner that checks its plans, and the outputs it must give.

`FakeRunner` keeps a pool of pages like the device does and "samples" a hash of the tokens that it
reads back *through the page table*, so a wrong page, a lost write or a page reused too early
changes the output. `expected_output` is the same function of the true tokens: the solo oracle.
"""

import collections
import dataclasses
import threading
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import tokenizers

from jaxserve.plan import NO_LAPS, Bucket, Chunk, Laps, RowLoad, StepLimits, StepPlan, StepResult
from jaxserve.request import SamplingParams
from jaxserve.text.token_bytes import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer

VOCAB_SIZE: Final = 259  # 256 bytes and three special ids

BOS_ID: Final = 256
EOS_ID: Final = 257

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Script = Callable[[tuple[int, ...], int], "int | Literal['not_finite'] | None"]
"""(prompt, output index) → the token to give, "not_finite", or None for the hash."""


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
        return tokens[output_index] if output_index < len(tokens) else None

    return script


def sample_token(
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    output_index: int,
    counted: tuple[Sequence[int], Sequence[int]] = ((), ()),
    stop_ids: Sequence[int] = (),
    choice: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> int:
    """Returns a token that depends on every argument the real sampler depends on.

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
    token = mixed % vocab_size
    while output_index < params.min_tokens and token in stop_ids:
        token = (token + 1) % vocab_size
    return token


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    n: int,
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    vocab_size: int = VOCAB_SIZE,
    script: Script | None = None,
) -> list[int]:
    """Returns the first n tokens that a request alone must get, ends not considered."""
    prompt = tuple(prompt)
    output: list[int] = []
    for index in range(n):
        forced = script(prompt, index) if script else None
        if isinstance(forced, int):
            output.append(forced)
            continue
        token = sample_token(
            (*prompt, *output),
            params,
            seed=seed,
            output_index=index,
            counted=(prompt, output),
            stop_ids=stop_ids,
            vocab_size=vocab_size,
        )
        output.append(token)
    return output


@dataclasses.dataclass(slots=True)
class FakeRow:
    """A state row: what the device knows of the sequence that owns it.

    Attributes:
      mark: unique for each load, so that a cell written by anyone else is seen.
    """

    load: RowLoad
    mark: int
    table: list[int]
    num_written: int = 0
    last_token: int | None = None
    output: list[int] = dataclasses.field(default_factory=list)


class FakeInFlight:
    """A launched step of the fake: already computed, its result not yet read."""

    def __init__(
        self, runner: "FakeRunner", plan: StepPlan, result: StepResult, *, laps: Laps
    ) -> None:
        self.plan = plan
        self._runner = runner
        self._laps = laps
        self._is_read = False
        self._result: StepResult | None = result
        self.writes: list[tuple[int, int, tuple[int, int, int]]] = []

    def is_ready(self) -> bool:
        return self._is_read

    def result(self) -> StepResult:
        """Its time, in which tests move their clocks, is that of waiting for the device."""
        self._runner.gate.wait()
        result, self._result = self._result, None
        if result is None:
            raise PlanError(f"step {self.plan.step_id}: result() was called twice")
        self._runner.retire(self)
        self._is_read = True
        self._laps.lap("wait")
        self._laps.lap("readback")
        return result


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
    ) -> None:
        """Args:
        script: forces tokens or not-finite logits.
        late_writes: K/V lands once more when the step retires, as a slow writer's would: a page
          that was given to someone else by then is damaged.
        """
        self.limits = limits
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.script = script
        self.late_writes = late_writes
        self.on_launch = on_launch
        self.on_result = on_result
        self.gate = threading.Event()
        self.gate.set()
        self.plans: collections.deque[StepPlan] = collections.deque(maxlen=256)
        self.num_steps = 0
        self._last_step_id: int | None = None
        self._pool = [[(-1, -1, -1)] * page_size for _ in range(num_pages)]
        self._page_owner: dict[int, int] = {}
        self._rows: dict[int, FakeRow] = {}
        self._num_loads = 0
        self._in_flight: list[FakeInFlight] = []

    def launch(self, plan: StepPlan, laps: Laps = NO_LAPS) -> FakeInFlight:
        if self.on_launch:
            self.on_launch(plan)
        self._check_shape(plan)
        self._load_rows(plan)
        for copy in plan.copies:
            self._pool[copy.target] = list(self._pool[copy.source])
        for chunk in plan.chunks:
            self._grow_table(chunk)
        token_ids: dict[int, int] = {}
        not_finite: set[int] = set()
        in_flight = FakeInFlight(
            self, plan, StepResult(
                token_ids=token_ids,
                not_finite=frozenset(),
                bucket=self._bucket(plan),
            ),
            laps=laps,
        )  # fmt: skip
        for chunk in plan.chunks:
            self._write(chunk, in_flight)
        for chunk in plan.chunks:
            if chunk.samples:
                self._sample(chunk, token_ids, not_finite)
        if not_finite and in_flight._result:
            in_flight._result = dataclasses.replace(
                in_flight._result, not_finite=frozenset(not_finite)
            )
        self._in_flight.append(in_flight)
        self.plans.append(plan)
        self.num_steps += 1
        laps.lap("dispatch")
        return in_flight

    def retire(self, step: FakeInFlight) -> None:
        """Called by `FakeInFlight.result`."""
        _require(step is self._in_flight[0], "results must be read in launch order")
        self._in_flight.pop(0)
        if self.late_writes:
            for page, place, cell in step.writes:
                self._pool[page][place] = cell
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
        ids = [chunk.sequence_id for chunk in plan.chunks]
        _require(len(set(ids)) == len(ids), "a sequence is in a plan once")
        rows = [chunk.row for chunk in plan.chunks]
        _require(len(set(rows)) == len(rows), "a row is in a plan once")
        loaded = {load.sequence_id for load in plan.row_loads}
        _require(loaded <= set(ids), "a loaded row computes in the same step")
        kept = (set(plan.preempted) & set(ids)) - loaded
        _require(not kept, f"sequences {kept} lost their rows and run without a load")

    def _bucket(self, plan: StepPlan) -> Bucket:
        tile = self.limits.chunk_tile
        longer = [chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1]
        return Bucket(
            decode_seqs=len(plan.chunks) - len(longer),
            verify_tokens=1,
            chunk_tokens=sum(-(-n // tile) * tile for n in longer),
        )

    def _load_rows(self, plan: StepPlan) -> None:
        for sequence_id in plan.preempted:
            for row in [r for r, s in self._rows.items() if s.load.sequence_id == sequence_id]:
                del self._rows[row]
        for load in plan.row_loads:
            _require(0 <= load.row < self.limits.max_seqs, f"row {load.row}")
            self._take_pages(load.sequence_id, load.pages)
            self._num_loads += 1
            self._rows[load.row] = FakeRow(
                load=load, mark=self._num_loads, table=list(load.pages), output=list(load.output)
            )

    def _take_pages(self, sequence_id: int, pages: Sequence[int]) -> None:
        """A page must be real, and no step on the "device" may still write it."""
        busy = {page for step in self._in_flight for page, _, _ in step.writes}
        for page in pages:
            _require(0 < page < self.num_pages, f"page {page} of sequence {sequence_id}")
            _require(page not in busy, f"page {page} is still written by a step in flight")
            self._page_owner[page] = sequence_id
        _require(len(set(pages)) == len(pages), f"a page twice in sequence {sequence_id}")

    def _grow_table(self, chunk: Chunk) -> None:
        row = self._rows.get(chunk.row)
        name = f"sequence {chunk.sequence_id}"
        if row is None or row.load.sequence_id != chunk.sequence_id:
            raise PlanError(f"{name} does not own row {chunk.row}")
        if chunk.new_pages:
            before = chunk.num_pages_before
            _require(before == len(row.table), f"{name} has {len(row.table)} pages, not {before}")
            self._take_pages(chunk.sequence_id, chunk.new_pages)
            row.table.extend(chunk.new_pages)
        wanted = f"{name} has {row.num_written} tokens written, chunk starts at {chunk.start}"
        _require(chunk.start == row.num_written, wanted)
        end = chunk.start + chunk.num_tokens
        _require(end <= len(row.table) * self.page_size, f"{name} has no page for {end} tokens")
        for page in row.table:
            owner = self._page_owner[page]
            _require(owner == chunk.sequence_id, f"{name} uses page {page} of sequence {owner}")

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
        for position, token in enumerate(token_ids, start=chunk.start):
            page, place = row.table[position // self.page_size], position % self.page_size
            cell = (token, position, row.mark)
            self._pool[page][place] = cell
            step.writes.append((page, place, cell))
        row.num_written += chunk.num_tokens

    def _sample(self, chunk: Chunk, token_ids: dict[int, int], not_finite: set[int]) -> None:
        row = self._rows[chunk.row]
        tokens = self._read_back(row)
        prompt_len = len(tokens) - chunk.output_index
        _require(prompt_len >= 1, f"output_index {chunk.output_index} of {len(tokens)} tokens")
        forced: int | str | None = None
        if self.script:
            forced = self.script(tuple(tokens[:prompt_len]), chunk.output_index)
        if forced == "not_finite":
            not_finite.add(chunk.sequence_id)
        if isinstance(forced, int):
            token = forced
        else:
            token = sample_token(
                tokens,
                row.load.sampling,
                seed=row.load.seed,
                choice=row.load.choice,
                output_index=chunk.output_index,
                counted=(row.load.prompt, row.output),
                stop_ids=row.load.stop_ids,
                vocab_size=self.vocab_size,
            )
        row.last_token = token
        row.output.append(token)
        token_ids[chunk.sequence_id] = token

    def _read_back(self, row: FakeRow) -> list[int]:
        """The sequence's tokens as attention would see them; a foreign cell reads as −2."""
        tokens = []
        for position in range(row.num_written):
            page = self._pool[row.table[position // self.page_size]]
            token, written_at, mark = page[position % self.page_size]
            tokens.append(token if (written_at, mark) == (position, row.mark) else -2)
        return tokens


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise PlanError(what)
