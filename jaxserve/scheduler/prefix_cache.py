"""Which pool pages hold the K/V of which tokens: a tree of full pages, and which goes first."""

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxserve.identity import CacheIdentity, Digest, identity_key, page_key, sha256
from jaxserve.scheduler.cached_page import ATTENTION_TOKENS, CachedPage, worth
from jaxserve.scheduler.host_tier import HostTier

_Leaf = tuple[float, int, int, CachedPage]  # rank, stamp and a tie


class PrefixCache:
    """A tree: below an identity its first pages, below a page those that follow it.

    A page is found by its key, and is taken only if identity, tokens and what is before it are
    really the same: a digest that collides costs a hit, never a text.

    A lookup stops at the first miss, so whatever goes takes with it all that follows. What is idle
    can always go: leaves first, and of those the one worth the least, which is GreedyDual-Size with
    frequency (Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency",
    HP Labs 1998; all pages are of one size): uses times cost, on a clock that is the rank of what
    went last, and the longest idle of equals.

    What goes from the pool stays in the tree while it is in host memory.

    Attributes:
      host: knows what is in host memory; None where nothing is.
      num_idle: pages that nobody holds.
      on_evicted: told of each page that goes to make room.
    """

    def __init__(
        self,
        page_size: int,
        *,
        digest: Digest = sha256,
        attention_tokens: int = ATTENTION_TOKENS,
        host: HostTier | None = None,
    ) -> None:
        """Args:
        attention_tokens: at this position a token costs twice what the first does.
        host: where pages go that are dropped; None has them forgotten.
        """
        self.page_size = page_size
        self.host = host
        if host is not None:
            host.attach(worth_of=self._worth_of, remove=self.remove)
        self.num_idle = 0
        self.on_evicted: Callable[[CacheIdentity], None] | None = None
        self._digest = digest
        self._attention_tokens = attention_tokens
        self._roots: dict[CacheIdentity, CachedPage] = {}
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        # the identities that begin with a page of the same tokens
        self._by_first: dict[tuple[int, ...], dict[CacheIdentity, None]] = {}
        self._leaves: list[_Leaf] = []  # a heap; some are out of date
        self._ties = itertools.count()  # pages have no order of their own
        self._stamps = itertools.count(1)
        self._clock = 0.0
        self._unfit: set[int] = set()  # pages that must not be kept, until they are handed out

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def __iter__(self) -> Iterator[CachedPage]:
        return iter(self._by_page.values())

    @property
    def identities(self) -> list[CacheIdentity]:
        """Those that something is kept under."""
        return list(self._roots)

    def find_identity(self, identity: CacheIdentity) -> CachedPage | None:
        """Returns where an identity's pages begin; None where there are none."""
        return self._roots.get(identity)

    def add_identity(self, identity: CacheIdentity) -> CachedPage:
        """Returns where an identity's pages begin, and makes it; the first is to be added at
        once."""
        root = self._roots.get(identity)
        if root is None:
            key = identity_key(identity, digest=self._digest)
            root = CachedPage(
                key=key, identity=identity, parent=None, token_ids=(), page=0, depth=0
            )
            self._roots[identity] = root
        return root

    def find(self, parent: CachedPage, token_ids: tuple[int, ...]) -> CachedPage | None:
        """Returns the page of these tokens behind `parent`."""
        found = self._by_key.get(page_key(parent.key, token_ids, digest=self._digest))
        if found is None or found.parent is not parent or found.token_ids != token_ids:
            return None
        return found

    def find_beginning(
        self, parent: CachedPage, token_ids: tuple[int, ...]
    ) -> tuple[CachedPage, int] | None:
        """Returns the page behind `parent` that begins with the most of these tokens, and with how
        many.

        Of sorted pages it stands beside the place where the tokens would stand themselves.
        """
        index = bisect.bisect_left(parent.tokens_of_children, token_ids)
        best: tuple[CachedPage, int] | None = None
        for child in parent.children[max(0, index - 1) : index + 1]:
            num_same = count_same(child.token_ids, token_ids)
            if num_same > (best[1] if best else 0):
                best = child, num_same
        return best

    def find_others(
        self, identity: CacheIdentity, token_ids: tuple[int, ...]
    ) -> Iterator[CacheIdentity]:
        """Yields other identities under which a first page of these tokens is kept."""
        for other in self._by_first.get(token_ids, ()):
            if other != identity:
                yield other

    def add(self, parent: CachedPage, token_ids: tuple[int, ...], page: int) -> CachedPage | None:
        """Keeps a held page, full of these tokens' K/V, behind `parent`.

        Returns the page that is found for them from now on, which is another one where there is
        one already; None where nothing may be kept: the key is taken by something else, or the
        page is unfit.
        """
        assert parent.is_live, "a page behind one that is gone could never be found"
        assert len(token_ids) == self.page_size, f"{len(token_ids)} tokens are not a full page"
        key = page_key(parent.key, token_ids, digest=self._digest)
        found = self._by_key.get(key)
        if found is not None and found.parent is parent and found.token_ids == token_ids:
            return found
        if found is not None or page in self._unfit or page in self._by_page:
            self._forget_if_empty(parent)
            return None
        node = parent.host_children.pop(token_ids, None)
        if node is not None:  # it is back
            node.page, node.is_live, node.is_proven = page, True, False
            self._host.offer(node)
        else:
            node = CachedPage(
                key=key,
                identity=parent.identity,
                parent=parent,
                token_ids=token_ids,
                page=page,
                depth=parent.depth + 1,
            )
        index = bisect.bisect_left(parent.tokens_of_children, token_ids)
        parent.tokens_of_children.insert(index, token_ids)
        parent.children.insert(index, node)
        if not parent.depth:
            self._by_first.setdefault(token_ids, {})[parent.identity] = None
        self._by_key[key] = self._by_page[page] = node
        return node

    def _forget_if_empty(self, parent: CachedPage) -> None:
        """Forgets an identity that was made for a page that is not kept."""
        if not (parent.depth or parent.children or parent.host_children):
            parent.is_live = False
            del self._roots[parent.identity]

    def take(self, page: int) -> None:
        """Somebody holds an idle page again."""
        node = self._by_page[page]
        assert node.is_idle, f"page {page} is not idle"
        node.is_idle, node.stamp = False, 0
        self.num_idle -= 1

    def set_idle(self, page: int) -> None:
        """Nobody holds the page any more, and nothing is in flight for it."""
        node = self._by_page[page]
        assert not node.is_idle, f"page {page} is idle already"
        node.is_idle, node.stamp = True, next(self._stamps)
        node.rank = self._clock + self._worth_of(node)
        self.num_idle += 1
        if not node.children:
            self._push(node)

    def evict(self) -> list[int]:
        """Drops the idle page that is worth the least, or leaves it to host memory; returns the
        pages that are free with it.

        At least one must be idle. Where none is a leaf, what follows one is held by sequences that
        computed the same at the same time; it goes with it, and stays theirs.
        """
        while self._leaves:
            leaf = heapq.heappop(self._leaves)
            if _is_current(leaf):
                node = leaf[-1]
                self._clock = max(self._clock, node.rank)
                break
        else:
            idle = (node for node in self._by_page.values() if node.is_idle)
            node = max(idle, key=lambda node: (node.depth, -node.rank))
        if self.host is not None and not node.children and self.host.keep(node):
            freed = [self._leave_to_host(node)]
        else:
            freed = self.remove(node)
        if self.on_evicted is not None:
            self.on_evicted(node.identity)
        return freed

    def remove(self, node: CachedPage) -> list[int]:
        """Drops a page and all that follows it; returns those that were idle, now free."""
        parent = node.parent
        assert node.is_live or node.host_page is not None, f"page {node.depth} is gone already"
        assert parent is not None, "an identity goes with the last of its pages"
        if node.is_live:
            self._unlink(node, parent)
        else:
            del parent.host_children[node.token_ids]
            self._host.offer(parent)
        self._forget_if_empty(parent)
        freed: list[int] = []
        rest = [node]
        while rest:
            gone = rest.pop()
            rest += gone.children
            rest += gone.host_children.values()
            if gone.is_idle:
                freed.append(gone.page)
            if gone.is_live:
                self._leave_pool(gone)
            if gone.host_page is not None:
                self._host.forget(gone)
        return freed

    def _leave_to_host(self, node: CachedPage) -> int:
        """Has an idle leaf stay in host memory alone; returns its page, which is free."""
        assert node.parent is not None
        page = node.page
        self._unlink(node, node.parent)
        node.parent.host_children[node.token_ids] = node
        self._leave_pool(node)
        node.page = 0
        return page

    def _unlink(self, node: CachedPage, parent: CachedPage) -> None:
        """Takes a page out of its parent's in the pool."""
        index = bisect.bisect_left(parent.tokens_of_children, node.token_ids)
        del parent.tokens_of_children[index], parent.children[index]
        if not parent.depth:
            same = self._by_first[node.token_ids]
            del same[parent.identity]
            if not same:
                del self._by_first[node.token_ids]
        if not parent.children and parent.is_idle:
            self._push(parent)

    def _leave_pool(self, node: CachedPage) -> None:
        del self._by_key[node.key], self._by_page[node.page]
        self.num_idle -= node.is_idle
        node.is_live, node.is_idle, node.stamp = False, False, 0

    def retire(self, step_id: int) -> None:
        """The step's result has been read: what it copied to host memory is there."""
        if self.host is not None:
            self.host.retire(step_id)

    @property
    def _host(self) -> HostTier:
        assert self.host is not None, "a page is in host memory, and there is none"
        return self.host

    def _worth_of(self, node: CachedPage) -> float:
        return worth(node, page_size=self.page_size, attention_tokens=self._attention_tokens)

    def flush(self, matches: Callable[[CacheIdentity], bool]) -> list[int]:
        """Drops all pages of the identities that match; returns those that are free now."""
        tops = [
            node
            for root in self._roots.values()
            if matches(root.identity)
            for node in (*root.children, *root.host_children.values())
        ]
        return [page for node in tops for page in self.remove(node)]

    def ban(self, pages: Sequence[int]) -> None:
        """Has pages never kept, whoever holds them, until they are handed out again."""
        self._unfit.update(pages)

    def hand_out(self, pages: Sequence[int]) -> None:
        """The pages are somebody's new ones: what they held does not matter any more."""
        if self._unfit:
            self._unfit.difference_update(pages)

    def check(self) -> None:
        """Asserts that all can be found by the tokens that it holds, and nothing else can."""
        assert len(self._by_key) == len(self._by_page), "a page has two keys"
        leaves = {(stamp, id(node)) for _, stamp, _, node in self._leaves}
        for page, node in self._by_page.items():
            assert node.is_live, f"page {page} is gone"
            assert node.page == page
            assert node.parent is not None
            again = page_key(node.parent.key, node.token_ids, digest=self._digest)
            assert again == node.key, f"page {page} holds other tokens than its key says"
            assert self._by_key[node.key] is node, f"page {page} cannot be found"
            assert node in node.parent.children, f"page {page} is not behind its parent"
            assert node.parent.depth == node.depth - 1
            assert node.parent.is_live
            assert node.identity == node.parent.identity
            assert node.tokens_of_children == [child.token_ids for child in node.children]
            assert node.tokens_of_children == sorted(set(node.tokens_of_children))
            if node.is_idle and not node.children:
                assert (node.stamp, id(node)) in leaves, f"idle page {page} can never go"
        for identity, root in self._roots.items():
            assert identity_key(identity, digest=self._digest) == root.key
            assert root.children or root.host_children, "an identity without pages is remembered"
        firsts = sum(map(len, self._by_first.values()))
        assert firsts == sum(len(root.children) for root in self._roots.values())
        num_idle = sum(node.is_idle for node in self._by_page.values())
        assert num_idle == self.num_idle, f"{num_idle} pages are idle, not {self.num_idle}"
        if self.host is not None:
            self.host.check(self._roots.values(), digest=self._digest)

    def _push(self, node: CachedPage) -> None:
        if len(self._leaves) > 2 * self.num_idle + 64:  # most are out of date
            self._leaves = [leaf for leaf in self._leaves if _is_current(leaf)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.rank, node.stamp, next(self._ties), node))


def _is_current(leaf: _Leaf) -> bool:
    _, stamp, _, node = leaf
    return node.stamp == stamp and not node.children


def count_same(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two begin with together."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
