"""The host tier's books: what goes there, what comes back when, and what leaves for good."""

from collections.abc import Sequence

import pytest

from jaxserve.host_pages import MAX_SWAP_OUT, SwapCosts
from jaxserve.metrics import Metrics
from jaxserve.plan import PageOut
from jaxserve.request import Request
from jaxserve.scheduler.cached_page import CachedPage
from jaxserve.scheduler.host_tier import HostTier
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache
from tests.fake_host_pages import ALWAYS_WORTH_IT, FakeHostPages
from tests.scheduler.loop import IDENTITY, Loop, Point
from tests.scheduler.test_prefix_cache import as_tokens


class Books:
    """A pool of pages of two tokens, its cache and a tier, without a scheduler."""

    def __init__(
        self, *, num_pages: int = 6, num_host_pages: int = 8, costs: SwapCosts = ALWAYS_WORTH_IT
    ) -> None:
        self.metrics = Metrics()
        self.pages = FakeHostPages(num_host_pages, costs=costs)
        self.tier = HostTier(self.pages, self.metrics, page_size=2)
        self.cache = PrefixCache(2, host=self.tier)
        self.pool = PagePool(num_pages + 1, 2, cache=self.cache)
        self.step_id = 0

    def keep(self, text: str, *, is_checked: bool = True) -> list[CachedPage]:
        """Computes a text and gives it up; returns its pages."""
        parent = self.cache.add_identity(IDENTITY)
        path = []
        for start in range(0, len(text), 2):
            (page,) = self.pool.allocate(1)
            node = self.cache.add(parent, as_tokens(text[start : start + 2]), page)
            assert node is not None
            path.append(node)
            parent = node
        self.pool.release([node.page for node in reversed(path)], last_step=0)
        if is_checked:
            self.check()
        return path

    def press(self, num_pages: int) -> None:
        """Somebody needs room, and gives it back."""
        self.pool.release(self.pool.allocate(num_pages), last_step=0)
        self.check()

    def plan(self) -> tuple[PageOut, ...]:
        self.step_id += 1
        return self.tier.pop_moves(self.step_id)

    def retire(self) -> None:
        for step_id in range(1, self.step_id + 1):
            for host_page in self.tier._storing.get(step_id, ()):
                self.pages.store(host_page, [(0, 0, host_page)])
            self.pool.retire(step_id)
        self.check()

    def find(self, text: str) -> int:
        """Returns how many pages of a text are found in pool and host memory."""
        node: CachedPage | None = self.cache.find_identity(IDENTITY)
        count = 0
        for start in range(0, len(text), 2):
            tokens = as_tokens(text[start : start + 2])
            assert node is not None
            node = self.cache.find(node, tokens) or self.tier.find(node, tokens)
            if node is None:
                break
            count += 1
        return count

    def dropped(self, reason: str) -> float:
        return self.metrics.value("host_tier_dropped_pages_total", reason=reason)

    def check(self) -> None:
        self.pool.check()


def test_what_the_pool_drops_is_found_again_once_its_step_has_retired() -> None:
    books = Books()
    path = books.keep("aabbcc")
    pages = [node.page for node in path]
    books.press(6)
    assert books.find("aabbcc") == 0
    moves = books.plan()
    assert [move.page for move in moves] == pages[::-1]  # what is last goes first
    assert books.find("aabbcc") == 0  # it is on its way
    books.retire()
    assert books.find("aabbcc") == 3
    assert books.metrics.value("host_tier_used_bytes") == 3 * books.pages.page_bytes


def test_pages_that_would_go_next_ride_along_and_stay_in_the_pool() -> None:
    books = Books()
    path = books.keep("aabbccdd")
    books.press(3)  # two are free; one goes
    assert [node.is_live for node in path] == [True, True, True, False]
    moves = books.plan()
    assert len(moves) == 4
    books.retire()
    books.press(6)
    assert books.plan() == ()  # all of it is there already
    assert books.find("aabbccdd") == 4


