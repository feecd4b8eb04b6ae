"""Where a call enters and leaves: whose it is, its request id, the bound on open calls, errors as
statuses."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import grpc
import structlog
from google.protobuf.message import Message

from jaxserve.config import LimitsSection
from jaxserve.errors import HttpError, InvalidRequestError, JaxserveError, UnauthenticatedError
from jaxserve.metrics import Metrics
from jaxserve.metrics.tenants import ANONYMOUS as NOBODYS
from jaxserve.server.auth import ANONYMOUS, Authenticator, Tenant
from jaxserve.server.open_calls import OpenCalls
from jaxserve.server.rich_status import build_status
from jaxserve.server.status import find_reason, find_row
from jaxserve.server.tracing import Operation, RequestSpan, Tracing

logger = logging.getLogger(__name__)

REQUEST_ID_KEY: Final = "x-request-id"
AUTHORIZATION_KEY: Final = "authorization"
# Whose calls are requests.
GENERATING: Final = frozenset({"Generate", "StreamGenerate", "VllmEngine/Generate"})
OURS: Final = "/jaxserve."
PLAIN: Final = (OURS, "/grpc.")  # services whose methods go by their own names in metrics

Context = grpc.aio.ServicerContext[Any, Any]  # the servicers' methods fix the message types


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Entered:
    """A call that was let in.

    Attributes:
      tenant: whose it is.
      span: where it is traced.
    """

    tenant: Tenant
    span: RequestSpan | None


class Edge:
    """Shared by all servicers: counts their calls, and is the last to see their errors."""

    def __init__(
        self,
        limits: LimitsSection,
        metrics: Metrics,
        *,
        open_calls: OpenCalls | None = None,
        authenticator: Authenticator | None = None,
        tracing: Tracing | None = None,
        find_model: Callable[[], str] = str,
    ) -> None:
        """Args:
        open_calls: shared with other doors; None counts these calls alone.
        authenticator: None asks for no key.
        tracing: None makes no spans.
        find_model: returns the served model's name; empty before there is one.
        """
        self._limits = limits
        self._metrics = metrics
        self._open_calls = open_calls or OpenCalls(limits)
        self._authenticator = authenticator
        self._tracing = tracing
        self._find_model = find_model

    @property
    def num_open(self) -> int:
        """Calls open at every door that shares the count."""
        return self._open_calls.count

    def tenant_of(self, context: Context) -> Tenant:
        """Returns whose call it is, by its key alone.

        Raises:
          UnauthenticatedError: its key is not valid, or has just ceased to be.
        """
        if self._authenticator is None:
            return ANONYMOUS
        return self.authenticate(context.invocation_metadata())

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Returns whose key is in a call's metadata.

        Raises:
          UnauthenticatedError: there is no valid one, or more than one.
        """
        if self._authenticator is None:
            return ANONYMOUS
        values = [value for key, value in metadata or () if key == AUTHORIZATION_KEY]
        value = values[0] if len(values) == 1 else None
        return self._authenticator.authenticate(value if isinstance(value, str) else None)

    @contextlib.asynccontextmanager
    async def call(
        self,
        context: Context,
        method: str,
        request_id: str = "",
        *,
        operation: Operation | None = None,
    ) -> AsyncIterator[Entered]:
        """Runs a call's body; whatever error leaves it becomes the call's status.

        A text that is not ours goes to the log, never to the client. The log's lines of the body
        carry the request id and the tenant.

        Args:
          operation: what a call is traced as; None makes no span.
        """
        span = self._open_span(context, operation, request_id)
        counting = self._counting(context, method, request_id, span)
        async with counting, contextlib.AsyncExitStack() as held:
            with self._counting_request(method):
                tenant = self.tenant_of(context)
                held.enter_context(self._open_calls.taking_place())
            structlog.contextvars.bind_contextvars(tenant=tenant.name or NOBODYS)
            yield Entered(tenant=tenant, span=span)

    def taking_place(self) -> contextlib.AbstractContextManager[None]:
        """Takes a place for a call that has not entered yet; see `OpenCalls.taking_place`."""
        return self._open_calls.taking_place()

    async def refuse(self, context: Context, method: str, error: JaxserveError) -> NoReturn:
        """Ends a call that may not even begin."""
        async with self._counting(context, method, "", None):
            with self._counting_request(method):
                raise error
        raise AssertionError("a call that is refused has ended")

    @contextlib.asynccontextmanager
    async def _counting(
        self, context: Context, method: str, request_id: str, span: RequestSpan | None
    ) -> AsyncIterator[None]:
        """Counts a call among the open ones, and ends it."""
        # the tenant is known later: this has it forgotten at the end
        facts = {"tenant": NOBODYS}
        if request_id and is_printable(request_id):  # what is refused for itself is not written
            facts["request_id"] = request_id
        with structlog.contextvars.bound_contextvars(**facts), self._open_calls.counting():
            async with self._ending(context, method, request_id, span):
                yield

    def _open_span(
        self, context: Context, operation: Operation | None, request_id: str
    ) -> RequestSpan | None:
        if self._tracing is None or operation is None:
            return None
        return self._tracing.open(
            context.invocation_metadata() or (),
            operation=operation,
            model=self._find_model(),
            request_id=request_id,
        )

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an error that leaves the block as a request that is not accepted."""
        try:
            yield
        except JaxserveError as error:
            self._metrics.count_refusal(error)
            raise

    def _counting_request(self, method: str) -> contextlib.AbstractContextManager[None]:
        return self.counting_refusals() if method in GENERATING else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def _ending(
        self, context: Context, method: str, request_id: str, span: RequestSpan | None
    ) -> AsyncIterator[None]:
        """Gives the call its status, counts it, and ends its span."""
        try:
            yield
        except JaxserveError as error:
            failure: Exception = error
        except grpc.aio.InternalError as error:
            # A write that a cancel cut short. The transport has ended the call, and may know so
            # before the context does.
            logger.debug("the transport ended a call request_id=%r", request_id)
            self._end(method, _cut_code(context), span)
            raise asyncio.CancelledError from error
        except asyncio.CancelledError:
            self._end(method, _cut_code(context), span)
            raise
        except Exception as error:  # the RPC edge
            logger.exception("a call failed request_id=%r", request_id)
            failure = error
        else:
            self._end(method, grpc.StatusCode.OK, span)
            return
        status = build_status(failure, request_id=request_id)
        if method in GENERATING:
            log_failure(failure, method=method)
        self._end(method, status.code, span, failure)
        try:
            await context.abort_with_status(status)  # type: ignore[attr-defined]  # not in the stubs
        except grpc.aio.InternalError as error:
            # the client left, or its time was over, at the same moment: nobody is to be told
            logger.debug("the transport ended a call before its status request_id=%r", request_id)
            raise asyncio.CancelledError from error

    def _end(
        self,
        method: str,
        code: grpc.StatusCode,
        span: RequestSpan | None,
        failure: Exception | None = None,
    ) -> None:
        self._metrics.rpcs.labels(method=method, code=code.name).inc()
        if span is not None:
            span.leave(code.name, failure)

    def check_size(self, reply: Message) -> None:
        """Raises InvalidRequestError for a reply that the transport would cut off."""
        num_bytes = reply.ByteSize()
        if num_bytes > self._limits.max_message_bytes:
            self.refuse_size(num_bytes)

    def refuse_size(self, num_bytes: int) -> NoReturn:
        """Raises InvalidRequestError for a reply of so many bytes."""
        raise InvalidRequestError(
            f"the reply is {num_bytes} bytes, but the limit of a message is "
            f"{self._limits.max_message_bytes} (limits.max_message_bytes); ask for less, or "
            "stream it"
        )


def _cut_code(context: Context) -> grpc.StatusCode:
    """Returns the status with which the transport ended a call: its time was over, or the client
    has gone."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def log_failure(failure: Exception, *, method: str) -> None:
    """Writes the line of a call that generates and ended with an error, refused or begun.

    Not what was wrong in words, which may hold words of the caller's. Who has no key can have as
    many lines as he likes, so those are for debugging.
    """
    level = logging.DEBUG if isinstance(failure, UnauthenticatedError) else logging.INFO
    logger.log(
        level,
        "failed method=%s code=%s reason=%s",
        method,
        find_row(failure).code,
        failure.reason if isinstance(failure, HttpError) else find_reason(failure),
    )


def find_method(path: str) -> str:
    """Returns a method's name in metrics, with the service's where ours may have the same."""
    service, _, method = path.rpartition("/")
    return method if path.startswith(PLAIN) else f"{service.rpartition('.')[2]}/{method}"


def find_request_id(asked: str, context: Context) -> str:
    """Returns the id of the field, else of the metadata, else a new one; not yet checked."""
    if asked:
        return asked
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and value:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return f"req-{secrets.token_hex(12)}"


def is_printable(request_id: str) -> bool:
    """Whether an id can stand in a header and in a line of the log."""
    is_plain = request_id.isascii() and request_id.isprintable()
    return is_plain and request_id == request_id.strip()


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError for an id that cannot be echoed in a header or a log line."""
    if not is_printable(request_id):
        raise InvalidRequestError(
            "request_id must be printable ASCII without spaces at its ends; use letters, digits "
            "and dashes",
            field="request_id",
        )
