"""With runner.batch_invariant a request's log-probabilities are the same bits, whatever happens."""

from collections.abc import Sequence

import pytest

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.plan import TokenLogprobs
from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential.small import CONFIG, Play, ask, prompt_of
from tests.differential.stage import MODEL, tiny_params
from tests.engines import Output

VALUES = CONFIG.model_dump()
INVARIANT = Config.model_validate(
    VALUES | {"runner": VALUES["runner"] | {"batch_invariant": True, "attention": "xla"}}
)
TARGETS = [
    ask(prompt_of(13), logprobs=3),
    ask(prompt_of(9, salt=1), logprobs=3, temperature=0.9, seed=7, top_p=0.9),
]
MATES = [ask(prompt_of(length, salt=2), max_tokens=9) for length in (3, 6, 11)]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(tiny_params(), MODEL, INVARIANT, metrics=Metrics())


def logprobs_of(output: Output) -> list[TokenLogprobs]:
    return [entry for delta in output.deltas for entry in delta.logprobs]


def run(
    runner: Runner,
    *,
    mates: Sequence[GenerationRequest] = (),
    preempt_at: Sequence[int] = (),
    overlap: bool = False,
    num_rounds: int = 1,
    cache: bool = False,
) -> list[list[TokenLogprobs]]:
    """Returns what the last round told of each target's tokens."""
    section = INVARIANT.prefix_cache.model_copy(update={"enabled": cache})
    config = INVARIANT.model_copy(update={"prefix_cache": section})
    play = Play(runner, overlap=overlap, config=config)
    outputs: list[list[TokenLogprobs]] = []
    for _ in range(num_rounds):
        before = [play.submit(mate) for mate in mates]
        guests = [play.submit(target, preempt_at=preempt_at) for target in TARGETS]
        play.run()
        for mate in before:
            play.read(mate)
        outputs = [logprobs_of(play.read(guest)) for guest in guests]
    return outputs


@pytest.fixture(scope="module")
def expected(runner: Runner) -> list[list[TokenLogprobs]]:
    return run(runner)


@pytest.mark.parametrize(
    "circumstances",
    [
        {"overlap": True},
        {"mates": MATES},
        {"mates": MATES, "overlap": True, "cache": True, "num_rounds": 2},
        {"preempt_at": (0, 3)},
        {"preempt_at": (5,), "mates": MATES, "overlap": True},
    ],
    ids=["overlap", "mates", "cache", "preempted", "together"],
)
def test_log_probabilities_are_the_same_bits(
    runner: Runner, expected: list[list[TokenLogprobs]], circumstances: dict[str, object]
) -> None:
    for got, wanted in zip(run(runner, **circumstances), expected, strict=True):  # type: ignore[arg-type]  # by name
        assert got == wanted  # tokens, and float32 numbers exactly
        assert len(wanted) == 16