def test_riders_take_no_room_from_what_is_there() -> None:
    books = Books(num_host_pages=2)
    books.keep("aabbccdd")
    books.press(3)
    assert len(books.plan()) == 2
    books.retire()
    assert books.dropped("budget") == 0


def test_no_more_leave_in_a_step_than_may_be_on_their_way() -> None:
    books = Books(num_pages=MAX_SWAP_OUT + 10, num_host_pages=1000)
    for number in range(MAX_SWAP_OUT + 10):
        books.keep(chr(1000 + number) * 2, is_checked=False)
    books.press(MAX_SWAP_OUT + 10)
    assert len(books.plan()) == MAX_SWAP_OUT
    assert books.dropped("budget") == 10
    books.retire()


def test_beyond_the_budget_what_is_worth_least_goes_and_nothing_before_what_follows_it() -> None:
    books = Books(num_host_pages=3)
    books.keep("aabbcc")
    books.press(6)
    books.plan()
    books.retire()
    books.keep("dd")
    books.press(6)
    books.plan()
    books.retire()
    assert (books.find("aabbcc"), books.find("dd")) == (2, 1)
    assert books.dropped("budget") == 1


def test_with_all_of_it_on_the_way_nothing_more_is_kept() -> None:
    books = Books(num_host_pages=2)
    books.keep("aabb")
    books.press(6)
    books.plan()
    books.keep("ccdd")
    books.press(6)
    assert books.plan() == ()
    assert books.dropped("budget") == 2
    books.retire()
    assert (books.find("aabb"), books.find("ccdd")) == (2, 0)


@pytest.mark.parametrize("when", ["planned", "retired"])
def test_a_flush_empties_it_and_its_pages_are_free_when_their_step_has_retired(when: str) -> None:
    books = Books(num_host_pages=3)
    books.keep("aabbcc")
    books.press(6)
    books.plan()
    if when == "retired":
        books.retire()
    books.pool.flush(lambda identity: identity == IDENTITY)
    assert len(books.tier._free) == (3 if when == "retired" else 0)
    books.check()
    books.retire()
    assert len(books.tier._free) == 3
    assert books.cache.identities == []
    assert books.metrics.value("host_tier_used_bytes") == 0


def test_what_is_dropped_while_its_step_is_planned_is_not_copied() -> None:
    books = Books(num_host_pages=3)
    path = books.keep("aabbcc")
    books.press(4)
    books.pool.drop(path[0])
    books.check()
    assert books.plan() == ()
    assert len(books.tier._free) == 3


def test_another_identitys_flush_leaves_it_alone() -> None:
    books = Books()
    books.keep("aabb")
    books.press(6)
    books.plan()
    books.retire()
    books.pool.flush(lambda identity: identity.owner == "other")
    assert books.find("aabb") == 2


def test_a_page_that_is_damaged_goes_with_all_behind_it() -> None:
    books = Books()
    path = books.keep("aabbcc")
    books.press(6)
    books.plan()
    books.retire()
    assert books.tier.verify(path[0])
    assert path[1].host_page is not None
    books.pages.damage(path[1].host_page)
    assert not books.tier.verify(path[1])
    assert books.find("aabbcc") == 1
    assert books.dropped("damaged") == 1
    books.check()


def test_what_is_computed_again_is_in_the_pool_too_and_keeps_what_follows_it() -> None:
    books = Books()
    path = books.keep("aabbcc")
    books.press(6)
    books.plan()
    books.retire()
    assert books.keep("aa") == path[:1]
    assert path[0].is_live
    assert books.find("aabbcc") == 3
    books.press(6)
    assert books.plan() == ()
    assert books.find("aabbcc") == 3


def test_where_no_copy_ever_pays_nothing_goes_there() -> None:
    books = Books(costs=SwapCosts(run_pages=16, run_s=1000.0, token_s=1.0))
    books.keep("aabbcc")
    books.press(6)
    assert books.plan() == ()


