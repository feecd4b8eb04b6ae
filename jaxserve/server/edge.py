"""Where a call enters and leaves: its request id, the bound on open calls, errors as statuses."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import Message

from jaxserve.config import LimitsSection
from jaxserve.errors import InvalidRequestError, JaxserveError, QueueFullError
from jaxserve.metrics import Metrics
from jaxserve.server.rich_status import build_status

logger = logging.getLogger(__name__)

REQUEST_ID_KEY: Final = "x-request-id"
BUSY_RETRY_S: Final = 1.0
GENERATING: Final = frozenset({"Generate", "StreamGenerate"})  # whose calls are requests

Context = grpc.aio.ServicerContext[Any, Any]  # the servicers' methods fix the message types


class Edge:
    """Shared by all servicers: counts their calls, and is the last to see their errors."""

    def __init__(self, limits: LimitsSection, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextlib.asynccontextmanager
    async def call(
        self, context: Context, method: str, request_id: str = ""
    ) -> AsyncIterator[None]:
        """Runs a call's body; whatever error leaves it becomes the call's status.

        A text that is not ours goes to the log, never to the client. The log's lines of the body
        carry the request id.
        """
        facts = {"request_id": request_id} if request_id else {}
        with structlog.contextvars.bound_contextvars(**facts), self._open():
            async with self._ending(context, method, request_id):
                self._check_open(method)
                yield

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an error that leaves the block as a request that is not accepted."""
        try:
            yield
        except JaxserveError as error:
            self._metrics.count_refusal(error)
            raise

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        self._num_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()

    @contextlib.asynccontextmanager
    async def _ending(self, context: Context, method: str, request_id: str) -> AsyncIterator[None]:
        """Gives the call its status, and counts it."""
        try:
            yield
        except JaxserveError as error:
            failure: Exception = error
        except grpc.aio.InternalError as error:
            # A write that a cancel cut short. The transport has ended the call, and may know so
            # before the context does.
            logger.debug("the transport ended a call request_id=%r", request_id)
            self._count(method, _cut_code(context))
            raise asyncio.CancelledError from error
        except asyncio.CancelledError:
            self._count(method, _cut_code(context))
            raise
        except Exception as error:  # the RPC edge
            logger.exception("a call failed request_id=%r", request_id)
            failure = error
        else:
            self._count(method, grpc.StatusCode.OK)
            return
        status = build_status(failure, request_id=request_id)
        self._count(method, status.code)
        await context.abort_with_status(status)  # type: ignore[attr-defined]  # not in the stubs

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._metrics.rpcs.labels(method=method, code=code.name).inc()

    async def wait_idle(self, timeout_s: float) -> None:
        """Returns when no call is open, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)

    def check_size(self, reply: Message) -> None:
        """Raises InvalidRequestError for a reply that the transport would cut off."""
        num_bytes, limit = reply.ByteSize(), self._limits.max_message_bytes
        if num_bytes > limit:
            raise InvalidRequestError(
                f"the reply is {num_bytes} bytes, but the limit of a message is {limit} "
                "(limits.max_message_bytes); ask for less, or stream it"
            )

    def _check_open(self, method: str) -> None:
        limit = self._limits.max_open_calls
        if self._num_open <= limit:
            return
        with self.counting_refusals() if method in GENERATING else contextlib.nullcontext():
            raise QueueFullError(
                f"{limit} calls are open, which is the limit (limits.max_open_calls); "
                "try again later",
                retry_after_s=BUSY_RETRY_S,
            )


def _cut_code(context: Context) -> grpc.StatusCode:
    """Returns the status with which the transport ended a call: its time was over, or the client
    has gone."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def find_request_id(asked: str, context: Context) -> str:
    """Returns the id of the field, else of the metadata, else a new one; not yet checked."""
    if asked:
        return asked
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and value:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return f"req-{secrets.token_hex(12)}"


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError for an id that cannot be echoed in a header or a log line."""
    if not (request_id.isascii() and request_id.isprintable()) or request_id != request_id.strip():
        raise InvalidRequestError(
            "request_id must be printable ASCII without spaces at its ends; use letters, digits "
            "and dashes",
            field="request_id",
        )
