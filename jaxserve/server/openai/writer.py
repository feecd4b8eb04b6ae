"""One reply from the events of its requests' streams: its chunks, or all of them in one body."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.engine import Delta, Event, Finished, Started, Tokenizer, Usage
from jaxserve.engine.events import ChoiceFinished
from jaxserve.server.chat_plan import ChatChoices
from jaxserve.server.openai.choice import ChatChoice, CompletionChoice, ReplyRules
from jaxserve.server.openai.echo import Echo, build_echo
from jaxserve.server.openai.logprobs import TokenNames, build_prompt_logprobs
from jaxserve.server.openai.requests import Asked

Chunk = dict[str, Any]


class ReplyWriter:
    """Makes chunks of events; those of several requests may come in any order.

    Choice k of request r is choice r * n + k of the reply. A chunk has one choice.

    Attributes:
      prompts: token ids of each request's.
    """

    def __init__(
        self,
        asked: Asked,
        *,
        prompts: Sequence[tuple[int, ...]],
        model_name: str,
        created_s: float,
        tokenizer: Tokenizer,
        chat: ChatChoices | None = None,
        interval: int = 1,
    ) -> None:
        """Args:
        created_s: Unix time.
        chat: takes reasoning and tool calls out of a chat's text; None leaves it as it is.
        interval: output tokens of a choice to gather before its next chunk.
        """
        self.prompts = prompts
        self._asked = asked
        self._tokenizer = tokenizer
        self._chat = chat
        names = TokenNames(tokenizer, as_ids=asked.tokens_as_ids)
        self._rules = ReplyRules(asked=asked, names=names, interval=interval)
        prefix, kind = (
            ("chatcmpl", "chat.completion.chunk") if asked.is_chat else ("cmpl", "text_completion")
        )
        self._head: Chunk = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(created_s),
            "model": model_name,
        }
        self._choices: dict[int, ChatChoice | CompletionChoice] = {}
        self._starts: dict[int, Started] = {}
        self._gathered_s: dict[int, list[float]] = {}
        self._sent_s: dict[int, list[float]] = {}
        self._usages: list[Usage] = []

    def push(self, request: int, event: Event) -> Iterator[Chunk]:
        """Yields the chunks that are due with an event of a request."""
        match event:
            case Started():
                self._starts[request] = event
            case Delta():
                choice = self._choice(request, event.index)
                choice.push(event)
                self._gathered_s.setdefault(request, []).extend(event.ready_s)
                if choice.is_due:
                    yield from self._take(request, choice)
            case ChoiceFinished() | Finished():
                choice = self._choice(request, event.index)
                if isinstance(event, Finished):
                    self._usages.append(event.usage)
                choice.end(event)
                yield from self._take(request, choice)

    def take_sent(self, request: int) -> list[float]:
        """Returns when each token of a request's chunks since the last call was on the host."""
        return self._sent_s.pop(request, [])

    def end(self) -> Iterator[Chunk]:
        """Yields what follows the last choice's end: the usage, where a stream is asked for it."""
        stream = self._asked.stream
        if stream is not None and stream.include_usage:
            yield {**self._head, "choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, object]:
        """The sums over all requests, as far as their chunks have told them."""
        return build_usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.num_told for choice in self._choices.values()),
            cached_tokens=sum(usage.cached_prompt_tokens for usage in self._usages),
        )

    def _choice(self, request: int, choice: int) -> ChatChoice | CompletionChoice:
        index = request * self._asked.num_choices + choice
        if index not in self._choices:
            self._choices[index] = self._open(request, index)
        return self._choices[index]

    def _open(self, request: int, index: int) -> ChatChoice | CompletionChoice:
        if self._asked.is_chat:
            return ChatChoice(index, self._rules, self._chat)
        return CompletionChoice(
            index,
            self._rules,
            prompt=self.prompts[request],
            tokenizer=self._tokenizer,
            sampling=self._asked.requests[request].sampling,
            echo=self._build_echo(request) if self._asked.echo else Echo(text=""),
        )

    def _build_echo(self, request: int) -> Echo:
        asked = self._asked.requests[request]
        assert isinstance(asked.prompt, str | tuple), "a completion continues a text or tokens"
        return build_echo(
            asked.prompt,
            self.prompts[request],
            self._tokenizer,
            skip_special_tokens=asked.sampling.skip_special_tokens,
            entries=(
                None if self._asked.logprobs is None else self._starts[request].prompt_logprobs
            ),
        )

    def build_prompt_logprobs(self, request: int) -> list[dict[str, object] | None]:
        """Returns the log-probabilities of a request's prompt, in vLLM's form."""
        return build_prompt_logprobs(
            self.prompts[request],
            self._starts[request].prompt_logprobs,
            self._rules.names,
            num_top=self._asked.prompt_logprobs or 0,
        )

    def _take(self, request: int, choice: ChatChoice | CompletionChoice) -> Iterator[Chunk]:
        stream = self._asked.stream
        for part in choice.take():
            # with the first chunk; where there is none, with whatever comes next
            gathered_s = self._gathered_s.pop(request, [])
            self._sent_s.setdefault(request, []).extend(gathered_s)
            chunk = {**self._head, "choices": [part]}
            if stream is not None and stream.continuous_usage_stats:
                chunk["usage"] = self.usage
            elif stream is not None and stream.include_usage:
                chunk["usage"] = None
            yield chunk


def build_usage(
    *, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
