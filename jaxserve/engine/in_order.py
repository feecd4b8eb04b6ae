"""Many requests at once, their results in the order of the requests, in bounded memory."""

import collections
import dataclasses
import queue
from collections.abc import Generator, Iterable
from typing import Final

from jaxserve.engine.completion import Completion, gather
from jaxserve.engine.engine import Engine
from jaxserve.engine.stream import Stream
from jaxserve.errors import QueueFullError, RequestError
from jaxserve.request import GenerationRequest

# Results that wait for an earlier one, for each row of the batch: while one request decodes 32
# times as many tokens as the others, the rows beside it stay full.
HELD_PER_ROW: Final = 32


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class _Place:
    """A request's place in the order; one of the two is set from the start, or comes."""

    stream: Stream | None = None
    result: Completion | RequestError | None = None


def run_in_order(
    engine: Engine, requests: Iterable[GenerationRequest | RequestError]
) -> Generator[Completion | RequestError]:
    """Yields one result for each request, in their order; a request's own error is its result.

    Requests are drawn as room comes up: as many wait as run, so that the batch is never short of
    rows, whichever request is the slow one. At most `HELD_PER_ROW` × max_seqs are in hand. Who
    stops reading cancels what runs.

    Args:
      requests: an error among them stands for a request that was refused before; it comes out in
        its place.

    Raises:
      QueueFullError: the queue is full of other callers' requests.
      NotServingError, EngineDeadError: the engine stopped or failed; nothing more comes.
    """
    max_seqs = engine.config.scheduler.max_seqs
    max_running = max_seqs + min(max_seqs, engine.config.limits.max_waiting_requests)
    places: collections.deque[_Place] = collections.deque()
    ended: queue.SimpleQueue[_Place] = queue.SimpleQueue()
    source = iter(requests)
    asked = next(source, None)
    num_running, is_full = 0, False
    try:
        while asked is not None or places:
            has_room = len(places) < HELD_PER_ROW * max_seqs and num_running < max_running
            if asked is not None and has_room and not is_full:
                place = _submit(engine, asked, ended, is_alone=num_running == 0)
                if place is None:
                    is_full = True
                    continue
                num_running += place.stream is not None
                places.append(place)
                asked = next(source, None)
            elif (result := places[0].result) is not None:
                places.popleft()
                yield result
            else:
                _settle(ended.get())
                num_running, is_full = num_running - 1, False
    finally:
        for place in places:
            if place.stream is not None:
                place.stream.cancel()


def _submit(
    engine: Engine,
    asked: GenerationRequest | RequestError,
    ended: "queue.SimpleQueue[_Place]",
    *,
    is_alone: bool,
) -> _Place | None:
    """Returns the request's place, or None where one of ours has to end first."""
    if isinstance(asked, RequestError):
        return _Place(result=asked)
    try:
        place = _Place(stream=engine.submit(asked))
    except QueueFullError:
        if is_alone:  # the queue is full of somebody else's
            raise
        return None
    except RequestError as error:
        return _Place(result=error)
    assert place.stream is not None
    place.stream.call_at_end(lambda: ended.put(place))
    return place


def _settle(place: _Place) -> None:
    """Reads a stream that has ended; an error that is not the request's own is raised."""
    assert place.stream is not None
    try:
        place.result = gather(place.stream)
    except RequestError as error:
        place.result = error
    place.stream = None
