"""The prefix cache behind the engine's door: whose it is, what is told of it, and its flush."""

import dataclasses
from concurrent.futures import Future

import pytest

from jaxserve.config import LimitsSection, PrefixCacheSection, load_config
from jaxserve.engine.namespaces import Namespaces
from jaxserve.engine.start import find_changing_ropes
from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError, NotServingError
from jaxserve.identity import CacheIdentity, identity_key
from jaxserve.plan import StepPlan
from jaxserve.request import GenerationRequest
from tests.engines import ask, build_engine, gather, serve
from tests.model.families import DYNAMIC, GEMMA2

PROMPT = tuple(range(60, 77))  # 17 tokens: four pages of four, and one token
SHARED = PrefixCacheSection(shared_namespaces={"team": ("acme", "bolt")})
MODEL = CacheIdentity(weights="w", tokenizer="t", positions="p", kv_dtype="f", page_size=4)


def asked_by(tenant: str, *, salt: str = "") -> GenerationRequest:
    return dataclasses.replace(ask(PROMPT, max_tokens=2), tenant=tenant, cache_salt=salt)


def run(asked: list[GenerationRequest], section: PrefixCacheSection | None = None) -> list[int]:
    """Returns how many prompt tokens each found, one after the other."""
    engine, runner = build_engine(prefix_cache=section, num_pages=60)
    with serve(engine, runner):
        outputs = [gather(engine.submit(request)) for request in asked]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    for output in outputs:
        cached = output.finished.usage.cached_prompt_tokens
        assert output.started.cached_prompt_tokens == cached
    return [output.finished.usage.cached_prompt_tokens for output in outputs]


def test_the_second_of_a_tenant_finds_what_the_first_left() -> None:
    assert run([asked_by("acme"), asked_by("acme")]) == [0, 16]


def test_two_tenants_share_nothing_though_they_ask_the_same() -> None:
    assert run([asked_by("acme"), asked_by("bolt"), asked_by(""), asked_by("bolt")]) == [
        0,
        0,
        0,
        16,
    ]


def test_a_salt_narrows_inside_a_tenants_namespace_and_opens_no_other() -> None:
    asked = [
        asked_by("acme", salt="x"),
        asked_by("acme"),
        asked_by("acme", salt="y"),
        asked_by("bolt", salt="x"),
        asked_by("acme", salt="x"),
    ]
    assert run(asked) == [0, 0, 0, 0, 16]


def test_a_salt_that_is_another_tenants_name_is_only_a_salt() -> None:
    assert run([asked_by("acme"), asked_by("", salt="acme"), asked_by("bolt", salt="acme")]) == [
        0, 0, 0,
    ]  # fmt: skip


def test_tenants_share_where_the_operator_says_so_and_salts_still_narrow() -> None:
    asked = [
        asked_by("acme"),
        asked_by("bolt"),
        asked_by("core"),
        asked_by("acme", salt="x"),
        asked_by("bolt", salt="x"),
    ]
    assert run(asked, SHARED) == [0, 16, 0, 0, 16]


def test_a_shared_namespace_is_not_the_tenant_of_its_name() -> None:
    section = PrefixCacheSection(shared_namespaces={"core": ("acme",)})
    assert run([asked_by("core"), asked_by("acme")], section) == [0, 0]


