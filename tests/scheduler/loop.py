"""Drives a scheduler and a `FakeRunner` as the engine does, one point at a time, and checks both.

After every point: no page or row is lost or twice, and nobody was admitted past an elder. At the
end of each choice: its tokens are those it would get alone, it has ended once, and all it asked to
be told of tokens and prompt is right.
"""

import collections
import dataclasses
import itertools
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.identity import CacheIdentity
from jaxserve.metrics import Metrics
from jaxserve.plan import (
    NO_DECODES,
    Chunk,
    PageCopy,
    PageIn,
    PageOut,
    StepLimits,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMask,
)
from jaxserve.request import FinishReason, Request, SamplingParams, Sequence, SequenceState
from jaxserve.scheduler.cached_page import CachedPage
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.settlement import Update
from tests.fake_host_pages import FakeHostPages
from tests.fake_logprobs import expected_logprobs, expected_prompt_logprobs
from tests.fakes import (
    FLAVOR,
    FakeInFlight,
    FakeRunner,
    Script,
    build_mask,
    expected_output,
    flavored,
    stack_masks,
)

GREEDY = SamplingParams(temperature=0.0)
IDENTITY = CacheIdentity(weights="w", tokenizer="t", positions="p", kv_dtype="float32", page_size=4)
NO_STOPS: dict[int, FinishReason] = {}

Policy = Literal["priority", "fcfs", "edf", "fair"]
NO_WEIGHTS: Mapping[str, float] = {}
Point = Literal["scheduled", "launched", "read", "committed"]
Outcome = FinishReason | Literal["not_finite", "late", "unreachable"]


def spell_out(plans: Iterable[StepPlan]) -> list[StepPlan]:
    """Returns the same plans without columns: one-token chunks by sequence, and those behind their
    prompts as if their tokens were on the device, where they are too. Of pages only the number is
    kept, and of rows nothing: of two that end with a step, either may give its own up first.
    """
    return [_spell_out(plan) for plan in plans]


def _spell_out(plan: StepPlan) -> StepPlan:
    chunks = [
        dataclasses.replace(
            chunk,
            row=0,
            forks=tuple(dataclasses.replace(fork, row=0) for fork in chunk.forks),
            token_ids=None if _is_decode(chunk) else chunk.token_ids,
            new_pages=(0,) * len(chunk.new_pages),
            num_pages_before=chunk.num_pages_before if chunk.new_pages else 0,
        )
        for chunk in plan.chunks
    ]
    chunks.sort(key=lambda chunk: (chunk.num_tokens > 1, chunk.sequence_id))
    return dataclasses.replace(
        plan,
        decodes=NO_DECODES,
        others=tuple(chunks),
        row_loads=tuple(
            dataclasses.replace(load, row=0, pages=(0,) * len(load.pages))
            for load in plan.row_loads
        ),
        copies=(PageCopy(source=0, target=0),) * len(plan.copies),
        swap_out=(PageOut(page=0, host_page=0),) * len(plan.swap_out),
        swap_in=(PageIn(host_page=0, page=0),) * len(plan.swap_in),
    )


