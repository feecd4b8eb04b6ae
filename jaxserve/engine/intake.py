"""What other threads leave for the engine thread, and the account of who is in the engine."""

import enum
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

from jaxserve.config import LimitsSection
from jaxserve.engine.live_request import LiveRequest
from jaxserve.engine.queue_bounds import QueueBounds
from jaxserve.errors import (
    DuplicateRequestError,
    EngineDeadError,
    NotServingError,
)
from jaxserve.request import Request


class EngineState(enum.Enum):
    """Requests are accepted in SERVING only. STOPPED and FAILED are final."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


FINAL_STATES = frozenset({EngineState.STOPPED, EngineState.FAILED})


class Intake:
    """The one place where threads meet: state, new requests, aborts, calls; all under one lock.

    A request is *live* from `add` to `remove`, and *queued* until it is first scheduled; the
    queue is bounded in requests and in prompt tokens. A request is known by its tenant and its id:
    nobody reaches or meets another tenant's.
    """

    def __init__(self, bounds: LimitsSection) -> None:
        self._changed = threading.Condition()
        self._state = EngineState.STARTING
        self._is_cut = False
        self._live: dict[tuple[str, str], LiveRequest] = {}
        self._new: list[LiveRequest] = []
        self._aborts: list[Request] = []
        self._calls: list[tuple[Callable[[], int], Future[int]]] = []
        self._queue = QueueBounds(bounds)

    @property
    def state(self) -> EngineState:
        return self._state

    def change_state(self, state: EngineState) -> bool:
        """Returns whether the state did change; a final one never does."""
        with self._changed:
            if self._state is state or self._state in FINAL_STATES:
                return False
            self._state = state
            self._changed.notify_all()
            return True

    def check_serving(self) -> None:
        """Raises what a request gets that comes now: NotServingError or EngineDeadError."""
        if self._state is EngineState.FAILED:
            raise EngineDeadError("the engine has failed; the server must be restarted")
        if self._state is not EngineState.SERVING:
            raise NotServingError(f"the engine is {self._state.value}; try again later")

    def add(self, live: LiveRequest, *, on_accept: Callable[[], None]) -> None:
        """Takes a request in and wakes the engine thread.

        Args:
          on_accept: called before the engine thread can see the request.
        """
        request, num_tokens = live.request, len(live.request.prompt)
        with self._changed:
            self.check_serving()
            if _key(request) in self._live:
                raise DuplicateRequestError(
                    f"request_id {request.id!r} is in flight; use another, or wait for its end",
                    field="request_id",
                )
            self._queue.join(num_tokens)
            self._live[_key(request)] = live
            self._new.append(live)
            on_accept()
            self._changed.notify_all()

    def find(self, request_id: str, tenant: str = "") -> LiveRequest | None:
        with self._changed:
            return self._live.get((tenant, request_id))

    def abort(self, request: Request) -> None:
        """Asks for a request's end; harmless where it has ended."""
        with self._changed:
            self._aborts.append(request)
            self._changed.notify_all()

    def call(self, function: Callable[[], int]) -> Future[int]:
        """Has the engine thread call `function` between two steps, and gives what it returns.

        Raises:
          NotServingError, EngineDeadError: there is no engine thread any more, or not yet.
        """
        with self._changed:
            if self._is_cut or self._state not in (EngineState.SERVING, EngineState.DRAINING):
                self.check_serving()
                raise NotServingError("the engine is stopping; there is nothing left to ask it")
            future: Future[int] = Future()
            self._calls.append((function, future))
            self._changed.notify_all()
            return future

    def wait_until_empty(self, timeout_s: float) -> None:
        """Blocks until nothing is live, the time is over, or `cut` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cut or not self._live, timeout_s)

    def cut(self) -> None:
        """Tells the engine thread to end what is live, and itself."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    # the engine thread's side

    def wait_for_work(self) -> None:
        """Blocks while nothing is live or to be called."""
        with self._changed:
            self._changed.wait_for(lambda: self._live or self._calls or self._is_cut)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is live, and nothing to be called."""
        return not (self._live or self._calls)

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def take(self) -> tuple[list[LiveRequest], list[Request]]:
        """Returns the new requests and the aborts since the last call."""
        with self._changed:
            new, self._new = self._new, []
            aborts, self._aborts = self._aborts, []
            return new, aborts

    def run_calls(self) -> None:
        """Calls what other threads left; nothing where they left nothing."""
        for function, future in self._take_calls():
            future.set_result(function())

    def drop_calls(self) -> None:
        """The engine has failed: whoever waits for a call is told."""
        for _, future in self._take_calls():
            future.set_exception(EngineDeadError("the engine has failed"))

    def _take_calls(self) -> list[tuple[Callable[[], int], Future[int]]]:
        with self._changed:
            calls, self._calls = self._calls, []
            return [(function, future) for function, future in calls if _begins(future)]

    def live(self) -> Collection[LiveRequest]:
        with self._changed:
            return list(self._live.values())

    def tell_new(self, update: Callable[[int, int], None]) -> None:
        """Calls `update` with the requests not taken yet and their prompt tokens; none comes in
        meanwhile."""
        with self._changed:
            update(len(self._new), sum(len(live.request.prompt) for live in self._new))

    def leave_queue(self, live: LiveRequest) -> None:
        """Its first tokens are scheduled: its place in the queue is free."""
        with self._changed:
            self._leave_queue(live)

    def remove(self, request: Request, *, now_s: float) -> LiveRequest | None:
        """Returns the live request and forgets it; None where it has ended before."""
        with self._changed:
            live = self._live.get(_key(request))
            if live is None or live.request is not request:
                return None
            del self._live[_key(request)]
            self._leave_queue(live)
            self._queue.note_end(now_s)
            self._changed.notify_all()
            return live

    def _leave_queue(self, live: LiveRequest) -> None:
        if live.is_queued:
            live.is_queued = False
            self._queue.leave(len(live.request.prompt))


def _begins(future: Future[int]) -> bool:
    """Whether anybody still waits for it; from here on it cannot be cancelled."""
    return future.set_running_or_notify_cancel()


def _key(request: Request) -> tuple[str, str]:
    return request.tenant, request.id
