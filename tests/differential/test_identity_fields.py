"""Each field of a page's identity is needed: without it, text is wrong or a stranger is seen.

Of each there are two requests of the same tokens that differ in it alone, on the real runner. With
the field the second gets what the model that it asked for says; with the field left out of keys and
comparisons it does not. The same ids have the same K/V whichever tokenizer wrote them, and pages of
another size never hold the same tokens: of those two, and of whose pages they are, all that can
show is that something was found.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.config import PrefixCacheSection
from jaxserve.engine.namespaces import Namespaces
from jaxserve.engine.start import find_changing_ropes
from jaxserve.identity import CacheIdentity, identity_key
from jaxserve.model.params import Params
from jaxserve.request import GenerationRequest
from jaxserve.runner.runner import Runner
from jaxserve.scheduler import prefix_cache
from tests.differential.small import Guest, Play, ask, oracle_output, prompt_of, set_params
from tests.differential.stage import tiny_params
from tests.differential.test_windows_and_lengths import MODEL as WINDOWS
from tests.differential.test_windows_and_lengths import SMALL, right_output

IMAGE_ID: Final = 128  # stands for what is no text; no prompt of `prompt_of` has it
PROMPT: Final = (IMAGE_ID, *prompt_of(13, salt=4))
ASKED: Final = ask(PROMPT, max_tokens=10)
SHARED: Final = PrefixCacheSection(shared_namespaces={"core": ("acme",)})

Outcome = tuple[object, object]  # what came of the second request, and what should have


def run(play: Play, asked: GenerationRequest = ASKED) -> Guest:
    guest = play.submit(asked)
    play.run()
    return guest


def tokens_of(play: Play, guest: Guest) -> Sequence[int]:
    return play.read(guest).token_ids


def identify(play: Play, *, section: PrefixCacheSection | None = None, **values: Any) -> None:  # noqa: ANN401
    """Has the requests to come run under an identity with these values."""
    engine = play.engine
    model = dataclasses.replace(engine._namespaces._model, **values)
    engine._namespaces = Namespaces(section or engine.config.prefix_cache, model)


def changed(path: str, rows: slice) -> Params:
    """Returns parameters in which some rows of one array are others."""
    params: Params = jax.tree.map(np.array, tiny_params())
    array: Any = params
    for name in path.split("/"):
        array = array[name]
    array[rows] += np.random.default_rng(5).normal(size=array[rows].shape).astype(np.float32)
    return params


def compare_params(
    path: str,
    *,
    rows: slice = slice(None),
    **values: Any,  # noqa: ANN401
) -> Callable[[Runner, Runner], Outcome]:
    """The same prompt to other parameters, which the identity's other value stands for."""

    def run_both(small: Runner, windows: Runner) -> Outcome:
        params = changed(path, rows)
        play = Play(small)
        assert tokens_of(play, run(play)) == oracle_output(ASKED)
        set_params(small, params)
        identify(play, **values)
        return tokens_of(play, run(play)), oracle_output(ASKED, params)

    return run_both


def compare_pools(
    store: Callable[[jax.Array], jax.Array],
    **values: Any,  # noqa: ANN401
) -> Callable[[Runner, Runner], Outcome]:
    """The same prompt where K/V was kept in another form before, read as if it were this one's."""

    def run_both(small: Runner, windows: Runner) -> Outcome:
        play = Play(small)
        identify(play, **values)
        run(play)
        small._kv = tuple(jnp.asarray(np.array(store(pool))) for pool in small._kv)
        fresh = Play(small).engine._namespaces._model
        identify(play, **{name: getattr(fresh, name) for name in values})
        return tokens_of(play, run(play)), oracle_output(ASKED)

    return run_both


def compare_lengths(small: Runner, windows: Runner) -> Outcome:
    """Prompts with a common beginning, and a RoPE that follows the length beyond 16."""
    ropes = find_changing_ropes(layer.rope for layer in WINDOWS.layers)
    play = Play(windows, config=SMALL, changing_ropes=ropes)
    prompts = [prompt_of(30, salt=4)[:length] for length in (14, 30, 19, 15)]
    got = [tokens_of(play, run(play, ask(prompt, max_tokens=10))) for prompt in prompts]
    return got, [right_output(prompt) for prompt in prompts]


