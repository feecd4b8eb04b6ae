"""Random operations against the scheduler, with the fake model as the judge (harness 2).

Each round draws a configuration and plays a few hundred operations on it, between any two points
of the engine's loop; then the round is drained. On failure the seed, the configuration and the last
operations are in the error's notes: `play_round(seed)` repeats it.
"""

import collections
import random
from collections.abc import Callable
from typing import Literal, override

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.identity import CacheIdentity
from jaxserve.request import FinishReason, SamplingParams, Sequence, SequenceState
from jaxserve.scheduler.planner import Planner
from jaxserve.scheduler.starts import Starts
from jaxserve.scheduler.step_builder import StepBuilder
from tests.scheduler.loop import IDENTITY, Loop, spell_out

NUM_SHARDS = 8
OPERATIONS_A_SHARD = 12_500
OPERATIONS_A_ROUND = 250
VOCAB_SIZE = 23  # small, so that end tokens are met


def break_some(prompt: tuple[int, ...], output_index: int) -> Literal["not_finite"] | None:
    """Few prompts meet logits that are not finite, always at the same token."""
    return "not_finite" if (sum(prompt) + 7 * output_index) % 41 == 0 else None


def draw_options(rng: random.Random) -> dict[str, object]:
    chunked = rng.random() < 0.7
    chunk_tile = rng.choice((1, 1, 4, 5))
    return {
        "rows": rng.choice((1, 2, 4)),
        "depth": rng.choice((1, 2, 2, 3)),
        "batching": rng.choice(("continuous", "continuous", "static")),
        "reserve": rng.choice(("on_demand", "on_demand", "max_length")),
        "chunked_prefill": chunked,
        "chunk_tile": chunk_tile,
        "chunk_tokens": rng.choice((5, 8, 10)) if chunked else 40,
        "max_chunks": rng.choice((1, 2, 4)),
        "step_tokens": rng.choice((10, 10, 7, 3, 1, None)) if chunked else rng.choice((40, None)),
        "num_pages": rng.choice((13, 13, 11)),
        "vocab_size": VOCAB_SIZE,
        "policy": rng.choice(("priority", "priority", "fcfs", "edf", "fair")),
        "ageing_s": rng.choice((60.0, 2.0, None)),
        "weights": {"b": 3.0},
        "step_s": rng.choice((0.0, 0.1, 0.1)),
        "target_itl_s": rng.choice((None, None, 0.05, 0.2)) if chunked else None,
        "script": break_some if rng.random() < 0.3 else None,
    }


def draw_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.8)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        min_tokens=rng.choice((0, 0, 4)),
        num_choices=rng.choice((1, 1, 1, 2, 3, 4)),
        logprobs=rng.choice((None, None, None, 0, 2)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
    )


