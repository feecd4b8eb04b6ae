"""What requests take from earlier ones, and what they must not (C04, C05, C07, C08, C14, C30)."""

import dataclasses
from typing import Any, Literal

import pytest

from jaxserve.identity import CacheIdentity, sha256
from jaxserve.plan import PageCopy
from jaxserve.request import FinishReason, Request, SamplingParams, SequenceState
from jaxserve.scheduler.fills import Fills
from jaxserve.scheduler.prefix_cache import PrefixCache
from tests.scheduler.loop import GREEDY, IDENTITY, Loop, Point

POINTS: tuple[Point, ...] = ("scheduled", "launched", "read", "committed")
PENALTIES = SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5)
LENS = (1, 3, 4, 5, 8, 12, 13)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(range(50, 50 + length))


def build_loop(**options: Any) -> Loop:  # noqa: ANN401  # as `Loop` takes them
    return Loop(cache=PrefixCache(4), **options)


def run(loop: Loop, prompt: tuple[int, ...] | int, max_tokens: int = 4, **asked: Any) -> Request:  # noqa: ANN401
    """Runs a request alone to its end."""
    request = loop.add(prompt, max_tokens, **asked)
    loop.drain(max_steps=80)
    return request


def count(loop: Loop, name: str) -> int:
    return int(loop.metrics.value(f"prefix_cache_{name}_total"))


# the whole prompt is there


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", LENS)
def test_a_prompt_sent_three_times_and_twice_at_once_is_answered_alike(
    length: int, depth: int
) -> None:
    loop = build_loop(depth=depth)
    sampling = dataclasses.replace(GREEDY, logprobs=2)
    requests = [run(loop, prompt_of(length), sampling=sampling) for _ in range(3)]
    requests += [loop.add(prompt_of(length), 4, sampling=sampling) for _ in range(2)]
    loop.drain(max_steps=40)
    assert len({tuple(loop.outputs[request]) for request in requests}) == 1
    assert len({loop.logprobs[r.sequences[0]][0] for r in requests}) == 1
    cached = [request.num_cached for request in requests]
    # All but the last token, where prompt and output fill the page that it stands in.
    assert cached == [0, *[length - 1 if length >= 2 else 0] * 4]


def test_the_last_token_is_computed_at_its_own_position_in_a_page_of_its_own() -> None:
    loop = build_loop()
    run(loop, prompt_of(8))
    again = loop.add(prompt_of(8), 4)
    loop.drain(max_steps=20)
    plan = next(p for p in loop.plans if p.chunks[0].sequence_id == again.sequences[0].id)
    (load,), (chunk,), (copy,) = plan.row_loads, plan.chunks, plan.copies
    assert (chunk.start, chunk.num_tokens, chunk.token_ids) == (7, 1, (57,))
    assert copy.target == load.pages[1]
    assert copy.source not in load.pages
    assert load.num_cached == 7


# what is taken


def test_a_longer_prompt_takes_whole_pages_and_the_beginning_of_the_next() -> None:
    loop = build_loop()
    run(loop, (*prompt_of(10), 1, 2))
    second = run(loop, (*prompt_of(10), 3, 3, 3, 3))
    assert second.num_cached == 10
    assert (count(loop, "hit_tokens"), count(loop, "copied_tokens")) == (10, 2)
    assert (count(loop, "queries"), count(loop, "hits"), count(loop, "query_tokens")) == (2, 1, 26)


def test_few_tokens_of_a_large_page_are_not_worth_a_copy() -> None:
    identity = dataclasses.replace(IDENTITY, page_size=16)
    loop = Loop(cache=PrefixCache(16), page_size=16, num_pages=5)
    run(loop, prompt_of(20), identity=identity)
    few = run(loop, (*prompt_of(3), 200, 201), identity=identity)
    more = run(loop, (*prompt_of(4), 200, 201), identity=identity)
    assert (few.num_cached, more.num_cached) == (0, 4)


def test_a_conversation_goes_on_from_its_own_output() -> None:
    loop = build_loop()
    first = run(loop, prompt_of(6), 7)
    second = run(loop, (*first.prompt, *loop.outputs[first], 1, 2, 3))
    assert second.num_cached == 12  # of 13: the last token's K/V was never written


def test_cached_prompt_tokens_count_for_the_penalties() -> None:
    loop = build_loop()
    run(loop, prompt_of(9), sampling=PENALTIES)
    again = run(loop, prompt_of(9), 12, sampling=PENALTIES, seed=5)
    assert again.num_cached == 8
    load = next(plan.row_loads[0] for plan in loop.plans if plan.chunks[0].start == 8)
    assert load.prompt == again.prompt


