"""The tiny model behind the gRPC door: what clients are told is what the oracle works out."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from jaxserve.client import (
    AsyncClient,
    BadRequestError,
    Delta,
    Finish,
    ScoreItem,
    Start,
    TokenLogprob,
)
from jaxserve.runner.runner import Runner
from jaxserve.server.app import Server
from tests.differential import small
from tests.differential.stage import EOS_ID, MODEL, build_engine, tiny_params
from tests.engines import check_idle
from tests.fakes import build_byte_tokenizer
from tests.oracle import oracle_logits
from tests.server.harness import local

pytestmark = pytest.mark.asyncio

TOKENIZER = build_byte_tokenizer()
TOLERANCE = 1e-4  # float32 against float64, over three layers


@contextlib.asynccontextmanager
async def served(runner: Runner) -> AsyncIterator[AsyncClient]:
    """Serves the runner; at the end nothing is anybody's (K1, K5)."""
    engine = build_engine(runner, small.CONFIG)
    server = Server(local(engine.config), engine.metrics)
    await server.start()
    engine.start()
    server.attach(engine)
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            yield client
    finally:
        await asyncio.to_thread(engine.stop)
        await server.stop(5.0)
    check_idle(engine)


def log_softmax(tokens: Sequence[int]) -> np.ndarray:
    """Returns the log-probabilities after each token, [len(tokens), vocabulary]."""
    logits = oracle_logits(tiny_params(), list(tokens), MODEL).astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def check(found: Sequence[TokenLogprob], tokens: Sequence[int], *, num_top: int) -> None:
    """Checks what is told of the last tokens of a sequence."""
    first = len(tokens) - len(found)
    rows = log_softmax(tokens)[first - 1 : -1]
    for row, token, entry in zip(rows, tokens[first:], found, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
        assert entry.rank == pytest.approx(1 + np.sum(row > row[token]), abs=near(row, row[token]))
        assert entry.token_bytes == TOKENIZER.token_bytes(token)
        assert len(entry.top) == num_top
        best = np.sort(row)[::-1][:num_top]
        assert [top.logprob for top in entry.top] == pytest.approx(best, abs=TOLERANCE)
        for top in entry.top:
            assert top.token_id < MODEL.vocab_size
            assert top.logprob == pytest.approx(row[top.token_id], abs=TOLERANCE)


def near(row: np.ndarray, value: float) -> int:
    """How many others are so near that rounding may order them otherwise."""
    return int(np.sum(np.abs(row - value) < 2 * TOLERANCE)) - 1


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17])
async def test_logprobs_of_prompt_and_output_are_the_oracles(
    small_runner: Runner, length: int
) -> None:
    """C37: any length around pages of 4, and chunks of up to 10; alone, again, beside others."""
    prompt = small.prompt_of(length)
    async with served(small_runner) as client:

        async def ask(num_top: int, n: int) -> None:
            whole = await client.generate(
                prompt,
                n=n,
                temperature=0.7,
                seed=5,
                max_tokens=4,
                ignore_eos=True,
                logprobs=num_top,
                prompt_logprobs=num_top,
                include_token_ids=True,
            )
            assert len(whole.prompt_logprobs) == length - 1
            if length > 1:
                check(whole.prompt_logprobs, prompt, num_top=num_top)
            for choice in whole.choices:
                check(choice.logprobs, (*prompt, *choice.token_ids), num_top=num_top)

        for num_top in (0, 5):
            await ask(num_top, 1)
        await asyncio.gather(*(ask(num_top, 1) for num_top in (0, 1, 5, 20)))
        await ask(1, 3)


async def test_all_probabilities_of_a_position_make_one(small_runner: Runner) -> None:
    """C29: of 131 real ids, though 192 rows are computed."""
    prompt = small.prompt_of(6)
    rows = log_softmax(prompt)
    total = 0.0
    async with served(small_runner) as client:
        items = [
            ScoreItem(context=prompt, continuation=(token,)) for token in range(MODEL.vocab_size)
        ]
        scores = await client.score(items)
        for token, score in enumerate(scores.results):
            assert score.sum_logprob == pytest.approx(rows[-1][token], abs=TOLERANCE)
            assert score.is_greedy is (token == int(np.argmax(rows[-1])))
            total += math.exp(score.sum_logprob)
    assert total == pytest.approx(1, abs=1e-4)


async def test_scores_are_sums_of_the_oracles(small_runner: Runner) -> None:
    context = small.prompt_of(7)
    continuations = [small.prompt_of(count, salt=9) for count in (1, 2, 5, 11)]
    async with served(small_runner) as client:
        items = [ScoreItem(context=context, continuation=tokens) for tokens in continuations]
        scores = await client.score(items, include_token_logprobs=True)
    for tokens, score in zip(continuations, scores.results, strict=True):
        check(score.token_logprobs, (*context, *tokens), num_top=0)
        rows = log_softmax((*context, *tokens))[len(context) - 1 : -1]
        wanted = sum(row[token] for row, token in zip(rows, tokens, strict=True))
        assert score.sum_logprob == pytest.approx(wanted, abs=len(tokens) * TOLERANCE)
        assert score.num_tokens == len(tokens)


