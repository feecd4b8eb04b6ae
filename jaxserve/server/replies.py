"""One request's events as the messages of its stream."""

from collections.abc import Callable, Iterable, Iterator

from jaxserve.engine.events import ChoiceFinished, Delta, Event, Finished, Started
from jaxserve.engine.served_model import ServedModel
from jaxserve.gen import generation_pb2
from jaxserve.server import answers
from jaxserve.server.chat_plan import ChatChoices
from jaxserve.server.choice_reply import ChoiceReply, ReplyRules
from jaxserve.server.logprobs import cut_logprobs
from jaxserve.text.chat_output import ContentDelta, OutputDelta


class Replies:
    """Holds the start back to the first output, and gathers deltas as `stream_interval` asks.

    So that the start's arrival at the client is the time to first token. No message is larger than
    the rules allow: what would be goes in several, built one by one as they are taken.
    """

    def __init__(
        self,
        rules: ReplyRules,
        model: ServedModel,
        *,
        complete: Callable[[Finished], Finished],
        chat: ChatChoices | None = None,
    ) -> None:
        """Args:
        complete: adds what is known of delivery to the end, when all before it is sent.
        chat: takes reasoning and tool calls out of the text; None leaves it as it is.
        """
        self._rules = rules
        self._model = model
        self._complete = complete
        self._chat = chat
        self._start: Started | None = None
        self._choices: dict[int, ChoiceReply] = {}
        self._sent_s: list[float] = []

    def push(self, event: Event) -> Iterable[generation_pb2.StreamGenerateResponse]:
        """Returns the messages that are due with this event; each is built as it is asked for."""
        if not isinstance(event, Delta):
            return self._push_frame(event)
        choice = self._choice(event.index)
        choice.push(event, self._chat.push(event) if self._chat else _content(event.text))
        if self._start is None and choice.is_due:
            reply = generation_pb2.StreamGenerateResponse()
            if choice.take_short(
                reply.delta
            ):  # in its place: to copy it there takes four times as long
                self._sent_s += choice.take_ready()
                return (reply,)
        return self._take_due(choice)

    def _take_due(self, choice: ChoiceReply) -> Iterator[generation_pb2.StreamGenerateResponse]:
        yield from self._take_start()
        if choice.is_due:
            yield from self._take_deltas(choice)

    def _push_frame(
        self, event: Started | ChoiceFinished | Finished
    ) -> Iterator[generation_pb2.StreamGenerateResponse]:
        match event:
            case Started():
                self._start = event
            case ChoiceFinished() | Finished():
                yield from self._take_start()
                choice = self._choice(event.index)
                parts, reason = self._chat.end(event) if self._chat else ([], event.reason)
                choice.add_text(parts)
                yield from self._take_deltas(choice)
                if isinstance(event, Finished):
                    event = self._complete(event)
                finish = answers.build_finish(event, reason, self._rules.options)
                yield generation_pb2.StreamGenerateResponse(finish=finish)

    def take_sent(self) -> list[float]:
        """Returns when each token of the messages since the last call was on the host."""
        sent_s, self._sent_s = self._sent_s, []
        return sent_s

    def _choice(self, index: int) -> ChoiceReply:
        if index not in self._choices:
            self._choices[index] = ChoiceReply(index, self._rules)
        return self._choices[index]

    def _take_start(self) -> Iterator[generation_pb2.StreamGenerateResponse]:
        started, self._start = self._start, None
        if started is None:
            return
        pieces = cut_logprobs(
            started.prompt_logprobs, self._rules.token_bytes, max_bytes=self._rules.max_bytes
        )
        for piece in pieces:
            start = answers.build_start(started, self._model)
            if piece.token_ids:
                start.prompt_logprobs.CopyFrom(piece)
            yield generation_pb2.StreamGenerateResponse(start=start)

    def _take_deltas(self, choice: ChoiceReply) -> Iterator[generation_pb2.StreamGenerateResponse]:
        last: generation_pb2.GenerationDelta | None = None
        for delta in choice.take():
            if last is not None:
                yield generation_pb2.StreamGenerateResponse(delta=last)
            last = delta
        # with the last message; where there is none, with whatever comes next
        self._sent_s += choice.take_ready()
        if last is not None:
            yield generation_pb2.StreamGenerateResponse(delta=last)


def _content(text: str) -> list[OutputDelta]:
    return [ContentDelta(text=text)] if text else []
