"""Any OpenAI-compatible endpoint as a target: completions or chat, streamed over HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final, Literal

import httpx

from jaxserve.errors import ConfigError
from jaxserve.measure.server_metrics import Snapshot
from jaxserve.measure.targets.base import Ask, End, Levels, Message, TargetError, TargetFacts
from jaxserve.measure.targets.scrape import Scraper, levels_of
from jaxserve.measure.targets.sse import EventReader

Api = Literal["completions", "chat"]
Extras = Literal["none", "vllm", "jaxserve"]

PLAIN: Final = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens"}
)
# What vLLM takes beside OpenAI's.
VLLM: Final = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"})
LATE_STATUS: Final = frozenset({408, 504})
REFUSED_STATUS: Final = frozenset({*range(400, 500), 503}) - LATE_STATUS
CONNECT_TIMEOUT_S: Final = 30.0
LAST_BYTES_S: Final = 0.1  # for the end of the body, once the stream has said its own
ERROR_CHARS: Final = 300
MAX_TOKENS: Final = (1 << 31) - 1  # of one request; more is no count


class OpenAITarget:
    """Replays against `URL/completions` or `URL/chat/completions`.

    Tokens come from the server: by message where it gives `token_ids` or a running usage (vLLM's
    extras), else from the usage at the end.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api: Api = "completions",
        extras: Extras = "none",
        api_key: str | None = None,
        metrics_url: str | None = None,
        vocab_size: int = 0,
        special_ids: frozenset[int] = frozenset(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Args:
        url: with its version, such as "http://127.0.0.1:8000/v1".
        model: the name to ask for; "" is the first of `URL/models`.
        extras: beyond OpenAI's fields, what vLLM understands or what jaxserve does, which gives
          outputs of exact lengths; the two differ in whose priority runs first.
        vocab_size, special_ids: of the model, which such an endpoint does not tell.
        """
        self._url = url.rstrip("/")
        self._model = model
        self._api = api
        self._extras = extras
        self._vocab_size = vocab_size
        self._special_ids = special_ids
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )
        self._scraper = None if metrics_url is None else Scraper(metrics_url)

    async def describe(self) -> TargetFacts:
        try:
            response = await self._client.get(f"{self._url}/models")
            response.raise_for_status()
            models = response.json()["data"]
            names = [str(model["id"]) for model in models]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise TargetError(
                f"{self._url}/models does not list models: {_say(error)}", outcome="refused"
            ) from error
        if self._model and self._model not in names:
            raise TargetError(
                f"model {self._model!r} is not served there, but {', '.join(names)}",
                outcome="refused",
            )
        if not names:
            raise TargetError(f"{self._url}/models lists no model", outcome="refused")
        self._model = self._model or names[0]
        longest = next(m.get("max_model_len") for m in models if m["id"] == self._model)
        return TargetFacts(
            backend=f"openai {self._api}",
            model=self._model,
            vocab_size=self._vocab_size,
            special_ids=self._special_ids,
            max_model_tokens=longest if isinstance(longest, int) else 0,
        )

    async def stream(self, ask: Ask, *, left_s: float | None) -> AsyncGenerator[Message | End]:
        """As `Target.stream`. The deadline cannot be told to such a server."""
        path = "completions" if self._api == "completions" else "chat/completions"
        body = self._build_body(ask)
        headers = {"X-Request-Id": ask.request_id}
        reading = _Reading(is_chat=self._api == "chat")
        try:
            async with self._client.stream(
                "POST", f"{self._url}/{path}", json=body, headers=headers
            ) as response:
                await _check_status(response)
                events = EventReader()
                contents = response.aiter_bytes()
                while not reading.is_done and (content := await anext(contents, b"")):
                    for text in events.feed(content):
                        if (message := reading.take(text)) is not None:
                            yield message
                end = reading.end()
                await _finish_body(contents)
        except httpx.ConnectError as error:
            raise TargetError(f"no connection: {_say(error)}", outcome="refused") from error
        except httpx.TimeoutException as error:
            raise TargetError(f"no connection in time: {_say(error)}", outcome="refused") from error
        except httpx.HTTPError as error:
            raise TargetError(f"the connection broke: {_say(error)}", outcome="failed") from error
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise TargetError(
                f"the stream is not OpenAI's: {_say(error)}", outcome="failed"
            ) from error
        yield end

    async def read_metrics(self) -> Snapshot | None:
        return await self._scraper.read() if self._scraper else None

    async def read_levels(self) -> Levels:
        return levels_of(await self.read_metrics())

    async def close(self) -> None:
        await self._client.aclose()
        if self._scraper is not None:
            await self._scraper.close()

    def _build_body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._api == "completions":
            body["prompt"] = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        elif isinstance(ask.prompt, str):
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            raise ConfigError(
                "chat takes text, but the workload's prompts are token ids; use completions, or "
                "name the model's tokenizer, so that they can be made text"
            )
        allowed = PLAIN | (VLLM if self._extras != "none" else frozenset())
        if unknown := sorted(ask.sampling.keys() - allowed):
            raise ConfigError(
                f"{', '.join(unknown)}: not of OpenAI's API; --extras vllm or jaxserve sends it to "
                "servers that take it"
            )
        body |= ask.sampling
        if self._extras != "none":
            body["stream_options"]["continuous_usage_stats"] = True
            body["return_token_ids"] = True
            if ask.priority:
                # in vLLM lower runs first
                body["priority"] = -ask.priority if self._extras == "vllm" else ask.priority
        elif ask.priority:
            raise ConfigError("priority: not of OpenAI's API; --extras vllm or jaxserve sends it")
        return body


async def _finish_body(contents: AsyncIterator[bytes]) -> None:
    """Reads what follows the last event, so that the connection can be used again; a server that
    keeps the body open is not waited for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_BYTES_S):
            async for _ in contents:
                pass


