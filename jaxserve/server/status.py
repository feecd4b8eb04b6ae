"""The one table from an error to its gRPC status, and the status with its details."""

import dataclasses
from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve import errors

DOMAIN: Final = "jaxserve"
MAX_MESSAGE_LEN: Final = 500  # characters; message and details travel in headers of 8 KiB


@dataclasses.dataclass(slots=True, frozen=True)
class Row:
    """How one kind of error leaves the server.

    Attributes:
      reason: of ErrorInfo; None takes the error's own.
      message: sent instead of the error's own, where that speaks of the server's insides.
    """

    code: grpc.StatusCode
    reason: str | None = None
    message: str | None = None


_CODE = grpc.StatusCode
_INTERNAL = Row(
    _CODE.INTERNAL, "INTERNAL", "the server failed; its log has more under this request id"
)
_ENGINE_DEAD = Row(
    _CODE.INTERNAL, "ENGINE_DEAD", "the engine failed and the server is going down; ask another"
)

# UNAVAILABLE stands once: clients repeat such a call on their own, so nothing may have begun.
TABLE: Final[Mapping[type[errors.JaxserveError], Row]] = {
    errors.InvalidRequestError: Row(_CODE.INVALID_ARGUMENT),
    errors.UnsupportedError: Row(_CODE.UNIMPLEMENTED),
    errors.ModelNotFoundError: Row(_CODE.NOT_FOUND),
    errors.DuplicateRequestError: Row(_CODE.ALREADY_EXISTS),
    errors.NoChatTemplateError: Row(_CODE.FAILED_PRECONDITION),
    errors.QueueFullError: Row(_CODE.RESOURCE_EXHAUSTED),
    errors.SlowReaderError: Row(_CODE.RESOURCE_EXHAUSTED),
    errors.DeadlineError: Row(_CODE.DEADLINE_EXCEEDED),
    errors.NumericsError: Row(_CODE.INTERNAL),
    errors.NotServingError: Row(_CODE.UNAVAILABLE, "NOT_SERVING"),
    errors.EngineDeadError: _ENGINE_DEAD,
    # faults of the server: none of these should reach a call
    errors.ConfigError: _INTERNAL,
    errors.ShapeError: _INTERNAL,
    errors.CheckpointError: _INTERNAL,
    errors.CapacityError: _INTERNAL,
    errors.RecompileError: _INTERNAL,
    errors.RequestError: _INTERNAL,
    errors.JaxserveError: _INTERNAL,
}


def build_status(error: Exception, *, request_id: str) -> grpc.Status:
    """Returns the status of an error, for `abort_with_status`.

    Args:
      error: any; what is not ours is INTERNAL and says nothing of itself.
      request_id: goes into ErrorInfo; empty where there is none yet.
    """
    row = find_row(error)
    message = row.message or str(error)
    if len(message) > MAX_MESSAGE_LEN:
        message = f"{message[:MAX_MESSAGE_LEN]}…"
    is_public = row.message is None
    field = error.field if is_public and isinstance(error, errors.RequestError) else ""
    facts = {"request_id": request_id, "field": field}
    details = [
        _pack(
            error_details_pb2.ErrorInfo(
                reason=row.reason or getattr(error, "reason", "INTERNAL"),
                domain=DOMAIN,
                metadata={key: value for key, value in facts.items() if value},
            )
        )
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, errors.QueueFullError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return rpc_status.to_status(
        status_pb2.Status(code=row.code.value[0], message=message, details=details)
    )


def find_row(error: Exception) -> Row:
    """Returns the row of the error's class or of the nearest class it comes from."""
    rows = (TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)
    return next(rows, _INTERNAL)


def _pack(
    detail: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
