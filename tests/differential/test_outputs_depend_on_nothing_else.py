"""The determinism contract: chunks, buckets, mates, preemption, overlap, batching change nothing.

In float32 on one machine the tokens are equal wherever the two best scores are not nearly tied; the
fixtures' scores are kept clear of ties, so here equal means equal.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.request import GenerationRequest, SamplingParams
from jaxserve.runner.runner import Runner
from tests.differential import stage
from tests.differential.covering import Case, covering_array, full_product

PROMPT = tuple((11 * i + 5) % 127 for i in range(21))
NUM_TOKENS = 12
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=2**40 + 42, max_tokens=NUM_TOKENS),
    "full": SamplingParams(
        temperature=0.9,
        seed=5,
        top_p=0.9,
        top_k=20,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={3: 2.0},
        min_tokens=6,
        max_tokens=NUM_TOKENS,
    ),
}
AXES = {
    "chunk": (1, 5, 64),
    "decode_seqs": ((2,), (64,), (2, 4, 32, 64)),
    "num_mates": (0, 1, 5, 40),
    "preempt_at": (None, *range(NUM_TOKENS)),
    "overlap": (True, False),
    "batching": ("continuous", "static"),
    "sampling": tuple(SAMPLING),
}
NIGHTLY_AXES = {**AXES, "decode_seqs": ((2,), (4,), (32,), (64,), (2, 4, 32, 64))}
# Native kernels, each with what it computes: attention of any weights, products of bfloat16.
NATIVE_AXES = {
    "chunk": (1, 5, 64),
    "decode_seqs": ((2,), (2, 4, 32, 64)),
    "num_mates": (0, 5, 40),
    "preempt_at": (None, 0, 5),
    "overlap": (True, False),
    "sampling": tuple(SAMPLING),
    "attention": ("native",),
}
# No step has more rows than the native product takes.
NATIVE_BFLOAT16_AXES = {
    **NATIVE_AXES,
    "chunk": (1, 5, 16),
    "decode_seqs": ((1,), (2,), (2, 4, 8)),
    "matmul": ("native",),
    "dtype": ("bfloat16",),
}
PLAIN = stage.Shape(chunk=64, decode_seqs=(2,))
BuildRunner = Callable[[stage.Shape], Runner]


def case_id(case: Case) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory: pytest.TempPathFactory) -> BuildRunner:
    """One runner a shape; they share a compilation cache."""
    cache_dir: Path = tmp_path_factory.mktemp("programs")
    runners: dict[stage.Shape, Runner] = {}

    def build(shape: stage.Shape) -> Runner:
        if shape not in runners:
            runners[shape] = stage.build_runner(shape, cache_dir)
        return runners[shape]

    return build


@pytest.fixture(scope="module")
def expected(runner_of: BuildRunner) -> dict[str, list[int]]:
    """Each request alone: whole prompt, smallest bucket, no overlap."""
    tokens = {}
    for name in SAMPLING:
        output, _ = run(runner_of, {"sampling": name})
        tokens[name] = output
    return tokens


def run(runner_of: BuildRunner, case: Case) -> tuple[list[int], int]:
    shape = stage.Shape(
        chunk=case.get("chunk", PLAIN.chunk),  # type: ignore[arg-type]  # a case's values are objects
        decode_seqs=case.get("decode_seqs", PLAIN.decode_seqs),  # type: ignore[arg-type]
        dtype=str(case.get("dtype", PLAIN.dtype)),
        attention=str(case.get("attention", PLAIN.attention)),
        matmul=str(case.get("matmul", PLAIN.matmul)),
        filters=str(case.get("filters", PLAIN.filters)),
    )
    config = shape.config
    config = config.model_copy(
        update={
            "scheduler": config.scheduler.model_copy(
                update={"batching": case.get("batching", "continuous")}
            ),
            "runner": config.runner.model_copy(update={"overlap": case.get("overlap", False)}),
        }
    )
    engine = stage.build_engine(runner_of(shape), config)
    target = GenerationRequest(prompt=PROMPT, sampling=SAMPLING[str(case["sampling"])])
    output, num_preemptions = stage.run_to_end(
        engine,
        target,
        mates=stage.make_mates(int(str(case.get("num_mates", 0)))),
        preempt_at=case.get("preempt_at"),  # type: ignore[arg-type]
    )
    assert engine.metrics.value("recompiles_total") == 0
    return output.token_ids, num_preemptions


def check(runner_of: BuildRunner, expected: dict[str, list[int]], case: Case) -> None:
    token_ids, num_preemptions = run(runner_of, case)
    assert token_ids == expected[str(case["sampling"])]
    if case["preempt_at"] is not None and case["preempt_at"] < NUM_TOKENS - 1:  # type: ignore[operator]
        assert num_preemptions >= 1, "the case did not do what it is for"


@pytest.mark.parametrize("sampling", SAMPLING)
def test_filters_found_in_passes_change_no_token(
    runner_of: BuildRunner, expected: dict[str, list[int]], sampling: str
) -> None:
    case: Case = {"sampling": sampling, "filters": "passes", "num_mates": 1, "overlap": True}
    token_ids, _ = run(runner_of, case)
    assert token_ids == expected[sampling]


@pytest.mark.parametrize("case", covering_array(AXES), ids=case_id)
def test_every_pair_of_circumstances_gives_the_same_tokens(
    runner_of: BuildRunner, expected: dict[str, list[int]], case: Case
) -> None:
    check(runner_of, expected, case)


@pytest.mark.native
@pytest.mark.parametrize("case", covering_array(NATIVE_AXES), ids=case_id)
def test_native_attention_gives_the_tokens_of_xlas(
    runner_of: BuildRunner, expected: dict[str, list[int]], case: Case
) -> None:
    check(runner_of, expected, case)


@pytest.fixture(scope="module")
def native_expected(runner_of: BuildRunner) -> dict[str, list[int]]:
    """In bfloat16 by native kernels, each request alone."""
    plain: Case = {name: values[-1] for name, values in NATIVE_BFLOAT16_AXES.items()}
    plain |= {"num_mates": 0, "preempt_at": None, "decode_seqs": (2,)}
    return {name: run(runner_of, {**plain, "sampling": name})[0] for name in SAMPLING}


@pytest.mark.native
@pytest.mark.parametrize("case", covering_array(NATIVE_BFLOAT16_AXES), ids=case_id)
def test_native_kernels_give_the_same_tokens_in_bfloat16(
    runner_of: BuildRunner, native_expected: dict[str, list[int]], case: Case
) -> None:
    """Over chunking too: a row's number does not depend on how many rows there are."""
    check(runner_of, native_expected, case)