class _Reading:
    """What the events of one stream have said so far.

    Attributes:
      is_done: the stream has said that nothing follows.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self.is_done = False
        self._is_chat = is_chat
        self._finish_reason = ""
        self._usage: Mapping[str, Any] = {}
        self._num_told = 0  # output tokens of the messages that told theirs

    def take(self, text: str) -> Message | None:
        """Returns the event's part of the output, if it has one."""
        if text.strip() == "[DONE]":
            self.is_done = True
            return None
        event = json.loads(text)
        if error := event.get("error"):
            raise TargetError(f"the stream says {_shorten(error)}", outcome="failed")
        usage = event.get("usage")
        if usage:
            self._usage = usage
        choices = event.get("choices") or ()
        if not choices:
            return None
        choice = choices[0]
        self._finish_reason = str(choice.get("finish_reason") or self._finish_reason)
        content = self._text_of(choice)
        num_tokens = self._count(choice, usage)
        if num_tokens is None and self._says_nothing(choice, content):
            return None
        return Message(num_tokens=num_tokens, has_text=bool(content))

    def end(self) -> End:
        """Returns the end.

        Raises:
          TargetError: the stream broke off before it.
          ValueError, AttributeError: its usage is none.
        """
        if not self._finish_reason:
            raise TargetError("the stream stopped before its end", outcome="failed")
        details = self._usage.get("prompt_tokens_details") or {}
        return End(
            finish_reason=self._finish_reason,
            prompt_tokens=_number(self._usage, "prompt_tokens"),
            output_tokens=_number(self._usage, "completion_tokens"),
            cached_prompt_tokens=_number(details, "cached_tokens"),
        )

    def _text_of(self, choice: Mapping[str, Any]) -> str:
        if not self._is_chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        parts = (delta.get(name) for name in ("content", "reasoning_content", "reasoning"))
        return "".join(part for part in parts if part)

    def _count(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> int | None:
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list):
            self._num_told += len(token_ids)
            return len(token_ids)
        told = _number(usage, "completion_tokens") if usage else None
        if told is None:
            return None
        new = max(0, told - self._num_told)  # a count that falls took nothing back
        self._num_told += new
        return new

    def _says_nothing(self, choice: Mapping[str, Any], content: str) -> bool:
        """The role in front of a chat, and an end without text, are no part of the output."""
        if content:
            return False
        is_role = "role" in (choice.get("delta") or {})
        return is_role or bool(choice.get("finish_reason"))


def _number(usage: Mapping[str, Any], name: str) -> int | None:
    """Returns a count of tokens; None where it is not told.

    Raises:
      ValueError: it is something else.
    """
    value = usage.get(name)
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"usage.{name} is {_shorten(value)}")
    return int(value)


async def _check_status(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    body = (await response.aread()).decode(errors="replace")
    outcome: Literal["refused", "failed", "timed_out"] = "failed"
    if response.status_code in LATE_STATUS:
        outcome = "timed_out"
    elif response.status_code in REFUSED_STATUS:
        outcome = "refused"
    raise TargetError(f"HTTP {response.status_code}: {_shorten(body)}", outcome=outcome)


def _shorten(what: object) -> str:
    text = " ".join(str(what).split())
    return text if len(text) <= ERROR_CHARS else f"{text[:ERROR_CHARS]}…"


def _say(error: Exception) -> str:
    return _shorten(error) or type(error).__name__
