"""A conversation on its way in and out: its tools and their choice as the engine takes them, and
its output taken apart."""

import dataclasses
from collections.abc import Callable
from typing import Final, Literal

from jaxserve.engine import Engine, limits
from jaxserve.engine.events import ChoiceFinished, Delta, Finished
from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.request import ChatPrompt, FinishReason, GenerationRequest, StructuredOutput
from jaxserve.text.chat_output import ChatOutput, OutputDelta, Parsers, ToolChoice
from jaxserve.text.chat_output.reasoning import REASONING_MARKERS
from jaxserve.text.tool_grammar import Thought, build_tool_form

NUM_TAIL_TOKENS: Final = 16  # of a prompt, in which its template may open the reasoning


class ChatChoices:
    """The output of a conversation's choices, each taken apart by itself."""

    def __init__(self, open_output: Callable[[], ChatOutput]) -> None:
        self._open_output = open_output
        self._outputs: dict[int, ChatOutput] = {}

    def push(self, event: Delta) -> list[OutputDelta]:
        """Returns what an event adds to its choice; often nothing, where it is not decided yet."""
        return self._output(event.index).push(event.text)

    def end(self, event: ChoiceFinished | Finished) -> tuple[list[OutputDelta], FinishReason]:
        """Returns the last of a choice's output, and why it ended.

        A choice that called tools and that a token ended has ended for the calls' sake.
        """
        output = self._output(event.index)
        deltas = output.flush()
        is_token = event.reason is FinishReason.EOS or isinstance(event.matched_stop, int)
        is_calling = is_token and output.has_calls
        return deltas, FinishReason.TOOL_CALLS if is_calling else event.reason

    def _output(self, index: int) -> ChatOutput:
        if index not in self._outputs:
            self._outputs[index] = self._open_output()
        return self._outputs[index]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ChatPlan:
    """One conversation, as it is asked of the engine, and how its output is read.

    Attributes:
      request: to be submitted.
      prompt: its conversation.
    """

    request: GenerationRequest
    prompt: ChatPrompt
    tool_choice: ToolChoice
    parsers: Parsers

    def open(self, token_ids: tuple[int, ...], engine: Engine) -> ChatChoices:
        """Returns the reader of the output.

        Args:
          token_ids: of the rendered prompt.
        """
        tail = read_tail(token_ids, engine)
        return ChatChoices(
            lambda: self.parsers.open(
                tools=self.prompt.tools, tool_choice=self.tool_choice, tail=tail
            )
        )


def plan_chat(
    request: GenerationRequest,
    prompt: ChatPrompt,
    choice: ToolChoice,
    *,
    output: Literal["parsed", "raw"],
    engine: Engine,
) -> ChatPlan:
    """Returns a request for an answer to a conversation as it is to be submitted.

    Args:
      prompt: its tools are checked, and `choice` fits them.
      output: raw leaves the text as the model writes it.

    Raises:
      InvalidRequestError: a call is demanded together with another form of the output.
      UnsupportedError: tools whose calls could not be read, or cannot be demanded.
    """
    parsers = Parsers() if output == "raw" else engine.parsers
    if prompt.tools:
        parsers.check_offer()
    if choice.is_forced:
        form = _build_form(request, prompt, choice, engine)
        request = dataclasses.replace(request, structured_output=form)
    sampling = dataclasses.replace(request.sampling, kept_special_ids=parsers.marker_ids)
    return ChatPlan(
        request=dataclasses.replace(request, sampling=sampling),
        prompt=prompt,
        tool_choice=choice,
        parsers=parsers,
    )


def read_tail(token_ids: tuple[int, ...], engine: Engine) -> str:
    """Returns the end of a rendered prompt, special tokens included."""
    return engine.tokenizer.decode(token_ids[-NUM_TAIL_TOKENS:], skip_special_tokens=False)


def _build_form(
    request: GenerationRequest, prompt: ChatPrompt, choice: ToolChoice, engine: Engine
) -> StructuredOutput:
    """Returns the form of the calls that a request demands."""
    if request.structured_output is not None:
        raise InvalidRequestError(
            "structured_output and a tool_choice that demands a call are both set; leave one of "
            "them out",
            field="structured_output",
        )
    if not engine.parsers.tool:
        raise UnsupportedError(
            "tool_choice demands a call, but the form in which this model writes its calls is not "
            "known; set model.tool_parser, or leave it out",
            field="chat.tool_choice",
        )
    return build_tool_form(
        prompt.tools,
        parser=engine.parsers.tool,
        tokenizer=engine.tokenizer,
        function=choice.function,
        thought=_find_thought(prompt, engine),
    )


def _find_thought(prompt: ChatPrompt, engine: Engine) -> Thought | None:
    """Returns what the model writes before its calls; None where it does not think."""
    if not engine.parsers.reasoning:
        return None
    opening, closing = REASONING_MARKERS[engine.parsers.reasoning]
    token_ids = limits.tokenize(
        prompt, model=engine.model, tokenizer=engine.tokenizer, limits=engine.config.limits
    )
    is_open = read_tail(token_ids, engine).rstrip().endswith(opening)
    return Thought(open=opening, close=closing, is_open=is_open)
