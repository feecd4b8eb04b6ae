"""The bucket scheme: which shapes are compiled, and which one a step gets."""

import dataclasses
import itertools

import pytest

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.model.sampling import Variant
from jaxserve.plan import Bucket, Chunk, StepPlan
from jaxserve.runner.batch import find_plan_bucket
from jaxserve.runner.buckets import (
    VARIANTS,
    BucketScheme,
    OutputBucket,
    Reach,
    build_scheme,
)


def _bucket(decode_seqs: int, chunk_tokens: int = 0) -> Bucket:
    return Bucket(decode_seqs=decode_seqs, verify_tokens=1, chunk_tokens=chunk_tokens)


def _scheme(
    *, max_model_tokens: int = 1024, min_rows: int = 2, **sections: dict[str, object]
) -> BucketScheme:
    """Returns a scheme of few chunk sizes, unless the sections have others."""
    buckets = {"chunk_tokens": [64, 128, 256], **sections.pop("buckets", {})}
    config = Config.model_validate(sections | {"buckets": buckets})
    return build_scheme(config, max_model_tokens=max_model_tokens, min_rows=min_rows)


def _reach(prompt_len: int, max_tokens: int, variant: Variant = "greedy") -> Reach:
    return Reach(prompt_len=prompt_len, max_tokens=max_tokens, variant=variant)


def test_the_default_scheme_is_fifteen_forwards_and_fifteen_outputs() -> None:
    scheme = build_scheme(Config(), max_model_tokens=1024, min_rows=2)
    decode = [_bucket(n) for n in (2, 4, 8, 16, 32)]
    mixed = [_bucket(n, c) for n in (8, 32) for c in (16, 32, 64, 128, 256)]
    assert set(scheme.forwards) == {*decode, *mixed}
    assert len(scheme.forwards) == 15
    assert len(scheme.outputs) == 5 * 3
    elsewhere = build_scheme(Config(), max_model_tokens=1024, min_rows=1)
    assert set(elsewhere.forwards) - set(scheme.forwards) == {_bucket(1)}
    assert elsewhere.outputs == scheme.outputs
    assert scheme.max_tokens == 32 + 256


def _plan(*lens: int) -> StepPlan:
    chunks = tuple(
        Chunk(
            sequence_id=n,
            row=n,
            start=0,
            num_tokens=num_tokens,
            token_ids=(1,) * num_tokens,
            samples=False,
            output_index=0,
            prompt_len=64,
        )
        for n, num_tokens in enumerate(lens)
    )
    return StepPlan(step_id=0, others=chunks)


@pytest.mark.parametrize(
    ("lens", "bucket", "is_fallback"),
    [
        ((1,), (2, 0), False),
        ((1, 1, 1), (4, 0), False),
        ((1,) * 5, (8, 0), False),
        ((1,) * 8 + (20,), (8, 64), False),
        ((1,) * 8 + (60, 20), (8, 128), False),  # tiles: 64 and 32
        ((1, 1, 1, 20), (8, 64), True),  # 4x1+64 was not compiled
        ((20,), (8, 64), True),  # nor was 2x1+64
        ((1,) * 9 + (20,), (32, 64), True),  # nor 16x1+64
        ((1,) * 20 + (20,), (32, 64), False),
    ],
)
def test_a_step_falls_back_where_its_sizes_were_not_compiled_together(
    lens: tuple[int, ...], bucket: tuple[int, int], is_fallback: bool
) -> None:
    scheme, plan = _scheme(), _plan(*lens)
    found = find_plan_bucket(plan, scheme)
    assert found == _bucket(*bucket)
    assert scheme.is_fallback(found, plan) is is_fallback


@pytest.mark.parametrize(
    ("lens", "is_fallback"), [((1, 1, 1, 64), True), ((1, 1, 1, 65), False), ((1, 1, 64), False)]
)
def test_a_step_of_a_listed_chunk_size_falls_back_to_a_larger_one(
    lens: tuple[int, ...], is_fallback: bool
) -> None:
    """Three rows beside exactly 64 tokens: 64 were compiled, but only beside two."""
    forwards = (_bucket(2, 0), _bucket(2, 64), _bucket(8, 128))
    scheme, plan = dataclasses.replace(_scheme(), forwards=forwards), _plan(*lens)
    assert scheme.is_fallback(find_plan_bucket(plan, scheme), plan) is is_fallback


