"""The Python API: a model in this process, prompts in, completions out."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Final, Self

from jaxserve.config import Config, load_config
from jaxserve.engine import Completion, Engine, ServedModel, Stream, Tokenizer, run_in_order
from jaxserve.engine.fields import refusal
from jaxserve.engine.limits import merge_sampling
from jaxserve.engine.start import Progress, load_engine
from jaxserve.errors import InvalidRequestError, RequestError
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SamplingParams,
    StructuredOutput,
)

__all__ = ["LLM", "Completion", "Prompt", "as_own_reader"]

WEEK_S: Final = 7 * 24 * 3600.0
Prompt = str | Sequence[int] | ChatPrompt


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
        limits = as_own_reader(config or load_config())
        self._engine = load_engine(model, limits, progress=progress)
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
        structured_output: StructuredOutput | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Returns one completion for each prompt, in their order, each with as many choices as
        `params` asks for.

        Any number of prompts is taken; they wait their turn here when the engine's queue is full.

        Args:
          prompts: a text, token ids, or a conversation; or a list of them.
          params: None takes the model's own defaults.
          chat: texts are a user's message, rendered by the model's chat template.
          structured_output: the form of each output; None is free.
          progress: called with prompts done and prompts in all.

        Raises:
          RequestError: a prompt or a parameter is not allowed, or a request failed; the others
            are cancelled.
          EngineDeadError: the engine failed.
        """
        sampling = self._sampling(params)
        requests = [
            GenerationRequest(
                prompt=_as_prompt(prompt, chat=chat),
                sampling=sampling,
                structured_output=structured_output,
            )
            for prompt in _as_list(prompts)
        ]
        done: list[Completion] = []
        with contextlib.closing(self.generate_each(requests)) as results:
            for result in results:
                if isinstance(result, RequestError):
                    raise result
                done.append(result)
                _report(progress, len(done), len(requests))
        return done

    def generate_each(
        self, requests: Iterable[GenerationRequest | RequestError]
    ) -> Generator[Completion | RequestError]:
        """Yields one result for each request, in their order; a request's own error is its result.

        For any number of requests, each with parameters of its own: they are drawn from the
        iterable as room comes up, and whoever stops reading cancels the rest. An error among
        them comes out in its place.

        Raises:
          NotServingError, EngineDeadError: the engine stopped or failed.
        """
        return run_in_order(self._engine, requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        structured_output: StructuredOutput | None = None,
    ) -> Stream:
        """Returns one prompt's events as they come: `Started`, `Delta`s, `Finished`; of several
        choices all but the last end with a `ChoiceFinished`.

        Raises:
          RequestError: the prompt or a parameter is not allowed.
        """
        request = GenerationRequest(
            prompt=_as_prompt(prompt, chat=chat),
            sampling=self._sampling(params),
            structured_output=structured_output,
        )
        return self._engine.submit(request)

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

    def _sampling(self, params: SamplingParams | None) -> SamplingParams:
        return params or merge_sampling({}, self.model.sampling_defaults)


def as_own_reader(config: Config) -> Config:
    """Returns the configuration without the limits that guard a server from slow or lost clients.

    Here the caller waits for what it sent itself, however long the queue is, and reads each output
    at its end. A limit that was set on purpose stays.
    """
    wide = {
        "queue_timeout_s": WEEK_S,
        "stream_buffer_bytes": 1 << 30,
        "total_buffer_bytes": 1 << 34,
    }
    unset = {key: value for key, value in wide.items() if key not in config.limits.model_fields_set}
    return config.model_copy(update={"limits": config.limits.model_copy(update=unset)})


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


def _report(progress: Callable[[int, int], None] | None, num_done: int, num_all: int) -> None:
    if progress is not None:
        progress(num_done, num_all)
