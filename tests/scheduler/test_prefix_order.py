"""Who starts before its turn for what the prefix cache has of its prompt, and how often."""

import random

import pytest

from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.request import Request
from jaxserve.scheduler.policies import build_order
from jaxserve.scheduler.prefix_cache import PrefixCache
from jaxserve.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.loop import Loop, Policy
from tests.scheduler.test_policies import started

KNOWN = tuple(range(100, 112))  # three pages


def build_loop(*, is_on: bool = True, policy: Policy = "fcfs", max_overtakes: int = 8) -> Loop:
    """One row, and the pages of KNOWN in the cache."""
    loop = Loop(
        cache=PrefixCache(4),
        rows=1,
        num_pages=40,
        policy=policy,
        prefix_order=is_on,
        prefix_max_overtakes=max_overtakes,
    )
    loop.add(KNOWN, 2)
    loop.drain(max_steps=20)
    return loop


def num_reordered(loop: Loop) -> int:
    return int(loop.metrics.value("reordered_starts_total"))


def test_who_has_more_of_its_prompt_in_the_cache_starts_first_and_it_is_counted() -> None:
    loop = build_loop()
    none = loop.add(9, 1)
    some = loop.add((*KNOWN[:4], 1, 2, 3), 1)
    most = loop.add((*KNOWN, 1), 1)
    as_much = loop.add((*KNOWN, 2), 1)
    loop.drain(60)
    assert started(loop)[1:] == [most, as_much, some, none]
    assert num_reordered(loop) == 3
    assert none.sequences[0].num_overtaken == 3


def test_off_the_order_is_the_policys_and_nothing_is_counted() -> None:
    loop = build_loop(is_on=False)
    requests = [loop.add(9, 1), loop.add((*KNOWN, 1), 1)]
    loop.drain(60)
    assert started(loop)[1:] == requests
    assert num_reordered(loop) == 0


@pytest.mark.parametrize("bound", [1, 3])
def test_nobody_is_overtaken_more_often_than_the_bound(bound: int) -> None:
    """As many as wait with all of it in the cache, and more come all the time."""
    loop = build_loop(max_overtakes=bound)
    none = loop.add(9, 1)
    for number in range(40):
        loop.add((*KNOWN, number), 1)
        loop.step()
    assert none.sequences[0].num_overtaken == bound
    assert none not in loop.live
    loop.drain(400)


def test_no_higher_class_is_overtaken_nor_looked_past() -> None:
    loop = build_loop(policy="priority")
    higher = loop.add(9, 1, priority=1)
    known = loop.add((*KNOWN, 1), 1)
    loop.drain(60)
    assert started(loop)[1:] == [higher, known]
    assert num_reordered(loop) == 0


def test_the_tenant_given_least_comes_first_whatever_is_cached() -> None:
    loop = build_loop(policy="fair")
    running = loop.add(3, 6, tenant="a")
    loop.step()
    known = loop.add((*KNOWN, 1), 1, tenant="a")
    other = loop.add(9, 1, tenant="b")
    loop.drain(60)
    assert started(loop)[1:] == [running, other, known]


def test_what_gave_its_pages_up_is_not_overtaken() -> None:
    loop = build_loop()
    first = loop.add(9, 8)
    for _ in range(3):
        loop.step()
    loop.preempt(first)
    known = loop.add((*KNOWN, 1), 1)
    loop.drain(60)
    assert first.sequences[0].num_overtaken == 0
    assert list(loop.outcomes)[1:] == [first, known]


@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_the_same_and_the_bound_holds_whatever_comes(seed: int) -> None:
    outputs: list[list[list[int]]] = []
    for is_on in (True, False):
        rng = random.Random(seed)
        loop = Loop(
            cache=PrefixCache(4),
            policy=("fcfs", "priority", "fair")[seed % 3],
            prefix_order=is_on,
            prefix_max_overtakes=2,
        )
        requests: list[Request] = []
        for _ in range(40):
            beginning = KNOWN[: rng.choice((0, 4, 8, 12))]
            prompt = (*beginning, *(rng.randrange(50) for _ in range(rng.randrange(1, 9))))
            priority = rng.choice((0, 0, 1)) if loop.policy == "priority" else 0
            tenant = rng.choice("ab")
            max_tokens = rng.randrange(1, 8)
            requests.append(loop.add(prompt, max_tokens, priority=priority, tenant=tenant))
            for _ in range(rng.randrange(3)):
                loop.step()
        loop.drain(2000)
        outputs.append([loop.outputs[request] for request in requests])
        assert (num_reordered(loop) > 0) is is_on
        assert max(r.sequences[0].num_overtaken for r in requests) <= (2 if is_on else 0)
    assert outputs[0] == outputs[1]


def test_the_front_of_a_queue_is_its_first_in_order_whoever_has_left() -> None:
    config = load_config().scheduler
    queue, rng = WaitingQueue(build_order(config)), random.Random(5)
    loop = Loop()
    sequences = [loop.add(2, 1, priority=rng.randrange(3)).sequences[0] for _ in range(200)]
    for sequence in sequences:
        queue.add(sequence)
    for sequence in rng.sample(sequences[:120], 60):
        queue.remove(sequence)
        if rng.random() < 0.3:
            queue.add(sequence)  # a second entry
    expected = sorted(queue._members.values(), key=build_order(config))
    front = queue.find_front(16)
    assert len(front) > 4
    assert front == expected[: len(front)]


def test_with_deadlines_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"prefix_order does not go with policy = \"edf\""):
        load_config(flags={"scheduler.prefix_order": True, "scheduler.policy": "edf"})
