"""Who comes first, who gives pages up, and what a tenant is given."""

import collections
import random

import pytest

from jaxserve.config import SchedulerSection
from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request
from jaxserve.scheduler.fair_shares import FairShares
from jaxserve.scheduler.policies import build_order, check_priority, find_victim
from tests.scheduler.loop import Loop, Point


def started(loop: Loop) -> list[Request]:
    """Requests in the order of their first step."""
    first: dict[int, int] = {}
    for plan in loop.plans:
        for load in plan.row_loads:
            first.setdefault(load.sequence_id, plan.step_id)
    by_sequence = {s.id: request for request in loop.outputs for s in request.sequences}
    return [by_sequence[id_] for id_ in sorted(first, key=lambda id_: (first[id_], id_))]


def test_fcfs_is_by_arrival_whatever_the_class() -> None:
    loop = Loop(rows=1, policy="fcfs")
    requests = [loop.add(3, 2, priority=priority) for priority in (0, 5, -1, 5)]
    loop.drain(60)
    assert started(loop) == requests


def test_fcfs_refuses_classes_by_name_and_the_others_take_them() -> None:
    check_priority(SchedulerSection(policy="fcfs"), 0)
    with pytest.raises(InvalidRequestError, match="fcfs, which has no classes"):
        check_priority(SchedulerSection(policy="fcfs"), 3)
    for policy in ("priority", "edf", "fair"):
        check_priority(SchedulerSection(policy=policy), 3)


def test_edf_takes_the_nearest_deadline_of_a_class_and_no_deadline_last() -> None:
    loop = Loop(rows=1, policy="edf")
    running = loop.add(3, 4, priority=9)
    loop.step()
    none = loop.add(3, 1)
    late = loop.add(3, 1, deadline_s=500.0)
    soon = loop.add(3, 1, deadline_s=100.0)
    admission = loop.add(3, 1, queue_deadline_s=50.0)
    higher = loop.add(3, 1, priority=1, deadline_s=900.0)
    loop.drain(60)
    assert started(loop) == [running, higher, admission, soon, late, none]


@pytest.mark.parametrize(("ageing_s", "is_bounded"), [(10.0, True), (None, False)])
def test_a_low_class_waits_no_longer_than_its_age_allows(
    ageing_s: float | None, is_bounded: bool
) -> None:
    """A higher class keeps the one row busy for 100 s; two classes lower is 20 s behind it."""
    loop = Loop(rows=1, ageing_s=ageing_s, depth=1)
    low = loop.add(3, 1, priority=0)
    loop.preempt(low)
    begun_s = None
    for step in range(100):
        loop.now_s = float(step)
        loop.add(2, 1, priority=2)
        loop.step()
        if begun_s is None and low.sequences[0].last_step:
            begun_s = loop.now_s
    assert (begun_s is not None) is is_bounded
    if begun_s is not None:
        backlog_s = 25.0  # of the higher class, from before the 20 s were over
        assert 20.0 <= begun_s <= 20.0 + backlog_s


def test_a_class_is_worth_its_time_and_no_more() -> None:
    order = build_order(SchedulerSection(ageing_s=10.0))
    loop = Loop()
    loop.now_s = 0.0
    early = loop.add(1, 1, priority=0).sequences[0]
    loop.now_s = 19.0
    ahead = loop.add(1, 1, priority=2).sequences[0]
    loop.now_s = 21.0
    behind = loop.add(1, 1, priority=2).sequences[0]
    assert order(ahead) < order(early) < order(behind)


def test_the_victim_has_least_to_lose_of_the_lowest_class() -> None:
    loop = Loop()
    order = build_order(SchedulerSection())
    high = loop.add(1, 1, priority=1).sequences[0]
    most, least, as_little = (loop.add(1, 1).sequences[0] for _ in range(3))
    for sequence, num_computed in ((high, 1), (most, 9), (least, 4), (as_little, 4)):
        sequence.num_computed = num_computed
    running = [high, most, least, as_little]
    assert find_victim(running, order, max_preemptions=2) is as_little  # the last of equals
    as_little.num_preemptions = 2
    assert find_victim(running, order, max_preemptions=2) is least
    least.num_preemptions = most.num_preemptions = 2
    assert find_victim(running, order, max_preemptions=2) is high
    high.num_preemptions = 2
    assert find_victim(running, order, max_preemptions=2) is as_little  # as if there were no bound
    assert find_victim([], order, max_preemptions=2) is None


def test_nobody_is_preempted_for_a_class_beyond_the_bound() -> None:
    """One row; a higher class comes again and again, and takes it three times."""
    loop = Loop(rows=1, depth=1)
    low = loop.add(3, 20)
    for _ in range(6):
        loop.step()
        loop.add(2, 1, priority=1)
        loop.step()
    assert low.sequences[0].num_preemptions == 3
    loop.drain(200)


