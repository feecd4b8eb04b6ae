"""Where an HTTP call enters and leaves: whose it is, its request id, the bound on open calls,
errors as bodies."""

import asyncio
import contextlib
import logging
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Final

import structlog

from jaxserve.config import is_loopback
from jaxserve.errors import HttpError, JaxserveError
from jaxserve.metrics.tenants import ANONYMOUS
from jaxserve.server.door import Door
from jaxserve.server.edge import check_request_id, log_failure
from jaxserve.server.http.call import CLIENT_GONE, Call, Receive, Scope, Send
from jaxserve.server.http.reply import build_refusal
from jaxserve.server.status import find_row
from jaxserve.server.tracing import Operation

logger = logging.getLogger(__name__)

Handler = Callable[[Call], Awaitable[None]]
UNKNOWN: Final = "other"  # the metrics' word for a path that is none of ours


class Endpoint:
    """An ASGI application for one path: lets calls in, counts them, and is the last to see their
    errors."""

    def __init__(
        self,
        door: Door,
        handler: Handler,
        *,
        route: str,
        methods: Collection[str] = (),
        is_free: bool = False,
        operation: Operation | None = None,
    ) -> None:
        """Args:
        route: the metrics' word for it.
        methods: that there are; empty for any.
        is_free: needs no key, and has room in a full house.
        operation: what is asked of the engine; what is refused then is one of its requests.
        """
        self._door = door
        self._handler = handler
        self._route = route
        self._methods = frozenset(methods)
        self._is_free = is_free
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call."""
        call = Call(scope, receive, send, self._door.config)
        # the tenant is known later: this has it forgotten at the end
        facts = {"request_id": call.request_id, "tenant": ANONYMOUS}
        failure: Exception | None = None
        with (
            structlog.contextvars.bound_contextvars(**facts),
            self._door.open_calls.counting(),
            contextlib.ExitStack() as held,
        ):
            try:
                self._let_in(call, held)
                await self._handler(call)
            except JaxserveError as error:
                failure = error
                await _refuse(call, error)
            except Exception as error:  # the HTTP edge
                logger.exception("a call failed request_id=%r", call.request_id)
                failure = error
                await _refuse(call, error)
            finally:
                self._leave(call, failure)

    def _leave(self, call: Call, failure: Exception | None) -> None:
        """Counts the call and ends its span."""
        status = str(call.status if call.is_complete else CLIENT_GONE)
        self._door.metrics.http_requests.labels(route=self._route, status=status).inc()
        if self._operation is not None and failure is not None:
            log_failure(failure, method=self._route)
        if call.span is None:
            return
        if failure is not None and not is_gone(failure):
            call.span.leave(find_row(failure).code, failure)
        else:
            call.span.leave("OK" if call.is_complete else "CANCELLED", None)

    def _let_in(self, call: Call, held: contextlib.ExitStack) -> None:
        """Args:
        held: takes what the call has until its end.
        """
        is_request = self._operation is not None
        with counting_refusals(self._door) if is_request else contextlib.nullcontext():
            try:
                check_request_id(call.asked_id)
            except JaxserveError:
                call.make_id()
                raise
            if not self._is_free:
                check_host(call, self._door)
                call.tenant = self._door.authenticator.authenticate(call.authorization).name
                structlog.contextvars.bind_contextvars(tenant=call.tenant or ANONYMOUS)
                held.enter_context(self._door.open_calls.taking_place())
        if self._operation is not None and self._door.tracing is not None:
            call.span = self._door.tracing.open(
                call.headers,
                operation=self._operation,
                model=self._door.find_model(),
                request_id=call.request_id,
            )
        if self._methods and call.method not in self._methods:
            raise HttpError(
                f"{self._route} has no method {call.method[:16]}; use "
                f"{' or '.join(sorted(self._methods))}",
                status=405,
                reason="METHOD_NOT_ALLOWED",
                headers={"allow": ", ".join(sorted(self._methods))},
            )


def check_host(call: Call, door: Door) -> None:
    """Refuses a request to an open loopback address that is for another name.

    A page in a browser here can have its own name resolve to 127.0.0.1, and then calls as one of
    that origin (DNS rebinding); its name is in the header.
    """
    section = door.config.server
    if not (door.credentials.asks_for_nothing and is_loopback(section.http_host)):
        return
    try:
        name = urllib.parse.urlsplit(f"//{call.header('host')}").hostname or ""
    except ValueError:  # no host at all
        name = ""
    if not is_loopback(name) and name not in section.http_allowed_hosts:
        raise HttpError(
            f"this server is open to this machine alone, but the request is for {name[:64]!r}; "
            "call it as localhost, or name the host in server.http_allowed_hosts",
            status=421,
            reason="WRONG_HOST",
        )


@contextlib.contextmanager
def counting_refusals(door: Door) -> Iterator[None]:
    """Counts an error that leaves the block as a request that is not accepted."""
    try:
        yield
    except JaxserveError as error:
        door.metrics.count_refusal(error)
        raise


async def do_until_gone(call: Call, work: Awaitable[None]) -> None:
    """Does the work, and gives it up where the client goes away meanwhile.

    Raises:
      HttpError: the client has gone.
    """
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(call.wait_gone())
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done() and not call.is_complete:
            raise HttpError("the client has gone", status=CLIENT_GONE, reason="CLIENT_GONE")
        await doing
    finally:
        doing.cancel()
        gone.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


def is_gone(error: Exception) -> bool:
    """Whether a call ended because its client had gone."""
    return isinstance(error, HttpError) and error.status == CLIENT_GONE


async def _refuse(call: Call, error: Exception) -> None:
    """Sends what was wrong, where there is somebody to hear it and a reply to put it in."""
    if is_gone(error):
        return
    if call.status is not None:  # the reply has begun: it can only be broken off
        call.abort()
        return
    with contextlib.suppress(HttpError):  # gone in the meantime
        await call.reply(build_refusal(error))
