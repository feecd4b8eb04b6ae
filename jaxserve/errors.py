"""Every error jaxserve raises on purpose. server/status.py has the status of each.

JaxserveError
├── ConfigError              a configuration value is wrong
├── ShapeError               arrays do not fit together (raised while tracing)
├── CheckpointError          a model file is missing, damaged or not supported
├── CapacityError            the model, its programs and its KV pool do not fit the machine
├── BatchError               a batch's input or output file will not do
├── WorkloadError            a workload, or a trace to make one of, will not do
├── ResultError              a benchmark's result cannot be read, or two cannot be compared
├── RecompileError           a shape was compiled after warm-up
├── RequestError             something about one request; the request ends, nothing else does
│   ├── InvalidRequestError      a field's value is not allowed
│   │   ├── ContextLengthError       prompt and output are longer than the model's context
│   │   └── BadGrammarError          a schema, regex or grammar is wrong, too large or too complex
│   ├── UnsupportedError         a field or option this version refuses by name
│   ├── ModelNotFoundError       no such served model
│   ├── DuplicateRequestError    a request with this id is in flight
│   ├── UnauthenticatedError     no valid key came with the call
│   ├── PermissionDeniedError    the tenant may not ask for this
│   ├── QuotaError               the tenant has used up what it may
│   ├── ReloadError              an administrator's reload found something wrong
│   ├── NoChatTemplateError      chat was asked of a model without a template
│   ├── QueueFullError           the waiting queue is at its limit
│   ├── SlowReaderError          the client reads slower than the stream's buffer allows
│   ├── DeadlineUnreachableError the deadline cannot be met, so that nothing was begun
│   ├── DeadlineError            the deadline passed before the first token
│   └── NumericsError            this request's logits were not finite
├── RequestCancelledError    ended from outside by its id; there is no output that could stand
├── HttpError                an HTTP request that is none of the API's: path, method, type, size
├── NotServingError          starting, draining or stopped: not begun, or not done by then
└── EngineDeadError          the engine failed; every request in it ends with this
"""

from collections.abc import Mapping


class JaxserveError(Exception):
    """Base class: catch this to catch only ours."""


class ConfigError(JaxserveError):
    """A configuration value is wrong. Names the key, the value and the fix."""


class ShapeError(JaxserveError, ValueError):
    """Arrays do not fit together. Raised while tracing, never on the device."""


class CheckpointError(JaxserveError):
    """A model file is missing, damaged or not supported. Names the file and the tensor or key."""


class CapacityError(JaxserveError):
    """The model does not fit: names what was needed and what there is."""


class BatchError(JaxserveError):
    """A batch's input or output file will not do: names the file, what is wrong and the fix."""


class WorkloadError(JaxserveError):
    """A workload or a trace will not do: names file and line, what it says and what is allowed.

    Attributes:
      problems: one line for each thing wrong; the message has the first and counts the others.
    """

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class ResultError(JaxserveError):
    """A benchmark's result cannot be read or written, or two are not of the same thing."""


class RecompileError(JaxserveError):
    """A program was compiled after warm-up, where that is forbidden (tests)."""


class RequestError(JaxserveError):
    """Ends one request. `reason` is API: clients may branch on it.

    Attributes:
      reason: UPPER_SNAKE word for google.rpc.ErrorInfo.
      field: the request field at fault, as the proto spells it; empty when it is not about one.
    """

    reason = "REQUEST"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(RequestError):
    """A field's value is not allowed."""

    reason = "INVALID_FIELD"


class ContextLengthError(InvalidRequestError):
    """Prompt and output are longer together than the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class BadGrammarError(InvalidRequestError):
    """A schema, regular expression, choice or grammar is wrong, too large or too complex."""

    reason = "BAD_GRAMMAR"


class UnsupportedError(RequestError):
    """A field or option this version refuses by name."""

    reason = "UNSUPPORTED"


class ModelNotFoundError(RequestError):
    """No such served model."""

    reason = "MODEL_NOT_FOUND"


class DuplicateRequestError(RequestError):
    """A request with this id is in flight."""

    reason = "DUPLICATE_REQUEST_ID"


class UnauthenticatedError(RequestError):
    """No valid key came with the call. It says the same whether it is missing, wrong or expired."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(RequestError):
    """The tenant may not ask for this, now or later."""

    reason = "PERMISSION_DENIED"


class QuotaError(RequestError):
    """The tenant has used up what it may.

    Attributes:
      quota: which one, as the configuration spells it.
      limit: of that quota.
      used: what it has used of it.
      retry_after_s: seconds after which a retry has a chance.
    """

    reason = "QUOTA_EXCEEDED"

    def __init__(
        self,
        message: str,
        *,
        quota: str = "",
        limit: float = 0.0,
        used: float = 0.0,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.quota = quota
        self.limit = limit
        self.used = used
        self.retry_after_s = retry_after_s


class ReloadError(RequestError):
    """An administrator had credentials read again, and something is wrong with them."""

    reason = "RELOAD_FAILED"


class NoChatTemplateError(RequestError):
    """Chat was asked of a model that has no chat template."""

    reason = "NO_CHAT_TEMPLATE"


class QueueFullError(RequestError):
    """The waiting queue is at its limit.

    Attributes:
      retry_after_s: seconds after which a retry has a chance.
    """

    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReaderError(RequestError):
    """The client left more unread output than `limits.stream_buffer_bytes`, or the most of all
    where together they left more than `limits.total_buffer_bytes`."""

    reason = "SLOW_READER"


class DeadlineUnreachableError(RequestError):
    """By the times of steps, what is due of the request cannot be met; nothing of it was begun.

    Attributes:
      retry_after_s: seconds after which a retry has a chance.
    """

    reason = "DEADLINE_UNREACHABLE"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The deadline passed before the first token."""

    reason = "DEADLINE"


class NumericsError(RequestError):
    """This request's logits were not finite; its batch mates go on."""

    reason = "NUMERICS"


class RequestCancelledError(JaxserveError):
    """Ended from outside by its id, where there is no output that could stand."""


class HttpError(JaxserveError):
    """What came over HTTP is no request of the API: its path, method, type, size or pace.

    Attributes:
      status: of the reply.
      reason: UPPER_SNAKE word; clients may branch on it.
      headers: that the reply has besides.
    """

    reason = "BAD_HTTP"

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        reason: str = "BAD_HTTP",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})


class NotServingError(JaxserveError):
    """Starting, draining or stopped: not begun, or not done by then; ask elsewhere or later."""


class EngineDeadError(JaxserveError):
    """The engine failed. Every request in it ends with this, and health is NOT_SERVING."""
