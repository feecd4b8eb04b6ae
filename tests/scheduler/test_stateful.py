"""What clients, operators and devices may do to a scheduler with a prefix cache, in any order.

A state machine of hypothesis: a run is a scheduler of some configuration and a few hundred
operations on it, and what fails is cut down to the few that it takes. After each operation no page
is lost or twice, references are what the tables say, nothing that is free can be found, and each
cached page re-hashes to its key and holds what that says. Each request ends once, within a bound,
with the output that it would get alone without a cache.
"""

import collections
import dataclasses
import random
import sys
import time
from typing import ClassVar, Final, Literal

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxserve.identity import CacheIdentity
from tests.scheduler.loop import IDENTITY
from tests.scheduler.test_cache_operations import NUM_KINDS, CachedRound
from tests.scheduler.test_random_operations import break_some

OPERATIONS: Final = 50_000
NIGHTLY_OPERATIONS: Final = 1_000_000
RULES_A_RUN: Final = 120
RUNS_A_BATCH: Final = 10  # after ten hypothesis varies those that it has, with less that is new
SCOPES: Final[tuple[Literal["tenant", "shared"], ...]] = ("tenant", "shared")


class StatefulRound(CachedRound):
    """A round in which the machine says what is next; what it draws is hypothesis's too."""

    def __init__(self, rng: random.Random) -> None:
        self.loaded = IDENTITY  # what runs now, and who asks
        self.known = [IDENTITY]  # what has
        self.failing = 0  # of so many prompts one fails; 0: none
        super().__init__(rng)

    def draw_options(self) -> dict[str, object]:
        return super().draw_options() | {"script": self.break_steps}

    def break_steps(self, prompt: tuple[int, ...], output_index: int) -> str | None:
        if self.failing and (sum(prompt) + len(prompt)) % self.failing == 0:
            return "not_finite"
        return break_some(prompt, output_index)

    def draw_identity(self) -> CacheIdentity:
        return self.rng.choice((self.loaded, IDENTITY, IDENTITY, self.rng.choice(self.known)))

    def change(self, field: str) -> None:
        """Other weights, another adapter or the same loaded again, another tenant or salt."""
        loaded, rng = self.loaded, self.rng
        match field:
            case "weights":
                new = dataclasses.replace(loaded, weights=rng.choice(("w", "other")))
            case "adapter":
                new = dataclasses.replace(loaded, adapter=rng.choice((None, "a", "b")))
            case "adapter_generation":
                again = loaded.adapter_generation + 1
                new = dataclasses.replace(loaded, adapter_generation=again)
            case "owner":
                owner = rng.choice(("", "a", "b"))
                new = dataclasses.replace(loaded, scope=rng.choice(SCOPES), owner=owner)
            case _:
                new = dataclasses.replace(loaded, salt=rng.choice((None, "", "a")))
        self.loaded = new
        self.known.append(new)

    def wait(self) -> None:
        self.loop.now_s += self.rng.choice((0.1, 0.1, 0.1, 3.0))
        self.log.append(f"now {self.loop.now_s:.2f}, late {[r.id for r in self.loop.expire()]}")

    def ask_again(self) -> None:
        """Who is cancelled asks the same again in the same moment."""
        if self.loop.live:
            request = self.rng.choice(self.loop.live)
            self.log.append(f"abort {request.id} and ask again: r{len(self.loop.outputs)}")
            self.loop.abort(request)
            self.loop.add(
                request.prompt,
                request.max_tokens,
                sampling=request.sampling,
                seed=request.seed,
                tenant=request.tenant,
                identity=request.cache_identity or IDENTITY,
            )

    def fail_step(self) -> None:
        """The next step's logits are no numbers, for all that are in it or for some."""
        self.failing = self.rng.choice((1, 2, 5))
        self.loop.step()
        self.failing = 0

    def evict(self) -> None:
        """What is worth the least goes, as if its room were needed."""
        pool = self.loop.pool
        if pool.num_cached:
            held = pool.allocate(pool.num_free - pool.num_cached + 1)
            pool.release(held, last_step=0)

    def drop(self) -> None:
        """Any page goes, and all behind it, whoever holds them."""
        pool = self.loop.pool
        nodes = list(pool.cache or ())
        if nodes:
            pool.drop(self.rng.choice(nodes))


