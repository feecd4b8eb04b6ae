"""The one table from an error to its status: the gRPC code, the HTTP status, the reason."""

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from jaxserve import errors

Code = Literal[
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
    "UNAVAILABLE",
]
"""Names of grpc.StatusCode: this table is also read where there is no gRPC."""


@dataclasses.dataclass(slots=True, frozen=True)
class Row:
    """How one kind of error leaves the server.

    Attributes:
      code: the gRPC status.
      http: the HTTP status.
      reason: of ErrorInfo; None takes the error's own.
      message: sent instead of the error's own, where that speaks of the server's insides.
    """

    code: Code
    http: int
    reason: str | None = None
    message: str | None = None


_INTERNAL: Final = Row(
    "INTERNAL", 500, "INTERNAL", "the server failed; its log has more under this request id"
)
_ENGINE_DEAD: Final = Row(
    "INTERNAL", 500, "ENGINE_DEAD", "the engine failed and the server is going down; ask another"
)

# UNAVAILABLE stands once: clients repeat such a call on their own, so nothing may have begun.
# A field that is not supported is 400, not 501: the OpenAI SDKs repeat every 5xx, for nothing here.
TABLE: Final[Mapping[type[errors.JaxserveError], Row]] = {
    errors.InvalidRequestError: Row("INVALID_ARGUMENT", 400),
    errors.ContextLengthError: Row("INVALID_ARGUMENT", 400),
    errors.BadGrammarError: Row("INVALID_ARGUMENT", 400),
    errors.UnsupportedError: Row("UNIMPLEMENTED", 400),
    errors.ModelNotFoundError: Row("NOT_FOUND", 404),
    errors.DuplicateRequestError: Row("ALREADY_EXISTS", 409),
    errors.UnauthenticatedError: Row("UNAUTHENTICATED", 401),
    errors.PermissionDeniedError: Row("PERMISSION_DENIED", 403),
    errors.QuotaError: Row("RESOURCE_EXHAUSTED", 429),
    errors.ReloadError: Row("FAILED_PRECONDITION", 400),
    errors.NoChatTemplateError: Row("FAILED_PRECONDITION", 400),
    errors.QueueFullError: Row("RESOURCE_EXHAUSTED", 429),
    errors.SlowReaderError: Row("RESOURCE_EXHAUSTED", 429),
    errors.DeadlineUnreachableError: Row("RESOURCE_EXHAUSTED", 429),
    errors.DeadlineError: Row("DEADLINE_EXCEEDED", 504),
    errors.RequestCancelledError: Row("CANCELLED", 499, "CANCELLED"),
    errors.NumericsError: Row("INTERNAL", 500),
    errors.HttpError: Row("INVALID_ARGUMENT", 400),  # each has a status of its own
    errors.NotServingError: Row("UNAVAILABLE", 503, "NOT_SERVING"),
    errors.EngineDeadError: _ENGINE_DEAD,
    # faults of the server: none of these should reach a call
    errors.ConfigError: _INTERNAL,
    errors.ShapeError: _INTERNAL,
    errors.CheckpointError: _INTERNAL,
    errors.CapacityError: _INTERNAL,
    errors.BatchError: _INTERNAL,
    errors.WorkloadError: _INTERNAL,
    errors.ResultError: _INTERNAL,
    errors.RecompileError: _INTERNAL,
    errors.RequestError: _INTERNAL,
    errors.JaxserveError: _INTERNAL,
}


def find_row(error: Exception) -> Row:
    """Returns the row of the error's class or of the nearest class it comes from."""
    rows = (TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)
    return next(rows, _INTERNAL)


def find_reason(error: Exception) -> str:
    """Returns the word that clients may branch on."""
    return find_row(error).reason or str(getattr(error, "reason", "INTERNAL"))


def public_message(error: Exception) -> str:
    """Returns what a client is told: the error's own text, unless that is the server's affair."""
    return find_row(error).message or str(error)


def public_field(error: Exception) -> str:
    """Returns the request's field at fault as the proto spells it; empty where there is none."""
    is_public = find_row(error).message is None
    return error.field if is_public and isinstance(error, errors.RequestError) else ""
