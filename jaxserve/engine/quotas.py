"""What each tenant may use, and the account of what it does use."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Final

from jaxserve.config import LimitsSection, TenantLimits, TenantsSection
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import JaxserveError, PermissionDeniedError, QuotaError
from jaxserve.metrics import Metrics
from jaxserve.request import GenerationRequest, Request

PLACE_RETRY_S: Final = 1.0  # when a place comes free depends on other requests: a guess
MINUTE_S: Final = 60.0
ROUNDING: Final = 1e-6  # of a request or a token


class Allowance:
    """A rate, as a level that rises to one minute's worth and that each use lowers.

    A use may lower it below 0: that is a debt, and nothing more is let in until it is paid. So over
    any time t the uses add up to at most limit · (1 + t / 60 s), and what one use took too much.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def used(self, now_s: float) -> float:
        """Returns what is missing from a full level."""
        return self.per_minute - self._rise(now_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Returns the seconds until `amount` may be used; more than a minute's worth may be used
        once the level is full."""
        missing = min(amount, self.per_minute) - self._rise(now_s)
        # what rounding lacks after just this wait must not make another
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def use(self, amount: float, now_s: float) -> None:
        """Lowers the level; a negative amount gives back."""
        self._level = min(self._rise(now_s) - amount, self.per_minute)

    def change(self, per_minute: int, now_s: float) -> None:
        """Goes on with another rate; what was used stays used."""
        used = self.used(now_s)
        self.per_minute = per_minute
        self._level = per_minute - used

    def _rise(self, now_s: float) -> float:
        risen = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level = min(self._level + risen, self.per_minute)
        self._at_s = now_s
        return self._level


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class _Account:
    """One tenant's.

    Attributes:
      label: the metrics' word for it.
      num_live: its requests in the engine.
      num_queued: those of them that were not scheduled yet.
      num_queued_tokens: their prompts' tokens.
    """

    limits: TenantLimits
    label: str
    requests: Allowance | None = None
    tokens: Allowance | None = None
    num_live: int = 0
    num_queued: int = 0
    num_queued_tokens: int = 0


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class _Hold:
    """What one request holds until its end."""

    account: _Account
    is_queued: bool = True


class Quotas:
    """Lets a request in or refuses it, by its tenant; any thread.

    Every request that is let in is given back exactly once: by `admitting`, where the engine then
    refuses it, or by `release` at its end. Nothing is limited until `set_limits`.
    """

    def __init__(
        self, bounds: LimitsSection, *, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._bounds = bounds
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._section = TenantsSection()
        self._accounts: dict[str, _Account] = {}  # as many as tenants have keys
        self._holds: dict[Request, _Hold] = {}

    def set_limits(self, section: TenantsSection) -> None:
        """Has these limits hold from now on; what was used stays used."""
        self._metrics.tenants.add_names(section.named)
        now_s = self._clock()
        with self._lock:
            self._section = section
            for tenant, account in self._accounts.items():
                self._set_label(account, self._metrics.tenants.label(tenant))
                self._set_account(account, section.limits_of(tenant), now_s)

    def allow(self, asked: GenerationRequest) -> GenerationRequest:
        """Returns the request as its tenant may ask it, before anything is done for it.

        One that asks for no priority, which is 0, has the tenant's ceiling where that is lower.

        Raises:
          PermissionDeniedError: its priority is above the ceiling.
          QuotaError: the tenant has used up what it may; looked at here so that what is refused
            costs little, and once more in `admitting`.
        """
        with self._lock:
            account = self._account(asked.tenant)
            self._check_requests(account, self._clock())
            ceiling = account.limits.max_priority
        # a value that is no integer is refused by the door
        if ceiling is None or not isinstance(asked.priority, int) or asked.priority <= ceiling:
            return asked
        if asked.priority == 0:
            return dataclasses.replace(asked, priority=ceiling)
        raise PermissionDeniedError(
            f"priority is {asked.priority}, but this key's requests may have {ceiling} at most; "
            "lower it or leave it out",
            field="priority",
        )

    def narrow(self, model: ServedModel, tenant: str) -> ServedModel:
        """Returns the model with the context that the tenant may use of it."""
        longest = self._section.limits_of(tenant).max_context_tokens
        if longest is None or longest >= model.max_model_tokens:
            return model
        return dataclasses.replace(model, max_model_tokens=longest)

    def weight(self, tenant: str) -> float:
        """Returns a tenant's share of the machine, by that of others."""
        return self._section.limits_of(tenant).weight

    @contextlib.contextmanager
    def admitting(self, request: Request) -> Iterator[None]:
        """Lets a request in while the block hands it to the engine.

        Where the block raises, all of it is given back: the request never began.

        Raises:
          QuotaError: the tenant has used up what it may.
        """
        with self._lock:
            account = self._account(request.tenant)
            self._check(account, request)
            self._charge(account, request, sign=1)
            self._holds[request] = _Hold(account=account)
        try:
            yield
        except JaxserveError:
            with self._lock:
                self._give_back(request)
                self._charge(account, request, sign=-1)
            raise
        self._metrics.tenant_requests_submitted.labels(account.label).inc()

    def leave_queue(self, request: Request) -> None:
        """It was scheduled for the first time."""
        with self._lock:
            self._leave_queue(self._holds[request], request)

    def release(self, request: Request, *, output_tokens: int) -> None:
        """Ends a request that was let in; its output is charged."""
        with self._lock:
            account = self._give_back(request)
            if account.tokens is not None:
                account.tokens.use(output_tokens, self._clock())
            label = account.label
        self._metrics.tenant_prompt_tokens.labels(label).inc(len(request.prompt))
        self._metrics.tenant_output_tokens.labels(label).inc(output_tokens)

    def count_refusal(self, tenant: str, error: QuotaError) -> None:
        """Counts a request that was refused because a quota was used up."""
        label = self._metrics.tenants.label(tenant)
        self._metrics.tenant_quota_refusals.labels(label, error.quota).inc()

    @property
    def num_live(self) -> int:
        """Requests that were let in and not given back."""
        return len(self._holds)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            limits = self._section.limits_of(tenant)
            account = _Account(limits=limits, label=self._metrics.tenants.label(tenant))
            self._set_account(account, limits, self._clock())
            self._accounts[tenant] = account
        return account

    def _set_label(self, account: _Account, label: str) -> None:
        live = self._metrics.tenant_requests_live
        live.labels(account.label).dec(account.num_live)
        live.labels(label).inc(account.num_live)
        account.label = label

    def _set_account(self, account: _Account, limits: TenantLimits, now_s: float) -> None:
        account.limits = limits
        account.requests = _follow(account.requests, limits.requests_per_minute, now_s)
        account.tokens = _follow(account.tokens, limits.tokens_per_minute, now_s)

    def _check(self, account: _Account, request: Request) -> None:
        now_s = self._clock()
        self._check_requests(account, now_s)
        self._check_queue(account, request)
        self._check_rate(
            account, "tokens_per_minute", account.tokens, len(request.prompt), now_s=now_s
        )

    def _check_requests(self, account: _Account, now_s: float) -> None:
        """Checks what does not depend on the request."""
        most = account.limits.max_concurrent_requests
        if most is not None and account.num_live >= most:
            self._refuse(account, "max_concurrent_requests", most, account.num_live, PLACE_RETRY_S)
        self._check_rate(account, "requests_per_minute", account.requests, 1, now_s=now_s)

    def _check_rate(
        self,
        account: _Account,
        quota: str,
        allowance: Allowance | None,
        amount: float,
        *,
        now_s: float,
    ) -> None:
        if allowance is None:
            return
        wait_s = allowance.wait_s(amount, now_s)
        if wait_s > 0:
            used = allowance.used(now_s)
            self._refuse(account, quota, allowance.per_minute, used, wait_s)

    def _check_queue(self, account: _Account, request: Request) -> None:
        """A tenant with an empty part of the queue may always put one request there."""
        share = account.limits.queue_share
        if share == 1.0 or not account.num_queued:
            return  # the queue's own bound is the engine's affair
        most = int(share * self._bounds.max_waiting_requests)
        if account.num_queued >= most:
            self._refuse(account, "queue_share", most, account.num_queued, PLACE_RETRY_S)
        most = int(share * self._bounds.max_waiting_tokens)
        if account.num_queued_tokens + len(request.prompt) > most:
            self._refuse(account, "queue_share", most, account.num_queued_tokens, PLACE_RETRY_S)

    def _refuse(
        self, account: _Account, quota: str, limit: float, used: float, retry_after_s: float
    ) -> None:
        raise QuotaError(
            f"{quota} is used up: {used:.0f} of {limit:.0f}; try again in {retry_after_s:.1f} s",
            quota=quota,
            limit=limit,
            used=used,
            retry_after_s=retry_after_s,
        )

    def _charge(self, account: _Account, request: Request, *, sign: int) -> None:
        now_s = self._clock()
        if account.requests is not None:
            account.requests.use(sign, now_s)
        if account.tokens is not None:
            account.tokens.use(sign * len(request.prompt), now_s)
        if sign > 0:
            account.num_live += 1
            account.num_queued += 1
            account.num_queued_tokens += len(request.prompt)
            self._metrics.tenant_requests_live.labels(account.label).inc()

    def _give_back(self, request: Request) -> _Account:
        """Gives back the places that a request holds; its rates stay charged."""
        hold = self._holds.pop(request)
        self._leave_queue(hold, request)
        hold.account.num_live -= 1
        self._metrics.tenant_requests_live.labels(hold.account.label).dec()
        return hold.account

    def _leave_queue(self, hold: _Hold, request: Request) -> None:
        if hold.is_queued:
            hold.is_queued = False
            hold.account.num_queued -= 1
            hold.account.num_queued_tokens -= len(request.prompt)


def _follow(allowance: Allowance | None, per_minute: int | None, now_s: float) -> Allowance | None:
    """Returns the allowance for a rate that may be new, or gone."""
    if per_minute is None:
        return None
    if allowance is None:
        return Allowance(per_minute, now_s)
    allowance.change(per_minute, now_s)
    return allowance
