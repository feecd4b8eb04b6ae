"""The Python API: a model in this process, prompts in, completions out."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Self

from jaxserve.config import Config, load_config
from jaxserve.engine import (
    Delta,
    Engine,
    Finished,
    ServedModel,
    Stream,
    Timings,
    Tokenizer,
    Usage,
)
from jaxserve.engine.fields import refusal
from jaxserve.engine.limits import merge_sampling
from jaxserve.engine.start import Progress, load_engine
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)

Prompt = str | Sequence[int] | ChatPrompt


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


class LLM:
    """A loaded model with its engine thread; close it, or use it in a `with` block.

        with jaxserve.LLM() as llm:
            print(llm.generate("Name three rivers.", chat=True)[0].text)

    Any thread may call `generate`; what different threads ask runs in one batch.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        config: Config | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Loads weights and compiles all programs, or reads them from the cache.

        Args:
          model: a built-in name, a .gguf file, or a Hugging Face folder.
          config: None takes the defaults and the environment, as the commands do.
          progress: called with a phase, the parts of it that are done, and all of them.

        Raises:
          CheckpointError, ConfigError, CapacityError: as `load_engine`.
        """
        self._engine = load_engine(model, config or load_config(), progress=progress)
        self._engine.start()

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """Returns an LLM that owns a started engine, wherever that came from."""
        llm = cls.__new__(cls)
        llm._engine = engine
        return llm

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def model(self) -> ServedModel:
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Returns one completion for each prompt, in their order.

        Any number of prompts is taken; they wait their turn here when the engine's queue is full.

        Args:
          prompts: a text, token ids, or a conversation; or a list of them.
          params: None takes the model's own defaults.
          chat: texts are a user's message, rendered by the model's chat template.
          progress: called with prompts done and prompts in all.

        Raises:
          RequestError: a prompt or a parameter is not allowed, or a request failed; the others
            are cancelled.
          EngineDeadError: the engine failed.
        """
        requests = [
            GenerationRequest(prompt=_as_prompt(prompt, chat=chat), sampling=sampling)
            for sampling in [params or merge_sampling({}, self.model.sampling_defaults)]
            for prompt in _as_list(prompts)
        ]
        done: list[Completion] = []
        streams: collections.deque[Stream] = collections.deque()
        try:
            for request in requests:
                while (stream := self._try_submit(request, is_alone=not streams)) is None:
                    done.append(_gather(streams.popleft()))
                    _report(progress, len(done), len(requests))
                streams.append(stream)
            while streams:
                done.append(_gather(streams.popleft()))
                _report(progress, len(done), len(requests))
        finally:
            for stream in streams:
                stream.cancel()
        return done

    def close(self) -> None:
        """Stops the engine; requests still running end with an error. Twice is as once."""
        self._engine.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _try_submit(self, request: GenerationRequest, *, is_alone: bool) -> Stream | None:
        """Returns its stream, or None where one of ours has to end first."""
        try:
            return self._engine.submit(request)
        except QueueFullError:
            if is_alone:  # the queue is full of somebody else's
                raise
            return None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | ChatPrompt):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise refusal(prompts, "prompts", "text, token ids, a conversation, or a list of them")
    parts = list(prompts)  # once: it may be a generator
    are_ids = [isinstance(part, Integral) for part in parts]
    if any(are_ids) and not all(are_ids):
        raise InvalidRequestError(
            "prompts holds both token ids and prompts; give one prompt, or a list of prompts",
            field="prompts",
        )
    return [parts] if any(are_ids) else parts  # type: ignore[list-item, return-value]  # one kind


def _as_prompt(prompt: Prompt, *, chat: bool) -> str | tuple[int, ...] | ChatPrompt:
    match prompt:
        case str() if chat:
            return ChatPrompt(messages=(ChatMessage(role="user", content=prompt),))
        case str() | ChatPrompt():
            return prompt
        case bytes() | Mapping():
            raise refusal(prompt, "prompt", "text, token ids or a conversation")
        case Iterable():
            return tuple(prompt)
    raise refusal(prompt, "prompt", "text, token ids or a conversation")


def _gather(stream: Stream) -> Completion:
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


def _report(progress: Callable[[int, int], None] | None, num_done: int, num_all: int) -> None:
    if progress is not None:
        progress(num_done, num_all)
