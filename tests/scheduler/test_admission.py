"""Admission with policy edf: what cannot meet its deadline is told so at once."""

import pytest

from jaxserve.plan import Bucket
from jaxserve.request import Request
from jaxserve.scheduler.admission import PROBE
from jaxserve.scheduler.step_time import StepWork
from tests.scheduler.loop import Loop

STEP_S = 1.0


def build(rows: int = 2, *, is_known: bool = True, **options: object) -> Loop:
    """Every step takes a second; a chunk is 8 tokens."""
    loop = Loop(rows=rows, policy="edf", chunk_tokens=8, max_len=40, num_pages=60, **options)  # type: ignore[arg-type]  # by name
    if is_known:
        for decode_seqs, chunk_tokens in ((rows, 0), (rows, 8)):
            bucket = Bucket(decode_seqs=decode_seqs, verify_tokens=1, chunk_tokens=chunk_tokens)
            for kv in range(20):
                loop.scheduler.step_times.observe(bucket, StepWork(kv, kv), STEP_S)
    return loop


def is_refused(loop: Loop, request: Request) -> bool:
    return loop.outcomes.get(request) == "unreachable"


@pytest.mark.parametrize(("deadline_s", "is_reachable"), [(9.5, False), (10.5, True)])
def test_a_request_alone_needs_its_chunks_and_its_tokens(
    deadline_s: float, is_reachable: bool
) -> None:
    """Two chunks of its prompt of 12, eight tokens more: ten seconds."""
    loop = build()
    request = loop.add(12, 9, deadline_s=deadline_s)
    loop.step()
    assert is_refused(loop, request) is not is_reachable
    assert bool(request.sequences[0].last_step) is is_reachable


@pytest.mark.parametrize(("deadline_s", "is_reachable"), [(10.5, False), (11.5, True)])
def test_beside_another_it_comes_behind_the_step_that_runs(
    deadline_s: float, is_reachable: bool
) -> None:
    loop = build()
    loop.add(3, 20)
    loop.step()  # launched, and not read yet
    request = loop.add(12, 9, deadline_s=loop.now_s + deadline_s)
    loop.step()
    assert is_refused(loop, request) is not is_reachable


def test_the_step_that_runs_is_nearly_done() -> None:
    loop = build()
    loop.add(3, 20)
    loop.step()
    request = loop.add(12, 9, deadline_s=loop.now_s + 11.5)
    loop.now_s += 0.9
    loop.step()
    assert not is_refused(loop, request)


def test_a_short_prompt_s_step_counts_and_not_the_largest() -> None:
    loop = build()
    large = Bucket(decode_seqs=2, verify_tokens=1, chunk_tokens=16)
    for kv in range(20):
        loop.scheduler.step_times.observe(large, StepWork(kv, kv), 9.0)
    request = loop.add(4, 2, deadline_s=2.5)
    loop.step()
    assert not is_refused(loop, request)


def test_a_machine_that_was_slow_once_does_not_refuse_everybody_for_ever() -> None:
    """Whoever is let in shows how long a step takes now; meanwhile nobody else would."""
    loop = build()
    requests = []
    for _ in range(PROBE):
        requests.append(loop.add(12, 9, deadline_s=loop.now_s + 5.0))
        loop.drain(30)
    assert [is_refused(loop, request) for request in requests] == [True] * (PROBE - 1) + [False]


def test_while_nothing_is_known_of_steps_nobody_is_refused() -> None:
    loop = build(is_known=False)
    request = loop.add(12, 9, deadline_s=0.5)
    loop.step()
    assert not is_refused(loop, request)


def test_who_runs_and_who_waits_before_it_count() -> None:
    loop = build(rows=1)
    loop.add(3, 20)
    for _ in range(3):
        loop.step()
    late = loop.add(3, 2, deadline_s=15.0)  # the row is taken for seventeen more
    fine = loop.add(3, 2, deadline_s=30.0)
    loop.step()
    assert is_refused(loop, late)
    assert not is_refused(loop, fine)
    behind = loop.add(3, 2, deadline_s=30.5)  # and it comes behind `fine`
    sooner = loop.add(3, 2, deadline_s=29.0)  # but this before it
    loop.step()
    assert not is_refused(loop, behind)
    assert not is_refused(loop, sooner)
    assert not loop.scheduler.unreachable(0.0)  # each is looked at once


def test_what_would_be_missed_most_is_told() -> None:
    loop = build()
    loop.add(12, 9, queue_deadline_s=1.5, deadline_s=100.0)
    loop.add(12, 9, queue_deadline_s=100.0, deadline_s=1.5)
    loop.scheduler.expired(0.0)
    missed = loop.scheduler.unreachable(0.0)
    assert [miss.field for _, miss in missed] == ["queue_timeout", "deadline"]
    assert all(miss.late_s > 0 for _, miss in missed)


def test_the_queue_timeout_is_for_the_first_token() -> None:
    loop = build()
    late = loop.add(12, 9, queue_deadline_s=1.5)
    fine = loop.add(12, 9, queue_deadline_s=9.5)
    loop.step()
    assert is_refused(loop, late)
    assert not is_refused(loop, fine)


def test_who_was_accepted_is_refused_once_its_time_is_over_before_anything_is_computed() -> None:
    loop = build(rows=1, depth=1)
    loop.add(3, 12)
    loop.step()
    waiting = loop.add(3, 5, deadline_s=25.0)
    loop.step()
    assert not is_refused(loop, waiting)
    loop.now_s = 15.0  # the machine was slower than it used to be
    loop.step()
    assert is_refused(loop, waiting)
    assert waiting.sequences[0].last_step == 0


def test_who_has_begun_is_never_refused() -> None:
    loop = build(rows=1, depth=1)
    request = loop.add(3, 12, deadline_s=30.0)
    loop.step()
    loop.preempt(request)
    loop.now_s = 29.0
    loop.step()
    assert not is_refused(loop, request)


def test_outputs_that_end_early_make_room_for_more() -> None:
    loop = build(rows=1, depth=1)
    for _ in range(40):
        request = loop.add(2, 20)
        loop.stops_at[request] = 2
        while request not in loop.outcomes:
            loop.step()
    busy = loop.add(3, 20)
    loop.step()
    request = loop.add(3, 2, deadline_s=12.0)
    loop.step()
    assert not is_refused(loop, request)
    loop.stops_at[busy] = 3
    loop.drain(60)
