"""Log-probabilities against numpy's log-softmax of the oracle's logits (C26, C29, C32, C37)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.engine import Event, Started
from jaxserve.errors import InvalidRequestError, NumericsError
from jaxserve.model.config import LOWEST_LOGPROB
from jaxserve.model.params import Params
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason, GenerationRequest, StructuredOutput
from jaxserve.runner.runner import Runner
from tests.differential.small import (
    CONFIG,
    Guest,
    Play,
    ask,
    constant_params,
    oracle_logprobs,
    oracle_output,
    prompt_of,
    set_params,
)
from tests.differential.stage import MODEL
from tests.differential.test_bad_rows import SICK_ID, poisoned
from tests.engines import Outputs

V = MODEL.vocab_size
TOLERANCE = 1e-4  # float32 against float64, over three layers
MATES = [
    ask(prompt_of(5, salt=1), max_tokens=9),
    ask(prompt_of(11, salt=2), temperature=0.8, seed=9, max_tokens=6, logprobs=3),
    ask(prompt_of(9, salt=3), repetition_penalty=1.5, max_tokens=12, prompt_logprobs=1),
]


def asking(asked: GenerationRequest, **fields: object) -> GenerationRequest:
    return dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, **fields))  # type: ignore[arg-type]  # by name


def check(
    entries: Sequence[TokenLogprobs],
    tokens: Sequence[int],
    *,
    num_top: int,
    params: Params | None = None,
) -> None:
    """Asserts that the entries are those of the last tokens."""
    first = len(tokens) - len(entries)
    logprobs_TV = oracle_logprobs(tokens, params)
    for entry, token_id, logprobs_V in zip(
        entries, tokens[first:], logprobs_TV[first - 1 : -1], strict=True
    ):
        best = np.argsort(-logprobs_V, kind="stable")
        assert entry.token_id == token_id
        assert abs(entry.logprob - logprobs_V[token_id]) < TOLERANCE
        assert entry.rank == 1 + list(best).index(token_id)
        assert list(entry.top_ids) == list(best[:num_top])
        assert (
            np.abs(np.array(entry.top_logprobs) - logprobs_V[best[:num_top]]).max(initial=0)
            < TOLERANCE
        )
        assert np.isfinite([entry.logprob, *entry.top_logprobs]).all()


def run(
    runner: Runner,
    asked: GenerationRequest,
    *,
    mates: Sequence[GenerationRequest] = (),
    preempt_at: Sequence[int] = (),
    max_step_tokens: int = 10,
    overlap: bool = True,
) -> Outputs:
    """Runs a request among mates; it loses its pages after so many of its steps."""
    scheduler = CONFIG.scheduler.model_copy(update={"max_step_tokens": max_step_tokens})
    config = CONFIG.model_copy(update={"scheduler": scheduler})
    play = Play(runner, overlap=overlap, config=config)
    others = [play.submit(mate) for mate in mates]
    if others:
        play.step()
    guest = play.submit(asked)
    due, num_steps = list(preempt_at), 0
    while play.has_work:
        num_steps += guest.is_running
        if due and num_steps >= due[0] and guest.is_running:
            del due[0]
            play.engine._scheduler.preempt(guest.request)
        play.step()
    play.run()
    assert not due, "it ended before it was preempted"
    for mate, other in zip(mates, others, strict=True):
        assert play.read_choices(other).token_ids == [oracle_output(mate)]
    return play.read_choices(guest)


def check_all(outputs: Outputs, asked: GenerationRequest) -> None:
    sampling, prompt = asked.sampling, asked.prompt
    assert isinstance(prompt, tuple)
    if sampling.prompt_logprobs is not None:
        assert len(outputs.started.prompt_logprobs) == len(prompt) - 1
        check(outputs.started.prompt_logprobs, prompt, num_top=sampling.prompt_logprobs)
    if sampling.logprobs is None:
        return
    for choice in outputs.choices:
        assert len(choice.logprobs) == len(choice.token_ids)
        check(choice.logprobs, (*prompt, *choice.token_ids), num_top=sampling.logprobs)


KINDS = {
    "greedy": ask(prompt_of(7)),
    "drawn": ask(prompt_of(7), temperature=0.8, seed=7),
    "cold": ask(prompt_of(7), temperature=1e-4, seed=7),
    "filters": ask(prompt_of(7), temperature=1.3, seed=7, top_k=5, top_p=0.8, min_p=0.05),
    "penalties": ask(prompt_of(7), repetition_penalty=1.8, presence_penalty=1.0),
    "bias": ask(prompt_of(7), temperature=0.8, seed=7, logit_bias={3: 30.0, 61: -100.0}),
    "min_tokens": ask(prompt_of(7), stop_token_ids=(3, 60), min_tokens=9),
    "allowed": ask(prompt_of(7), temperature=0.8, seed=7, allowed_token_ids=tuple(range(90, 120))),
    "bad words": ask(prompt_of(7), bad_words=("a", "bc", "zz")),
}


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("name", KINDS)
def test_they_are_the_models_own_whatever_draws_the_tokens(
    small_runner: Runner, name: str, num_top: int
) -> None:
    asked = asking(KINDS[name], logprobs=num_top, max_tokens=12)
    outputs = run(small_runner, asked)
    assert outputs.token_ids == [oracle_output(asked)]
    check_all(outputs, asked)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_choice_has_its_own_wherever_it_is_preempted(
    small_runner: Runner, overlap: bool
) -> None:
    asked = asking(KINDS["drawn"], num_choices=3, logprobs=3, prompt_logprobs=2, max_tokens=8)
    wanted = [oracle_output(asked, choice=choice) for choice in range(3)]
    for preempt_at in ((), *((step,) for step in range(1, 8)), (2, 3), (1, 6)):
        outputs = run(small_runner, asked, preempt_at=preempt_at, overlap=overlap)
        assert outputs.token_ids == wanted, preempt_at
        check_all(outputs, asked)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 8, 9, 17, 36])
def test_the_prompts_are_right_for_every_length(
    small_runner: Runner, prompt_len: int, max_tokens: int, num_top: int
) -> None:
    asked = ask(prompt_of(prompt_len), prompt_logprobs=num_top, max_tokens=max_tokens)
    outputs = run(small_runner, asked)
    check_all(outputs, asked)
    assert outputs.choices[0].token_ids == oracle_output(asked)
    assert outputs.finished.reason is FinishReason.MAX_TOKENS


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 5, 8, 10])
@pytest.mark.parametrize("overlap", [True, False])
def test_chunks_mates_and_preemption_change_nothing(
    small_runner: Runner, max_step_tokens: int, overlap: bool
) -> None:
    """Entry by entry they are equal to the undisturbed ones, to rounding; and twice in a row."""
    asked = ask(prompt_of(17), prompt_logprobs=5, logprobs=2, max_tokens=4)
    for mates, preempt_at in (
        ((), ()), ((), (1,)), ((), (2,)), ((), (3,)), ((), (2, 2)), (MATES, ()), (MATES[:2], (2,)),
    ):  # fmt: skip
        for _ in range(2):
            outputs = run(
                small_runner, asked, mates=mates, preempt_at=preempt_at, overlap=overlap,
                max_step_tokens=max_step_tokens,
            )  # fmt: skip
            check_all(outputs, asked)
            assert outputs.token_ids == [oracle_output(asked)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8, 9, 17])
def test_the_prompts_are_the_same_where_the_prefix_cache_has_it(
    small_runner: Runner, prompt_len: int, overlap: bool
) -> None:
    """In one engine: cold, twice again, and behind one that did not ask for them."""
    scored = ask(prompt_of(prompt_len), prompt_logprobs=5, logprobs=2, max_tokens=3)
    plain = ask(prompt_of(prompt_len), max_tokens=3)
    play = Play(small_runner, overlap=overlap)
    cached = []
    for asked in (scored, scored, plain, scored):
        guest = play.submit(asked)
        play.run()
        outputs = play.read_choices(guest)
        check_all(outputs, asked)
        assert outputs.token_ids == [oracle_output(asked)]
        cached.append(guest.request.num_cached)
    assert cached == [0, 0, prompt_len - 1, 0]


def test_more_alternatives_than_the_server_gives_are_refused(small_runner: Runner) -> None:
    play = Play(small_runner)
    for field in ("logprobs", "prompt_logprobs"):
        for num_top in (21, V, -1):
            with pytest.raises(InvalidRequestError, match="in \\[0, 20\\]") as refusal:
                play.engine.submit(ask((5,), **{field: num_top}))
            assert refusal.value.field == f"output.{field}"


def test_they_sum_to_one_over_the_real_vocabulary_though_all_logits_are_low(
    small_runner: Runner,
) -> None:
    """The padding's logits are 0 and would have nearly all of it."""
    params = constant_params({7: -4.0, V - 1: -6.0}, rest=-5.0)
    set_params(small_runner, params)
    found: dict[int, float] = {}
    for first in range(0, V, 35):
        prompt = (0, *range(first, min(first + 35, V)))
        outputs = run(small_runner, ask(prompt, prompt_logprobs=20, max_tokens=0))
        for entry in outputs.started.prompt_logprobs:
            found[entry.token_id] = entry.logprob
            assert max(entry.top_ids) < V
            assert entry.top_ids[0] == 7
    assert len(found) == V
    assert abs(sum(np.exp(list(found.values()))) - 1) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1.0])