def test_batch_invariance_leaves_one_shape_whatever_the_lists_are() -> None:
    scheme = _scheme(runner={"batch_invariant": True})
    assert scheme.forwards == (_bucket(32, 256),)
    assert scheme.outputs == (OutputBucket(rows=32, variant="full"),)
    assert scheme.find_bucket(1, 0) == _bucket(32, 256)
    assert scheme.find_output(1, "greedy").variant == "full"
    assert not scheme.is_fallback(_bucket(32, 256), _plan(1))
    reached = scheme.reachable(_reach(300, 5), max_step_tokens=None)
    assert (reached.forwards, reached.outputs) == (scheme.forwards, scheme.outputs)


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8, 31, 33, 64])
def test_every_step_within_the_limits_has_a_bucket(max_seqs: int) -> None:
    scheme = _scheme(scheduler={"max_seqs": max_seqs})
    limits = scheme.limits
    assert limits.max_seqs == max_seqs
    for rows, tiles in itertools.product(
        range(limits.max_rows + 1), range(limits.max_chunk_tokens // limits.chunk_tile + 1)
    ):
        bucket = scheme.find_bucket(rows, tiles * limits.chunk_tile)
        assert bucket.decode_seqs >= rows
        assert bucket.chunk_tokens >= tiles * limits.chunk_tile
    for rows, variant in itertools.product(range(max_seqs + 1), VARIANTS):
        assert scheme.find_output(rows, variant).rows >= rows


def test_the_smallest_bucket_that_fits_is_chosen() -> None:
    scheme = _scheme()
    assert scheme.find_bucket(1, 0) == _bucket(2)
    assert scheme.find_bucket(2, 0) == _bucket(2)
    assert scheme.find_bucket(3, 0) == _bucket(4)
    assert scheme.find_bucket(0, 16) == _bucket(8, 64)
    assert scheme.find_bucket(9, 80) == _bucket(32, 128)


def test_the_maximum_is_always_a_size() -> None:
    scheme = _scheme(scheduler={"max_seqs": 24})
    assert _bucket(24) in scheme.forwards
    assert _bucket(24, 256) in scheme.forwards
    assert max(bucket.decode_seqs for bucket in scheme.forwards) == 24


def test_no_program_has_one_row_where_that_is_slow() -> None:
    scheme = _scheme(scheduler={"max_seqs": 1}, buckets={"decode_seqs": [1, 4]})
    assert min(bucket.decode_seqs for bucket in scheme.forwards) == 2
    assert min(bucket.rows for bucket in scheme.outputs) == 2
    assert scheme.limits.max_seqs == 1


def test_one_row_is_a_size_elsewhere() -> None:
    scheme = _scheme(min_rows=1, buckets={"decode_seqs": [1, 4]})
    assert scheme.find_bucket(1, 0) == _bucket(1)
    assert scheme.find_output(1, "plain").rows == 2  # costs the same


def test_a_geometric_list_is_expanded() -> None:
    scheme = _scheme(buckets={"decode_seqs": {"first": 2, "last": 16, "ratio": 2}})
    assert [b.decode_seqs for b in scheme.forwards if not b.chunk_tokens] == [2, 4, 8, 16, 32]


def test_a_malformed_geometric_list_is_refused() -> None:
    with pytest.raises(ValueError, match="1 ≤ first ≤ last, ratio ≥ 2"):
        _scheme(buckets={"decode_seqs": {"first": 2, "last": 16, "ratio": 1}})


def test_chunk_sizes_are_whole_tiles() -> None:
    scheme = _scheme(buckets={"chunk_tokens": [10, 33], "chunk_tile": 8})
    assert {b.chunk_tokens for b in scheme.forwards} == {0, 16, 40}


def test_without_capture_there_is_one_bucket_of_each_kind() -> None:
    scheme = _scheme(buckets={"capture": False})
    assert scheme.forwards == (_bucket(32), _bucket(32, 256))
    assert {(b.rows, b.variant) for b in scheme.outputs} == {(32, v) for v in VARIANTS}
    assert all(scheme.is_largest(bucket) for bucket in scheme.forwards)


def test_without_chunking_the_largest_chunk_bucket_holds_a_whole_sequence() -> None:
    scheme = _scheme(scheduler={"chunked_prefill": False}, max_model_tokens=1000)
    assert {b.chunk_tokens for b in scheme.forwards} == {0, 64, 128, 256, 512, 1008}
    assert scheme.limits.max_chunk_tokens == 1008


def test_without_chunking_a_budget_below_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_step_tokens is 512.*1000 tokens"):
        _scheme(scheduler={"chunked_prefill": False, "max_step_tokens": 512}, max_model_tokens=1000)


def test_chunk_buckets_that_no_step_can_fill_are_left_out() -> None:
    scheme = _scheme(max_model_tokens=24, scheduler={"max_chunks": 2})
    assert {b.chunk_tokens for b in scheme.forwards} == {0, 64}


def test_only_the_largest_of_a_kind_is_largest() -> None:
    scheme = _scheme()
    assert [b for b in scheme.forwards if scheme.is_largest(b)] == [_bucket(32), _bucket(32, 256)]


def test_a_short_prompt_reaches_one_chunk_bucket_and_the_least_decode_bucket() -> None:
    scheme = _scheme().reachable(_reach(65, 10, "plain"), max_step_tokens=None)
    assert set(scheme.forwards) == {_bucket(2), _bucket(8, 128)}
    assert scheme.outputs == (OutputBucket(rows=2, variant="plain"),)
    assert scheme.limits.max_seqs == 1
    assert scheme.limits.max_chunk_tokens == 128


def test_a_prompt_of_one_token_reaches_no_chunk_bucket() -> None:
    scheme = _scheme().reachable(_reach(1, 10), max_step_tokens=None)
    assert scheme.forwards == (_bucket(2),)


def test_one_token_of_output_after_a_chunk_reaches_no_decode_bucket() -> None:
    scheme = _scheme().reachable(_reach(20, 1), max_step_tokens=None)
    assert scheme.forwards == (_bucket(8, 64),)
    assert scheme.find_bucket(1, 0) == _bucket(8, 64)


def test_a_prompt_longer_than_the_budget_reaches_every_smaller_chunk() -> None:
    scheme = _scheme().reachable(_reach(600, 10), max_step_tokens=128)
    assert set(scheme.forwards) == {_bucket(2), _bucket(8, 64), _bucket(8, 128)}


@pytest.mark.parametrize("num_choices", [1, 2, 9, 32])
def test_choices_reach_rows_for_all_of_them_and_a_chunk_beside_the_others(num_choices: int) -> None:
    reach = Reach(prompt_len=65, max_tokens=10, variant="full", num_choices=num_choices)
    scheme = _scheme().reachable(reach, max_step_tokens=None)
    rows = _scheme().find_bucket(num_choices, 0).decode_seqs
    beside = 8 if num_choices <= 9 else 32
    assert set(scheme.forwards) == {_bucket(rows), _bucket(beside, 128)}
    assert scheme.outputs == (OutputBucket(rows=rows, variant="full"),)
    assert (scheme.limits.max_seqs, scheme.limits.max_rows) == (num_choices, num_choices)
    assert scheme.find_bucket(num_choices - 1, 128) == _bucket(beside, 128)


@pytest.mark.parametrize("wanted", VARIANTS)
def test_a_missing_variant_is_replaced_by_one_that_can_do_more(wanted: Variant) -> None:
    scheme = _scheme().reachable(_reach(20, 10, "full"), max_step_tokens=None)
    assert scheme.find_output(1, wanted).variant == "full"


def test_a_step_beyond_the_limits_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="33 one-token rows"):
        _scheme().find_bucket(33, 0)
