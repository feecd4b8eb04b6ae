"""What one choice of a request has to say since its last message."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from jaxserve.engine.events import Delta
from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs
from jaxserve.server.logprobs import TokenBytes, build_logprobs, cut_logprobs, size_of
from jaxserve.text.chat_output import CallDelta, ContentDelta, OutputDelta, ReasoningDelta

MAX_DELTA_TOKENS: Final = 1 << 16  # tokens of a delta: it stays a small message
TOKEN_BYTES: Final = 5  # of a token id, at most
CHAR_BYTES: Final = 4  # of a character, at most
CALL_BYTES: Final = 32  # what frames a tool call


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ReplyRules:
    """What a request's messages hold, and how large they may be.

    Attributes:
      interval: tokens to gather before a delta is sent.
      max_bytes: of the parts of one message.
      echo: what each choice's text begins with.
    """

    options: generation_pb2.OutputOptions
    interval: int
    max_bytes: int
    token_bytes: TokenBytes
    echo: str = ""


class ChoiceReply:
    """Gathers a choice's output, and gives it back in messages of a bounded size.

    What is not asked for is not kept.
    """

    def __init__(self, index: int, rules: ReplyRules) -> None:
        self._index = index
        self._rules = rules
        self._parts: list[OutputDelta] = [ContentDelta(text=rules.echo)] if rules.echo else []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_tokens = 0
        self._num_bytes = 0  # of the log-probabilities, which alone grow large in few tokens
        self._ready_s: list[float] = []

    @property
    def is_due(self) -> bool:
        """Whether enough is gathered for a message."""
        rules = self._rules
        return self._num_tokens >= rules.interval or self._num_bytes >= rules.max_bytes

    def push(self, delta: Delta, parts: Iterable[OutputDelta]) -> None:
        """Adds what came.

        Args:
          parts: what its text is made of.
        """
        self.add_text(parts)
        if self._rules.options.include_token_ids:
            self._token_ids += delta.token_ids
        self._num_tokens += len(delta.token_ids)
        if delta.logprobs:
            self._logprobs += delta.logprobs
            token_bytes = self._rules.token_bytes
            self._num_bytes += sum(size_of(entry, token_bytes) for entry in delta.logprobs)
        self._ready_s += delta.ready_s

    def add_text(self, parts: Iterable[OutputDelta]) -> None:
        """Adds text that came without tokens, having been held back."""
        if not self._rules.options.omit_text:
            self._parts += parts

    def take_short(self, message: generation_pb2.GenerationDelta) -> bool:
        """Fills an empty message with all that was gathered, where that is short, as nearly always;
        else False, and nothing is taken."""
        half, token_ids = self._rules.max_bytes // 2, self._token_ids
        text = None if self._logprobs else _find_short_text(self._parts, half)
        if text is None or not (text or token_ids) or len(token_ids) * TOKEN_BYTES > half:
            return False
        self._parts, self._token_ids, self._num_tokens = [], [], 0
        message.index, message.text = self._index, text
        message.token_ids.extend(token_ids)
        return True

    def take(self) -> Iterator[generation_pb2.GenerationDelta]:
        """Yields all that was gathered, in as many messages as it needs; none for nothing."""
        short = generation_pb2.GenerationDelta()
        if self.take_short(short):
            yield short
            return
        half = self._rules.max_bytes // 2  # of text; the other is for tokens
        parts, self._parts = self._parts, []
        texts = _pack(parts, self._index, half)
        tokens = self._take_tokens(half)
        for text, token in itertools.zip_longest(texts, tokens):
            message = token or text
            if token is not None and text is not None:
                message.MergeFrom(text)
            yield message

    def take_ready(self) -> list[float]:
        """Returns when each token since the last call was on the host."""
        ready_s, self._ready_s = self._ready_s, []
        return ready_s

    def _take_tokens(self, max_bytes: int) -> Iterator[generation_pb2.GenerationDelta]:
        token_ids, self._token_ids = self._token_ids, []
        entries, self._logprobs = self._logprobs, []
        num_bytes, self._num_tokens, self._num_bytes = self._num_bytes, 0, 0
        if not entries:
            most = max(max_bytes // TOKEN_BYTES, 1)  # batched() would make room for as many at once
            for begin in range(0, len(token_ids), most):
                ids = token_ids[begin : begin + most]
                yield generation_pb2.GenerationDelta(index=self._index, token_ids=ids)
            return
        first = 0
        if num_bytes <= max_bytes:
            piece = build_logprobs(entries, self._rules.token_bytes)
            yield generation_pb2.GenerationDelta(
                index=self._index, token_ids=token_ids, logprobs=piece
            )
            return
        for piece in cut_logprobs(entries, self._rules.token_bytes, max_bytes=max_bytes):
            last = first + len(piece.token_ids)
            yield generation_pb2.GenerationDelta(
                index=self._index, token_ids=token_ids[first:last], logprobs=piece
            )
            first = last


def _find_short_text(parts: list[OutputDelta], max_bytes: int) -> str | None:
    """Returns the text that the parts are, where they are no more than that and are short: as of
    nearly every message."""
    if not parts:
        return ""
    if len(parts) > 1 or not isinstance(parts[0], ContentDelta):
        return None
    text = parts[0].text
    return text if len(text) * CHAR_BYTES <= max_bytes else None


def _pack(
    parts: list[OutputDelta], index: int, max_bytes: int
) -> Iterator[generation_pb2.GenerationDelta]:
    """Yields the parts in order, as many to a message as fit; long ones are cut."""
    message, num_bytes = generation_pb2.GenerationDelta(index=index), 0
    max_chars = max(max_bytes // CHAR_BYTES, 1)
    for part in itertools.chain.from_iterable(_cut(part, max_chars) for part in _join(parts)):
        size = _size_of(part)
        if num_bytes and num_bytes + size > max_bytes:
            yield message
            message, num_bytes = generation_pb2.GenerationDelta(index=index), 0
        _add_part(message, part)
        num_bytes += size
    if num_bytes:
        yield message


def _join(parts: list[OutputDelta]) -> Iterator[OutputDelta]:
    """Yields the same with neighbours of one kind in one: appending to a message copies it."""
    if len(parts) < 2:  # as of nearly every message
        yield from parts
        return
    for _, group in itertools.groupby(parts, _kind):
        first, *rest = group
        match first:
            case CallDelta():
                pieces = [part.arguments for part in (first, *rest) if isinstance(part, CallDelta)]
                yield dataclasses.replace(first, arguments="".join(pieces))
            case _:
                texts = [part.text for part in (first, *rest) if not isinstance(part, CallDelta)]
                yield dataclasses.replace(first, text="".join(texts))


def _kind(part: OutputDelta) -> tuple[type[OutputDelta], int]:
    return type(part), part.index if isinstance(part, CallDelta) else 0


def _cut(part: OutputDelta, max_chars: int) -> Iterator[OutputDelta]:
    text = part.arguments if isinstance(part, CallDelta) else part.text
    if len(text) <= max_chars:
        yield part
        return
    for first in range(0, len(text), max_chars):
        piece = text[first : first + max_chars]
        if not isinstance(part, CallDelta):
            yield dataclasses.replace(part, text=piece)
        elif first == 0:
            yield dataclasses.replace(part, arguments=piece)
        else:  # the first piece alone begins a call
            yield CallDelta(index=part.index, id="", name="", arguments=piece)


def _size_of(part: OutputDelta) -> int:
    match part:
        case CallDelta():
            return CALL_BYTES + len((part.id + part.name + part.arguments).encode())
        case _:
            return len(part.text.encode())


def _add_part(message: generation_pb2.GenerationDelta, part: OutputDelta) -> None:
    match part:
        case ContentDelta():
            message.text += part.text
        case ReasoningDelta():
            message.reasoning += part.text
        case CallDelta():
            message.tool_calls.add(
                index=part.index, id=part.id, name=part.name, arguments=part.arguments
            )
