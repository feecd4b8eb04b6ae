"""The values of labels: every set of them is known beforehand."""

from typing import Final

from jaxserve import errors
from jaxserve.request import FinishReason

AUTH_FAILURES: Final = ("missing", "unknown", "expired")
HOST_TIER_DROPS: Final = ("budget", "damaged")
SPAN_DROPS: Final = ("queue_full", "export_failed", "shutdown")
# Errors that only end a request after it was accepted; all others refuse it.
_LATE_ERRORS: Final = (
    errors.SlowReaderError, errors.DeadlineUnreachableError, errors.DeadlineError,
    errors.NumericsError,
)  # fmt: skip
# And of those the ones that end it too: a grammar can turn out to be too complex on the way.
_GRAMMAR_ERRORS: Final = (errors.BadGrammarError, errors.QueueFullError)
_STATE_LABELS: Final = ("not_serving", "engine_dead")


def error_label(error: errors.JaxserveError) -> str:
    """Returns the metrics' word for an error: `queue_full`, `not_serving`, …"""
    match error:
        case errors.RequestError():
            return error.reason.lower()
        case errors.EngineDeadError():
            return "engine_dead"
        case errors.NotServingError():
            return "not_serving"
        case _:
            return "other"


def refusal_labels() -> tuple[str, ...]:
    """Returns the reasons for which a request is not accepted."""
    kinds = [errors.RequestError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    early = [kind.reason.lower() for kind in kinds[1:] if kind not in _LATE_ERRORS]
    return (*early, *_STATE_LABELS)


def finish_labels() -> tuple[str, ...]:
    """Returns the reasons with which an accepted request ends."""
    late = [kind.reason.lower() for kind in (*_LATE_ERRORS, *_GRAMMAR_ERRORS)]
    faults = [f"error_{label}" for label in (*late, *_STATE_LABELS)]
    reasons = [reason.value for reason in FinishReason if reason is not FinishReason.TOOL_CALLS]
    return (*reasons, *faults)