def build_loop(*, num_pages: int = 9, costs: SwapCosts = ALWAYS_WORTH_IT) -> Loop:
    metrics, pages = Metrics(), FakeHostPages(40, costs=costs)
    cache = PrefixCache(4, host=HostTier(pages, metrics, page_size=4))
    return Loop(
        num_pages=num_pages, cache=cache, metrics=metrics, host_pages=pages,
        max_len=32,
    )  # fmt: skip


def ask(loop: Loop, prompt: Sequence[int], max_tokens: int = 2) -> Request:
    request = loop.add(tuple(prompt), max_tokens)
    loop.drain(100)
    return request


def go_to(loop: Loop, point: Point) -> None:
    while loop.advance() != point:
        pass


@pytest.mark.parametrize("prompt_len", [21, 23])
def test_a_prompt_that_returns_is_copied_back_and_published_when_its_step_has_retired(
    prompt_len: int,
) -> None:
    loop = build_loop()
    prompt = tuple(range(prompt_len))
    ask(loop, prompt)
    ask(loop, range(100, 129))
    request = loop.add(prompt, 2)
    go_to(loop, "launched")
    (load,) = loop.plans[-1].row_loads
    assert load.num_cached == request.num_cached == 20
    assert [move.page for move in loop.plans[-1].swap_in] == list(load.pages[:5])
    assert loop.cache is not None
    assert not any(page in loop.cache for page in load.pages)
    go_to(loop, "committed")
    # the chunk filled no page, and those that came back are found none the less
    assert all(page in loop.cache for page in load.pages[:5])
    loop.drain(100)
    assert loop.metrics.value("host_tier_hit_tokens_total") == 20


def test_who_asks_the_same_meanwhile_waits_instead_of_copying_it_again() -> None:
    loop = build_loop(num_pages=13)
    prompt = tuple(range(21))
    ask(loop, prompt)
    for first in (100, 200):
        ask(loop, range(first, first + 29))
    requests = [loop.add(prompt, 2) for _ in range(3)]
    loop.drain(100)
    assert sum(len(plan.swap_in) for plan in loop.plans) == 5
    assert [request.num_cached for request in requests] == [20, 20, 20]
    assert loop.metrics.value("prefix_cache_waits_total") == 1  # the third is behind it


def test_what_a_preempted_one_computed_comes_back_too() -> None:
    loop = build_loop()
    victim = loop.add(tuple(range(17)), 8)
    while len(loop.outputs[victim]) < 4:
        loop.advance()
    loop.preempt(victim)
    other = loop.add(tuple(range(100, 129)), 2, priority=5)
    loop.drain(100)
    assert loop.outcomes.keys() == {victim, other}
    assert sum(len(plan.swap_in) for plan in loop.plans) >= 4


def test_a_damaged_page_is_computed_and_so_is_what_follows_it() -> None:
    loop = build_loop()
    prompt = tuple(range(21))
    ask(loop, prompt)
    ask(loop, range(100, 129))
    assert loop.host_pages is not None
    second = next(
        host_page
        for host_page in loop.host_pages.stored
        if loop.host_pages.read(host_page)[0][:2] == (4, 4)
    )
    loop.host_pages.damage(second)
    request = ask(loop, prompt)
    assert request.num_cached == 4
    assert loop.metrics.value("host_tier_dropped_pages_total", reason="damaged") == 1


@pytest.mark.parametrize(("run_s", "num_cached", "num_declined"), [(19.0, 20, 0), (20.0, 0, 20)])
def test_pages_come_back_where_that_is_sooner_than_to_compute_them(
    run_s: float, num_cached: int, num_declined: int
) -> None:
    loop = build_loop(costs=SwapCosts(run_pages=16, run_s=run_s, token_s=1.0))
    prompt = tuple(range(21))
    ask(loop, prompt)
    ask(loop, range(100, 129))
    assert ask(loop, prompt).num_cached == num_cached
    assert loop.metrics.total("host_tier_declined_tokens_total") == num_declined
    assert loop.metrics.total("host_tier_hit_tokens_total") == num_cached
