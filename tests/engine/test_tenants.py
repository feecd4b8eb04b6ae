"""Ids of requests are a tenant's own: nobody meets, finds or ends another's."""

import dataclasses

import pytest

from jaxserve.errors import DuplicateRequestError
from jaxserve.request import FinishReason, GenerationRequest
from tests.engines import ask, build_engine, gather, serve


def of(tenant: str, *, id: str = "same") -> GenerationRequest:
    return dataclasses.replace(ask((1,), id=id, ignore_eos=True), tenant=tenant)


def test_two_tenants_may_use_the_same_id_at_once_and_one_may_not() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        streams = [engine.submit(of(tenant)) for tenant in ("", "a", "b")]
        for tenant in ("", "a", "b"):
            with pytest.raises(DuplicateRequestError, match="'same' is in flight"):
                engine.submit(of(tenant))
        runner.gate.set()
        for stream in streams:
            assert len(gather(stream).token_ids) == 8


def test_an_abort_reaches_the_tenants_own_request_alone() -> None:
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        streams = {tenant: engine.submit(of(tenant)) for tenant in ("a", "b")}
        assert not engine.abort("same")
        assert not engine.abort("same", "c")
        assert not engine.abort("other", "a")
        assert engine.abort("same", "b")
        runner.gate.set()
        reasons = {tenant: gather(stream).finished.reason for tenant, stream in streams.items()}
        assert not engine.abort("same", "b")
    assert reasons["b"] is FinishReason.CANCELLED
    assert reasons["a"] is FinishReason.MAX_TOKENS


def test_no_choice_of_names_makes_two_requests_one() -> None:
    """Tenant and id are not joined into one text."""
    engine, runner = build_engine()
    runner.gate.clear()
    with serve(engine, runner):
        pairs = [("a", "b/c"), ("a/b", "c"), ("", "a/b/c"), ("ab", "c"), ("a", "bc")]
        streams = [engine.submit(of(tenant, id=id)) for tenant, id in pairs]
        assert engine.abort("c", "a/b")
        runner.gate.set()
        reasons = [gather(stream).finished.reason for stream in streams]
    assert [reason is FinishReason.CANCELLED for reason in reasons] == [False, True] + [False] * 3
