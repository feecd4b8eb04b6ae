"""What the reader of one request's stream sees of time: delivery, and turning tokens into text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.engine.events import Finished
from jaxserve.metrics import Metrics


class Decoder(Protocol):
    """Token ids to text, a few at a time: `text.Detokenizer`, or a test's."""

    def push(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class ReaderAccount:
    """One for each stream; its reader's thread alone writes.

    Attributes:
      delivered_s: when the reader had the end, and had carried all before it on; None until then.
    """

    def __init__(
        self, metrics: Metrics, clock: Callable[[], float], *, times_decoding: bool
    ) -> None:
        self.delivered_s: float | None = None
        self._metrics = metrics
        self._clock = clock
        self._times_decoding = times_decoding
        self._delivery_sum_s = 0.0
        self._decoding_s = 0.0

    def deliver(self, ready_s: Sequence[float]) -> None:
        """Whoever carries them on has accepted tokens that were on the host at these times."""
        now_s = self._clock()
        took_s = [now_s - since_s for since_s in ready_s]
        self._delivery_sum_s += self._metrics.delivery_seconds.observe_all(took_s)

    def complete(self, finished: Finished) -> Finished:
        """Returns the end with its delivery: the reader has it, and has delivered the rest."""
        self.delivered_s = self._clock()
        timings = dataclasses.replace(
            finished.timings,
            delivery_s=self.delivered_s - finished.end_s,
            delivery_sum_s=self._delivery_sum_s,
        )
        return dataclasses.replace(finished, timings=timings)

    def decode(self, decoder: Decoder, token_ids: list[int], *, is_last: bool) -> str:
        """Returns what comes of more tokens, timed; where they are the last, all that is left."""
        since_s = self._clock() if self._times_decoding else 0.0
        text = decoder.push(token_ids) if token_ids else ""
        if is_last:
            text += decoder.flush()
        if self._times_decoding:
            self._decoding_s += self._clock() - since_s
        return text

    def close(self) -> None:
        """Counts what is not counted yet: nothing more is read."""
        self._metrics.reader_detokenize_seconds.inc(self._decoding_s)
        self._decoding_s = 0.0
