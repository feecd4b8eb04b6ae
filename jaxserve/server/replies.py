"""One request's events as the messages of its stream."""

from collections.abc import Callable, Iterator
from typing import Final

from jaxserve.engine.events import Delta, Event, Finished, Started
from jaxserve.engine.served_model import ServedModel
from jaxserve.gen import generation_pb2
from jaxserve.server import convert

MAX_DELTA_TOKENS: Final = 1 << 16  # tokens of a delta: it stays a small message


class Replies:
    """Holds the start back to the first output, and gathers deltas as `stream_interval` asks.

    So that the start's arrival at the client is the time to first token.
    """

    def __init__(
        self,
        output: generation_pb2.OutputOptions,
        model: ServedModel,
        *,
        interval: int,
        complete: Callable[[Finished], Finished],
    ) -> None:
        """Args:
        interval: tokens to gather before a delta is sent.
        complete: adds what is known of delivery to the end, when all before it is sent.
        """
        self._output = output
        self._model = model
        self._complete = complete
        self._interval = min(interval, MAX_DELTA_TOKENS)
        self._start: generation_pb2.GenerationStart | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._gathered_s: list[float] = []
        self._sent_s: list[float] = []

    def push(self, event: Event) -> Iterator[generation_pb2.StreamGenerateResponse]:
        """Yields the messages that are due with this event."""
        match event:
            case Started():
                self._start = convert.build_start(event, self._model)
            case Delta():
                yield from self._take_start()
                self._texts.append(event.text)
                self._token_ids += event.token_ids
                self._gathered_s += event.ready_s
                if len(self._token_ids) >= self._interval:
                    yield from self._take_delta()
            case Finished():
                yield from self._take_start()
                yield from self._take_delta()
                finish = convert.build_finish(self._complete(event), self._output)
                yield generation_pb2.StreamGenerateResponse(finish=finish)

    def take_sent(self) -> list[float]:
        """Returns when each token of the messages since the last call was on the host."""
        sent_s, self._sent_s = self._sent_s, []
        return sent_s

    def _take_start(self) -> Iterator[generation_pb2.StreamGenerateResponse]:
        start, self._start = self._start, None
        if start is not None:
            yield generation_pb2.StreamGenerateResponse(start=start)

    def _take_delta(self) -> Iterator[generation_pb2.StreamGenerateResponse]:
        delta = convert.build_delta(self._texts, self._token_ids, self._output)
        self._texts, self._token_ids = [], []
        # where they make no message, they go with the next
        self._sent_s, self._gathered_s = self._sent_s + self._gathered_s, []
        if delta is not None:
            yield generation_pb2.StreamGenerateResponse(delta=delta)
