"""Which forms a model writes its calls and its reasoning in, and the parser of one output."""

import dataclasses
import itertools
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from jaxserve.errors import UnsupportedError
from jaxserve.text.chat_output import hermes, llama3, mistral, qwen_coder
from jaxserve.text.chat_output.deltas import CallDelta, DeltaSink, OutputDelta
from jaxserve.text.chat_output.json_call import is_object
from jaxserve.text.chat_output.reader import PlainReader, ToolReader
from jaxserve.text.chat_output.reasoning import REASONING_MARKERS, ReasoningReader
from jaxserve.text.chat_output.tools import AUTO, ToolChoice, Tools, parameter_types, tool_names
from jaxserve.text.detokenizer import SPECIAL_MARK
from jaxserve.text.messages import PROBED_ARGUMENTS, PROBED_NAME, PROBED_TOOL
from jaxserve.text.tokenizer import Tokenizer

# What marks calls, by the tool parser's name; in many models these are special tokens.
TOOL_MARKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3": (llama3.TAG,),
    "mistral": (mistral.OPEN, mistral.CALL_ID, mistral.ARGS),
    "qwen_coder": (
        qwen_coder.OPEN,
        qwen_coder.CLOSE,
        qwen_coder.FUNCTION,
        qwen_coder.END_FUNCTION,
        qwen_coder.PARAMETER,
        qwen_coder.END_PARAMETER,
    ),
}
MISTRAL_ID_CHARS: Final = 9  # its templates refuse any other length
PIECE_CHARS: Final = 4096  # a long text is read in pieces: its rest is copied at each call
LLAMA3_TURN: Final = "<|end_header_id|>"
_ID_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Parsers:
    """How a model's output is read.

    Attributes:
      tool: a name of TOOL_MARKERS; empty where calls are not read.
      reasoning: a name of REASONING_MARKERS; empty where it is not read.
      has_tools: the template tells the model of tools.
      is_tool_form_unknown: how the model writes calls could not be told from its template.
      specials: the markers that are special tokens of the model, with their ids. Text that spells
        one is no marker: a caller's words that the model repeats call nothing.
    """

    tool: str = ""
    reasoning: str = ""
    has_tools: bool = True
    is_tool_form_unknown: bool = False
    specials: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def marker_ids(self) -> frozenset[int]:
        """The special tokens that must stay in the text, each after a mark."""
        return frozenset(self.specials.values())

    def check_offer(self) -> None:
        """Raises UnsupportedError where tools could not be told of, or their calls not be read."""
        if not self.has_tools:
            raise UnsupportedError(
                "tools are offered, but this model's chat template has no place for them; leave "
                "them out, or set model.chat_template",
                field="chat.tools",
            )
        if self.is_tool_form_unknown:
            raise UnsupportedError(
                "tools are offered, but the form in which this model writes its calls is not "
                "known; set model.tool_parser (none leaves them in the text), or leave tools out",
                field="chat.tools",
            )

    def make_call_id(self) -> str:
        """Returns an id for a call, in the form that the model's template takes."""
        if self.tool == "mistral":
            return "".join(secrets.choice(_ID_LETTERS) for _ in range(MISTRAL_ID_CHARS))
        return f"call_{secrets.token_hex(12)}"

    def open(
        self,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice = AUTO,
        tail: str = "",
        make_id: Callable[[], str] | None = None,
    ) -> "ChatOutput":
        """Returns the parser of one choice's output.

        Args:
          tools: those that are offered, checked; without any no calls are read.
          tail: the end of the rendered prompt, special tokens included; templates may open the
            reasoning there.
          make_id: of each call; None is `make_call_id`.
        """
        sink = DeltaSink(make_id or self.make_call_id)
        offered = () if tool_choice.mode == "none" else tools
        reader = self._open_tools(sink, offered)
        if not self.reasoning:
            return ChatOutput(sink, reader, None)
        markers = REASONING_MARKERS[self.reasoning]
        is_open = tail.rstrip().endswith(markers[0])
        spelled = (self._spell(markers[0]), self._spell(markers[1]))
        reasoning = ReasoningReader(sink, reader.push, markers=spelled, is_open=is_open)
        return ChatOutput(sink, reader, reasoning)

    def _spell(self, marker: str) -> str:
        return SPECIAL_MARK + marker if marker in self.specials else marker

    def _open_tools(self, sink: DeltaSink, tools: Tools) -> ToolReader:
        if not tools:
            return PlainReader(sink)
        match self.tool:
            case "hermes":
                return hermes.HermesReader(sink, self._spell)
            case "llama3":
                return llama3.Llama3Reader(sink, self._spell, names=frozenset(tool_names(tools)))
            case "mistral":
                return mistral.MistralReader(sink, self._spell)
            case "qwen_coder":
                return qwen_coder.QwenCoderReader(sink, self._spell, types=parameter_types(tools))
        return PlainReader(sink)