def is_busy(machine: "SchedulerMachine") -> bool:
    return bool(machine.round.loop.live)


def has_cached(machine: "SchedulerMachine") -> bool:
    return bool(machine.round.loop.pool.cache)


def has_host_pages(machine: "SchedulerMachine") -> bool:
    pages = machine.round.loop.host_pages
    return pages is not None and bool(pages.stored)


class SchedulerMachine(RuleBasedStateMachine):
    """One run. The class counts, over all runs, the operations and what came of them."""

    num_operations: ClassVar[int]
    ran: ClassVar[collections.Counter[str]]

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng: random.Random) -> None:
        self.round = StatefulRound(rng)

    @rule(number=st.integers(1, 4))
    def submit(self, number: int) -> None:
        for _ in range(number):
            self.round.submit()
        self.count(number)

    @rule(number=st.integers(1, 12))
    def go_on(self, number: int) -> None:
        """To the next point, so many times: a plan, a launch, a result, a commit."""
        for _ in range(number):
            self.round.advance()
        self.count(number)

    @rule(number=st.integers(1, 12))
    def step(self, number: int) -> None:
        for _ in range(number):
            self.round.loop.step()
        self.count(number)

    @rule()
    def fail_step(self) -> None:
        self.round.fail_step()
        self.count()

    @precondition(is_busy)
    @rule(how=st.sampled_from(("cancel", "cancel and ask again", "finish one choice")))
    def end(self, how: str) -> None:
        match how:
            case "cancel":
                self.round.abort()
            case "finish one choice":
                self.round.end()
            case _:
                self.round.ask_again()
        self.count()

    @precondition(is_busy)
    @rule(what=st.sampled_from(("one choice", "all of a request")))
    def preempt(self, what: str) -> None:
        if what == "one choice":
            self.round.preempt_one()
        else:
            self.round.preempt()
        self.count()

    @rule()
    def let_time_pass(self) -> None:
        self.round.wait()
        self.count()

    @precondition(has_cached)
    @rule(how=st.sampled_from(("evict", "drop", "flush")))
    def lose_pages(self, how: str) -> None:
        match how:
            case "evict":
                self.round.evict()
            case "drop":
                self.round.drop()
            case _:
                self.round.flush()
        self.count()

    @precondition(has_host_pages)
    @rule()
    def spoil_host_pages(self) -> None:
        self.round.spoil()
        self.count()

    @rule(field=st.sampled_from(("weights", "adapter", "adapter_generation", "owner", "salt")))
    def change(self, field: str) -> None:
        self.round.change(field)
        self.count()

    @invariant()
    def every_page_is_what_it_is_kept_for(self) -> None:
        self.round.loop.check()

    def count(self, number: int = 1) -> None:
        type(self).num_operations += number

    def teardown(self) -> None:
        if not hasattr(self, "round"):
            return
        if sys.exc_info()[0] is not None:  # it has failed already, or there is no more to draw
            hypothesis.note(self.round.configuration)
            hypothesis.note("\n".join(self.round.log))
            return
        self.round.drain()
        type(self).ran.update(self.round.tell())


SETTINGS: Final = hypothesis.settings(
    max_examples=RUNS_A_BATCH,
    stateful_step_count=RULES_A_RUN,
    phases=(Phase.generate, Phase.shrink),
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def play(num_operations: int, *, seed: int) -> collections.Counter[str]:
    """Plays batches of runs until there are so many operations; returns what they met."""

    class Machine(SchedulerMachine):
        num_operations: ClassVar[int] = 0
        ran: ClassVar[collections.Counter[str]] = collections.Counter()

    while Machine.num_operations < num_operations:
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=SETTINGS)
        except BaseException as error:
            error.add_note(f"play(1, seed={seed})")
            raise
        seed += 1
    return Machine.ran


def check_met(ran: collections.Counter[str]) -> None:
    assert len(+ran) == NUM_KINDS, f"something never happened, the test is weak: {ran}"


@pytest.mark.timeout(900)  # a failure is cut down first
def test_any_order_of_operations_keeps_the_books_and_the_outputs() -> None:
    check_met(play(OPERATIONS, seed=0))


@pytest.mark.nightly
def test_a_million_operations_keep_the_books_and_the_outputs() -> None:
    check_met(play(NIGHTLY_OPERATIONS, seed=time.time_ns()))