def compare_found(**values: Any) -> Callable[[Runner, Runner], Outcome]:  # noqa: ANN401
    """Whether what another left is found at all."""

    def run_both(small: Runner, windows: Runner) -> Outcome:
        play = Play(small)
        run(play)
        identify(play, **values)
        return run(play).request.num_cached, 0

    return run_both


def compare_callers(
    first: dict[str, str], second: dict[str, str], section: PrefixCacheSection | None = None
) -> Callable[[Runner, Runner], Outcome]:
    """What the second is told of the first by `cached_prompt_tokens`."""

    def run_both(small: Runner, windows: Runner) -> Outcome:
        play = Play(small)
        identify(play, section=section)
        run(play, dataclasses.replace(ASKED, **first))  # type: ignore[arg-type]  # by name
        guest = run(play, dataclasses.replace(ASKED, **second))  # type: ignore[arg-type]
        return play.read(guest).finished.usage.cached_prompt_tokens, 0

    return run_both


def read_rounded(pool: jax.Array) -> jax.Array:
    return pool.astype(jnp.float8_e4m3fn).astype(pool.dtype)


def read_with_another_scale(pool: jax.Array) -> jax.Array:
    return pool * 2


CASES: Final[dict[str, Callable[[Runner, Runner], Outcome]]] = {
    "weights": compare_params("layers/1/k_DKH", weights="other"),
    "adapter": compare_params("layers/1/v_DKH", adapter="a"),
    "adapter_generation": compare_params("layers/1/v_DKH", adapter_generation=1),
    "contents": compare_params(
        "embedding_VD", rows=slice(IMAGE_ID, IMAGE_ID + 1), contents=((0, "another image"),)
    ),
    "positions": compare_lengths,
    "kv_dtype": compare_pools(read_rounded, kv_dtype="float8_e4m3fn"),
    "kv_scales": compare_pools(read_with_another_scale, kv_scales="half"),
    "tokenizer": compare_found(tokenizer="other"),
    "page_size": compare_found(page_size=8),
    "owner": compare_callers({"tenant": "acme"}, {"tenant": "bolt"}),
    "scope": compare_callers({"tenant": "core"}, {"tenant": "acme"}, SHARED),
    "salt": compare_callers({"cache_salt": "x"}, {"cache_salt": "y"}),
}


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a field out of keys and comparisons."""
    names = [field.name for field in dataclasses.fields(CacheIdentity) if field.name != name]

    def rest(identity: CacheIdentity) -> tuple[object, ...]:
        return tuple(getattr(identity, other) for other in names)

    def key(identity: CacheIdentity, **options: Any) -> bytes:  # noqa: ANN401
        nothing: dict[str, Any] = {name: None}
        return identity_key(dataclasses.replace(identity, **nothing), **options)

    monkeypatch.setattr(CacheIdentity, "__eq__", lambda one, other: rest(one) == rest(other))
    monkeypatch.setattr(CacheIdentity, "__hash__", lambda identity: hash(rest(identity)))
    monkeypatch.setattr(prefix_cache, "identity_key", key)


def test_no_field_is_without_a_case() -> None:
    assert CASES.keys() == {field.name for field in dataclasses.fields(CacheIdentity)}


@pytest.mark.parametrize("name", CASES)
def test_with_the_field_nobody_gets_what_is_not_his(
    name: str, small_runner: Runner, windows_runner: Runner
) -> None:
    got, wanted = CASES[name](small_runner, windows_runner)
    assert got == wanted


@pytest.mark.parametrize("name", CASES)
def test_without_the_field_somebody_does(
    name: str,
    small_runner: Runner,
    windows_runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(name, monkeypatch)
    got, wanted = CASES[name](small_runner, windows_runner)
    assert got != wanted
