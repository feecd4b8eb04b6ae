"""What a server answers instead of a result.

ServerError                 any of them
├── BadRequestError         a field's value is not allowed (INVALID_ARGUMENT)
├── NotSupportedError       a field that this server refuses by name (UNIMPLEMENTED)
├── NotFoundError           no such model (NOT_FOUND)
├── ConflictError           the request id is in flight (ALREADY_EXISTS)
├── UnauthenticatedError    no valid key came with the call (UNAUTHENTICATED)
├── PermissionDeniedError   the key's tenant may not ask for this (PERMISSION_DENIED)
├── PreconditionError       chat with a model that has no template (FAILED_PRECONDITION)
├── OverloadedError         queue, buffer or quota full, or a message too large (RESOURCE_EXHAUSTED)
├── UnavailableError        starting, going away or not there: send it again (UNAVAILABLE)
├── CallDeadlineError       it took longer than was allowed (DEADLINE_EXCEEDED)
├── CallCancelledError      the call was given up (CANCELLED)
└── ServerFaultError        the server failed (INTERNAL and all others)
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from jaxserve.errors import JaxserveError

DETAILS_KEY: Final = "grpc-status-details-bin"


class ServerError(JaxserveError):
    """A call ended without its result.

    Attributes:
      code: the gRPC status code.
      reason: the server's word for it, stable between versions; empty where it gave none, as when
        nobody answered.
      field: the request's field at fault; empty when it is not about one.
      retry_after_s: seconds after which a retry has a chance; None where the server did not say.
      request_id: as the server knows it; empty where it gave none.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class BadRequestError(ServerError):
    """A field's value is not allowed."""


class NotSupportedError(ServerError):
    """A field that this server refuses by name."""


class NotFoundError(ServerError):
    """No such model."""


class ConflictError(ServerError):
    """The request id is in flight."""


class UnauthenticatedError(ServerError):
    """No valid key came with the call: pass `key`."""


class PermissionDeniedError(ServerError):
    """The key's tenant may not ask for this, now or later."""


class PreconditionError(ServerError):
    """The model lacks what the request needs: a chat template."""


class OverloadedError(ServerError):
    """The server's queue, this call's buffer or a quota is full, or a message is too large."""


class UnavailableError(ServerError):
    """The server is starting, going away, or not there. The call may be sent again."""


class CallDeadlineError(ServerError):
    """It took longer than the call, or its queue_timeout_s, allowed."""


class CallCancelledError(ServerError):
    """The call was given up."""


class ServerFaultError(ServerError):
    """The server failed."""


CLASSES: Final[Mapping[grpc.StatusCode, type[ServerError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequestError,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallDeadlineError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
}


def read_error(error: grpc.RpcError) -> ServerError:
    """Returns our error for one of grpc's, of a blocking or an asyncio call."""
    # every error that a call raises is a Call too, which its type does not say
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code = error.code()
    facts = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    for detail in _details(error.trailing_metadata() or ()):
        detail.Unpack(facts)
        detail.Unpack(retry)
    delay = retry.retry_delay
    return CLASSES.get(code, ServerFaultError)(
        error.details() or code.name,
        code=code,
        reason=facts.reason,
        field=facts.metadata.get("field", ""),
        retry_after_s=delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        request_id=facts.metadata.get("request_id", ""),
    )


def _details(metadata: Iterable[Any]) -> Sequence[any_pb2.Any]:  # pairs; the stubs disagree
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return tuple(status_pb2.Status.FromString(value).details)
    return ()


@contextlib.contextmanager
def server_errors() -> Iterator[None]:
    """Turns an error of grpc, raised in the block, into ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise read_error(error) from error


def build_not_ready(timeout_s: float) -> CallDeadlineError:
    return CallDeadlineError(
        f"the server was not ready after {timeout_s:g} s; allow more time, or look at its log",
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
    )
