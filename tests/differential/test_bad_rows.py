"""What is bad in one request stays in it: ids, numbers, padding of the vocabulary (C28, C29, C32).

On the real runner; the faults are put into its parameters and pages.
"""

import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.engine import Delta, Event
from jaxserve.errors import InvalidRequestError, NumericsError
from jaxserve.model.params import Params
from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from tests.differential.small import (
    MAX_MODEL_TOKENS,
    Guest,
    Play,
    ask,
    constant_params,
    oracle_output,
    prompt_of,
    run_all,
    set_params,
)
from tests.differential.stage import MODEL, tiny_params

V = MODEL.vocab_size
OUTSIDE = [-1, V, MODEL.padded_vocab_size - 1, MODEL.padded_vocab_size, 2**31, 2**63, "abc"]


def bad_requests(bad_id: object) -> dict[str, GenerationRequest]:
    return {
        "token_ids": ask((5, bad_id)),  # type: ignore[arg-type]  # on purpose
        "sampling.logit_bias": ask((5,), logit_bias={bad_id: 1.0}),
        "stop.stop_token_ids": ask((5,), stop_token_ids=(bad_id,)),
        "sampling.allowed_token_ids": ask((5,), allowed_token_ids=(7, bad_id)),
    }


def test_ids_outside_the_vocabulary_are_refused_beside_a_healthy_stream(
    small_runner: Runner,
) -> None:
    healthy = ask(prompt_of(6), temperature=0.8, seed=3)
    play = Play(small_runner)
    guest = play.submit(healthy)
    for bad_id in OUTSIDE:
        for field, request in bad_requests(bad_id).items():
            with pytest.raises(InvalidRequestError) as refusal:
                play.engine.submit(request)
            assert refusal.value.field.endswith(field.rpartition(".")[2])
        play.step()
    assert play.has_work, "the healthy stream was to run beside them"
    play.run()
    assert play.read(guest).token_ids == oracle_output(healthy)
    # The last id of the vocabulary is an id like any other.
    last = [
        ask((5, V - 1)),
        ask((5,), logit_bias={V - 1: 100.0}),
        ask((5,), stop_token_ids=(V - 1,)),
        ask((5,), allowed_token_ids=(V - 1,)),
    ]
    for request, output in zip(last, run_all(small_runner, last), strict=True):
        assert output.token_ids == oracle_output(request)
    assert set(oracle_output(last[1])) == set(oracle_output(last[3])) == {V - 1}


def test_padding_ids_are_never_drawn_though_all_real_logits_are_negative(
    small_runner: Runner,
) -> None:
    set_params(small_runner, constant_params({7: -4.9}, rest=-5.0))
    (greedy,) = run_all(small_runner, [ask(prompt_of(3))])
    assert greedy.token_ids == [7] * 16
    hot = [
        ask((n % V,), temperature=5.0, seed=n, max_tokens=30, top_p=[1.0, 0.99][n % 2])
        for n in range(60)
    ]
    drawn = [token for output in run_all(small_runner, hot) for token in output.token_ids]
    assert len(drawn) == 1800
    assert max(drawn) == V - 1
    assert len(set(drawn)) == V  # and all others are


def poisoned(token: int, value: float) -> Params:
    """Returns the parameters with a value that is no number in one token's embedding."""
    params: Params = jax.tree.map(np.array, tiny_params())
    params["embedding_VD"][token, 5] = value
    return params


def read_sick(guest: Guest) -> list[int]:
    """Returns what came before the error that the request must end with."""
    seen: list[Event] = []
    with pytest.raises(NumericsError, match="are not finite"):
        seen.extend(guest.stream)
    return [token for event in seen if isinstance(event, Delta) for token in event.token_ids]


def check_canaries(runner: Runner, *prompts: tuple[int, ...]) -> None:
    """Fills every page of the pool, the sick one's among them; what is in them must not show."""
    num_pages_each = 6
    asked = [ask(prompt, max_tokens=4 * num_pages_each - len(prompt) + 1) for prompt in prompts]
    for request, output in zip(asked, run_all(runner, asked), strict=True):
        assert output.token_ids == oracle_output(request)


