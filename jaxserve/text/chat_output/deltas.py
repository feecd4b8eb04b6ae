"""What a chat's output is made of: content, reasoning, and calls of tools, as they come."""

import dataclasses
from collections.abc import Callable

from jaxserve.text.detokenizer import SPECIAL_MARK


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ContentDelta:
    """More of the answer itself."""

    text: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class CallDelta:
    """More of one call: first its id and name, then its arguments in pieces.

    Attributes:
      index: which call of this output, from 0.
      id: on the call's first delta.
      name: of the function; on the call's first delta.
      arguments: more of a JSON object, as the model wrote it; it is whole only where the model
        wrote it whole.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


OutputDelta = ContentDelta | ReasoningDelta | CallDelta


class DeltaSink:
    """Gathers what parsers find; pieces of one kind that follow each other are one delta.

    What was read may hold marks of special tokens; what comes out does not.
    """

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._deltas: list[OutputDelta] = []
        self.num_calls = 0

    def add_content(self, text: str) -> None:
        text = text.replace(SPECIAL_MARK, "")
        match self._deltas:
            case [*_, ContentDelta(text=before)] if text:
                self._deltas[-1] = ContentDelta(text=before + text)
            case _ if text:
                self._deltas.append(ContentDelta(text=text))

    def add_reasoning(self, text: str) -> None:
        text = text.replace(SPECIAL_MARK, "")
        match self._deltas:
            case [*_, ReasoningDelta(text=before)] if text:
                self._deltas[-1] = ReasoningDelta(text=before + text)
            case _ if text:
                self._deltas.append(ReasoningDelta(text=text))

    def open_call(self, name: str) -> None:
        """Begins the next call; its arguments follow."""
        name = name.replace(SPECIAL_MARK, "")
        self._deltas.append(CallDelta(index=self.num_calls, id=self._make_id(), name=name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Adds to the newest call's arguments."""
        index = self.num_calls - 1
        text = text.replace(SPECIAL_MARK, "")
        match self._deltas:
            case [*_, CallDelta(name="", arguments=before)] if text:
                self._deltas[-1] = CallDelta(index=index, arguments=before + text)
            case _ if text:
                self._deltas.append(CallDelta(index=index, arguments=text))

    def take(self) -> list[OutputDelta]:
        """Returns what came since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas
