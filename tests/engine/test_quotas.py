"""Quotas of tenants: what is let in, what is refused and until when, and that all comes back."""

import contextlib
import dataclasses
import random

import pytest

from jaxserve.config import LimitsSection, SchedulerSection, TenantLimits, TenantsSection
from jaxserve.engine import ServedModel, Stream
from jaxserve.engine.quotas import Allowance, Quotas
from jaxserve.errors import (
    ContextLengthError,
    DuplicateRequestError,
    InvalidRequestError,
    JaxserveError,
    PermissionDeniedError,
    QueueFullError,
    QuotaError,
)
from jaxserve.metrics import Metrics
from jaxserve.request import FinishReason, GenerationRequest, Request, SamplingParams
from tests.engines import ONE_ROW, Clock, ask, build_engine, gather, serve

MODEL = ServedModel(name="m", max_model_tokens=40, vocab_size=256, eos_ids=frozenset())


def request(tenant: str = "acme", *, tokens: int = 3) -> Request:
    return Request(
        id="r",
        prompt=(1,) * tokens,
        sampling=SamplingParams(),
        seed=0,
        max_tokens=5,
        ends_by_context=False,
        stop_ids={},
        arrival_s=0.0,
        tenant=tenant,
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class Desk:
    """Quotas of one tenant, and its clock."""

    quotas: Quotas
    metrics: Metrics
    clock: Clock

    def admit(self, tenant: str = "acme", *, tokens: int = 3) -> Request:
        admitted = request(tenant, tokens=tokens)
        with self.quotas.admitting(admitted):
            pass
        return admitted

    def refusal(self, tenant: str = "acme", *, tokens: int = 3) -> QuotaError:
        with pytest.raises(QuotaError) as caught:
            self.admit(tenant, tokens=tokens)
        return caught.value

    def try_admit(self, tokens: int) -> float:
        """Returns the seconds to wait; 0 where it was let in."""
        try:
            self.admit(tokens=tokens)
        except QuotaError as error:
            return error.retry_after_s
        return 0.0

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds


def desk(bounds: LimitsSection | None = None, **limits: object) -> Desk:
    metrics, clock = Metrics(), Clock()
    quotas = Quotas(bounds or LimitsSection(), metrics=metrics, clock=clock)
    quotas.set_limits(section(**limits))
    return Desk(quotas=quotas, metrics=metrics, clock=clock)


def section(**limits: object) -> TenantsSection:
    return TenantsSection(named={"acme": TenantLimits.model_validate(limits)})


def test_requests_come_as_often_as_the_minute_allows() -> None:
    at = desk(requests_per_minute=3)
    for _ in range(3):
        at.admit()
    error = at.refusal()
    assert (error.quota, error.limit, error.used) == ("requests_per_minute", 3, 3)
    assert error.retry_after_s == pytest.approx(20.0)
    at.wait(error.retry_after_s)
    at.admit()
    assert at.refusal().retry_after_s == pytest.approx(20.0)
    at.wait(1000.0)  # more than a minute's worth is never saved up
    for _ in range(3):
        at.admit()
    at.refusal()


def test_the_time_to_wait_is_enough_and_no_more() -> None:
    draw = random.Random(7)
    at = desk(requests_per_minute=7, tokens_per_minute=101)
    num_waits = 0
    for _ in range(300):
        tokens = draw.randint(1, 60)
        while (wait_s := at.try_admit(tokens)) > 0:
            num_waits += 1
            at.wait(wait_s * 0.99)
            rest_s = at.try_admit(tokens)
            assert rest_s > 0, "the time said was more than was needed"
            at.wait(rest_s)
        at.wait(draw.random() * 10)
    assert num_waits > 100


def test_the_prompt_is_charged_at_once_and_the_output_at_the_end() -> None:
    at = desk(tokens_per_minute=100)
    first = at.admit(tokens=60)
    error = at.refusal(tokens=60)
    assert (error.quota, error.limit, error.used) == ("tokens_per_minute", 100, 60)
    assert error.retry_after_s == pytest.approx(20 * 60 / 100)
    at.admit(tokens=40)
    at.quotas.release(first, output_tokens=100)  # a debt of 100
    assert at.refusal(tokens=1).used == 200
    assert at.refusal(tokens=1).retry_after_s == pytest.approx(101 * 60 / 100)
    at.wait(60.0)
    at.refusal(tokens=1)  # the debt is just paid
    at.wait(0.6)
    at.admit(tokens=1)


def test_a_prompt_longer_than_a_minutes_worth_waits_for_a_full_level_and_leaves_a_debt() -> None:
    at = desk(tokens_per_minute=10)
    at.admit(tokens=35)
    assert at.refusal(tokens=35).retry_after_s == pytest.approx(35 * 6)
    at.wait(35 * 6.0)
    at.admit(tokens=35)


def test_over_any_time_the_use_is_at_most_the_rate_and_what_one_took_too_much() -> None:
    draw = random.Random(3)
    per_minute = 50
    for _ in range(50):
        allowance, now_s, uses = Allowance(per_minute, 0.0), 0.0, [(0.0, 0)]
        for _ in range(100):
            now_s += draw.choice((0.0, 0.1, 1.0, 30.0))
            amount = draw.randint(1, 40)
            if allowance.wait_s(amount, now_s) == 0.0:
                allowance.use(amount, now_s)
                uses.append((now_s, amount))
        for first in range(len(uses)):
            since_s, total = uses[first][0], 0
            for at_s, amount in uses[first:]:
                total += amount
                assert total <= per_minute * (1 + (at_s - since_s) / 60) + 1e-6


def test_places_are_held_from_submit_to_the_end() -> None:
    at = desk(max_concurrent_requests=2)
    first, second = at.admit(), at.admit()
    error = at.refusal()
    assert (error.quota, error.limit, error.used) == ("max_concurrent_requests", 2, 2)
    at.quotas.leave_queue(first)
    at.refusal()  # running counts as well
    at.quotas.release(first, output_tokens=1)
    third = at.admit()
    at.refusal()
    for last in (second, third):
        at.quotas.release(last, output_tokens=0)
    assert at.quotas.num_live == 0


def test_a_share_of_the_queue_is_of_its_requests_and_of_its_tokens() -> None:
    at = desk(LimitsSection(max_waiting_requests=10, max_waiting_tokens=100), queue_share=0.25)
    first, _ = at.admit(tokens=5), at.admit(tokens=5)
    error = at.refusal(tokens=1)
    assert (error.quota, error.limit, error.used) == ("queue_share", 2, 2)
    at.quotas.leave_queue(first)
    assert at.refusal(tokens=21).used == 5  # 25 tokens is its share
    at.admit(tokens=20)


def test_a_tenant_with_nothing_in_the_queue_may_always_put_one_there() -> None:
    at = desk(LimitsSection(max_waiting_requests=4, max_waiting_tokens=100), queue_share=0.01)
    at.admit(tokens=99)
    assert at.refusal(tokens=1).quota == "queue_share"


def test_tenants_do_not_share() -> None:
    at = desk(requests_per_minute=1, max_concurrent_requests=1, queue_share=0.1)
    at.admit("acme")
    at.refusal("acme")
    for tenant in ("", "bolt", "bolt", ""):
        at.admit(tenant)


def test_the_default_holds_for_each_tenant_without_a_table_by_itself() -> None:
    at = desk()
    at.quotas.set_limits(TenantsSection(default=TenantLimits(requests_per_minute=1)))
    for tenant in ("", "bolt", "coil"):
        at.admit(tenant)
        at.refusal(tenant)


def test_what_the_engine_refuses_was_never_used() -> None:
    at = desk(requests_per_minute=1, tokens_per_minute=3, max_concurrent_requests=1)
    for _ in range(3):
        with pytest.raises(QueueFullError):
            with at.quotas.admitting(request()):
                raise QueueFullError("full")
    assert at.quotas.num_live == 0
    assert at.metrics.value("tenant_requests_live") == 0
    assert at.metrics.value("tenant_requests_submitted_total") == 0
    at.admit()


def test_a_reload_changes_the_rate_and_forgets_no_use() -> None:
    at = desk(requests_per_minute=4, max_concurrent_requests=9)
    held = [at.admit() for _ in range(4)]
    at.quotas.set_limits(section(requests_per_minute=6, max_concurrent_requests=9))
    at.admit()
    at.admit()
    assert at.refusal().used == 6
    at.quotas.set_limits(section(max_concurrent_requests=6))
    assert at.refusal().quota == "max_concurrent_requests"
    at.quotas.release(held[0], output_tokens=0)
    at.admit()


def test_a_ceiling_of_priority_refuses_what_is_above_it() -> None:
    at = desk(max_priority=2)
    for priority in (-5, 0, 2):
        asked = GenerationRequest(prompt="x", tenant="acme", priority=priority)
        assert at.quotas.allow(asked) is asked
    with pytest.raises(PermissionDeniedError, match=r"priority is 3, .* 2 at most") as caught:
        at.quotas.allow(GenerationRequest(prompt="x", tenant="acme", priority=3))
    assert caught.value.field == "priority"
    at.quotas.allow(GenerationRequest(prompt="x", tenant="bolt", priority=3))


def test_a_ceiling_below_0_is_the_priority_of_who_asks_for_none() -> None:
    at = desk(max_priority=-3)
    assert at.quotas.allow(GenerationRequest(prompt="x", tenant="acme")).priority == -3
    assert at.quotas.allow(GenerationRequest(prompt="x", tenant="bolt")).priority == 0
    for priority in (-2, 1):
        with pytest.raises(PermissionDeniedError):
            at.quotas.allow(GenerationRequest(prompt="x", tenant="acme", priority=priority))


def test_a_shorter_context_is_what_the_tenant_has_of_the_model() -> None:
    at = desk(max_context_tokens=10)
    assert at.quotas.narrow(MODEL, "acme").max_model_tokens == 10
    assert at.quotas.narrow(MODEL, "bolt") is MODEL
    at.quotas.set_limits(section(max_context_tokens=100))
    assert at.quotas.narrow(MODEL, "acme") is MODEL


def test_only_configured_tenants_are_named_in_labels_and_never_too_many() -> None:
    at = desk()
    at.quotas.set_limits(TenantsSection(named={f"t{i}": TenantLimits() for i in range(100)}))
    for tenant in ("acme", "t0", "t30", "t31", "t99", "unheard", ""):
        at.quotas.release(at.admit(tenant), output_tokens=2)
    named = {
        sample.labels["tenant"]: sample.value
        for family in at.metrics.tenant_output_tokens.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert named == {"acme": 2, "t0": 2, "t30": 2, "other": 6, "anonymous": 2}


def test_a_tenant_that_gets_a_name_while_it_is_there_leaves_no_count_behind() -> None:
    at = desk()
    held = at.admit("late")
    live = at.metrics.value
    assert live("tenant_requests_live", tenant="other") == 1
    at.quotas.set_limits(TenantsSection(named={"late": TenantLimits()}))
    assert live("tenant_requests_live", tenant="other") == 0
    assert live("tenant_requests_live", tenant="late") == 1
    at.quotas.release(held, output_tokens=0)
    assert live("tenant_requests_live") == 0


# with an engine


def submit(engine_ask: GenerationRequest, tenant: str) -> GenerationRequest:
    return dataclasses.replace(engine_ask, tenant=tenant)


def test_an_engine_refuses_by_tenant_and_counts_why() -> None:
    engine, runner = build_engine()
    engine.quotas.set_limits(section(requests_per_minute=1, max_context_tokens=8, max_priority=0))
    with serve(engine, runner):
        for bad, kind in (
            (dataclasses.replace(ask("x"), priority=1), PermissionDeniedError),
            (ask("x", max_tokens=9), ContextLengthError),
        ):
            with pytest.raises(kind):
                engine.submit(submit(bad, "acme"))
        gather(engine.submit(submit(ask("x", max_tokens=2), "acme")))
        with pytest.raises(QuotaError):
            engine.submit(submit(ask("x", max_tokens=2), "acme"))
        gather(engine.submit(ask("x", max_tokens=2)))
    value = engine.metrics.value
    assert value("requests_refused_total", reason="quota_exceeded") == 1
    assert value("requests_refused_total", reason="permission_denied") == 1
    labels = {"tenant": "acme", "quota": "requests_per_minute"}
    assert value("tenant_quota_refusals_total", **labels) == 1
    assert value("tenant_requests_submitted_total", tenant="acme") == 1


def test_whatever_happens_to_requests_all_they_held_is_given_back_once() -> None:
    """By length, EOS, cancel, deadline, stop; or refused as a duplicate, by queue or quota."""
    for seed in range(6):
        check_random_run(seed)


def check_random_run(seed: int) -> None:
    draw = random.Random(seed)
    clock = Clock()
    engine, runner = build_engine(
        clock=clock, step_limits=ONE_ROW, bounds=LimitsSection(max_waiting_requests=5)
    )
    engine.quotas.set_limits(
        TenantsSection(
            default=TenantLimits(tokens_per_minute=400, queue_share=0.5),
            named={"acme": TenantLimits(max_concurrent_requests=3, requests_per_minute=30)},
        )
    )
    releases: list[Request] = []
    release = engine.quotas.release

    def watch(ended: Request, *, output_tokens: int) -> None:
        releases.append(ended)
        release(ended, output_tokens=output_tokens)

    engine.quotas.release = watch  # type: ignore[method-assign, assignment]
    streams: list[Stream] = []
    num_refused = 0
    with serve(engine, runner):
        for number in range(60):
            clock.now_s += draw.random() * 2
            asked = ask(
                tuple(draw.randrange(200) for _ in range(draw.randint(1, 30))),
                id=draw.choice(("", "twice", f"r{number}")),
                max_tokens=draw.randint(1, 9),
            )
            late_s = clock.now_s + draw.choice((-1.0, 0.5, 100.0))
            asked = dataclasses.replace(
                asked, tenant=draw.choice(("acme", "bolt", "")), deadline_s=late_s
            )
            try:
                streams.append(engine.submit(asked))
            except JaxserveError:
                num_refused += 1
            if streams and draw.random() < 0.3:
                draw.choice(streams).cancel()
            if draw.random() < 0.2:
                with contextlib.suppress(JaxserveError):
                    for _ in streams.pop(0) if streams else ():
                        pass
    assert num_refused
    assert len(releases) == len(set(releases)) == engine.metrics.value("requests_submitted_total")
    check_all_is_back(engine.quotas, engine.metrics)


def check_all_is_back(quotas: Quotas, metrics: Metrics) -> None:
    assert quotas.num_live == 0
    assert metrics.value("tenant_requests_live") == 0
    submitted = metrics.value("requests_submitted_total")
    assert metrics.value("tenant_requests_submitted_total") == submitted
    assert metrics.value("tenant_output_tokens_total") == metrics.value("output_tokens_total")
    for account in quotas._accounts.values():
        places = (account.num_live, account.num_queued, account.num_queued_tokens)
        assert places == (0, 0, 0)


def test_an_engine_that_fails_gives_everything_back() -> None:
    def fail(plan: object) -> None:
        raise RuntimeError("gone")

    engine, runner = build_engine(on_launch=fail)
    with serve(engine, runner):
        stream = engine.submit(ask("x"))
        with pytest.raises(JaxserveError):
            gather(stream)
    check_all_is_back(engine.quotas, engine.metrics)


def test_what_is_over_its_quota_is_not_even_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = build_engine()
    engine.quotas.set_limits(section(requests_per_minute=1))
    with serve(engine, runner):
        gather(engine.submit(submit(ask("x", max_tokens=1), "acme")))
        monkeypatch.setattr(engine, "tokenizer", None)
        with pytest.raises(QuotaError):
            engine.submit(submit(ask("x", max_tokens=1), "acme"))


def test_a_request_that_runs_is_in_nobodys_share_of_the_queue() -> None:
    engine, runner = build_engine(
        step_limits=ONE_ROW, bounds=LimitsSection(max_waiting_requests=10, max_waiting_tokens=10)
    )
    engine.quotas.set_limits(section(queue_share=0.1))  # one request
    runner.gate.clear()
    with serve(engine, runner):
        engine.submit(submit(ask("x", max_tokens=1), "acme"))
        while engine.metrics.value("requests_running") < 1:
            pass  # a hang is the test's timeout
        engine.submit(submit(ask("x", max_tokens=1), "acme"))
        with pytest.raises(QuotaError, match=r"queue_share is used up: 1 of 1"):
            engine.submit(submit(ask("x", max_tokens=1), "acme"))
        runner.gate.set()


def test_a_duplicate_uses_nothing_up() -> None:
    engine, runner = build_engine()
    engine.quotas.set_limits(section(requests_per_minute=2))
    runner.gate.clear()
    with serve(engine, runner):
        first = engine.submit(submit(ask("x", id="same", max_tokens=1), "acme"))
        for _ in range(3):
            with pytest.raises(DuplicateRequestError):
                engine.submit(submit(ask("x", id="same"), "acme"))
        runner.gate.set()
        assert gather(first).finished.reason is FinishReason.MAX_TOKENS
        gather(engine.submit(submit(ask("x", max_tokens=1), "acme")))


def test_a_weight_is_the_tenant_s_own_and_changes_with_its_limits() -> None:
    engine, _ = build_engine()
    assert engine.quotas.weight("acme") == 1.0
    engine.quotas.set_limits(TenantsSection(named={"acme": TenantLimits(weight=3.0)}))
    assert (engine.quotas.weight("acme"), engine.quotas.weight("other")) == (3.0, 1.0)


def test_fcfs_refuses_a_class_that_was_asked_for_and_not_a_tenant_s_ceiling() -> None:
    engine, runner = build_engine(scheduler=SchedulerSection(policy="fcfs"))
    engine.quotas.set_limits(TenantsSection(default=TenantLimits(max_priority=-1)))
    with serve(engine, runner):
        gather(engine.submit(ask((1, 2), max_tokens=1)))
        with pytest.raises(InvalidRequestError, match="fcfs, which has no classes"):
            engine.submit(dataclasses.replace(ask((1, 2), max_tokens=1), priority=-2))