def test_shares_follow_weights_while_both_wait() -> None:
    shares = FairShares({"a": 1.0, "b": 3.0}.__getitem__)
    given: collections.Counter[str] = collections.Counter()
    shares.join("a", [])
    shares.join("b", ["a"])
    for _ in range(400):
        tenant = min("ab", key=lambda name: (shares.level(name), name))
        shares.charge(tenant, 10)
        given[tenant] += 10
    assert given["b"] == pytest.approx(3 * given["a"], rel=0.02)


def test_who_was_away_has_saved_nothing_up() -> None:
    shares = FairShares(lambda tenant: 1.0)
    shares.join("a", [])
    shares.charge("a", 1000)
    shares.join("b", ["a"])
    assert shares.level("b") == shares.level("a")
    shares.charge("b", 50)
    shares.join("c", [])  # nobody waits: it begins where the least that waited was
    assert shares.level("c") == 1000


def test_who_stays_within_its_share_saves_up_to_the_credit() -> None:
    shares = FairShares({"a": 1.0, "b": 1.0, "c": 2.0}.__getitem__, credit_tokens=100)
    shares.join("a", [])
    shares.charge("a", 1000)
    shares.join("b", ["a"])
    assert shares.level("b") == 900
    shares.charge("b", 30)
    shares.charge("a", 50)
    shares.join("b", ["a"])
    assert shares.level("b") == 950  # of 120 that it might have had more, 100
    shares.join("c", ["a", "b"])
    assert shares.level("c") == 1050 - 50  # half as much by weight


def test_who_was_given_a_good_deal_more_than_one_that_is_present_is_ahead() -> None:
    shares = FairShares(lambda tenant: 1.0, credit_tokens=160)
    for tenant, num_tokens in (("a", 5), ("b", 16), ("a", 1)):
        shares.charge(tenant, num_tokens)
    shares.find_ahead()
    assert not shares.is_ahead("b")  # by 10, which is a sixteenth of the credit
    shares.charge("b", 1)
    shares.find_ahead()
    assert shares.is_ahead("b")
    assert not shares.is_ahead("a")
    shares.charge("b", 160)
    shares.find_ahead()
    assert not shares.is_ahead("b")  # nobody else is present


def test_in_which_order_the_tokens_of_a_step_were_counted_says_nothing() -> None:
    for order in ("aaaaab", "baaaaa"):
        shares = FairShares(lambda tenant: 1.0, credit_tokens=16)
        for tenant in order:
            shares.count_token(tenant)
        shares.charge_counted()
        shares.charge("c", 12)  # too few to forget b, who had its token among the first six
        shares.find_ahead()
        assert list(map(shares.is_ahead, "abc")) == [True, False, True], order


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    shares = FairShares(lambda tenant: 1.0)
    for number in range(5000):
        shares.join(f"t{number}", [f"t{number - 1}"] if number else [])
        shares.charge(f"t{number}", 1)
    assert len(shares._levels) <= 70


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_shared_by_weight_while_both_have_work(seed: int) -> None:
    """Theorem 4.4 of the paper, with a request's tokens as the bound, whoever sends more."""
    rng = random.Random(seed)
    loop = Loop(rows=3, policy="fair", weights={"b": 2.0}, num_pages=40, max_len=20, chunk_tokens=8)
    for _ in range(60):
        loop.add(rng.randrange(1, 12), rng.randrange(1, 8), tenant="a")
        if rng.random() < 0.8:
            loop.add(rng.randrange(1, 12), rng.randrange(1, 8), tenant="b")
    given = {"a": 0.0, "b": 0.0}
    tenants = {s.id: r.tenant for r in loop.outputs for s in r.sequences}
    num_plans = 0
    while all(any(r.tenant == name and not r.sequences[0].last_step for r in loop.live)
              for name in "ab"):  # fmt: skip
        loop.advance()
        for plan in loop.plans[num_plans:]:
            for chunk in plan.chunks:
                if chunk.start + chunk.num_tokens > 0:
                    given[tenants[chunk.sequence_id]] += chunk.num_tokens
        num_plans = len(loop.plans)
    longest, rows = 20, 3
    assert sum(given.values()) > 150
    assert abs(given["a"] - given["b"] / 2.0) <= 2 * rows * longest
    loop.drain(2000)