@pytest.mark.parametrize("reserve", ["on_demand", "max_length"])
@pytest.mark.parametrize("length", LENS)
def test_choices_are_forked_from_a_cached_prompt(
    length: int, reserve: Literal["on_demand", "max_length"]
) -> None:
    loop = build_loop(reserve=reserve, num_pages=25)
    sampling = SamplingParams(temperature=0.8, num_choices=3)
    run(loop, prompt_of(length), 6, sampling=sampling)
    again = run(loop, prompt_of(length), 6, sampling=sampling, seed=3)
    assert again.num_cached == max(0, length - 1)
    assert loop.metrics.value("forked_choices_total") == 4


def test_a_preempted_sequence_takes_back_what_is_still_there() -> None:
    loop = build_loop(depth=1)
    request = loop.add(prompt_of(9), 12)
    while len(loop.outputs[request]) < 6:
        loop.step()
    loop.preempt(request)
    loop.drain(max_steps=40)
    assert loop.outcomes[request] is FinishReason.MAX_TOKENS
    assert request.num_cached == 0
    assert (count(loop, "reused_tokens"), count(loop, "hits")) == (12, 0)
    assert loop.metrics.value("recomputed_tokens_total") == 14 - 12


# what is not


def test_prompts_of_one_step_share_nothing_where_nobody_waits_and_are_kept_once() -> None:
    """Static batching forms its batch at once."""
    loop = build_loop(chunk_tokens=24, step_tokens=None, batching="static")
    first, second = loop.add(prompt_of(11), 4), loop.add(prompt_of(11), 4)
    loop.step()
    assert len(loop.plans[0].chunks) == 2
    loop.drain(max_steps=20)
    assert (first.num_cached, second.num_cached) == (0, 0)
    assert loop.cache is not None
    assert len(loop.cache) == 3


def test_a_page_is_kept_only_once_the_step_that_fills_it_has_retired() -> None:
    loop = build_loop(depth=2, chunk_tokens=8)
    request = loop.add(prompt_of(16), 4)
    loop.step()  # launched: 8 tokens
    follower = loop.add(prompt_of(16), 4)
    assert loop.cache is not None
    assert len(loop.cache) == 0
    loop.step()  # 8 more launched, the first 8 committed
    assert len(loop.cache) == 2
    loop.drain(max_steps=30)
    assert loop.outputs[follower] == loop.outputs[request]


def test_other_models_and_tenants_get_nothing_and_it_is_told_why() -> None:
    loop = build_loop(num_pages=60)
    run(loop, prompt_of(9))
    others: dict[str, CacheIdentity] = {
        "weights": dataclasses.replace(IDENTITY, weights="x"),
        "adapter": dataclasses.replace(IDENTITY, adapter="x"),
        "owner": dataclasses.replace(IDENTITY, owner="x"),
        "salt": dataclasses.replace(IDENTITY, salt="x"),
    }
    for reason, identity in others.items():
        assert run(loop, prompt_of(9), identity=identity).num_cached == 0
        assert loop.metrics.value("prefix_cache_refusals_total", reason=reason) >= 1
        assert run(loop, prompt_of(9), identity=identity).num_cached == 8
    assert count(loop, "refusals") == len(others)


def test_a_request_whose_prompt_is_scored_reads_nothing_and_is_read() -> None:
    loop = build_loop()
    run(loop, prompt_of(9))
    scored = dataclasses.replace(GREEDY, prompt_logprobs=2)
    assert run(loop, prompt_of(9), sampling=scored).num_cached == 0
    only = tuple(range(100, 113))
    assert run(loop, only, 0, sampling=scored).num_cached == 0
    assert run(loop, only).num_cached == 12
    assert count(loop, "queries") == 2


def test_a_request_without_an_identity_neither_reads_nor_is_read() -> None:
    loop = build_loop()
    for _ in range(2):
        request = loop.add(prompt_of(9), 2)
        request.cache_identity = None
        loop.drain(max_steps=20)
        assert request.num_cached == 0
    assert loop.cache is not None
    assert (len(loop.cache), count(loop, "queries")) == (0, 0)


# who waits for another's prompt