@pytest.mark.nightly
@pytest.mark.parametrize("decode_seqs", NIGHTLY_AXES["decode_seqs"], ids=str)
@pytest.mark.parametrize("chunk", NIGHTLY_AXES["chunk"])
def test_every_combination_of_circumstances_gives_the_same_tokens(
    runner_of: BuildRunner,
    expected: dict[str, list[int]],
    chunk: int,
    decode_seqs: tuple[int, ...],
) -> None:
    for case in full_product({**AXES, "chunk": (chunk,), "decode_seqs": (decode_seqs,)}):
        check(runner_of, expected, case)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_in_bfloat16_mates_and_buckets_change_nothing(
    runner_of: BuildRunner, sampling: str
) -> None:
    """Bitwise on a CPU, from two rows up; over chunking nothing is promised in bfloat16."""
    tokens = {
        (decode_seqs, num_mates): run(
            runner_of,
            {
                "dtype": "bfloat16",
                "sampling": sampling,
                "decode_seqs": decode_seqs,
                "num_mates": num_mates,
                "overlap": True,
            },
        )[0]
        for decode_seqs in AXES["decode_seqs"]
        for num_mates in (0, 1, 5)
    }
    assert len(set(map(tuple, tokens.values()))) == 1, tokens


def test_the_three_requests_differ(expected: dict[str, list[int]]) -> None:
    """Otherwise a sampler that ignores its parameters would pass."""
    assert len({tuple(tokens) for tokens in expected.values()}) == len(SAMPLING)


def test_the_covering_array_meets_every_pair() -> None:
    cases = covering_array(AXES)
    names = list(AXES)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            met = {(case[a], case[b]) for case in cases}
            assert met == {(x, y) for x in AXES[a] for y in AXES[b]}