def test_they_are_finite_for_the_largest_logits_and_the_smallest_temperatures(
    small_runner: Runner, temperature: float
) -> None:
    params = constant_params({3: 1e4, 5: 9.9e3, 9: -1e4}, rest=0.0)
    set_params(small_runner, params)
    prompt = (3, 5, 9, 5, 3)
    asked = ask(
        prompt, temperature=temperature, seed=1, logprobs=4, prompt_logprobs=4, max_tokens=3
    )
    outputs = run(small_runner, asked)
    assert outputs.token_ids == [[3, 3, 3]]
    logprobs = {3: 0.0, 5: -100.0, 9: LOWEST_LOGPROB}  # -20,000 is below what is told
    entries = [*outputs.started.prompt_logprobs, *outputs.choices[0].logprobs]
    for entry in entries:
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], rel=1e-4, abs=1e-4)
        assert entry.top_ids[:2] == (3, 5)
        assert min(entry.top_logprobs) == LOWEST_LOGPROB


def read_sick(guest: Guest) -> list[Event]:
    """Returns what came before the error that the request must end with."""
    seen: list[Event] = []
    with pytest.raises(NumericsError, match="are not finite"):
        seen.extend(guest.stream)
    return seen


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("place", [0, 3, 7, 13, 14])
def test_a_prompt_whose_scores_are_no_numbers_ends_alone(
    small_runner: Runner, place: int, max_tokens: int, overlap: bool
) -> None:
    """In its first chunk or its last, at its last token, which predicts nothing of the prompt."""
    mates = MATES[:2]
    set_params(small_runner, poisoned(SICK_ID, np.nan))
    prompt = [*prompt_of(15)]
    prompt[place] = SICK_ID
    play = Play(small_runner, overlap=overlap)
    guests = [play.submit(mate) for mate in mates]
    play.step()
    sick = play.submit(ask(tuple(prompt), prompt_logprobs=2, max_tokens=max_tokens))
    play.run()
    if max_tokens == 0 and place == 14:  # what comes after it is asked by nobody
        started = play.read_choices(sick).started
        assert len(started.prompt_logprobs) == 14
    else:
        assert all(isinstance(event, Started) for event in read_sick(sick))
    for mate, guest in zip(mates, guests, strict=True):
        assert play.read_choices(guest).token_ids == [oracle_output(mate)]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_choices": 3, "temperature": 0.8, "seed": 5},
        {"logprobs": 3},
        {"allowed_token_ids": tuple(range(40, 120))},
    ],
)
def test_every_new_kind_of_request_ends_alone_where_its_logits_are_no_numbers(
    small_runner: Runner, fields: dict[str, object]
) -> None:
    mates = MATES[:2]
    set_params(small_runner, poisoned(SICK_ID, np.nan))
    play = Play(small_runner)
    guests = [play.submit(mate) for mate in mates]
    sick = play.submit(ask((5, SICK_ID, 9), **fields))
    play.run()
    assert all(isinstance(event, Started) for event in read_sick(sick))
    for mate, guest in zip(mates, guests, strict=True):
        assert play.read_choices(guest).token_ids == [oracle_output(mate)]


def test_a_form_does_not_change_them(small_runner: Runner) -> None:
    form = StructuredOutput(kind="regex", text="[a-z]{6}")
    asked = ask(prompt_of(7), temperature=0.8, seed=7, logprobs=2, ignore_eos=False)
    asked = dataclasses.replace(asked, structured_output=form)
    outputs = run(small_runner, asked)
    assert outputs.token_ids == [oracle_output(asked)]
    check_all(outputs, asked)