class Round:
    """One loop, the operations played on it, and their log."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        options = self.draw_options()
        self.configuration = str(options)
        self.loop = Loop(**options)  # type: ignore[arg-type]  # drawn by name
        self.log: collections.deque[str] = collections.deque(maxlen=60)
        self.num_forced: collections.Counter[Sequence] = collections.Counter()

    def draw_options(self) -> dict[str, object]:
        return draw_options(self.rng)

    def draw_prompt(self) -> tuple[int, ...]:
        prompt_len = self.rng.choice((1, 3, 4, 5, 9, 17, 30))
        return tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(prompt_len))

    def draw_identity(self) -> CacheIdentity:
        return IDENTITY

    def draw_sampling(self) -> SamplingParams:
        return draw_sampling(self.rng)

    def operations(self) -> dict[Callable[[], None], int]:
        """Returns what may be done, and how often in proportion."""
        return {
            self.submit: 14, self.advance: 80, self.abort: 3, self.end: 2, self.preempt: 1,
            self.preempt_one: 2, self.wait: 3,
        }  # fmt: skip

    def play(self, num_operations: int) -> None:
        operations = self.operations()
        for _ in range(num_operations):
            self.rng.choices(list(operations), weights=list(operations.values()))[0]()
        self.drain()

    def drain(self) -> None:
        """Nobody waits for ever, and nobody is preempted without end."""
        self.log.append("drain")
        owed = sum((len(r.prompt) + r.max_tokens) * len(r.sequences) for r in self.loop.live)
        self.loop.drain(max_steps=6 * owed + 10)
        for sequence in (s for request in self.loop.outputs for s in request.sequences):
            by_shortage = sequence.num_preemptions - self.num_forced[sequence]
            assert by_shortage <= 12, f"{sequence.id} was preempted {by_shortage} times"

    def submit(self) -> None:
        rng = self.rng
        prompt = self.draw_prompt()
        stop_ids = {1: FinishReason.EOS, 2: FinishReason.STOP} if rng.random() < 0.7 else {}
        now_s = self.loop.now_s
        sampling = self.draw_sampling()
        is_only_scored = sampling.prompt_logprobs is not None and rng.random() < 0.4
        try:
            request = self.loop.add(
                prompt,
                0 if is_only_scored else rng.choice((1, 2, 8, 16, 32)),
                sampling=sampling,
                seed=rng.randrange(2**64),
                stop_ids=stop_ids,
                priority=rng.choice((0, 0, 0, 1, 5)),
                deadline_s=now_s + rng.uniform(0, 6) if rng.random() < 0.3 else None,
                queue_deadline_s=now_s + rng.uniform(0, 20) if rng.random() < 0.2 else None,
                is_masked=rng.random() < 0.2,
                tenant=rng.choice("aaab"),
                identity=self.draw_identity(),
            )
        except InvalidRequestError:
            self.log.append(f"refused a prompt of {len(prompt)}")
            return
        if rng.random() < 0.2:
            self.loop.stops_at[request] = rng.randrange(1, 8)
        asked = f"{len(prompt)}+{request.max_tokens} n={sampling.num_choices}"
        asked += f" masked={request.is_masked} priority={request.priority}"
        self.log.append(f"submit {request.id} {asked} deadline={request.deadline_s}")

    def advance(self) -> None:
        self.log.append(self.loop.advance())

    def abort(self) -> None:
        if self.loop.live:
            request = self.rng.choice(self.loop.live)
            self.log.append(f"abort {request.id}")
            self.loop.abort(request)

    def end(self) -> None:
        """Ends one choice, as if it had come to an end of its own."""
        left = [s for r in self.loop.live for s in r.sequences if s not in self.loop.ends]
        if left:
            sequence = self.rng.choice(left)
            self.log.append(f"end sequence {sequence.id} {sequence.state.name}")
            self.loop.end(sequence, FinishReason.CANCELLED)

    def preempt(self) -> None:
        if self.loop.live:
            request = self.rng.choice(self.loop.live)
            self.num_forced.update(s for s in request.sequences if is_running(s))
            self.log.append(f"preempt {request.id}")
            self.loop.preempt(request)

    def preempt_one(self) -> None:
        running = [s for r in self.loop.live for s in r.sequences if is_running(s)]
        if running:
            sequence = self.rng.choice(running)
            self.num_forced[sequence] += 1
            self.log.append(f"preempt sequence {sequence.id}")
            self.loop.scheduler._planner.preemption.preempt(sequence)

    def wait(self) -> None:
        self.loop.now_s += self.rng.uniform(0, 3)
        late = self.loop.expire()
        self.log.append(f"now {self.loop.now_s:.2f}, late {[r.id for r in late]}")


def is_running(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.RUNNING


def play_round(
    seed: int, num_operations: int = OPERATIONS_A_ROUND, *, kind: type[Round] = Round
) -> Round:
    played = kind(random.Random(seed))
    try:
        played.play(num_operations)
    except BaseException as error:
        error.add_note(f"seed {seed}: {played.configuration}")
        error.add_note("\n".join(played.log))
        raise
    return played


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_random_operations_lose_no_page_and_change_no_output(shard: int) -> None:
    ran: collections.Counter[str] = collections.Counter()
    for index in range(OPERATIONS_A_SHARD // OPERATIONS_A_ROUND):
        loop = play_round(seed=1000 * shard + index).loop
        ran["requests"] += len(loop.outcomes)
        for outcome in loop.outcomes.values():
            ran[str(outcome)] += 1
        for name in ("preemptions", "recomputed_tokens", "chunked_prompts", "surplus_tokens",
                     "forked_choices"):  # fmt: skip
            ran[name] += int(loop.metrics.value(f"{name}_total"))
        ran["copies"] += sum(len(plan.copies) for plan in loop.plans)
        ran["masked steps"] += sum(plan.needs_masks for plan in loop.plans)
        ran["scores"] += sum(map(len, loop.prompt_logprobs.values()))
        ran["only scored"] += sum(not request.max_tokens for request in loop.outputs)
        ran["ends"] += len(loop.ends)
        assert loop.metrics.value("useful_rows_total") <= loop.metrics.value("offered_rows_total")
    assert len(+ran) == 19, f"something never happened, the test is weak: {ran}"


class Followed(Round):
    """With outputs that are read where they grow."""

    @override
    def draw_options(self) -> dict[str, object]:
        return super().draw_options() | {"follows": True}


class Roomy(Round):
    """With pages for all, so that who decodes is planned by column."""

    @override
    def draw_options(self) -> dict[str, object]:
        page_size, credit = self.rng.choice((4, 8)), self.rng.choice((0, 16))
        return super().draw_options() | {
            "num_pages": 80, "page_size": page_size, "rows": 4, "fair_credit_tokens": credit
        }  # fmt: skip

    @override
    def draw_sampling(self) -> SamplingParams:
        is_plain = self.rng.random() < 0.8
        return SamplingParams(temperature=0.8) if is_plain else super().draw_sampling()


class FollowedRoomy(Roomy, Followed):
    pass


def outcomes_of(loop: Loop) -> dict[str, object]:
    return {request.id: outcome for request, outcome in loop.outcomes.items()}


@pytest.mark.parametrize(
    ("kind", "followed_kind", "least_by_column"),
    [(Round, Followed, 0.0), (Roomy, FollowedRoomy, 0.3)],
)
def test_who_is_followed_gets_what_all_others_get(
    kind: type[Round], followed_kind: type[Round], least_by_column: float
) -> None:
    """The same plans, outputs, ends and pages kept, and of most tokens no update."""
    num_followed = num_tokens = num_by_column = 0
    for seed in range(20):
        told, followed = play_round(seed, kind=kind).loop, play_round(seed, kind=followed_kind).loop
        assert spell_out(followed.plans) == spell_out(told.plans), f"seed {seed}"
        for loop in (told, followed):
            value = loop.metrics.value
            assert list(loop.outputs.values()) == list(told.outputs.values()), f"seed {seed}"
            assert outcomes_of(loop) == outcomes_of(told), f"seed {seed}"
            assert value("surplus_tokens_total") == told.metrics.value("surplus_tokens_total")
            assert value("useful_rows_total") == told.metrics.value("useful_rows_total")
        assert told.num_followed == told.num_by_column == 0
        num_by_column += followed.num_by_column
        assert followed.metrics.value("decode_table_tokens_total") == followed.num_by_column
        num_followed += followed.num_followed
        num_tokens += sum(map(len, followed.outputs.values()))
    assert 0.2 * num_tokens < num_followed < num_tokens
    assert num_by_column > least_by_column * num_followed


class SmallPages(FollowedRoomy):
    """With tables that grow at nearly each token, and as many tokens in the pool as ever, or room
    for all."""

    @override
    def draw_options(self) -> dict[str, object]:
        options = super().draw_options()
        page_size, capacity = self.rng.choice((1, 2, 4)), self.rng.choice((48, 320))
        return options | {"page_size": page_size, "num_pages": 1 + capacity // page_size}


def play_noting(seed: int, patch: pytest.MonkeyPatch) -> tuple[Loop, list[int]]:
    """Returns the round's loop, and what each step left promised for who starts behind it."""
    promised: list[int] = []
    start_all = Starts.start_all

    def note(starts: Starts, step: StepBuilder, now_s: float) -> None:
        promised.append(step.num_promised)
        start_all(starts, step, now_s)

    patch.setattr(Starts, "start_all", note)
    return play_round(seed, kind=SmallPages).loop, promised


def test_the_short_ways_to_plan_a_token_plan_what_the_long_one_does() -> None:
    num_grown = num_by_column = 0
    for seed in range(40):
        with pytest.MonkeyPatch.context() as patch:
            short, promised = play_noting(seed, patch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Planner, "_pay_token", lambda self, sequence, step: False)
            long, as_promised = play_noting(seed, patch)
        assert as_promised == promised, f"seed {seed}"
        assert spell_out(long.plans) == spell_out(short.plans), f"seed {seed}"
        assert long.num_by_column == 0
        num_by_column += short.num_by_column
        num_grown += int(short.metrics.value("kv_grown_pages_total"))
    assert num_grown > 1000
    assert num_by_column > 100
