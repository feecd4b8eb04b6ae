"""What one choice of a reply has to say since its last chunk."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from jaxserve.engine import Delta, Finished, Tokenizer
from jaxserve.engine.events import ChoiceFinished
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason, SamplingParams
from jaxserve.server.chat_plan import ChatChoices
from jaxserve.server.openai.echo import Echo, Offsets
from jaxserve.server.openai.logprobs import Place, TokenNames, build_content, build_legacy
from jaxserve.server.openai.requests import Asked
from jaxserve.text.chat_output import CallDelta, ContentDelta, OutputDelta, ReasoningDelta

Part = dict[str, object]

# Clients know only these words. What was cut short by a deadline or by the operator is "length".
FINISH_REASONS: Final[Mapping[FinishReason, str]] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.CANCELLED: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ReplyRules:
    """What all choices of a reply have in common.

    Attributes:
      interval: output tokens to gather before a chunk is due.
    """

    asked: Asked
    names: TokenNames
    interval: int

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are worth a chunk that have no text yet."""
        stream = self.asked.stream
        is_counting = stream is not None and stream.continuous_usage_stats
        return self.asked.return_token_ids or self.asked.logprobs is not None or is_counting


class _Tokens:
    """A choice's tokens since its last chunk.

    Attributes:
      num_told: of earlier chunks.
    """

    def __init__(self, rules: ReplyRules) -> None:
        self.num_told = 0
        self._rules = rules
        self._token_ids: list[int] = []
        self._num = 0

    @property
    def is_due(self) -> bool:
        return self._num >= self._rules.interval

    @property
    def are_worth_a_chunk(self) -> bool:
        return self._num > 0 and self._rules.counts_tokens

    def push(self, token_ids: Sequence[int]) -> None:
        self._num += len(token_ids)
        if self._rules.asked.return_token_ids:
            self._token_ids += token_ids

    def take(self) -> Part:
        """Returns their key, where it is asked for."""
        self.num_told += self._num
        token_ids, self._token_ids, self._num = self._token_ids, [], 0
        return {"token_ids": token_ids} if self._rules.asked.return_token_ids else {}


