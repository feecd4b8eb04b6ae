"""Where a call enters and leaves: its request id, the bound on open calls, errors as statuses."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from jaxserve.config import LimitsSection
from jaxserve.errors import InvalidRequestError, JaxserveError, QueueFullError
from jaxserve.server.rich_status import build_status

logger = logging.getLogger(__name__)

REQUEST_ID_KEY: Final = "x-request-id"
BUSY_RETRY_S: Final = 1.0

Context = grpc.aio.ServicerContext[Any, Any]  # the servicers' methods fix the message types


class Edge:
    """Shared by all servicers: counts their open calls, and is the last to see their errors."""

    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextlib.asynccontextmanager
    async def call(self, context: Context, request_id: str = "") -> AsyncIterator[None]:
        """Runs a call's body; whatever error leaves it becomes the call's status.

        A text that is not ours goes to the log, never to the client.
        """
        self._num_open += 1
        self._is_idle.clear()
        try:
            self._check_open()
            yield
        except JaxserveError as error:
            failure: Exception = error
        except grpc.aio.InternalError as error:
            # A write that a cancel cut short. The transport has ended the call, and may know so
            # before the context does.
            logger.debug("the transport ended a call: request_id=%r", request_id)
            raise asyncio.CancelledError from error
        except Exception as error:  # the RPC edge
            logger.exception("a call failed: request_id=%r", request_id)
            failure = error
        else:
            return
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()
        status = build_status(failure, request_id=request_id)
        await context.abort_with_status(status)  # type: ignore[attr-defined]  # not in the stubs

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

    def _check_open(self) -> None:
        limit = self._limits.max_open_calls
        if self._num_open > limit:
            raise QueueFullError(
                f"{limit} calls are open, which is the limit (limits.max_open_calls); "
                "try again later",
                retry_after_s=BUSY_RETRY_S,
            )


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