def test_a_tenant_that_fills_all_rows_gives_one_up_for_one_that_has_none() -> None:
    loop = Loop(rows=4, policy="fair", num_pages=40, max_len=40)
    flood = [loop.add(3, 30, tenant="flood") for _ in range(9)]
    for _ in range(8):
        loop.step()
    assert sum(map(loop.is_running, flood)) == 4
    other = loop.add(3, 10, tenant="other")
    for _ in range(3):
        loop.step()
    assert loop.is_running(other)
    assert sum(map(loop.is_running, flood)) == 3
    more = [loop.add(3, 10, tenant="other") for _ in range(4)]
    for _ in range(4):
        loop.step()
    assert sum(map(loop.is_running, (other, *more))) == 2  # half, and no more
    loop.drain(900)
    assert max(r.sequences[0].num_preemptions for r in flood) <= 3


def test_room_is_for_whom_it_was_made_where_both_were_given_as_much() -> None:
    """Then who gave it up is first in the queue, for it came before."""
    loop = Loop(rows=2, policy="fair", num_pages=40, max_len=40, chunk_tokens=16)
    loop.add(12, 1, tenant="b")
    loop.drain(20)
    held = [loop.add(3, 30, tenant="a") for _ in range(2)]
    shares = loop.scheduler._planner._shares
    assert shares is not None
    while shares.level("a") < shares.level("b"):
        loop.step()
    assert shares.level("a") == shares.level("b")
    assert all(map(loop.is_running, held))
    other = loop.add(3, 10, tenant="b")
    loop.step()
    assert loop.is_running(other)
    assert sum(map(loop.is_running, held)) == 1
    loop.drain(300)


def test_who_comes_within_its_share_starts_in_the_next_step_beyond_its_rows_too() -> None:
    """With credit what counts is what both were given; without it rows are halved."""
    loop = Loop(
        rows=4, policy="fair", num_pages=80, max_len=40, step_tokens=None, fair_credit_tokens=500
    )
    loop.add(3, 1, tenant="other")
    loop.step()
    for _ in range(30):
        loop.add(3, 30, tenant="flood")
    for _ in range(60):
        loop.step()
    others = [loop.add(1, 8, tenant="other") for _ in range(3)]
    for _ in range(2):
        loop.step()
    assert all(map(loop.is_running, others))
    loop.drain(1000)


@pytest.mark.parametrize(("credit", "num_free"), [(64, 1), (0, 0)])
def test_a_row_stays_free_for_a_tenant_that_is_present(credit: int, num_free: int) -> None:
    loop = Loop(
        rows=5, policy="fair", num_pages=80, max_len=40, max_chunks=4, fair_credit_tokens=credit
    )
    loop.add(3, 1, tenant="other")
    loop.step()
    for _ in range(40):
        loop.add(3, 3, tenant="flood")
    assert find_least_free(loop, num_steps=10) == num_free
    assert find_least_free(loop, num_steps=30) == 0  # it is not present any more
    loop.drain(1000)


def find_least_free(loop: Loop, *, num_steps: int) -> int:
    """Returns the fewest rows that plans left free."""
    free: list[int] = []

    def look(point: Point) -> None:
        if point == "scheduled":
            free.append(loop.scheduler._running.num_free_rows)

    for _ in range(num_steps):
        loop.step(look)
    return min(free)


def test_prompts_of_who_is_ahead_are_half_of_a_step() -> None:
    loop = Loop(
        rows=5, policy="fair", num_pages=80, max_len=40, chunk_tokens=8, fair_credit_tokens=80
    )
    loop.add(3, 1, tenant="other")
    loop.step()
    for _ in range(4):
        loop.add(30, 1, tenant="flood")
    for _ in range(40):
        loop.step()
    longest = [max((c.num_tokens for c in plan.chunks), default=0) for plan in loop.plans]
    assert max(longest) == 8
    assert 4 in longest[3:12]
    loop.drain(1000)


def test_a_tenant_alone_has_everything() -> None:
    loop = Loop(rows=4, policy="fair", num_pages=40, max_len=40)
    requests = [loop.add(3, 8, tenant="only") for _ in range(8)]
    for _ in range(6):
        loop.step()
    assert sum(map(loop.is_running, requests)) == 4
    assert loop.metrics.value("preemptions_total") == 0
    loop.drain(300)


def test_a_class_counts_among_the_requests_of_one_tenant_alone() -> None:
    loop = Loop(rows=1, policy="fair")
    first = loop.add(3, 6, tenant="a")
    loop.step()
    loop.add(3, 1, tenant="b", priority=9)
    for _ in range(2):
        loop.step()
    assert first.sequences[0].num_preemptions == 0
    low = loop.add(3, 1, tenant="a")
    high = loop.add(3, 1, tenant="a", priority=1)
    loop.drain(100)
    order = started(loop)
    assert order.index(high) < order.index(low)
