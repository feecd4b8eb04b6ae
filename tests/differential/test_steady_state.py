"""After warm-up nothing is traced, compiled or allocated, whatever is asked (C63, C65)."""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxserve.engine import Delta, Finished, Started
from jaxserve.errors import DeadlineError, InvalidRequestError
from jaxserve.metrics import Metrics
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams, StructuredOutput
from jaxserve.runner.runner import Runner
from tests.differential import small
from tests.differential.small import MAX_MODEL_TOKENS, Guest, Play, bucket_steps, oracle_output
from tests.differential.stage import MODEL, tiny_params
from tests.engines import check_idle

NUM_REQUESTS = 2000
NUM_ROUNDS = 20


@pytest.fixture
def compile_events() -> Iterator[Counter[str]]:
    """What JAX itself tells of traces, lowerings and compiles; the product's own ear is apart."""
    events: Counter[str] = Counter()

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile"):
            events[event] += 1

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield events
    jax.monitoring.unregister_event_duration_listener(hear)


def any_sampling(rng: random.Random) -> SamplingParams:
    """Returns any parameters, each off half of the time."""

    def maybe[T](off: T, *values: T) -> T:
        return rng.choice(values) if rng.random() < 0.5 else off

    ids = [rng.randrange(MODEL.vocab_size) for _ in range(4)]
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 1e-6, 0.3, 0.8, 1.0, 5.0)),
        top_k=maybe(0, 1, 2, 7, 64, 65, 130, 131, 5000),
        top_p=maybe(1.0, 0.05, 0.5, 0.9, 0.999),
        min_p=maybe(0.0, 0.01, 0.3, 1.0),
        presence_penalty=maybe(0.0, -2.0, 0.5, 2.0),
        frequency_penalty=maybe(0.0, -2.0, 0.7, 2.0),
        repetition_penalty=maybe(1.0, 0.5, 1.3, 3.0),
        seed=maybe(None, 0, 7, 2**32, 2**64 - 1),
        logit_bias=maybe({}, {ids[0]: 5.0}, dict.fromkeys(ids, -3.0)),
        min_tokens=maybe(0, 1),
        stop_strings=maybe((), ("a",), ("absent", "ab")),
        stop_token_ids=maybe((), tuple(ids[:1]), tuple(ids)),
        ignore_eos=rng.random() < 0.5,
        include_stop_text=rng.random() < 0.5,
        num_choices=rng.choice((1, 1, 1, 2, 3, 4)),
        logprobs=maybe(None, 0, 1, 20),
        prompt_logprobs=rng.choice((None, None, None, 0, 2)),
        allowed_token_ids=rng.choice((None, None, None, tuple({*range(20, 60), *ids}))),
        bad_words=rng.choice(((), (), (), ("a", "ab"))),
    )


def any_request(rng: random.Random) -> GenerationRequest:
    prompt_len = rng.choice((1, 2, 4, 5, 6, 9, 10, 11, rng.randrange(1, MAX_MODEL_TOKENS)))
    sampling = any_sampling(rng)
    max_tokens = min(rng.choice((1, 1, 2, 2, 3, 3, 5, 8, 8, 30)), MAX_MODEL_TOKENS - prompt_len)
    max_tokens, structured = max(max_tokens, sampling.min_tokens, 1), None
    if sampling.prompt_logprobs is not None and rng.random() < 0.3:
        max_tokens = 0
        sampling = replace(sampling, min_tokens=0, num_choices=1)
    elif sampling.min_tokens == 0 and not sampling.ignore_eos and rng.random() < 0.3:
        structured = StructuredOutput(kind="regex", text="[a-f]{1,3}( [0-9]+)?")
    return GenerationRequest(
        prompt=tuple(rng.randrange(MODEL.vocab_size) for _ in range(prompt_len)),
        sampling=replace(sampling, max_tokens=max_tokens),
        structured_output=structured,
        priority=rng.choice((0, 0, 0, 1)),
    )


