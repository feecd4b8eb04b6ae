"""Whole replies: the same chunks as a stream's, put together."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from jaxserve.engine import Completion, Delta, Event, Finished, Started, Tokenizer
from jaxserve.engine.completion import Choice
from jaxserve.engine.events import ChoiceFinished, ExecutionInfo
from jaxserve.server.chat_plan import ChatChoices
from jaxserve.server.openai.requests import Asked
from jaxserve.server.openai.writer import Chunk, ReplyWriter

ALL_AT_ONCE: Final = 1 << 62  # tokens of a chunk, where nobody waits for the first


class WholeReply:
    """Gathers the events of a reply's requests, and builds its one body."""

    def __init__(
        self,
        asked: Asked,
        *,
        prompts: Sequence[tuple[int, ...]],
        model_name: str,
        created_s: float,
        tokenizer: Tokenizer,
        chat: ChatChoices | None = None,
    ) -> None:
        """Args are those of `ReplyWriter`."""
        self._asked = asked
        self._writer = ReplyWriter(
            asked,
            prompts=prompts,
            model_name=model_name,
            created_s=created_s,
            tokenizer=tokenizer,
            chat=chat,
            interval=ALL_AT_ONCE,
        )
        self._chunks: list[Chunk] = []

    def push(self, request: int, event: Event) -> None:
        """Adds the next event of a request."""
        self._chunks += self._writer.push(request, event)

    def take_sent(self, request: int) -> list[float]:
        """Returns when each token of a request was on the host, all of it having been sent."""
        return self._writer.take_sent(request)

    def build(self) -> dict[str, object]:
        """Returns the body, all requests having ended."""
        return _put_together(self._asked, self._writer, self._chunks)


def build_reply(
    asked: Asked,
    completions: Sequence[Completion],
    *,
    model_name: str,
    created_s: float,
    tokenizer: Tokenizer,
    chat: ChatChoices | None = None,
) -> dict[str, object]:
    """Returns the body of requests that have ended: the choices of each prompt, in their order.

    Args:
      completions: one for each of `asked.requests`.
      created_s: Unix time.
      chat: see `ReplyWriter`.
    """
    reply = WholeReply(
        asked,
        prompts=[completion.prompt_ids for completion in completions],
        model_name=model_name,
        created_s=created_s,
        tokenizer=tokenizer,
        chat=chat,
    )
    for request, completion in enumerate(completions):
        for event in _events_of(completion):
            reply.push(request, event)
    return reply.build()


def _events_of(completion: Completion) -> Iterator[Event]:
    """Yields a stream's events that make this completion."""
    yield Started(
        request_id="",
        prompt_tokens=len(completion.prompt_ids),
        prompt_logprobs=completion.prompt_logprobs,
    )
    *others, last = enumerate(completion.choices)
    for index, choice in others:
        yield _delta_of(index, choice)
        yield ChoiceFinished(
            index=index, reason=choice.finish_reason, matched_stop=choice.matched_stop
        )
    index, choice = last
    yield _delta_of(index, choice)
    yield Finished(
        index=index,
        reason=choice.finish_reason,
        matched_stop=choice.matched_stop,
        usage=completion.usage,
        timings=completion.timings,
        execution=ExecutionInfo(),
    )


def _delta_of(index: int, choice: Choice) -> Delta:
    return Delta(
        index=index, text=choice.text, token_ids=choice.token_ids, logprobs=choice.logprobs
    )


def _put_together(
    asked: Asked, writer: ReplyWriter, chunks: Sequence[dict[str, Any]]
) -> dict[str, object]:
    parts: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        parts.setdefault(part["index"], []).append(part)
    reply: dict[str, object] = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    if asked.is_chat:
        reply["object"] = "chat.completion"
        reply["choices"] = [_join_chat(parts[index]) for index in sorted(parts)]
        reply |= _chat_extras(asked, writer)
    else:
        reply["choices"] = [
            _join_completion(parts[index]) | _completion_extras(asked, writer, index)
            for index in sorted(parts)
        ]
    reply["usage"] = writer.usage
    return reply


def _chat_extras(asked: Asked, writer: ReplyWriter) -> dict[str, object]:
    """Returns what vLLM says of a chat's prompt beside the choices."""
    extras: dict[str, object] = {}
    if asked.return_token_ids:
        extras["prompt_token_ids"] = list(writer.prompts[0])
    if asked.prompt_logprobs is not None:
        extras["prompt_logprobs"] = writer.build_prompt_logprobs(0)
    return extras


def _completion_extras(asked: Asked, writer: ReplyWriter, index: int) -> dict[str, object]:
    """Returns what vLLM says of a completion's prompt in each choice."""
    if asked.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": writer.build_prompt_logprobs(index // asked.num_choices)}


def _join_completion(parts: Sequence[dict[str, Any]]) -> dict[str, object]:
    last = parts[-1]
    return {
        "index": last["index"],
        "text": "".join(part["text"] for part in parts),
        "logprobs": _join_lists([part["logprobs"] for part in parts]),
        "finish_reason": last["finish_reason"],
        **(_join_lists([_only_ids(part) for part in parts]) or {}),
    }


def _join_chat(parts: Sequence[dict[str, Any]]) -> dict[str, object]:
    last = parts[-1]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    content = [entry for found in logprobs for entry in found["content"]]
    return {
        "index": last["index"],
        "message": _join_message([part["delta"] for part in parts]),
        "logprobs": {"content": content, "refusal": None} if logprobs else None,
        "finish_reason": last["finish_reason"],
        **(_join_lists([_only_ids(part) for part in parts]) or {}),
    }


def _join_message(deltas: Sequence[dict[str, Any]]) -> dict[str, object]:
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if piece["index"] == len(calls):
            function = {"name": piece["function"]["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": function})
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _only_ids(part: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: part[key] for key in ("prompt_token_ids", "token_ids") if key in part}


def _join_lists(parts: Sequence[dict[str, list[Any]] | None]) -> dict[str, list[Any]] | None:
    """Returns lists by key, each joined over the parts that have it; None where none has any."""
    joined: dict[str, list[Any]] | None = None
    for part in parts:
        for key, values in (part or {}).items():
            joined = joined or {}
            joined.setdefault(key, []).extend(values)
    return joined
