"""A stream read to its end: what the model said to one prompt."""

import dataclasses

from jaxserve.engine.events import Delta, Finished, Timings, Usage
from jaxserve.engine.stream import Stream
from jaxserve.request import FinishReason


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Completion:
    """What the model said to one prompt.

    Attributes:
      token_ids: all that were sampled, an end token too; its text is left out of `text`.
      matched_stop: with STOP, the stop string or stop token id that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings


def gather(stream: Stream) -> Completion:
    """Returns all of a stream; waits for its end.

    Raises:
      JaxserveError: what the request ended with.
    """
    texts: list[str] = []
    token_ids: list[int] = []
    finished: Finished | None = None
    for event in stream:
        match event:
            case Delta():
                texts.append(event.text)
                token_ids += event.token_ids
            case Finished():
                finished = event
    assert finished is not None, "a stream ends with Finished, or raises"
    return Completion(
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=finished.reason,
        matched_stop=finished.matched_stop,
        usage=finished.usage,
        timings=finished.timings,
    )