class ChatOutput:
    """One choice's output, taken apart as it comes.

    However the text is cut into pieces, the deltas put together are the same.
    """

    def __init__(
        self, sink: DeltaSink, reader: ToolReader, reasoning: ReasoningReader | None
    ) -> None:
        self._sink = sink
        self._reader = reader
        self._reasoning = reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a call was delivered."""
        return self._sink.num_calls > 0

    def push(self, text: str) -> list[OutputDelta]:
        """Takes the next piece of text; returns what is decided by now."""
        push = self._reader.push if self._reasoning is None else self._reasoning.push
        for start in range(0, len(text), PIECE_CHARS):
            push(text[start : start + PIECE_CHARS])
        return self._sink.take()

    def flush(self) -> list[OutputDelta]:
        """Returns what was held back; the output is over."""
        if self._reasoning is not None:
            self._reasoning.flush()
        self._reader.flush()
        return self._sink.take()


def find_parsers(tokenizer: Tokenizer, *, tool: str = "auto", reasoning: str = "auto") -> Parsers:
    """Returns the parsers for a model.

    Args:
      tool: a name of TOOL_MARKERS, "qwen" (which is hermes), "none", or "auto": by what the chat
        template spells.
      reasoning: likewise, of REASONING_MARKERS.
    """
    template = tokenizer.tool_template or tokenizer.chat_template or ""
    found = _find_tool_form(tokenizer.templates.probed_call) if tool == "auto" else ""
    tool_name = {"auto": found, "none": "", "qwen": "hermes"}.get(tool, tool)
    reasoning_name = {"auto": _find_reasoning(template), "none": ""}.get(reasoning, reasoning)
    markers = {*TOOL_MARKERS.get(tool_name, ()), *REASONING_MARKERS.get(reasoning_name, ())}
    return Parsers(
        tool=tool_name,
        reasoning=reasoning_name,
        has_tools=tokenizer.templates.has_tools,
        is_tool_form_unknown=tool == "auto" and not found,
        specials=tokenizer.find_specials(markers),
    )


def _find_tool_form(rendered: str) -> str:
    """Returns the form that reads the probed call in a rendered conversation; empty for none."""
    return next((form for form in TOOL_MARKERS if _reads_call(form, rendered)), "")


def _reads_call(form: str, rendered: str) -> bool:
    if form == "llama3":  # its calls have no marker: they stand where an output begins
        _, _, rendered = rendered.rpartition(LLAMA3_TURN + "\n\n{")
        rendered = "{" + rendered
    elif TOOL_MARKERS[form][0] not in rendered:
        return False
    output = Parsers(tool=form).open(tools=(PROBED_TOOL,))
    parts = [*output.push(rendered), *output.flush()]
    calls = [part for part in parts if isinstance(part, CallDelta)]
    return any(
        opened.name == PROBED_NAME and json.loads(arguments.arguments) == PROBED_ARGUMENTS
        for opened, arguments in itertools.pairwise(calls)
        if is_object(arguments.arguments)
    )


def _find_reasoning(template: str) -> str:
    for name, (opening, closing) in REASONING_MARKERS.items():
        if opening in template or closing in template:
            return name
    return ""
