"""An error as a gRPC status with its details: ErrorInfo, BadRequest, RetryInfo, QuotaFailure."""

from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import DeadlineUnreachableError, QueueFullError, QuotaError
from jaxserve.server.status import find_reason, find_row, public_field, public_message

DOMAIN: Final = "jaxserve"
MAX_MESSAGE_LEN: Final = 500  # characters; message and details travel in headers of 8 KiB


def build_status(error: Exception, *, request_id: str) -> grpc.Status:
    """Returns the status of an error, for `abort_with_status`.

    Args:
      error: any; what is not ours is INTERNAL and says nothing of itself.
      request_id: goes into ErrorInfo; empty where there is none yet.
    """
    message = public_message(error)
    if len(message) > MAX_MESSAGE_LEN:
        message = f"{message[:MAX_MESSAGE_LEN]}…"
    field = public_field(error)
    facts = {"request_id": request_id, "field": field}
    if isinstance(error, QuotaError):
        facts |= {"quota": error.quota, "limit": f"{error.limit:.0f}", "used": f"{error.used:.0f}"}
    details = [
        _pack(
            error_details_pb2.ErrorInfo(
                reason=find_reason(error),
                domain=DOMAIN,
                metadata={key: value for key, value in facts.items() if value},
            )
        )
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, QuotaError):
        exceeded = error_details_pb2.QuotaFailure.Violation(
            subject=f"quota:{error.quota}", description=message
        )
        details.append(_pack(error_details_pb2.QuotaFailure(violations=[exceeded])))
    if isinstance(error, QueueFullError | QuotaError | DeadlineUnreachableError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = grpc.StatusCode[find_row(error).code]
    return rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=message, details=details)
    )


def _pack(
    detail: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo
    | error_details_pb2.QuotaFailure,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
