"""The span of one call that generates, from what its door and the engine say of it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from jaxserve.errors import HttpError, JaxserveError
from jaxserve.metrics.tenants import ANONYMOUS
from jaxserve.metrics.view import VLLM_REASONS
from jaxserve.request import RequestEnd
from jaxserve.server.status import find_reason, find_row
from jaxserve.server.tracing import conventions as names

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Value = str | bool | int | float | tuple[str, ...]
# gRPC codes that are the server's fault, by the conventions of RPC spans; others are the caller's.
FAULTS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
CALLERS: Final = frozenset({"UNSUPPORTED"})  # though its code is UNIMPLEMENTED


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Ended:
    """All that becomes of a span; made into it by the exporting thread.

    Attributes:
      attributes: in the order of the conventions.
      is_fault: of the server.
      end_ns: since 1970.
    """

    span: "Span"
    attributes: Mapping[str, Value]
    is_fault: bool
    end_ns: int


class RequestSpan:
    """One of these for a call; its door and the engine thread write to it.

    It is complete when the door has left the call and the engine has ended each request that the
    call had in it. A call may have several (a list of prompts); one that is refused has none.

    Attributes:
      is_streaming: its reply comes in pieces.
    """

    def __init__(self, span: "Span", *, model: str, on_complete: Callable[[Ended], None]) -> None:
        self.is_streaming = False
        self._span = span
        self._model = model
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._ends: list[RequestEnd] = []
        self._num_accepted = 0
        self._left: tuple[str, str, int] | None = None  # code, error type, time
        self._is_complete = False

    def accept(self) -> None:
        """The engine has taken a request in, and will tell `note_end` of its end."""
        with self._lock:
            self._num_accepted += 1

    def note_end(self, end: RequestEnd) -> None:
        """Takes what became of a request; `on_end` of a `GenerationRequest`."""
        with self._lock:
            self._ends.append(end)
            is_last = self._take_completion()
        if is_last:
            self._complete()

    def leave(self, code: str, error: Exception | None) -> None:
        """The door has done with the call.

        Args:
          code: of gRPC's, also where the call came over HTTP.
          error: what was wrong; None where nothing was, or the caller has gone.
        """
        kind = "" if code == "OK" else code if error is None else find_reason(error)
        if isinstance(error, HttpError):
            kind = error.reason
        with self._lock:
            self._left = (code, kind, time.time_ns())
            is_last = self._take_completion()
        if is_last:
            self._complete()

    def _take_completion(self) -> bool:
        """Whether it is complete now, and was not before."""
        is_complete = self._left is not None and len(self._ends) >= self._num_accepted
        if not is_complete or self._is_complete:
            return False
        self._is_complete = True
        return True

    def _complete(self) -> None:
        assert self._left is not None
        code, kind, end_ns = self._left
        failed = next((e.outcome for e in self._ends if isinstance(e.outcome, JaxserveError)), None)
        if failed is not None and not kind:  # told in the middle of a stream whose status was good
            code, kind = find_row(failed).code, find_reason(failed)
        attributes: dict[str, Value] = {names.REQUEST_STREAM: self.is_streaming}
        if kind:
            attributes[names.ERROR_TYPE] = kind
        if self._ends:
            attributes |= describe_ends(self._ends, model=self._model)
        if self.is_streaming and (first_s := attributes.get(names.LATENCY_TIME_TO_FIRST_TOKEN)):
            attributes[names.RESPONSE_TIME_TO_FIRST_CHUNK] = first_s
        self._on_complete(
            Ended(
                span=self._span,
                attributes=attributes,
                is_fault=code in FAULTS and kind not in CALLERS,
                end_ns=end_ns,
            )
        )


def describe_ends(ends: Sequence[RequestEnd], *, model: str) -> dict[str, Value]:
    """Returns the attributes of a call's requests: nothing of what was said in them.

    Of several, tokens are added up; a time is the longest, that to the first token the shortest.
    """
    request = ends[0].request  # they differ in their prompts alone
    sampling = request.sampling
    described: dict[str, Value] = {
        names.TENANT: request.tenant or ANONYMOUS,
        names.REQUEST_MAX_TOKENS: request.max_tokens,
        names.REQUEST_TEMPERATURE: float(sampling.temperature),
        names.REQUEST_TOP_P: float(sampling.top_p),
        names.REQUEST_TOP_K: float(sampling.top_k),
        names.REQUEST_FREQUENCY_PENALTY: float(sampling.frequency_penalty),
        names.REQUEST_PRESENCE_PENALTY: float(sampling.presence_penalty),
        names.REQUEST_N: sampling.num_choices,
        names.RESPONSE_ID: request.id,
        names.RESPONSE_MODEL: model,
        names.USAGE_INPUT_TOKENS: sum(len(end.request.prompt) for end in ends),
        names.USAGE_OUTPUT_TOKENS: sum(end.completion_tokens for end in ends),
        names.LATENCY_TIME_IN_QUEUE: max(end.queue_s for end in ends),
        names.LATENCY_E2E: max(end.e2e_s for end in ends),
        names.PREEMPTIONS: sum(end.preemptions for end in ends),
    }
    if sampling.num_choices > 1:
        described[names.REQUEST_CHOICE_COUNT] = sampling.num_choices
    if sampling.seed is not None and sampling.seed < 1 << 63:  # what an attribute can hold
        described[names.REQUEST_SEED] = sampling.seed
    reasons = tuple(VLLM_REASONS[reason.value] for end in ends for reason in end.reasons)
    if reasons:
        described[names.RESPONSE_FINISH_REASONS] = reasons
    first_s = [s for end in ends if (s := end.time_to_first_token_s) is not None]
    if first_s:
        described[names.LATENCY_TIME_TO_FIRST_TOKEN] = min(first_s)
    phases = [
        (p, d)
        for end in ends
        if (p := end.prefill_s) is not None and (d := end.decode_s) is not None
    ]
    if phases:
        described[names.LATENCY_TIME_IN_MODEL_PREFILL] = max(p for p, _ in phases)
        described[names.LATENCY_TIME_IN_MODEL_DECODE] = max(d for _, d in phases)
        described[names.LATENCY_TIME_IN_MODEL_INFERENCE] = max(p + d for p, d in phases)
    return described