@pytest.mark.parametrize("depth", [1, 2])
def test_who_comes_while_its_beginning_is_computed_waits_and_takes_it(depth: int) -> None:
    loop = build_loop(depth=depth, max_len=48, num_pages=40)
    leader = loop.add(prompt_of(30), 2)  # six chunks
    same = [loop.add((*prompt_of(20), number), 2) for number in range(3)]
    other = loop.add(tuple(range(100, 110)), 2)
    loop.drain(max_steps=40)
    assert leader.num_cached == 0
    assert [request.num_cached for request in same] == [20, 20, 20]
    # the two behind the one that waits find the pages when it is their turn
    assert (other.num_cached, count(loop, "waits")) == (0, 1)
    computed = sum(chunk.num_tokens for plan in loop.plans for chunk in plan.chunks)
    assert computed <= 30 + 3 * 1 + 10 + 5 * 2  # and a surplus token each


def test_it_starts_as_soon_as_the_pages_it_wants_are_there() -> None:
    loop = build_loop(depth=1, max_len=48, num_pages=40)
    leader = loop.add(prompt_of(30), 2)
    follower = loop.add((*prompt_of(9), 1), 2)
    while not loop.is_running(follower):
        loop.step()
    assert leader.sequences[0].num_computed < 30
    assert follower.num_cached == 9
    loop.drain(max_steps=40)


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_waits_for_who_is_gone(how: str, depth: int) -> None:
    loop = build_loop(depth=depth, max_len=48, num_pages=40)
    leader, follower = loop.add(prompt_of(30), 2), loop.add(prompt_of(29), 2)
    for _ in range(2):
        loop.step()
    assert not loop.is_running(follower)
    getattr(loop, how)(leader)
    loop.drain(max_steps=40)
    assert loop.outcomes[follower] is FinishReason.MAX_TOKENS
    assert count(loop, "waits") == 1


def test_a_wait_is_for_one_prompt_only() -> None:
    fills = Fills(4, chunk_tokens=5)
    loop = build_loop(max_len=48, num_pages=40)
    (first,), (second,), (follower,) = (loop.add(prompt_of(30), 2).sequences for _ in range(3))
    for leader in (first, second):
        leader.state = SequenceState.RUNNING
        fills.start(leader, num_kept=0)

    def waits(step_id: int) -> bool:
        return fills.should_wait(follower, None, step_id=step_id, is_in_flight=lambda _: False)

    assert waits(1)
    first.state = SequenceState.WAITING  # it was preempted; the other goes on
    assert not waits(2)
    first.state = SequenceState.RUNNING
    assert not waits(3)


def test_a_wait_ends_after_the_steps_that_the_prompt_takes_though_it_is_held_up() -> None:
    fills = Fills(4, chunk_tokens=5)
    loop = build_loop(max_len=48, num_pages=40)
    leader, follower = loop.add(prompt_of(30), 2), loop.add(prompt_of(29), 2)
    (leading,), (following,) = leader.sequences, follower.sequences
    leading.state = SequenceState.RUNNING  # and is never paid
    fills.start(leading, num_kept=0)

    def waits(step_id: int) -> bool:
        return fills.should_wait(following, None, step_id=step_id, is_in_flight=lambda _: False)

    # 28 tokens are six chunks, and their result is here three steps later
    assert [waits(step_id) for step_id in range(1, 14)] == [True] * 10 + [False] * 3
    fills.leave(following)
    fills.leave(leading)
    fills.check(set())


def test_a_short_prompt_a_scored_one_and_another_tenants_wait_for_nobody() -> None:
    loop = build_loop(depth=1, max_len=48, num_pages=60, rows=8, step_tokens=None)
    loop.add(prompt_of(30), 2)
    loop.step()
    short = loop.add(prompt_of(4), 2)  # its only full page would hold its last token
    scored = loop.add(prompt_of(9), 2, sampling=dataclasses.replace(GREEDY, prompt_logprobs=0))
    other = loop.add(prompt_of(9), 2, identity=dataclasses.replace(IDENTITY, owner="x"))
    loop.drain(max_steps=60)
    assert count(loop, "waits") == 0
    assert [request.num_cached for request in (scored, other)] == [0, 0]
    assert short.num_cached in (0, 3)


# what was not finite


def break_after(length: int) -> Any:  # noqa: ANN401  # a script of the fake runner
    """Logits behind the prompts of this length are not finite."""

    def script(prompt: tuple[int, ...], output_index: int) -> str | None:
        return "not_finite" if len(prompt) == length and output_index >= 0 else None

    return script


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_kept_of_a_prompt_whose_logits_are_not_finite(depth: int) -> None:
    loop = build_loop(depth=depth, script=break_after(17))
    request = run(loop, prompt_of(17))
    assert loop.outcomes[request] == "not_finite"
    assert len(loop.plans) >= 4  # pages of its first chunks were kept meanwhile
    assert loop.cache is not None
    assert len(loop.cache) == 0


