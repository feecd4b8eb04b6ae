"""A stream read to its end: what the model said to one prompt."""

import dataclasses

from jaxserve.engine.events import ChoiceFinished, Delta, Finished, Started, Timings, Usage
from jaxserve.engine.stream import Stream
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Choice:
    """One output.

    Attributes:
      token_ids: all that were sampled, an end token too; its text is left out of `text`.
      matched_stop: with STOP, the stop string or stop token id that ended it.
      logprobs: one for each of `token_ids`; empty unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Completion:
    """What the model said to one prompt.

    Attributes:
      choices: by index; one unless more were asked for. The first one's fields can be read here.
      usage, timings: of all choices together.
      prompt_ids: the prompt's tokens.
      prompt_logprobs: of those, from the second on; empty unless asked for.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        return self.choices[0].matched_stop

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs


class _Gathered:
    """A choice's output so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs

    def build(self, end: ChoiceFinished | Finished) -> Choice:
        return Choice(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=end.reason,
            matched_stop=end.matched_stop,
            logprobs=tuple(self._logprobs),
        )


def gather(stream: Stream) -> Completion:
    """Returns all of a stream; waits for its end.

    Raises:
      JaxserveError: what the request ended with.
    """
    gathered: dict[int, _Gathered] = {}
    choices: dict[int, Choice] = {}
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished: Finished | None = None
    for event in stream:
        match event:
            case Started():
                prompt_logprobs = event.prompt_logprobs
            case Delta():
                gathered.setdefault(event.index, _Gathered()).add(event)
            case ChoiceFinished() | Finished():
                choices[event.index] = gathered.pop(event.index, _Gathered()).build(event)
                finished = event if isinstance(event, Finished) else None
    assert finished is not None, "a stream ends with Finished, or raises"
    return Completion(
        choices=tuple(choices[index] for index in sorted(choices)),
        usage=finished.usage,
        timings=finished.timings,
        prompt_ids=stream.prompt,
        prompt_logprobs=prompt_logprobs,
    )