class Fuzz:
    """Requests of all kinds on the one runner, cancelled, late, preempted or refused at random."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self.rng = random.Random(seed)
        self.runner = runner
        self.ends: Counter[str] = Counter()
        self.num_steps = 0
        self.compared: list[tuple[GenerationRequest, int, list[int]]] = []

    def play_round(self, num_requests: int, *, overlap: bool) -> None:
        rng, play = self.rng, Play(self.runner, overlap=overlap)
        asked: list[tuple[GenerationRequest, Guest]] = []
        while len(asked) < num_requests or play.has_work:
            while len(asked) < num_requests and rng.random() < 0.4:
                request = any_request(rng)
                if rng.random() < 0.03:
                    request = replace(request, deadline_s=play.engine.now() - 1.0)
                at = [rng.randrange(5)] if rng.random() < 0.05 else []
                asked.append((request, play.submit(request, preempt_at=at)))
            if rng.random() < 0.02 and asked:
                rng.choice(asked)[1].stream.cancel()
            if rng.random() < 0.01:
                self.ask_too_much(play)
            self.step(play)
        self.num_steps += play.num_steps
        check_idle(play.engine)
        for request, guest in asked:
            self.read(request, guest)

    def ask_too_much(self, play: Play) -> None:
        with pytest.raises(InvalidRequestError):
            play.engine.submit(small.ask((MODEL.vocab_size,)))
        self.ends["refused"] += 1

    def step(self, play: Play) -> None:
        """Steps, and sees that what the step replaced is gone."""
        before = self.runner._kv
        play.step()
        if self.runner._kv is not before:
            assert all(pool.is_deleted() for pool in before)

    def read(self, request: GenerationRequest, guest: Guest) -> None:
        sampling = request.sampling
        token_ids: list[list[int]] = [[] for _ in range(sampling.num_choices)]
        num_scored = 0
        try:
            for event in guest.stream:
                if isinstance(event, Delta):
                    token_ids[event.index] += event.token_ids
                    num_wanted = len(event.token_ids) * (sampling.logprobs is not None)
                    assert len(event.logprobs) == num_wanted
                elif isinstance(event, Started):
                    num_scored = len(event.prompt_logprobs)
                elif isinstance(event, Finished):
                    self.ends[event.reason.value] += 1
                    if event.reason is not FinishReason.CANCELLED:
                        wants_prompt = sampling.prompt_logprobs is not None
                        to_score = guest.request.prompt[1:] if wants_prompt else ()
                        assert num_scored == len(to_score)
        except DeadlineError:
            self.ends["late"] += 1
        if sampling.seed is not None or sampling.is_greedy:
            self.compared += [(request, choice, ids) for choice, ids in enumerate(token_ids)]


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_two_thousand_requests_of_all_kinds_compile_and_keep_nothing(
    small_runner: Runner, compile_events: Counter[str]
) -> None:
    fuzz = Fuzz(small_runner, seed=63)
    metrics, steps_before = small_runner._metrics, bucket_steps(small_runner)
    variants = ("greedy", "plain", "full")
    outputs_before = [metrics.value("output_programs_total", variant=v) for v in variants]
    recompiles, preemptions = (
        metrics.value("recompiles_total"),
        metrics.value("preemptions_total"),
    )
    names = ("forked_choices", "kv_page_copies", "masked_tokens", "scored_tokens")
    ran = {f"{name}_total": metrics.value(f"{name}_total") for name in names}
    held = live_bytes()
    compile_events.clear()
    for index in range(NUM_ROUNDS):
        fuzz.play_round(NUM_REQUESTS // NUM_ROUNDS, overlap=index % 2 == 0)
        assert live_bytes() == held
    assert compile_events == {}
    assert metrics.value("recompiles_total") == recompiles
    # It was worth the name.
    assert fuzz.num_steps > 1000
    assert sum(fuzz.ends.values()) - fuzz.ends["refused"] == NUM_REQUESTS
    wanted = {"eos", "stop", "max_tokens", "cancelled", "late", "refused"}
    assert wanted <= set(fuzz.ends), fuzz.ends
    assert metrics.value("preemptions_total") > preemptions
    for name, then in ran.items():
        assert metrics.value(name) > then, name
    steps = bucket_steps(small_runner)
    assert all(steps[name] > steps_before[name] for name in steps)
    outputs = [metrics.value("output_programs_total", variant=v) for v in variants]
    assert all(now > then for now, then in zip(outputs, outputs_before, strict=True))
    # And the outputs are what each would get alone (a part: the oracle is slow).
    for request, choice, token_ids in fuzz.compared[::30]:
        assert token_ids == oracle_output(request, choice=choice)[: len(token_ids)]


def test_the_ear_hears_a_trace_and_a_compile(compile_events: Counter[str]) -> None:
    jax.jit(lambda x: x * 7 - 2)(3.0)
    assert {event.rpartition("/")[2] for event in compile_events} >= {
        "jaxpr_trace_duration",
        "backend_compile_duration",
    }


def test_a_second_start_from_the_cache_gives_the_same_bits(
    small_runner: Runner, small_cache: Path
) -> None:
    """Of C25: what a restart compiles or finds must not change a number."""

    def bits(runner: Runner) -> list[bytes]:
        runner._kv, runner._state, runner._hidden_TD = runner._run["init", None]()
        asked = [small.ask(small.prompt_of(9, salt=n), max_tokens=8) for n in range(3)]
        small.run_all(runner, asked)
        arrays = (*runner._kv, runner._hidden_TD, runner._state.last_token_B)
        return [jax.device_get(array).tobytes() for array in arrays]

    jax.clear_caches()
    metrics = Metrics()
    again = Runner(tiny_params(), MODEL, small.CONFIG, metrics=metrics, cache_dir=small_cache)
    assert metrics.total("compiles_total") == 0
    first, second = bits(small_runner), bits(again)
    assert first == second == bits(again)