async def test_a_greedy_continuation_is_the_one_that_is_written(small_runner: Runner) -> None:
    context = small.prompt_of(5)
    async with served(small_runner) as client:
        written = await client.generate(
            context, temperature=0.0, max_tokens=5, ignore_eos=True, include_token_ids=True
        )
        (score,) = (
            await client.score([ScoreItem(context=context, continuation=written.token_ids)])
        ).results
    assert score.is_greedy


async def test_penalties_biases_and_temperature_change_no_logprob(small_runner: Runner) -> None:
    """They are the model's own; what is drawn is not."""
    prompt = small.prompt_of(6)
    async with served(small_runner) as client:
        for options in (
            {"temperature": 1e-3},
            {"temperature": 3.0, "top_k": 2},
            {"presence_penalty": 2.0, "repetition_penalty": 1.7},
            {"logit_bias": {3: 50.0}},
            {"allowed_token_ids": [4, 9]},
        ):
            whole = await client.generate(
                prompt,
                seed=1,
                max_tokens=4,
                ignore_eos=True,
                logprobs=3,
                include_token_ids=True,
                **options,
            )
            check(whole.logprobs, (*prompt, *whole.token_ids), num_top=3)
            if "logit_bias" in options:
                assert set(whole.token_ids) == {3}
            if "allowed_token_ids" in options:
                assert set(whole.token_ids) <= {4, 9}


async def test_choices_are_what_each_would_be_alone(small_runner: Runner) -> None:
    """Preempted, too: four choices of 13 tokens and 16 more do not fit twelve pages of four."""
    prompt = small.prompt_of(13)
    options = {"temperature": 0.8, "seed": 11, "max_tokens": 16, "ignore_eos": True}
    async with served(small_runner) as client:
        whole = await client.generate(prompt, n=4, include_token_ids=True, **options)  # type: ignore[arg-type]
        first = await client.generate(prompt, n=1, include_token_ids=True, **options)  # type: ignore[arg-type]
        again = await client.generate(prompt, n=2, include_token_ids=True, **options)  # type: ignore[arg-type]
    outputs = [choice.token_ids for choice in whole.choices]
    assert len(set(outputs)) == 4
    assert outputs[0] == first.token_ids
    assert outputs[:2] == [choice.token_ids for choice in again.choices]
    oracle = small.oracle_output(small.ask(prompt, temperature=0.8, seed=11))
    assert list(outputs[0]) == oracle


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-5, 1e-4])
async def test_tiny_temperatures_take_the_best(small_runner: Runner, temperature: float) -> None:
    """C26."""
    prompt = small.prompt_of(6)
    async with served(small_runner) as client:
        whole = await client.generate(
            prompt,
            n=2,
            temperature=temperature,
            max_tokens=8,
            ignore_eos=True,
            logprobs=0,
            include_token_ids=True,
        )
    for choice in whole.choices:
        assert list(choice.token_ids) == small.oracle_output(small.ask(prompt, max_tokens=8))
        assert {entry.rank for entry in choice.logprobs} == {1}


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
async def test_temperatures_that_are_none_are_refused(
    small_runner: Runner, temperature: float
) -> None:
    """C26."""
    async with served(small_runner) as client:
        with pytest.raises(BadRequestError, match="temperature") as caught:
            await client.generate(small.prompt_of(3), temperature=temperature)
        assert caught.value.field == "sampling.temperature"


async def test_a_stream_is_the_whole_answer_with_everything_asked_for(
    small_runner: Runner,
) -> None:
    prompt = small.prompt_of(9)
    options = {
        "n": 3,
        "temperature": 1.0,
        "seed": 4,
        "max_tokens": 6,
        "logprobs": 2,
        "prompt_logprobs": 2,
        "include_token_ids": True,
        "bad_words": ["a"],
        "stop_token_ids": [EOS_ID - 1],
    }
    async with served(small_runner) as client:
        whole = await client.generate(prompt, **options)  # type: ignore[arg-type]
        events = [event async for event in client.stream(prompt, **options)]  # type: ignore[arg-type]
    start, finishes = events[0], [event for event in events if isinstance(event, Finish)]
    assert isinstance(start, Start)
    assert start.prompt_logprobs == whole.prompt_logprobs
    for choice in whole.choices:
        deltas = [
            event for event in events if isinstance(event, Delta) and event.index == choice.index
        ]
        assert sum((delta.token_ids for delta in deltas), ()) == choice.token_ids
        assert sum((delta.logprobs for delta in deltas), ()) == choice.logprobs
        (finish,) = [finish for finish in finishes if finish.index == choice.index]
        assert finish.reason is choice.finish_reason
