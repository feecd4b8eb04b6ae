"""Where a call enters and leaves: whose it is, its request id, the bound on open calls, errors as
statuses."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final, NoReturn

import grpc
import structlog
from google.protobuf.message import Message

from jaxserve.config import LimitsSection
from jaxserve.errors import InvalidRequestError, JaxserveError, UnauthenticatedError
from jaxserve.metrics import Metrics
from jaxserve.server.auth import ANONYMOUS, Authenticator, Tenant
from jaxserve.server.open_calls import OpenCalls
from jaxserve.server.rich_status import build_status

logger = logging.getLogger(__name__)

REQUEST_ID_KEY: Final = "x-request-id"
AUTHORIZATION_KEY: Final = "authorization"
GENERATING: Final = frozenset({"Generate", "StreamGenerate"})  # whose calls are requests

Context = grpc.aio.ServicerContext[Any, Any]  # the servicers' methods fix the message types


class Edge:
    """Shared by all servicers: counts their calls, and is the last to see their errors."""

    def __init__(
        self,
        limits: LimitsSection,
        metrics: Metrics,
        *,
        open_calls: OpenCalls | None = None,
        authenticator: Authenticator | None = None,
    ) -> None:
        """Args:
        open_calls: shared with other doors; None counts these calls alone.
        authenticator: None asks for no key.
        """
        self._limits = limits
        self._metrics = metrics
        self._open_calls = open_calls or OpenCalls(limits)
        self._authenticator = authenticator

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
        self, context: Context, method: str, request_id: str = ""
    ) -> AsyncIterator[None]:
        """Runs a call's body; whatever error leaves it becomes the call's status.

        A text that is not ours goes to the log, never to the client. The log's lines of the body
        carry the request id.
        """
        facts = {"request_id": request_id} if request_id else {}
        with structlog.contextvars.bound_contextvars(**facts), self._open_calls.counting():
            async with self._ending(context, method, request_id):
                with self._counting_request(method):
                    self._open_calls.check()
                yield

    async def refuse(self, context: Context, method: str, error: UnauthenticatedError) -> None:
        """Ends a call that may not even begin."""
        async with self.call(context, method):
            with self._counting_request(method):
                raise error

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
