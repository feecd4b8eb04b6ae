"""The table error → status is complete, and tells clients only what is theirs."""

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from jaxserve import errors
from jaxserve.client import ServerError
from jaxserve.client.errors import CLASSES, read_error
from jaxserve.server.rich_status import DOMAIN, build_status
from jaxserve.server.status import TABLE, find_row

OURS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.JaxserveError)
]


def unpack(status: grpc.Status) -> tuple[status_pb2.Status, error_details_pb2.ErrorInfo]:
    ((key, value),) = status.trailing_metadata
    assert key == "grpc-status-details-bin"
    rich = status_pb2.Status.FromString(value)
    facts = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(facts)
    return rich, facts


@pytest.mark.parametrize("kind", OURS)
def test_every_error_of_the_tree_has_its_own_row(kind: type[errors.JaxserveError]) -> None:
    assert kind in TABLE


def test_nothing_else_is_in_the_table() -> None:
    assert set(OURS) == TABLE.keys()


def test_every_code_is_one_of_grpc_and_every_http_status_an_error() -> None:
    for row in TABLE.values():
        assert grpc.StatusCode[row.code] is not grpc.StatusCode.OK
        assert (400 <= row.http < 500) != (
            row.code in ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED")
        )


def test_only_not_serving_is_unavailable() -> None:
    unavailable = [kind for kind, row in TABLE.items() if row.code == "UNAVAILABLE"]
    assert unavailable == [errors.NotServingError]


def test_a_new_subclass_takes_the_row_of_its_parent() -> None:
    class Narrower(errors.QueueFullError):
        pass

    assert find_row(Narrower("full")) is TABLE[errors.QueueFullError]


def test_reasons_are_api() -> None:
    """A change here breaks clients: say so in the change log."""
    reasons = {kind.__name__: row.reason or kind.reason for kind, row in TABLE.items()}  # type: ignore[attr-defined]
    assert {name: reason for name, reason in reasons.items() if reason != "INTERNAL"} == {
        "InvalidRequestError": "INVALID_FIELD",
        "ContextLengthError": "CONTEXT_LENGTH_EXCEEDED",
        "BadGrammarError": "BAD_GRAMMAR",
        "UnsupportedError": "UNSUPPORTED",
        "ModelNotFoundError": "MODEL_NOT_FOUND",
        "DuplicateRequestError": "DUPLICATE_REQUEST_ID",
        "UnauthenticatedError": "UNAUTHENTICATED",
        "PermissionDeniedError": "PERMISSION_DENIED",
        "QuotaError": "QUOTA_EXCEEDED",
        "ReloadError": "RELOAD_FAILED",
        "NoChatTemplateError": "NO_CHAT_TEMPLATE",
        "QueueFullError": "QUEUE_FULL",
        "SlowReaderError": "SLOW_READER",
        "DeadlineUnreachableError": "DEADLINE_UNREACHABLE",
        "DeadlineError": "DEADLINE",
        "RequestCancelledError": "CANCELLED",
        "NumericsError": "NUMERICS",
        "HttpError": "BAD_HTTP",
        "NotServingError": "NOT_SERVING",
        "EngineDeadError": "ENGINE_DEAD",
    }


def test_a_field_at_fault_is_named_in_the_details() -> None:
    error = errors.InvalidRequestError("top_p is 2", field="sampling.top_p")
    status = build_status(error, request_id="r1")
    rich, facts = unpack(status)
    assert (status.code, status.details) == (grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2")
    assert rich.code == 3
    assert (facts.reason, facts.domain) == ("INVALID_FIELD", DOMAIN)
    assert dict(facts.metadata) == {"request_id": "r1", "field": "sampling.top_p"}
    request = error_details_pb2.BadRequest()
    assert rich.details[1].Unpack(request)
    (violation,) = request.field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "top_p is 2")


def test_a_full_queue_carries_the_time_to_wait() -> None:
    rich, _ = unpack(build_status(errors.QueueFullError("full", retry_after_s=1.5), request_id=""))
    retry = error_details_pb2.RetryInfo()
    assert rich.details[1].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 1_500_000_000


def test_a_quota_says_which_how_much_and_when() -> None:
    error = errors.QuotaError(
        "used up", quota="tokens_per_minute", limit=1_000_000, used=1_000_000.4, retry_after_s=2.5
    )
    status = build_status(error, request_id="r1")
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    rich, facts = unpack(status)
    assert dict(facts.metadata) == {
        "request_id": "r1",
        "quota": "tokens_per_minute",
        "limit": "1000000",
        "used": "1000000",
    }
    failure, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    assert rich.details[1].Unpack(failure)
    (violation,) = failure.violations
    assert (violation.subject, violation.description) == ("quota:tokens_per_minute", "used up")
    assert rich.details[2].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 2_500_000_000


@pytest.mark.parametrize(
    "error",
    [
        ValueError("/secret/path"),
        errors.CheckpointError("/secret/path"),
        errors.EngineDeadError("/secret/path"),
        errors.ShapeError("/secret/path"),
    ],
)
def test_what_is_the_servers_own_affair_is_not_told(error: Exception) -> None:
    status = build_status(error, request_id="r1")
    assert status.code is grpc.StatusCode.INTERNAL
    assert b"secret" not in status.trailing_metadata[0][1]
    assert "secret" not in status.details
    _, facts = unpack(status)
    assert facts.metadata["request_id"] == "r1"


def test_a_status_fits_into_headers_whatever_the_message() -> None:
    error = errors.InvalidRequestError("€" * 100_000, field="x" * 50)
    status = build_status(error, request_id="r" * 256)
    assert len(status.details) < 1000
    assert len(status.trailing_metadata[0][1]) + 3 * len(status.details.encode()) < 16_384


def fail(status: grpc.Status, metadata: grpc.aio.Metadata | None = None) -> grpc.RpcError:
    """What a call that ended with this status raises."""
    sent = grpc.aio.Metadata(*status.trailing_metadata) if metadata is None else metadata
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), sent, status.details, None)


@pytest.mark.parametrize("kind", OURS)
def test_the_client_reads_back_what_the_server_meant(kind: type[errors.JaxserveError]) -> None:
    error = kind("why")
    if isinstance(error, errors.RequestError):
        error.field = "sampling.seed"
    read = read_error(fail(build_status(error, request_id="r9")))
    row = TABLE[kind]
    code = grpc.StatusCode[row.code]
    assert isinstance(read, CLASSES.get(code, ServerError))
    assert (read.code, str(read)) == (code, row.message or "why")
    assert read.request_id == "r9"
    assert read.reason == (row.reason or getattr(error, "reason", None))
    is_told = isinstance(error, errors.RequestError) and row.message is None
    assert read.field == ("sampling.seed" if is_told else "")
    is_for_a_while = isinstance(
        error, errors.QueueFullError | errors.QuotaError | errors.DeadlineUnreachableError
    )
    assert read.retry_after_s == (1.0 if is_for_a_while else None)


def test_an_answer_that_is_not_this_servers_is_still_an_error_of_ours() -> None:
    status = build_status(errors.NotServingError("gone"), request_id="")
    read = read_error(fail(status, grpc.aio.Metadata()))
    assert (type(read).__name__, read.reason, read.field) == ("UnavailableError", "", "")
