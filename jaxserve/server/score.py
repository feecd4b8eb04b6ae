"""Score: each item is a request that only has its prompt scored; all of them end with the call."""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from jaxserve.engine import Engine, Stream
from jaxserve.engine.events import Finished, Started, Usage
from jaxserve.errors import (
    DeadlineError,
    JaxserveError,
    PermissionDeniedError,
    QueueFullError,
    QuotaError,
    RequestCancelledError,
    RequestError,
)
from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams
from jaxserve.server import answers
from jaxserve.server.logprobs import build_logprobs
from jaxserve.server.score_items import ScoredPrompt
from jaxserve.server.submitting import submit_in_thread
from jaxserve.server.tracing import RequestSpan

CANCELLED: Final = "the call was ended by CancelGeneration"
SCORED: Final = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


class ScoreCall:
    """One call. At most as many of its items are in the engine as can run there at once."""

    def __init__(
        self,
        engine: Engine,
        threads: ThreadPoolExecutor,
        message: generation_pb2.ScoreRequest,
        *,
        request_id: str,
        tenant: str,
        deadline_s: float | None,
        span: RequestSpan | None = None,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._message = message
        self._request_id = request_id
        self._tenant = tenant
        self._deadline_s = deadline_s
        self._span = span
        self._room = asyncio.Semaphore(engine.config.scheduler.max_seqs)
        self._submitting = asyncio.Lock()
        self._one_ended = asyncio.Event()
        self._streams: set[Stream] = set()
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ends the items that are in the engine, and so the call with RequestCancelledError."""
        self._is_cancelled = True
        for stream in self._streams:
            stream.cancel()

    async def run(self, items: Sequence[ScoredPrompt]) -> generation_pb2.ScoreResponse:
        """Returns the scores in order.

        Raises:
          JaxserveError: an item's own, naming it; the others are ended.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._run_item(place, item))
                    for place, item in enumerate(items)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        results, usages = zip(*(task.result() for task in tasks), strict=True)
        return generation_pb2.ScoreResponse(
            request_id=self._request_id,
            model=self._engine.model.name,
            results=results,
            usage=answers.sum_usage(usages),
        )

    async def _run_item(
        self, place: int, item: ScoredPrompt
    ) -> tuple[generation_pb2.ScoreResult, Usage]:
        async with self._room:
            try:
                stream = await self._submit(place, item)
                logprobs, usage = await self._read(stream)
            except RequestError as error:
                raise _named(error, place) from error
        return self._build_result(logprobs[-item.num_scored :]), usage

    async def _submit(self, place: int, item: ScoredPrompt) -> Stream:
        """Submits one item; where there is no room for it, waits until another one has ended."""
        asked = GenerationRequest(
            prompt=item.prompt,
            sampling=SCORED,
            id=f"{self._request_id}/{place}",
            tenant=self._tenant,
            priority=self._message.priority,
            deadline_s=self._deadline_s,
            on_end=self._span.note_end if self._span else None,
        )

        def offer() -> Stream:
            stream = self._engine.offer(asked)
            if self._span is not None:
                self._span.accept()
            return stream

        async with self._submitting:
            while not self._is_cancelled:
                self._one_ended.clear()
                try:
                    stream = await submit_in_thread(self._threads, offer, stream_of=_itself)
                except JaxserveError as error:
                    if not self._may_wait(error):
                        self._engine.count_refusal(asked, error)
                        raise
                else:
                    self._streams.add(stream)
                    return stream
                await self._one_ended.wait()
        raise RequestCancelledError(CANCELLED)

    def _may_wait(self, error: JaxserveError) -> bool:
        """Whether an item that is refused finds room when another one of this call has ended."""
        has_others = bool(self._streams) or self._one_ended.is_set()
        return has_others and isinstance(error, QueueFullError | QuotaError)

    async def _read(self, stream: Stream) -> tuple[Sequence[TokenLogprobs], Usage]:
        logprobs: Sequence[TokenLogprobs] = ()
        usage = Usage(prompt_tokens=0, completion_tokens=0)
        try:
            async for event in stream:  # to its end: only then it is the reader's no more
                match event:
                    case Started():
                        logprobs = event.prompt_logprobs
                    case Finished():
                        _check_end(event.reason)
                        usage = event.usage
        finally:
            stream.cancel()
            self._streams.discard(stream)
            self._one_ended.set()
        return logprobs, usage

    def _build_result(self, scored: Sequence[TokenLogprobs]) -> generation_pb2.ScoreResult:
        result = generation_pb2.ScoreResult(
            sum_logprob=math.fsum(entry.logprob for entry in scored),
            num_tokens=len(scored),
            is_greedy=all(entry.rank == 1 for entry in scored),
        )
        if self._message.include_token_logprobs:
            spell = self._engine.tokenizer.token_bytes
            result.token_logprobs.CopyFrom(build_logprobs(scored, spell))
        return result


def _itself(stream: Stream) -> Stream:
    return stream


def _check_end(reason: FinishReason) -> None:
    """Raises for an end that came before all of the prompt was scored."""
    match reason:
        case FinishReason.CANCELLED:
            raise RequestCancelledError(CANCELLED)
        case FinishReason.DEADLINE:
            raise DeadlineError("the deadline passed before all items were scored")


def _named(error: RequestError, place: int) -> RequestError:
    """Returns the same error with its item's name, unless it is about the call or the server."""
    is_items = not isinstance(
        error, QueueFullError | QuotaError | PermissionDeniedError | DeadlineError
    )
    if is_items and error.field != "request_id":
        error.field = f"items[{place}]"
        error.args = (f"items[{place}]: {error}",)
    return error
