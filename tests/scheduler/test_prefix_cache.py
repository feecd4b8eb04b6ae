"""The tree of cached pages alone: what is found, and what goes first (C03, C05)."""

import dataclasses
from collections.abc import Sequence

import pytest

from jaxserve.identity import Digest, sha256
from jaxserve.scheduler.cached_page import CachedPage
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache
from tests.scheduler.loop import IDENTITY

OTHER = dataclasses.replace(IDENTITY, owner="other")


def constant(message: bytes) -> bytes:
    return b"always the same"


class Books:
    """A pool of pages of two tokens, with a cache, and pages kept by one holder each."""

    def __init__(self, num_pages: int = 9, *, digest: Digest = sha256) -> None:
        self.cache = PrefixCache(2, digest=digest, attention_tokens=8)
        self.pool = PagePool(num_pages, 2, cache=self.cache)

    def keep(self, tokens: str, *, held: bool = False) -> list[CachedPage]:
        """Has the pages of a text, two letters each, computed, kept and given up."""
        node = self.cache.add_identity(IDENTITY)
        pages = self.pool.allocate(len(tokens) // 2)
        nodes = []
        for index, page in enumerate(pages):
            token_ids = as_tokens(tokens[2 * index : 2 * index + 2])
            added = self.cache.add(node, token_ids, page)
            assert added is not None
            node = added
            nodes.append(node)
        if not held:
            self.pool.release(reversed(pages), last_step=0)
        self.cache.check()
        return nodes

    def reuse(self, nodes: Sequence[CachedPage]) -> None:
        """Has the pages taken and given up once more."""
        for node in nodes:
            node.num_uses += 1
            self.pool.hold(node.page)
        self.pool.release([node.page for node in reversed(nodes)], last_step=0)
        self.pool.check()

    def find(self, tokens: str) -> str:
        """Returns the beginning of a text that is found."""
        node, found = self.cache.find_identity(IDENTITY), ""
        while node is not None and len(found) < len(tokens):
            node = self.cache.find(node, as_tokens(tokens[len(found) : len(found) + 2]))
            found += "" if node is None else tokens[len(found) : len(found) + 2]
        return found


def as_tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_what_was_kept_is_found_up_to_the_first_miss() -> None:
    books = Books()
    books.keep("aabbcc")
    assert books.find("aabbcc") == "aabbcc"
    assert books.find("aabbxx") == "aabb"
    assert books.find("xxbbcc") == ""
    assert books.find("bb") == ""
    assert (books.pool.num_free, books.pool.num_cached, books.pool.num_held) == (8, 3, 0)


def test_another_identity_finds_nothing() -> None:
    books = Books()
    books.keep("aabb")
    assert books.cache.find_identity(OTHER) is None
    assert list(books.cache.find_others(OTHER, as_tokens("aa"))) == [IDENTITY]
    assert list(books.cache.find_others(OTHER, as_tokens("bb"))) == []


def test_the_page_with_the_longest_common_beginning_is_found() -> None:
    cache = PrefixCache(4)
    root = cache.add_identity(IDENTITY)
    for page, text in enumerate(("abcd", "abce", "abxx", "b___"), start=1):
        assert cache.add(root, as_tokens(text), page)
    expected = {"abcz": ("abce", 3), "abc": ("abcd", 3), "abx": ("abxx", 3), "aa": ("abcd", 1)}
    for text, (wanted, num_same) in expected.items():
        found = cache.find_beginning(root, as_tokens(text))
        assert found is not None
        assert (found[0].token_ids, found[1]) == (as_tokens(wanted), num_same)
    assert cache.find_beginning(root, as_tokens("zz")) is None


def test_the_same_tokens_are_kept_once() -> None:
    books = Books()
    first = books.keep("aabb", held=True)
    second = books.keep("aabbcc")
    assert second[:2] == first
    assert (books.pool.num_cached, len(books.cache)) == (1, 3)
    books.pool.check()


def test_leaves_go_first_and_of_those_the_longest_idle() -> None:
    books = Books()
    books.keep("aabb")
    books.keep("ccdd")
    books.reuse(books.keep("eeff"))
    books.pool.allocate(3)  # two are free
    assert [books.find(text) for text in ("aabb", "ccdd", "eeff")] == ["aa", "ccdd", "eeff"]
    books.pool.allocate(1)
    assert [books.find(text) for text in ("aabb", "ccdd", "eeff")] == ["", "ccdd", "eeff"]
    books.pool.check()


def test_what_was_used_often_and_costs_more_to_compute_stays_longer() -> None:
    books = Books(num_pages=10)
    often = books.keep("aa")
    for _ in range(3):
        books.reuse(often)
    books.keep("bb")
    books.keep("ccddeeffgg")  # the last of it costs more than twice what bb does
    books.pool.allocate(2 + 1)
    assert [books.find(text) for text in ("aa", "bb", "ccddeeffgg")] == ["aa", "", "ccddeeffgg"]
    books.pool.allocate(4)
    assert [books.find(text) for text in ("aa", "ccddeeffgg")] == ["aa", "cc"]


def test_what_is_never_used_again_goes_in_the_end_however_often_it_was() -> None:
    books = Books(num_pages=3)
    often = books.keep("aa")
    for _ in range(20):
        books.reuse(often)
    for number in range(40):
        books.keep(chr(200 + number) * 2)
    assert books.find("aa") == ""


def test_held_pages_never_go_and_what_only_they_follow_goes_with_them_left_alone() -> None:
    books = Books(num_pages=4)
    first = books.keep("aa")
    own = books.pool.allocate(2)  # a sequence that computed aa itself at the same time
    assert books.cache.add(first[0], as_tokens("bb"), own[1])
    assert books.pool.num_free == 1
    (page,) = books.pool.allocate(1)
    assert page == first[0].page
    assert (len(books.cache), books.cache.identities) == (0, [])
    books.pool.release(own, last_step=0)
    assert (books.pool.num_free, books.pool.num_cached) == (2, 0)
    books.pool.check([[page]])


def test_a_page_whose_steps_are_in_flight_is_found_and_cannot_go() -> None:
    books = Books(num_pages=3)
    (node,) = books.keep("aa", held=True)
    books.pool.release([node.page], last_step=2)
    assert (books.pool.num_free, books.pool.num_pending, books.find("aa")) == (1, 1, "aa")
    books.pool.hold(node.page)
    books.pool.release([node.page], last_step=1)
    books.pool.retire(1)
    assert (books.pool.num_free, books.pool.num_pending) == (1, 1)
    books.pool.retire(2)
    assert (books.pool.num_free, books.pool.num_cached, books.pool.num_pending) == (2, 1, 0)
    books.pool.check([])


def test_a_page_that_is_banned_is_not_kept_until_it_is_somebody_elses() -> None:
    books = Books(num_pages=2)
    pages = books.pool.allocate(1)
    books.cache.ban(pages)
    assert books.cache.add(books.cache.add_identity(IDENTITY), as_tokens("aa"), pages[0]) is None
    assert books.cache.identities == []
    books.pool.release(pages, last_step=0)
    assert books.keep("aa")


def test_a_flush_frees_the_idle_and_leaves_the_held_to_their_holders() -> None:
    books = Books()
    books.keep("aabb")
    held = books.keep("cc", held=True)
    other = books.cache.add_identity(OTHER)
    pages = books.pool.allocate(1)
    assert books.cache.add(other, as_tokens("aa"), pages[0])
    assert books.pool.flush(lambda identity: identity == IDENTITY) == 2
    assert (books.pool.num_cached, books.cache.identities) == (0, [OTHER])
    books.pool.release([held[0].page], last_step=0)
    books.pool.release(pages, last_step=0)
    assert (books.pool.num_free, books.pool.num_cached) == (8, 1)
    books.pool.check([])


@pytest.mark.parametrize("text", ["aabb", "aaaa"])
def test_a_digest_that_is_always_the_same_finds_only_what_is_really_there(text: str) -> None:
    books = Books(digest=constant)
    root = books.cache.add_identity(IDENTITY)
    first, second = books.pool.allocate(2)
    kept = books.cache.add(root, as_tokens("aa"), first)
    assert kept is not None
    assert books.cache.add(kept, as_tokens(text[2:]), second) is None
    assert books.find(text) == "aa"
    assert books.find("ccdd") == ""
    other = books.cache.add_identity(OTHER)
    assert books.cache.find(other, as_tokens("aa")) is None
    assert books.cache.add(other, as_tokens("aa"), second) is None
    assert books.cache.identities == [IDENTITY]
    books.pool.check([[first, second]])
