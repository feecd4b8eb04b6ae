"""How many requests may wait for their first step, and what one more is told."""

from jaxserve.config import LimitsSection
from jaxserve.errors import DeadlineUnreachableError, QueueFullError
from jaxserve.scheduler.admission import Miss


class QueueBounds:
    """Counts who waits. It has no lock and no clock.

    Attributes:
      num_requests: that wait.
      num_tokens: of their prompts.
    """

    def __init__(self, bounds: LimitsSection) -> None:
        self._bounds = bounds
        self.num_requests = 0
        self.num_tokens = 0
        self._last_end_s: float | None = None
        self._end_interval_s = 1.0  # smoothed: about how soon a place opens

    def join(self, num_tokens: int) -> None:
        """Takes a request in.

        Args:
          num_tokens: of its prompt.

        Raises:
          QueueFullError: there is no room for it.
        """
        bounds, num_all_tokens = self._bounds, self.num_tokens + num_tokens
        if self.num_requests >= bounds.max_waiting_requests:
            raise self._full(
                f"{self.num_requests} requests wait, the limit is {bounds.max_waiting_requests}"
            )
        # an empty queue takes any prompt: it could never be accepted otherwise
        if self.num_requests and num_all_tokens > bounds.max_waiting_tokens:
            raise self._full(
                f"{num_all_tokens} prompt tokens would wait, "
                f"the limit is {bounds.max_waiting_tokens}"
            )
        self.num_requests += 1
        self.num_tokens = num_all_tokens

    def leave(self, num_tokens: int) -> None:
        """A request was scheduled for the first time, or has ended before."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens

    def note_end(self, now_s: float) -> None:
        """A request has ended, wherever it was."""
        if self._last_end_s is not None:
            self._end_interval_s += 0.2 * (now_s - self._last_end_s - self._end_interval_s)
        self._last_end_s = now_s

    def _full(self, what: str) -> QueueFullError:
        retry_after_s = _bound_retry(self._end_interval_s)
        return QueueFullError(
            f"the queue is full: {what}; try again in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )


def _bound_retry(seconds: float) -> float:
    return min(max(seconds, 0.1), 60.0)


def build_unreachable(miss: Miss) -> DeadlineUnreachableError:
    """Returns what a request ends with that would miss what is due of it."""
    retry_after_s = _bound_retry(miss.late_s)
    return DeadlineUnreachableError(
        f"by the times of steps this request would miss its {miss.field} by {miss.late_s:.2f} s; "
        f"allow more time, or try again in {retry_after_s:.1f} s",
        field=miss.field,
        retry_after_s=retry_after_s,
    )