def test_what_gave_a_good_token_before_stays_and_what_did_not_goes() -> None:
    loop = build_loop(script=break_after(17))
    run(loop, prompt_of(9))
    assert loop.outcomes[run(loop, prompt_of(17))] == "not_finite"
    assert loop.cache is not None
    assert len(loop.cache) == 2 + 1  # the prompt's pages, and one of its outputs
    assert run(loop, prompt_of(9)).num_cached == 8


def test_whoever_shares_a_page_that_was_not_finite_does_not_keep_it_again() -> None:
    loop = build_loop(chunk_tokens=8, depth=1, script=break_after(17), num_pages=30)
    bad = loop.add(prompt_of(17), 4)
    loop.step()
    loop.step()  # its first pages are kept
    mate = loop.add((*prompt_of(8), 1, 2, 3), 12)
    while bad in loop.live:
        loop.step()
    assert mate.num_cached == 8
    assert loop.cache is not None
    assert len(loop.cache) == 0
    loop.drain(max_steps=40)
    assert loop.outcomes[mate] is FinishReason.MAX_TOKENS
    assert len(loop.cache) == 0


def test_a_fault_that_is_told_after_the_abort_is_heard() -> None:
    loop = build_loop(depth=2, script=break_after(9), chunk_tokens=4)
    bad = loop.add(prompt_of(9), 4)
    while len(loop.plans) < 3 or loop.plans[-1].chunks[0].samples is False:
        loop.advance()
    loop.abort(bad)  # the step that samples is in flight
    loop.drain(max_steps=20)
    while loop._in_flight:
        loop.advance()
    assert loop.cache is not None
    assert len(loop.cache) == 0


# aborts, and a pool that is nearly full


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_point", range(4 * 12))
def test_an_abort_at_any_point_does_not_hurt_the_same_prompt_sent_again(
    at_point: int, depth: int
) -> None:
    loop = build_loop(depth=depth, max_len=48)
    prompt = prompt_of(30)
    request = loop.add(prompt, 5)
    for _ in range(at_point):
        loop.advance()
    loop.abort(request)
    again = loop.add(prompt, 5)
    loop.drain(max_steps=40)
    assert len(loop.outputs[again]) == 5
    canary = run(loop, 44)  # all twelve pages
    assert len(loop.outputs[canary]) == 4


def test_five_hundred_requests_leave_every_page_to_be_had() -> None:
    loop = build_loop(max_len=48)
    for number in range(500):
        run(loop, (number % 250, number // 250, *prompt_of(5)), 2)
        assert (loop.pool.num_held, loop.pool.num_free) == (0, 12)
    assert len(loop.outputs[run(loop, 44)]) == 4
    assert count(loop, "evictions") > 400


def test_a_match_is_not_evicted_by_its_own_request() -> None:
    """It is what would go first, and its own request needs pages that are not free."""
    loop = build_loop(max_len=48)
    run(loop, prompt_of(9), 2)
    run(loop, tuple(range(100, 138)), 2)
    assert (loop.pool.num_cached, loop.pool.num_free) == (11, 12)
    again = run(loop, (*prompt_of(8), *range(200, 212)), 2)
    assert again.num_cached == 8
    assert count(loop, "evictions") >= 2


def test_the_copy_is_left_out_where_its_page_is_needed() -> None:
    loop = build_loop(max_len=48)
    run(loop, prompt_of(48 - 1), 1)  # eleven full pages
    whole = run(loop, (*prompt_of(42), 1, 2, 3), 3)  # needs twelve: none is left to copy from
    assert whole.num_cached == 40
    assert not any(isinstance(copy, PageCopy) for plan in loop.plans for copy in plan.copies)


@pytest.mark.parametrize("depth", [1, 2])
def test_growth_with_cached_prompts_ends_within_a_bound(depth: int) -> None:
    loop = build_loop(depth=depth)
    requests = [loop.add(prompt_of(8), 32, seed=seed) for seed in range(4)]
    loop.drain(max_steps=6 * 160)
    assert all(loop.outcomes[request] is FinishReason.MAX_TOKENS for request in requests)


def test_a_colliding_digest_changes_no_output() -> None:
    for digest in (lambda message: b"same", lambda message: sha256(message)[:1], sha256):
        loop = Loop(cache=PrefixCache(4, digest=digest))
        for tokens in ((2,) * 14, (2,) * 9 + (1,) * 5, (1,) * 14, (2,) * 14):
            run(loop, tokens)
            run(loop, tokens, identity=dataclasses.replace(IDENTITY, weights="x"))
