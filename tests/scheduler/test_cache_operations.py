"""Random operations with the prefix cache on: the outputs are those of an engine without one (C05).

Prompts are of three symbols and often go on from earlier ones, so that prefixes collide; models,
tenants and salts change; the digest of the keys is now and then one that collides. After each
operation every page is in one place, and every page of the cache holds what its key says.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Final

import pytest

from jaxserve.host_pages import SwapCosts
from jaxserve.identity import CacheIdentity, Digest, sha256
from jaxserve.metrics import Metrics
from jaxserve.scheduler.host_tier import HostTier
from jaxserve.scheduler.prefix_cache import PrefixCache
from tests.fake_host_pages import FakeHostPages
from tests.scheduler import test_random_operations
from tests.scheduler.loop import GREEDY, IDENTITY, spell_out
from tests.scheduler.test_random_operations import Round, play_round

NUM_SHARDS: Final = 4
OPERATIONS_A_ROUND: Final = 500
NUM_KINDS: Final = 26  # of what may happen
# and of those, what need not in a shard; test_stateful.py wants them too
RARE: Final = frozenset(("prefix_cache_waits", "host_tier_declined_tokens", "damaged"))
OPERATIONS: Final = 50_000
IDENTITIES: Final = (
    *(IDENTITY,) * 9,
    dataclasses.replace(IDENTITY, weights="other"),
    dataclasses.replace(IDENTITY, adapter="a"),
    dataclasses.replace(IDENTITY, adapter="a", adapter_generation=1),
    dataclasses.replace(IDENTITY, owner="tenant"),
    dataclasses.replace(IDENTITY, owner="tenant", salt="a"),
)


def one_byte(message: bytes) -> bytes:
    return sha256(message)[:1]


def two_bits(message: bytes) -> bytes:
    return bytes([sha256(message)[0] & 3])


def eight_bytes(message: bytes) -> bytes:
    return sha256(message)[:8]


def constant(message: bytes) -> bytes:
    return b"always the same"


DIGESTS: Final = (sha256, sha256, sha256, eight_bytes, one_byte, two_bits, constant)


class CachedRound(Round):
    """A round whose requests have much in common."""

    def draw_options(self) -> dict[str, object]:
        digest: Digest = self.rng.choice(DIGESTS)
        metrics = Metrics()
        self.host_pages = self.draw_host_pages()
        cache = PrefixCache(
            4,
            digest=digest,
            attention_tokens=self.rng.choice((8, 8192)),
            host=HostTier(self.host_pages, metrics, page_size=4) if self.host_pages else None,
        )
        self.num_flushed = 0
        self.favourites = [
            tuple(self.rng.randrange(3) for _ in range(self.rng.randrange(13, 31)))
            for _ in range(3)
        ]
        return super().draw_options() | {
            "cache": cache,
            "page_size": 4,
            "metrics": metrics,
            "host_pages": self.host_pages,
        }

    def draw_host_pages(self) -> FakeHostPages | None:
        """Six rounds in ten have a host tier; now and then few pages come back at no gain, or
        none ever does."""
        if self.rng.random() < 0.4:
            return None
        run_s, run_pages = self.rng.choice(
            ((1e-9, 16), (1e-9, 2), (6.0, 16), (6.0, 16), (99.0, 16))
        )
        costs = SwapCosts(run_pages=run_pages, run_s=run_s, token_s=1.0)
        return FakeHostPages(self.rng.choice((2, 12, 60)), costs=costs)

    def draw_prompt(self) -> tuple[int, ...]:
        rng, known = self.rng, list(self.loop.outputs)[-20:]
        if self.host_pages and rng.random() < 0.7:  # what left the pool long ago
            return rng.choice(self.favourites)
        if known and rng.random() < 0.8:
            earlier = rng.choice(known)
            tokens = (*earlier.prompt, *rng.choice(self.loop.choices[earlier]))
            tokens = tokens[: rng.randrange(1, 31)]
        else:
            tokens = tuple(rng.randrange(3) for _ in range(rng.choice((1, 3, 4, 5, 8, 9, 12, 17))))
        if rng.random() < 0.5:
            tokens += tuple(rng.randrange(3) for _ in range(rng.randrange(6)))
        return tokens[:30]

    def draw_identity(self) -> CacheIdentity:
        return (
            IDENTITY if self.host_pages and self.rng.random() < 0.5 else self.rng.choice(IDENTITIES)
        )

    def operations(self) -> dict[Callable[[], None], int]:
        return super().operations() | {self.flush: 1, self.spoil: 2}

    def flush(self) -> None:
        owner = self.rng.choice(("", "tenant", None))
        self.log.append(f"flush {owner!r}")
        num_pages = self.loop.pool.flush(lambda identity: owner in (None, identity.owner))
        self.num_flushed += num_pages
        self.loop.scheduler.check()

    def spoil(self) -> None:
        """Host memory goes bad, or is lost; not between a plan and its launch, which read it in one
        breath."""
        pages = self.host_pages
        if pages is None or not pages.stored or self.loop.point == "scheduled":
            return
        spoiled = [host_page for host_page in pages.stored if self.rng.random() < 0.5]
        self.log.append(f"spoil host pages {spoiled}")
        for host_page in spoiled:
            if self.rng.random() < 0.5:
                pages.damage(host_page)
            else:
                pages.lose(host_page)

    def tell(self) -> collections.Counter[str]:
        """Returns what happened in it, by kind."""
        loop = self.loop
        ran = collections.Counter(map(str, loop.outcomes.values()))
        for name in ("preemptions", "forked_choices", "prefix_cache_queries", "prefix_cache_hits",
                     "prefix_cache_hit_tokens", "prefix_cache_copied_tokens", "prefix_cache_waits",
                     "prefix_cache_evictions", "prefix_cache_refusals", "host_tier_hit_tokens",
                     "host_tier_declined_tokens"):  # fmt: skip
            ran[name] += int(loop.metrics.value(f"{name}_total"))
        ran["reused after a preemption"] += int(
            loop.metrics.value("prefix_cache_reused_tokens_total")
            - loop.metrics.value("prefix_cache_hit_tokens_total")
        )
        for reason in ("budget", "damaged"):
            ran[reason] += int(loop.metrics.value("host_tier_dropped_pages_total", reason=reason))
        ran["swapped out"] += sum(len(plan.swap_out) for plan in loop.plans)
        ran["swapped in"] += sum(len(plan.swap_in) for plan in loop.plans)
        ran["flushed"] += self.num_flushed
        ran["cached at the end"] += loop.pool.num_cached
        return ran


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_outputs_are_those_of_an_engine_without_a_cache(shard: int) -> None:
    ran: collections.Counter[str] = collections.Counter()
    for index in range(OPERATIONS // NUM_SHARDS // OPERATIONS_A_ROUND):
        played = play_round(1_000_000 * shard + index, OPERATIONS_A_ROUND, kind=CachedRound)
        assert isinstance(played, CachedRound)
        ran += played.tell()
        assert all(request.num_cached < len(request.prompt) for request in played.loop.outputs)
    num_kinds = len((+ran).keys() - RARE)
    assert num_kinds == NUM_KINDS - len(RARE), f"something never happened, the test is weak: {ran}"


class FollowedRound(CachedRound):
    """With outputs that are read where they grow."""

    def draw_options(self) -> dict[str, object]:
        return super().draw_options() | {"follows": True}


def kept_pages(played: Round) -> set[tuple[object, ...]]:
    """Returns what the pool keeps at the end."""
    cache = played.loop.cache
    assert cache is not None
    return {
        (node.identity, *(page.token_ids for page in node.path()), node.is_proven) for node in cache
    }


def test_of_who_is_followed_the_same_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_random_operations, "draw_sampling", lambda rng: GREEDY)
    num_followed = num_kept = 0
    for seed in range(15):
        told = play_round(seed, OPERATIONS_A_ROUND, kind=CachedRound)
        followed = play_round(seed, OPERATIONS_A_ROUND, kind=FollowedRound)
        assert spell_out(followed.loop.plans) == spell_out(told.loop.plans), f"seed {seed}"
        assert kept_pages(followed) == kept_pages(told), f"seed {seed}"
        num_followed += followed.loop.num_followed
        num_kept += len(kept_pages(told))
    assert num_followed > 500
    assert num_kept > 50


@pytest.mark.parametrize("name", ["weights", "adapter", "adapter_generation"])
def test_an_identity_without_one_of_its_fields_gives_wrong_outputs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ForgetfulRound(CachedRound):
        def submit(self) -> None:
            super().submit()
            for request in self.loop.outputs:
                assert request.cache_identity is not None
                request.cache_identity = dataclasses.replace(
                    request.cache_identity, **{name: getattr(IDENTITY, name)}
                )

    monkeypatch.setattr("tests.scheduler.loop.Loop._check_cache", lambda loop: None)
    with pytest.raises(AssertionError, match=r"alone it gets|log-probabilities"):
        play_rounds(ForgetfulRound, range(20))


def play_rounds(kind: type[Round], seeds: range) -> None:
    for seed in seeds:
        play_round(seed, OPERATIONS_A_ROUND, kind=kind)
