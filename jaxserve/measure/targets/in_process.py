"""An engine of this process as a target: no transport between it and the replay."""

import contextlib
import resource
import sys
from collections.abc import AsyncGenerator, Callable

from jaxserve.engine import Delta, Engine, Event, Finished, Stream
from jaxserve.engine.limits import merge_sampling
from jaxserve.errors import DeadlineError, DeadlineUnreachableError, JaxserveError
from jaxserve.measure.server_metrics import Snapshot
from jaxserve.measure.targets.base import (
    Ask,
    End,
    Levels,
    Message,
    TargetError,
    TargetFacts,
    read_end,
)
from jaxserve.request import GenerationRequest


class InProcessTarget:
    """Replays against a started engine; whoever made it stops it."""

    def __init__(self, engine: Engine, *, tenant_of: Callable[[Ask], str] | None = None) -> None:
        """Args:
        tenant_of: whose a request is; None has no tenants.
        """
        self._engine = engine
        self._tenant_of = tenant_of

    async def describe(self) -> TargetFacts:
        model, tokenizer = self._engine.model, self._engine.tokenizer
        return TargetFacts(
            backend="jaxserve in-process",
            model=model.name,
            vocab_size=model.vocab_size,
            special_ids=tokenizer.special_ids | model.eos_ids,
            max_model_tokens=model.max_model_tokens,
        )

    async def stream(self, ask: Ask, *, left_s: float | None) -> AsyncGenerator[Message | End]:
        engine = self._engine
        request = GenerationRequest(
            prompt=ask.prompt,
            sampling=merge_sampling(ask.sampling, engine.model.sampling_defaults),
            id=ask.request_id,
            priority=ask.priority,
            tenant="" if self._tenant_of is None else self._tenant_of(ask),
            deadline_s=None if left_s is None else engine.now() + left_s,
        )
        try:
            stream = engine.submit(request)
        except JaxserveError as error:
            raise TargetError(str(error), outcome="refused") from error
        with stream:
            try:
                async with contextlib.aclosing(_aiter(stream)) as events:
                    async for event in events:
                        match event:
                            case Delta():
                                yield Message(
                                    num_tokens=len(event.token_ids), has_text=bool(event.text)
                                )
                            case Finished():
                                yield read_end(event, by="engine")
            except DeadlineError as error:
                raise TargetError(str(error), outcome="timed_out") from error
            except DeadlineUnreachableError as error:
                raise TargetError(str(error), outcome="refused") from error
            except JaxserveError as error:
                raise TargetError(str(error), outcome="failed") from error

    @property
    def engine(self) -> Engine:
        return self._engine

    async def read_metrics(self) -> Snapshot:
        return Snapshot.of_registry(self._engine.metrics.registry)

    async def read_levels(self) -> Levels:
        metrics = self._engine.metrics
        return Levels(
            running=metrics.value("requests_running"),
            waiting=metrics.value("requests_waiting"),
            kv_usage=metrics.value("kv_usage_ratio"),
            memory_bytes=peak_memory_bytes(),
        )

    async def close(self) -> None:
        """Nothing is held."""


def peak_memory_bytes() -> float:
    """Returns the most resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _aiter(stream: Stream) -> AsyncGenerator[Event]:
    """Returns the stream's generator, which is to be closed with the request."""
    events = stream.__aiter__()
    assert isinstance(events, AsyncGenerator)
    return events
