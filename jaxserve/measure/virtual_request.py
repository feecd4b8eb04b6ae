"""The requests of a simulation: made of what a client asks, and what is told of them at the end."""

import dataclasses
from collections.abc import Callable
from typing import Final

from jaxserve.config import Config
from jaxserve.engine.limits import merge_sampling
from jaxserve.engine.namespaces import Namespaces
from jaxserve.errors import WorkloadError
from jaxserve.identity import CacheIdentity
from jaxserve.measure.records import Arrival, Outcome, RequestRecord, ServerPhases
from jaxserve.measure.targets.base import Ask
from jaxserve.request import FinishReason, Request, SamplingParams

NO_STOPS: Final[dict[int, FinishReason]] = {}


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class VirtualRequest:
    """A request on its way through a simulation."""

    ask: Ask
    request: Request
    intended_s: float
    arrivals: list[Arrival] = dataclasses.field(default_factory=list)
    scheduled_s: float | None = None
    is_queued: bool = True
    has_ended: bool = False

    def build_record(
        self,
        outcome: Outcome,
        *,
        end_s: float,
        error: str,
        finish_reason: str,
        has_cache: bool,
    ) -> RequestRecord:
        """Returns what is told of it; it has ended."""
        ask, request = self.ask, self.request
        return RequestRecord(
            index=ask.index,
            request_id=ask.request_id,
            prompt_class=ask.prompt_class,
            intended_s=self.intended_s,
            sent_s=self.intended_s,
            arrivals=tuple(self.arrivals),
            end_s=end_s,
            outcome=outcome,
            prompt_tokens=len(request.prompt),
            output_tokens=len(self.arrivals),
            cached_prompt_tokens=request.num_cached if has_cache else None,
            wanted_tokens=ask.wanted_tokens,
            deadline_s=ask.deadline_s,
            finish_reason=finish_reason,
            error=error,
            phases=self._build_phases(),
        )

    def _build_phases(self) -> ServerPhases:
        if self.scheduled_s is None:
            return ServerPhases()
        queue_s = self.scheduled_s - self.intended_s
        if not self.arrivals:
            return ServerPhases(queue_s=queue_s)
        first_s, last_s = self.arrivals[0].time_s, self.arrivals[-1].time_s
        return ServerPhases(
            queue_s=queue_s,
            prefill_s=first_s - self.scheduled_s,
            decode_s=last_s - first_s,
            delivery_s=0.0,
            compile_s=0.0,
        )


class RequestMaker:
    """Makes requests as an engine would of the same calls."""

    def __init__(self, config: Config, *, tenant_of: Callable[[Ask], str] | None) -> None:
        """Args:
        tenant_of: whose a request is; None has no tenants.
        """
        self._namespaces = Namespaces(config.prefix_cache, _identify(config.kv.page_size))
        self._queue_timeout_s = config.limits.queue_timeout_s
        self._tenant_of = tenant_of
        self._sampling: dict[tuple[tuple[str, object], ...], SamplingParams] = {}

    def make(self, ask: Ask, intended_s: float) -> Request:
        """Returns a client's request.

        Raises:
          WorkloadError: it cannot be simulated.
        """
        if isinstance(ask.prompt, str):
            raise WorkloadError(
                f"entry {ask.index} is a text, which only a tokenizer can count; simulate a "
                "workload of token ids or of lengths"
            )
        sampling = self._merge(ask)
        if sampling.max_tokens is None:
            raise WorkloadError(
                f"entry {ask.index} leaves its end to the model, which nobody can foresee; give it "
                "wanted_tokens, or max_tokens in its sampling"
            )
        tenant = "" if self._tenant_of is None else self._tenant_of(ask)
        return Request(
            id=ask.request_id,
            prompt=ask.prompt,
            sampling=sampling,
            seed=0,
            max_tokens=sampling.max_tokens,
            ends_by_context=False,
            stop_ids=NO_STOPS,
            arrival_s=intended_s,
            priority=ask.priority,
            deadline_s=None if ask.deadline_s is None else intended_s + ask.deadline_s,
            queue_deadline_s=intended_s + self._queue_timeout_s,
            tenant=tenant,
            cache_identity=self._namespaces.find_identity(tenant, "", prompt_len=len(ask.prompt)),
        )

    def _merge(self, ask: Ask) -> SamplingParams:
        """Returns the parameters but for the seed, which changes nothing here."""
        key = tuple(item for item in ask.sampling.items() if item[0] != "seed")
        found = self._sampling.get(key)
        if found is None:
            found = self._sampling[key] = merge_sampling(dict(key), {})
        return found


def _identify(page_size: int) -> CacheIdentity:
    """Returns what all K/V of a simulation has in common: it is of one model."""
    return CacheIdentity(weights="", tokenizer="", positions="", kv_dtype="", page_size=page_size)