def _is_decode(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.start >= chunk.prompt_len


class Loop:
    """The small engine E0: pages of 4, 12 of them usable, 10 tokens a step, chunks of 5, 4 rows.

    Attributes:
      outputs: the tokens delivered to each request's first choice.
      choices: to all of its choices.
      outcomes: how each request ended: its last choice, or all of it at once.
      ends: how each choice ended by itself.
      prompt_logprobs: what each request was told of its prompt.
      point: where the engine's loop is.
    """

    def __init__(
        self,
        *,
        num_pages: int = 13,
        page_size: int = 4,
        max_len: int = 40,
        rows: int = 4,
        chunk_tokens: int = 5,
        chunk_tile: int = 1,
        max_chunks: int = 4,
        step_tokens: int | None = 10,
        depth: int = 2,
        batching: Literal["continuous", "static"] = "continuous",
        chunked_prefill: bool = True,
        reserve: Literal["on_demand", "max_length"] = "on_demand",
        vocab_size: int = 259,
        script: Script | None = None,
        cache: PrefixCache | None = None,
        metrics: Metrics | None = None,
        host_pages: FakeHostPages | None = None,
        policy: Policy = "priority",
        ageing_s: float | None = 60.0,
        weights: Mapping[str, float] = NO_WEIGHTS,
        target_itl_s: float | None = None,
        step_s: float = 0.0,
        fair_credit_tokens: int = 0,
        prefix_order: bool = False,
        prefix_max_overtakes: int = 8,
        follows: bool = False,
    ) -> None:
        """Args:
        follows: whether outputs are read where they grow, of requests that allow it.
        cache: keeps the pages of all requests, under the identity that `add` is given.
        metrics: where the cache counts.
        host_pages: host memory, where the cache has a tier there.
        step_s: that passes with each step, and that the scheduler is told of; 0 times nothing.
        """
        limits = StepLimits(
            max_rows=rows,
            max_chunk_tokens=chunk_tokens,
            chunk_tile=chunk_tile,
            max_chunks=max_chunks,
            max_seqs=rows,
        )
        self.metrics = metrics or Metrics()
        self.host_pages = host_pages
        self.cache = cache
        self.pool = PagePool(num_pages, page_size, cache=cache)
        self.runner = FakeRunner(
            limits=limits,
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=vocab_size,
            script=script,
            late_writes=True,
            flavor_of=lambda sequence_id: self._flavors[sequence_id],
            host_pages=host_pages,
        )
        self._flavors: dict[int, int] = {}  # by sequence id
        self.scheduler = Scheduler(
            config=SchedulerSection(
                batching=batching,
                chunked_prefill=chunked_prefill,
                max_seqs=rows,
                max_chunks=max_chunks,
                max_step_tokens=step_tokens,
                policy=policy,
                ageing_s=ageing_s,
                target_itl_s=target_itl_s,
                fair_credit_tokens=fair_credit_tokens,
                prefix_order=prefix_order,
                prefix_max_overtakes=prefix_max_overtakes,
            ),
            reserve=reserve,
            pool=self.pool,
            limits=limits,
            max_model_tokens=max_len,
            overlap_depth=depth,
            metrics=self.metrics,
            page_bytes=1000 * page_size,
            weight_of=lambda tenant: weights.get(tenant, 1.0),
        )
        self.policy = policy
        self.max_overtakes = prefix_max_overtakes if prefix_order else 0
        self.step_s = step_s
        self.ageing_s = ageing_s
        self.depth = depth
        self.vocab_size = vocab_size
        self.script = script
        self.now_s = 0.0
        self.outputs: dict[Request, list[int]] = {}
        self.choices: dict[Request, list[list[int]]] = {}
        self.outcomes: dict[Request, Outcome] = {}
        self.ends: dict[Sequence, Outcome] = {}
        self.logprobs: dict[Sequence, list[TokenLogprobs]] = collections.defaultdict(list)
        self.prompt_logprobs: dict[Request, list[TokenLogprobs]] = collections.defaultdict(list)
        self.live: list[Request] = []
        # output length at which a stop string matches, one more with each choice
        self.stops_at: dict[Request, int] = {}
        self.plans: list[StepPlan] = []
        self.point: Point = "committed"
        self.num_steps = 0
        self.follows = follows
        self.num_followed = 0  # tokens that no update told of
        self.num_by_column = 0  # chunks of `StepPlan.decodes`
        self._num_uncommitted = 0
        self._has_work = False  # of the last plan
        self._in_flight: collections.deque[tuple[StepPlan, FakeInFlight]] = collections.deque()
        self._points = self._run()

    def add(
        self,
        prompt: tuple[int, ...] | int,
        max_tokens: int,
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        stop_ids: dict[int, FinishReason] = NO_STOPS,
        priority: int = 0,
        deadline_s: float | None = None,
        queue_deadline_s: float | None = None,
        is_masked: bool = False,
        tenant: str = "",
        identity: CacheIdentity = IDENTITY,
    ) -> Request:
        """Submits a request; an int prompt is that many tokens, different for each request."""
        if isinstance(prompt, int):
            first = len(self.outputs)
            prompt = tuple((first + 3 * i) % self.vocab_size for i in range(prompt))
        self.scheduler.check_fits(len(prompt), max_tokens, sampling.num_choices)
        request = Request(
            id=f"r{len(self.outputs)}",
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            max_tokens=max_tokens,
            ends_by_context=False,
            stop_ids=stop_ids,
            arrival_s=self.now_s,
            priority=priority,
            deadline_s=deadline_s,
            queue_deadline_s=queue_deadline_s,
            is_masked=is_masked,
            tenant=tenant,
            cache_identity=identity if self.cache is not None else None,
        )
        self.scheduler.add(request)
        for sequence in request.sequences:
            self._flavors[sequence.id] = flavor_of(identity)
        self.choices[request] = [[] for _ in request.sequences]
        self.outputs[request] = self.choices[request][0]
        self.live.append(request)
        return request

    def finish(self, request: Request, outcome: Outcome) -> None:
        """Ends what is left of a request."""
        assert request not in self.outcomes, f"{request.id} ends twice"
        self.outcomes[request] = outcome
        self.live.remove(request)
        self.scheduler.finish(request)
        self.scheduler.finish(request)  # a second time changes nothing
        for sequence in request.sequences:
            if sequence not in self.ends:
                self._check_output(sequence, outcome)
        self._check_prompt_logprobs(request, outcome)

    def end(self, sequence: Sequence, outcome: Outcome) -> None:
        """Ends one choice; its request too, if it was the last."""
        assert sequence not in self.ends, f"sequence {sequence.id} ends twice"
        self.ends[sequence] = outcome
        self.scheduler.end(sequence)
        self.scheduler.end(sequence)
        request = sequence.request
        if all(other in self.ends for other in request.sequences):
            self.finish(request, outcome)
        self._check_output(sequence, outcome)

    def abort(self, request: Request) -> None:
        """What a client's cancel does, at whatever point; nothing once the request has ended."""
        if request not in self.outcomes:
            self.finish(request, FinishReason.CANCELLED)

    def expire(self) -> list[Request]:
        """Ends what is late, as the engine does before each step."""
        expired = self.scheduler.expired(self.now_s)
        for request in expired:
            if not any(self.choices[request]):
                self.finish(request, "late")
            else:
                self.finish(request, FinishReason.DEADLINE)
        return expired

    def refuse(self) -> None:
        """Ends what cannot meet its deadline, as the engine does next."""
        for request, miss in self.scheduler.unreachable(self.now_s):
            assert miss.late_s > 0
            assert not any(sequence.last_step for sequence in request.sequences)
            self.finish(request, "unreachable")

    def advance(self) -> Point:
        """Goes on to the next point of the engine's loop, and checks the books there."""
        point = self.point = next(self._points)
        self.check()
        return point

    def check(self) -> None:
        """Asserts that every page and row is in one place, and each cached page is what it says."""
        self.scheduler.check()
        self._check_cache()

    def step(self, on_point: Callable[[Point], None] | None = None) -> None:
        """One round of the engine: up to the next "committed", or to a plan that only launched."""
        while True:
            point = self.advance()
            if on_point:
                on_point(point)
            if point == "committed" or (point == "launched" and not self._must_retire()):
                return

    def drain(self, max_steps: int) -> None:
        """Runs until all requests have ended and nothing is in flight; raises past the bound."""
        last = self.num_steps + max_steps
        while self.scheduler.has_unfinished or self._num_uncommitted:
            self.advance()
            self.expire()
            assert self.num_steps <= last, f"not done after {max_steps} steps: {self.live}"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held by anyone: what an idle engine must look like."""
        self.pool.check(())
        assert self.pool.num_free == self.pool.num_usable
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.waiting_tokens == 0
        assert set(self.outcomes) == set(self.outputs)

    def preempt(self, request: Request) -> None:
        self.scheduler.preempt(request)

    def is_running(self, request: Request) -> bool:
        return any(s.state is SequenceState.RUNNING for s in request.sequences)

    def _must_retire(self) -> bool:
        num_in_flight = len(self._in_flight)
        is_full = num_in_flight >= (2 if self._waits_for_masks() else self.depth)
        return num_in_flight > 0 and (is_full or not self._has_work)

    def _waits_for_masks(self) -> bool:
        if not self._in_flight:
            return False
        plan, step = self._in_flight[-1]
        return plan.needs_masks and not step.has_output

    def _build_masks(self, plan: StepPlan) -> dict[int, TokenMask]:
        masks = {}
        for chunk in plan.chunks:
            ids = (chunk.sequence_id, *(fork.sequence_id for fork in chunk.forks))
            for request in self.live if chunk.is_masked else ():
                for sequence in request.sequences:
                    if sequence.id in ids:
                        output = self.choices[request][sequence.choice]
                        masks[sequence.id] = self._mask_of(tuple(output))
        return masks

    def _mask_of(self, output: tuple[int, ...]) -> TokenMask:
        """Allows a third of the tokens, others after each output, and those that may end it."""
        shift = zlib.crc32(array("q", output).tobytes())
        allowed = [t for t in range(self.vocab_size) if (t + shift) % 3 == 0 or t < 3]
        return build_mask(allowed, self.vocab_size)

    def _run(self) -> Iterator[Point]:
        while True:
            self.expire()
            self.refuse()
            for request in self.live:
                request.is_followed = self._may_follow(request)
            plan = self.scheduler.schedule(self.now_s)
            self._check_plan(plan)
            self._has_work = plan.has_work
            self._num_uncommitted += plan.has_work
            yield "scheduled"
            if plan.has_work:
                self.plans.append(plan)
                self.num_steps += 1
                self._in_flight.append((plan, self.runner.launch(plan)))
            yield "launched"
            if self._waits_for_masks():  # its output goes behind all that is before it
                while len(self._in_flight) > 1:
                    yield from self._retire()
                masked, step = self._in_flight[-1]
                step.launch_output(stack_masks(self._build_masks(masked), self.vocab_size))
            if self._must_retire():
                yield from self._retire()

    def _retire(self) -> Iterator[Point]:
        launched, in_flight = self._in_flight.popleft()
        result = in_flight.result()
        yield "read"
        stopped = self._match_stops(result)
        self.now_s += self.step_s
        now_s = self.now_s if self.step_s else None
        updates = self.scheduler.commit(launched, result, stopped, now_s=now_s)
        self.num_by_column += len(launched.decodes)
        self.num_followed += sum(self.scheduler.followed_gaps.values())
        for request in self.live:
            if request.is_followed:
                self.outputs[request][:] = request.sequences[0].output
        for update in updates:
            self._deliver(update)
        self._num_uncommitted -= 1
        yield "committed"

    def _check_cache(self) -> None:
        """What the cache keeps is there, is of its identity, and is only that identity's."""
        if self.cache is None:
            return
        for node in self.cache:
            self._check_page(node, self.runner.read_page(node.page))
        if self.host_pages is not None:
            assert self.cache.host is not None
            for node in self.cache.host:
                assert node.host_page is not None
                if self.host_pages.is_intact(node.host_page):
                    self._check_page(node, self.host_pages.read(node.host_page))
        holders: dict[int, CacheIdentity | None] = {}
        for request in self.live:
            for sequence in request.sequences:
                for page in sequence.pages:
                    identity = holders.setdefault(page, request.cache_identity)
                    assert identity == request.cache_identity, f"page {page} is shared"

    def _check_page(self, node: CachedPage, cells: list[tuple[int, int, int]]) -> None:
        first = (node.depth - 1) * self.pool.page_size
        tokens = flavored(node.token_ids, flavor_of(node.identity))
        wanted = list(zip(tokens, itertools.count(first), strict=False))
        found = [cell[:2] for cell in cells]
        assert found == wanted, f"{node.token_ids} from {first} on are kept, but it holds {found}"

    def _check_plan(self, plan: StepPlan) -> None:
        if not plan.has_work and not self._in_flight:
            assert not self.scheduler.has_unfinished, f"nothing planned for {self.live}"
        assert plan.retire_first is None or (self._in_flight and not plan.has_work)
        sequences = [s for request in self.live for s in request.sequences]
        forks = {fork.sequence_id for chunk in plan.chunks for fork in chunk.forks}
        admitted = {load.sequence_id for load in plan.row_loads} - forks
        waiting = [s for s in sequences if _is_waiting(s)]
        for sequence in sequences:
            if sequence.id not in admitted:
                continue
            for other in waiting:
                is_rival = self.policy != "fair" or sequence.request.tenant == other.request.tenant
                assert other.num_overtaken <= self.max_overtakes
                if other.num_overtaken and sequence.request.priority == other.request.priority:
                    continue
                is_in_order = self._order(sequence) < self._order(other)
                assert is_in_order or not is_rival, f"{sequence.id} overtook {other.id}"

    def _order(self, sequence: Sequence) -> tuple[float, ...]:
        """Who comes first, in the words of the configuration."""
        request, age = sequence.request, sequence.id
        if self.policy == "fcfs":
            return (age,)
        if self.policy == "edf":
            times = (request.deadline_s, request.queue_deadline_s)
            due_s = min([time_s for time_s in times if time_s is not None] or [math.inf])
            return (-request.priority, due_s, age)
        if self.policy == "priority" and self.ageing_s:
            return (request.arrival_s - self.ageing_s * request.priority, age)
        return (-request.priority, age)

    def _match_stops(self, result: StepResult) -> set[int]:
        return {
            sequence.id
            for request in self.live
            for sequence in request.sequences
            if sequence.id in result.token_ids
            and len(self.choices[request][sequence.choice]) + 1 == self._stop_of(sequence)
        }

    def _may_follow(self, request: Request) -> bool:
        sampling = request.sampling
        wants_scores = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        is_plain = not (wants_scores or request in self.stops_at)
        return self.follows and is_plain and sampling.num_choices == 1

    def _stop_of(self, sequence: Sequence) -> int | None:
        stops_at = self.stops_at.get(sequence.request)
        return None if stops_at is None else stops_at + sequence.choice

    def _deliver(self, update: Update) -> None:
        sequence, request = update.sequence, update.sequence.request
        if sequence.state is SequenceState.FINISHED:
            return  # with its request, by an update before this one
        self.prompt_logprobs[request] += update.prompt_logprobs
        if update.not_finite:
            self.finish(request, "not_finite")
            return
        if update.token_id is not None and not request.is_followed:
            self.choices[request][sequence.choice].append(update.token_id)
        if update.logprobs:
            self.logprobs[sequence].append(update.logprobs)
        if update.finish:
            self.end(sequence, update.finish)

    def _check_output(self, sequence: Sequence, outcome: Outcome) -> None:
        request = sequence.request
        output = self.choices[request][sequence.choice]
        alone = expected_output(
            request.prompt,
            request.sampling,
            len(output),
            seed=request.seed,
            stop_ids=tuple(request.stop_ids),
            choice=sequence.choice,
            mask_of=self._mask_of if request.is_masked else None,
            vocab_size=self.vocab_size,
            script=self.script,
            flavor=self._flavors[sequence.id],
        )
        name = f"{request.id}, choice {sequence.choice}"
        assert output == alone, f"{name} got {output}, alone it gets {alone}"
        self._check_logprobs(sequence, output)
        min_tokens = request.sampling.min_tokens
        ends = [i for i, t in enumerate(output) if t in request.stop_ids and i >= min_tokens]
        if ends:
            assert ends == [len(output) - 1], f"{name} went on after its end token"
            assert outcome is request.stop_ids[output[-1]]
        elif self._stop_of(sequence) == len(output):
            assert outcome is FinishReason.STOP
        elif 0 < len(output) == request.max_tokens and sequence in self.ends:
            assert outcome is FinishReason.MAX_TOKENS
        elif request.max_tokens or outcome is not FinishReason.MAX_TOKENS:
            assert outcome not in (FinishReason.MAX_TOKENS, FinishReason.EOS, FinishReason.STOP)
        if outcome == "late" and request.deadline_s is None:
            assert request.sequences[0].last_step == 0, "a prefill was spent on a late request"

    def _check_logprobs(self, sequence: Sequence, output: list[int]) -> None:
        request, num_top = sequence.request, sequence.request.sampling.logprobs
        wanted: list[TokenLogprobs] = []
        if num_top is not None:
            wanted = expected_logprobs(
                request.prompt,
                output,
                num_top=num_top,
                vocab_size=self.vocab_size,
                seen_as=self._flavors[sequence.id] * FLAVOR,
            )
        assert self.logprobs[sequence] == wanted, f"{request.id} was told wrong log-probabilities"

    def _check_prompt_logprobs(self, request: Request, outcome: Outcome) -> None:
        num_top, told = request.sampling.prompt_logprobs, self.prompt_logprobs[request]
        wanted: list[TokenLogprobs] = []
        if num_top is not None:
            wanted = expected_prompt_logprobs(
                request.prompt,
                num_top=num_top,
                vocab_size=self.vocab_size,
                seen_as=self._flavors[request.sequences[0].id] * FLAVOR,
            )
        is_whole = self.outputs[request] or outcome is FinishReason.MAX_TOKENS
        if not is_whole:  # it ended before its prompt was computed
            wanted = wanted[: len(told)]
        assert told == wanted, f"{request.id} was told wrong log-probabilities of its prompt"


def flavor_of(identity: CacheIdentity) -> int:
    """Returns the flavor of the model that an identity runs on: all but whose it is."""
    model = dataclasses.replace(identity, scope="tenant", owner="", salt=None)
    return 0 if model == IDENTITY else 1 + zlib.crc32(repr(model).encode()) % 1000


def _is_waiting(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.WAITING
