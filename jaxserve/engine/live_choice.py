"""One choice of a request while it is in the engine: its text, its stops, its mask, its end."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from jaxserve.engine.reader_account import Decoder
from jaxserve.plan import StepResult
from jaxserve.request import FinishReason
from jaxserve.text.constraints import Constraint
from jaxserve.text.stops import StopMatcher

if TYPE_CHECKING:
    from jaxserve.engine.live_request import LiveRequest

# without stop strings, STOP too is by a token id
ENDS_BY_ID: Final = frozenset({FinishReason.EOS, FinishReason.STOP})


class StopText:
    """The text of a choice with stop strings, cut exactly where one matches.

    A stop that is complete before `min_tokens` does not count.

    Attributes:
      text: what the last token lets out; less than its own text while a stop may be beginning.
      matched: the stop string that was found.
    """

    def __init__(self, *, decoder: Decoder, matcher: StopMatcher, min_tokens: int) -> None:
        self.text = ""
        self.matched: str | None = None
        self._decoder = decoder
        self._matcher = matcher
        self._min_tokens = min_tokens

    def push(self, token_id: int, *, output_index: int) -> bool:
        """Takes the next token; True where a stop string is complete."""
        self.text = self._decoder.push([token_id])
        if output_index < self._min_tokens:
            self.text = self._matcher.push_unmatched(self.text)
            return False
        found = self._matcher.push(self.text)
        self.text, self.matched = found.text, found.matched
        return found.matched is not None

    def push_stop_id(self, token_id: int, *, is_text_kept: bool) -> None:
        """Takes a token that ends the choice by its id: nothing is held back any more."""
        self.text = self._matcher.flush()
        self.text += self._decoder.push([token_id]) if is_text_kept else ""

    def flush(self) -> str:
        """Returns the text still held back at an end that no stop string made."""
        if self.matched is not None:
            return ""
        return self._matcher.flush() + self._decoder.flush()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class LiveChoice:
    """What the engine thread knows of one choice.

    Attributes:
      stops: makes the text here; None leaves that to the reader.
      constraint: what may be drawn next; None is everything. It reads each token of `output` once.
      output, output_s: the tokens, and when each was on the host; its sequence's own lists, the
        last of which the stream may not have yet.
      num_output: tokens in the stream; of one that is followed, at its end.
      has_ended: its end is in the stream.
      reason: of that end; None before, and after an error.
    """

    live: "LiveRequest"
    index: int
    stops: StopText | None
    constraint: Constraint | None
    output: list[int] = dataclasses.field(default_factory=list)
    output_s: list[float] = dataclasses.field(default_factory=list)
    num_output: int = 0
    has_ended: bool = False
    reason: FinishReason | None = None

    @property
    def last_token_s(self) -> float | None:
        """When the last token in the stream was on the host; None before the first."""
        return self.output_s[self.num_output - 1] if self.num_output else None

    def match(self, stops: StopText, token_id: int) -> bool:
        """Searches the next token's text; True where a stop string ends the choice with it."""
        request = self.live.request
        sampling = request.sampling
        if token_id in request.stop_ids and self.num_output >= sampling.min_tokens:
            stops.push_stop_id(token_id, is_text_kept=sampling.include_stop_text)
            return False
        return stops.push(token_id, output_index=self.num_output)

    def text_of(self, finish: FinishReason | None) -> str | None:
        """Returns the last token's text, given how the choice ends with it; None is the reader's
        to decode."""
        if self.stops is not None:
            return self.stops.text
        if finish in ENDS_BY_ID and not self.live.request.sampling.include_stop_text:
            return ""
        return None

    def matched_stop(self, reason: FinishReason) -> str | int | None:
        """Returns the stop string or the stop token id that ended it."""
        if reason is not FinishReason.STOP:
            return None
        if self.stops is not None and self.stops.matched is not None:
            return self.stops.matched
        return self.output[self.num_output - 1]

    def flush(self) -> str:
        """Returns the text that was held back."""
        return self.stops.flush() if self.stops else ""


def find_stopped(result: StepResult, choices: Mapping[int, LiveChoice]) -> set[int]:
    """Returns the sequences that a stop string ends with this step's token.

    Args:
      choices: those with stop strings that have not ended, by sequence id.
    """
    stopped = set()
    for sequence_id, choice in choices.items():
        token_id = result.token_ids.get(sequence_id)
        assert choice.stops is not None
        if token_id is not None and choice.match(choice.stops, token_id):
            stopped.add(sequence_id)
    return stopped