MATES = [
    ask(prompt_of(4, salt=1), max_tokens=12),
    ask(prompt_of(7, salt=2), temperature=0.8, seed=9, max_tokens=9),
    ask(prompt_of(3, salt=3), repetition_penalty=1.5, max_tokens=12),
]
SICK_ID = 128  # no prompt of `prompt_of` has it


def all_tokens(asked: GenerationRequest) -> set[int]:
    assert isinstance(asked.prompt, tuple)
    return {*asked.prompt, *oracle_output(asked)}


def fresh_output(num_tokens: int) -> tuple[tuple[int, ...], list[int]]:
    """Returns a prompt and its output whose first tokens are all new."""
    for salt in range(100):
        prompt = prompt_of(6, salt=salt)
        output = oracle_output(ask(prompt))
        if len({*prompt, *output[:num_tokens]}) == len(set(prompt)) + num_tokens:
            return prompt, output
    raise AssertionError("every output repeats itself")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 1, 3])
def test_numbers_that_are_none_end_their_request_alone(
    small_runner: Runner, index: int, value: float, overlap: bool
) -> None:
    """At the first token (a sick prompt, in one chunk or two), or later: the token fed back."""
    healthy = small_runner._params, small_runner._head
    prompt, free = fresh_output(index)
    sick_id = SICK_ID if index == 0 else free[index - 1]
    mates = [mate for mate in MATES if sick_id not in all_tokens(mate)]
    assert len(mates) >= 2
    prompts = [prompt] if index else [(5, SICK_ID, 9), (SICK_ID, *prompt_of(13))]
    set_params(small_runner, poisoned(sick_id, value))
    for prompt in prompts:
        failures = small_runner._metrics.value("requests_finished_total", reason="error_numerics")
        play = Play(small_runner, overlap=overlap)
        guests = [play.submit(mate) for mate in mates]
        play.step()
        sick = play.submit(ask(prompt))
        play.run()
        assert read_sick(sick) == free[:index]
        for mate, guest in zip(mates, guests, strict=True):
            assert play.read(guest).token_ids == oracle_output(mate)
        counted = small_runner._metrics.value("requests_finished_total", reason="error_numerics")
        assert counted == failures + 1
        sick_params = small_runner._params, small_runner._head
        small_runner._params, small_runner._head = healthy
        again = play.submit(ask(prompt))  # nothing of it is in the prefix cache
        play.run()
        assert play.read(again).token_ids == oracle_output(ask(prompt))
        small_runner._params, small_runner._head = sick_params
    small_runner._params, small_runner._head = healthy
    check_canaries(small_runner, prompt_of(6), prompt_of(6, salt=1))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_poison_in_a_page_ends_its_owner_alone(
    small_runner: Runner, at: int, overlap: bool
) -> None:
    """In the prompt's first page while the rest is still to be prefilled, or while decoding."""
    play = Play(small_runner, overlap=overlap)
    sick = play.submit(ask(prompt_of(14)))
    play.step()
    guests = [play.submit(mate) for mate in MATES[:2]]
    while len(sick.output) < at:
        play.step()
    page = sick.request.sequences[0].pages[0]
    pools = [np.array(pool) for pool in small_runner._kv]
    pools[1][page, 0, :, 1] = np.nan
    small_runner._kv = tuple(jnp.asarray(pool) for pool in pools)
    play.run()
    given = read_sick(sick)
    assert at <= len(given) <= at + 1
    assert given == oracle_output(ask(prompt_of(14)))[: len(given)]
    for mate, guest in zip(MATES, guests, strict=False):
        assert play.read(guest).token_ids == oracle_output(mate)
    check_canaries(small_runner, prompt_of(6), prompt_of(14))


def test_nan_in_every_page_shows_to_nobody(small_runner: Runner) -> None:
    """What a page held before is not read, not even times nothing."""
    small_runner._kv = tuple(jnp.full_like(pool, jnp.nan) for pool in small_runner._kv)
    lens = itertools.product((1, 4, 5, 10, 11), (1, 3, 8))
    asked = [ask(prompt_of(a, salt=b), max_tokens=b) for a, b in lens]
    for request, output in zip(asked, run_all(small_runner, asked), strict=True):
        assert output.token_ids == oracle_output(request)
    longest = ask(prompt_of(MAX_MODEL_TOKENS - 1), max_tokens=1)
    assert run_all(small_runner, [longest])[0].token_ids == oracle_output(longest)