def test_with_the_switch_off_nothing_is_kept_or_counted() -> None:
    engine, runner = build_engine(prefix_cache=PrefixCacheSection(enabled=False))
    with serve(engine, runner):
        outputs = [gather(engine.submit(asked_by("acme", salt="x"))) for _ in range(2)]
    assert [output.finished.usage.cached_prompt_tokens for output in outputs] == [0, 0]
    assert engine.metrics.total("prefix_cache_queries_total") == 0
    assert engine._pool.num_cached == 0


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({"a": ("x", "y"), "b": ("y",)}, "tenant y is listed twice"),
        ({"a b": ("x",)}, "must be 1 to 64 ASCII letters"),
        ({"a": ("x", "")}, "must be 1 to 64 ASCII letters"),
    ],
)
def test_namespaces_that_contradict_each_other_are_refused(
    shared: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(flags={"prefix_cache.shared_namespaces": shared})


def test_a_salt_has_a_limit() -> None:
    engine, runner = build_engine(bounds=LimitsSection(max_cache_salt_bytes=4))
    with serve(engine, runner):
        gather(engine.submit(asked_by("acme", salt="four")))
        with pytest.raises(InvalidRequestError, match="cache_salt is 5 bytes") as caught:
            engine.submit(asked_by("acme", salt="fünf"))
    assert caught.value.field == "cache_salt"


# positions that follow the length of the prompt


def test_what_a_prompts_length_changes_of_its_positions_is_in_its_identity() -> None:
    ropes = (("dynamic", 16), ("longrope", 32))
    namespaces = Namespaces(PrefixCacheSection(), MODEL, changing_ropes=ropes)

    def key(prompt_len: int) -> bytes:
        identity = namespaces.find_identity("", "", prompt_len=prompt_len)
        assert identity is not None
        return identity_key(identity)

    assert key(3) == key(16)
    assert len({key(16), key(17), key(18), key(33), key(34)}) == 5
    only_long = Namespaces(PrefixCacheSection(), MODEL, changing_ropes=ropes[1:])
    identities = [only_long.find_identity("", "", prompt_len=n) for n in (3, 32, 33, 90)]
    assert identities[0] == identities[1] != identities[2] == identities[3]


def test_the_ropes_that_change_are_found() -> None:
    assert find_changing_ropes([*(layer.rope for layer in GEMMA2.layers), None]) == ()
    ropes = [DYNAMIC, GEMMA2.layers[0].rope, DYNAMIC]
    assert find_changing_ropes(ropes) == (("dynamic", DYNAMIC.original_max_position),)


# the flush


def test_a_flush_empties_it_and_tells_how_many_pages_came_free() -> None:
    engine, runner = build_engine(num_pages=60)
    with serve(engine, runner):
        gather(engine.submit(asked_by("acme")))
        gather(engine.submit(asked_by("bolt")))
        assert engine.flush_prefix_cache("acme").result(60) == 4
        assert engine.flush_prefix_cache().result(60) == 4
        assert engine.flush_prefix_cache().result(60) == 0
        assert gather(engine.submit(asked_by("acme"))).finished.usage.cached_prompt_tokens == 0


def test_a_flush_in_the_middle_of_a_request_hurts_nobody() -> None:
    flushed: list[Future[int]] = []

    def flush(plan: StepPlan) -> None:
        flushed.append(engine.flush_prefix_cache())

    engine, runner = build_engine(on_launch=flush)
    with serve(engine, runner):
        outputs = [gather(engine.submit(asked_by("acme"))) for _ in range(3)]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert len(flushed) > 6
    assert all(future.done() for future in flushed)


def test_a_flush_of_an_engine_that_does_not_run_is_refused() -> None:
    engine, runner = build_engine()
    with pytest.raises(NotServingError, match="starting"):
        engine.flush_prefix_cache()
    with serve(engine, runner):
        pass
    with pytest.raises(NotServingError, match="stopped"):
        engine.flush_prefix_cache()


def test_a_flush_that_waits_when_the_engine_fails_is_told_so() -> None:
    flushed: list[Future[int]] = []

    def fail(plan: StepPlan) -> None:
        flushed.append(engine.flush_prefix_cache())
        raise RuntimeError("the device is gone")

    engine, runner = build_engine(on_launch=fail)
    with serve(engine, runner):
        stream = engine.submit(asked_by("acme"))
        with pytest.raises(EngineDeadError):
            gather(stream)
        with pytest.raises(EngineDeadError):
            flushed[0].result(60)