class CompletionChoice:
    """A choice of `/v1/completions`."""

    def __init__(
        self,
        index: int,
        rules: ReplyRules,
        *,
        prompt: tuple[int, ...],
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        echo: Echo,
    ) -> None:
        """Args:
        prompt: token ids that the output continues.
        """
        self._index = index
        self._rules = rules
        self._prompt_ids: tuple[int, ...] | None = prompt
        self._offsets = Offsets(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            prompt=prompt,
            first=len(echo.text),
        )
        self._texts = [echo.text] if echo.text else []
        self._places = list(echo.places)
        self._tokens = _Tokens(rules)
        self._finish: str | None = None

    @property
    def is_due(self) -> bool:
        return self._tokens.is_due

    @property
    def num_told(self) -> int:
        """Output tokens of the chunks so far."""
        return self._tokens.num_told

    def push(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens.push(delta.token_ids)
        for entry in delta.logprobs:
            offset = self._offsets.take(entry.token_id)
            self._places.append(Place(token_id=entry.token_id, entry=entry, offset=offset))

    def end(self, end: ChoiceFinished | Finished) -> None:
        self._finish = FINISH_REASONS[end.reason]

    def take(self) -> Iterator[Part]:
        """Yields what is new; nothing where that says nothing yet."""
        text, self._texts = "".join(self._texts), []
        if text or self._places or self._tokens.are_worth_a_chunk:
            yield self._build(text, finish=None)
        if self._finish is not None:
            yield self._build("", finish=self._finish)

    def _build(self, text: str, *, finish: str | None) -> Part:
        places, self._places = self._places, []
        num_top = self._rules.asked.logprobs
        return {
            "index": self._index,
            "text": text,
            "logprobs": (
                build_legacy(places, self._rules.names, num_top=num_top)
                if places and num_top is not None
                else None
            ),
            "finish_reason": finish,
            **self._take_prompt_ids(),
            **self._tokens.take(),
        }

    def _take_prompt_ids(self) -> Part:
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        is_shown = self._rules.asked.return_token_ids and prompt_ids is not None
        return {"prompt_token_ids": list(prompt_ids or ())} if is_shown else {}


class ChatChoice:
    """A choice of `/v1/chat/completions`: its role first, then its parts as they come."""

    def __init__(self, index: int, rules: ReplyRules, chat: ChatChoices | None) -> None:
        """Args:
        chat: takes reasoning and tool calls out of the text; None leaves it as it is.
        """
        self._index = index
        self._rules = rules
        self._chat = chat
        self._parts: list[OutputDelta] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tokens = _Tokens(rules)
        self._has_role = False
        self._finish: str | None = None

    @property
    def is_due(self) -> bool:
        return self._tokens.is_due

    @property
    def num_told(self) -> int:
        """Output tokens of the chunks so far."""
        return self._tokens.num_told

    def push(self, delta: Delta) -> None:
        if self._chat is not None:
            self._add(self._chat.push(delta))
        elif delta.text:
            self._parts.append(ContentDelta(text=delta.text))
        self._tokens.push(delta.token_ids)
        self._logprobs += delta.logprobs

    def end(self, end: ChoiceFinished | Finished) -> None:
        reason = end.reason
        if self._chat is not None:
            last, reason = self._chat.end(end)
            self._add(last)
        self._finish = FINISH_REASONS[reason]

    def take(self) -> Iterator[Part]:
        """Yields what is new; nothing where that says nothing yet."""
        deltas = [_build_delta(part) for part in _join(self._parts)]
        self._parts = []
        if not deltas and self._tokens.are_worth_a_chunk:
            deltas = [{"content": ""}]
        if self._has_role is False and (deltas or self._finish is not None):
            self._has_role = True
            yield self._build({"role": "assistant", "content": ""}, with_tokens=False)
        for delta in deltas:
            yield self._build(delta)
        if self._finish is not None:
            yield self._build({}, finish=self._finish)

    def _add(self, parts: Iterable[OutputDelta]) -> None:
        asked = self._rules.asked
        for part in parts:
            match part:
                case ReasoningDelta() if not asked.keeps_reasoning:
                    continue
                case CallDelta() if asked.max_calls is not None and part.index >= asked.max_calls:
                    continue
                case _:
                    self._parts.append(part)

    def _build(self, delta: Part, *, finish: str | None = None, with_tokens: bool = True) -> Part:
        logprobs: Part | None = None
        if with_tokens and self._logprobs:
            entries, self._logprobs = self._logprobs, []
            content = build_content(
                entries, self._rules.names, num_top=self._rules.asked.logprobs or 0
            )
            logprobs = {"content": content, "refusal": None}
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            **(self._tokens.take() if with_tokens else {}),
        }


def _join(parts: Sequence[OutputDelta]) -> Iterator[OutputDelta]:
    """Yields the same with neighbours of one kind in one."""
    for _, group in itertools.groupby(parts, _kind):
        first, *rest = group
        if isinstance(first, CallDelta):
            pieces = [part.arguments for part in (first, *rest) if isinstance(part, CallDelta)]
            yield dataclasses.replace(first, arguments="".join(pieces))
        else:
            texts = [part.text for part in (first, *rest) if not isinstance(part, CallDelta)]
            yield dataclasses.replace(first, text="".join(texts))


def _kind(part: OutputDelta) -> tuple[type[OutputDelta], int]:
    return type(part), part.index if isinstance(part, CallDelta) else 0


def _build_delta(part: OutputDelta) -> Part:
    match part:
        case ContentDelta():
            return {"content": part.text}
        case ReasoningDelta():
            return {"reasoning_content": part.text}
        case CallDelta(id="", name=""):
            call: Part = {"index": part.index, "function": {"arguments": part.arguments}}
            return {"tool_calls": [call]}
        case CallDelta():
            function = {"name": part.name, "arguments": part.arguments}
            call = {"index": part.index, "id": part.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
