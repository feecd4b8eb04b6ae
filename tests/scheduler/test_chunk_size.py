"""With a target between tokens a step takes as many prompt tokens as its time allows."""

import pytest

from jaxserve.config import SchedulerSection
from jaxserve.plan import Bucket
from jaxserve.scheduler.step_time import StepWork
from tests.scheduler.loop import Loop

SIZES = (4, 8, 16, 32)


def build(target_itl_s: float | None, *, slow: float = 1.0) -> Loop:
    """A step takes 10 ms, and 10 ms more for each prompt token it has room for; one of five is so
    many times slower."""
    loop = Loop(
        rows=4, chunk_tokens=32, chunk_tile=4, step_tokens=None, num_pages=80, max_len=100,
        target_itl_s=target_itl_s,
    )  # fmt: skip
    for chunk_tokens in (0, *SIZES):
        bucket = Bucket(decode_seqs=4, verify_tokens=1, chunk_tokens=chunk_tokens)
        for kv in range(200):
            seconds = (0.01 + 0.01 * chunk_tokens) * (slow if kv % 5 == 0 else 1.0)
            loop.scheduler.step_times.observe(bucket, StepWork(kv, kv), seconds)
    return loop


@pytest.mark.parametrize(
    ("target_itl_s", "largest"), [(None, 32), (1.0, 32), (0.2, 16), (0.1, 8), (0.06, 4), (1e-6, 4)]
)
def test_a_prompt_beside_decoding_rows_is_cut_to_the_target(
    target_itl_s: float | None, largest: int
) -> None:
    loop = build(target_itl_s)
    loop.add(3, 30)
    loop.step()
    loop.step()
    long = loop.add(64, 2)
    for _ in range(6):
        loop.step()
    sizes = [
        chunk.num_tokens
        for plan in loop.plans
        for chunk in plan.chunks
        if chunk.sequence_id == long.sequences[0].id
    ]
    assert max(sizes) == largest
    is_limited = loop.metrics.value("limited_chunk_steps_total") > 0
    assert is_limited is (largest < 32)
    loop.drain(200)
    num_cut = 64 // largest if largest < 32 else 0  # and no step without a prompt
    assert loop.metrics.value("limited_chunk_steps_total") == num_cut


@pytest.mark.parametrize(("slow", "largest"), [(1.0, 16), (1.1, 16), (1.6, 8), (3.0, 4)])
def test_slow_steps_are_to_keep_to_the_target_too(slow: float, largest: int) -> None:
    loop = build(0.2, slow=slow)
    loop.add(3, 30)
    loop.step()
    loop.step()
    long = loop.add(64, 2)
    for _ in range(6):
        loop.step()
    chunks = [chunk for plan in loop.plans for chunk in plan.chunks]
    sizes = [c.num_tokens for c in chunks if c.sequence_id == long.sequences[0].id]
    assert max(sizes) == largest
    loop.drain(200)


def test_where_nobody_decodes_prompts_take_all_there_is() -> None:
    loop = build(1e-6)
    long = loop.add(64, 2)
    for _ in range(2):
        loop.step()
    assert [chunk.num_tokens for plan in loop.plans for chunk in plan.chunks] == [32, 32]
    assert loop.metrics.value("limited_chunk_steps_total") == 0
    loop.drain(60)
    assert long in loop.outcomes


def test_a_target_without_cut_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="target_itl_s needs chunked_prefill"):
        SchedulerSection(target_itl_s=0.1, chunked_prefill=False)
