"""Calls as Qwen3-Coder and its kin write them: not as JSON, but with tags."""

import enum
import json
import math
import re
from collections.abc import Mapping
from typing import Final

from jaxserve.text.chat_output.deltas import DeltaSink
from jaxserve.text.chat_output.gap import MAX_LAYOUT, Gap, MarkerSearch, split_whitespace
from jaxserve.text.chat_output.json_call import MAX_HELD, MAX_NAME
from jaxserve.text.chat_output.reader import Spell

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_NAME_RUN: Final = re.compile(r"[^<>\s]+")

# Of a function, the JSON types of its parameters; a parameter that is not there is a string.
ParameterTypes = Mapping[str, Mapping[str, frozenset[str]]]


class _Place(enum.Enum):
    GAP = enum.auto()  # outside of calls, or between parameters
    OPENED = enum.auto()  # after <tool_call>
    NAME = enum.auto()  # of a function or a parameter
    VALUE = enum.auto()


class QwenCoderReader:
    """<tool_call><function=f><parameter=x>…</parameter></function></tool_call>

    The arguments are made a JSON object on the way: a string as it comes, any other value when it
    is whole, by the type that the tool's schema gives the parameter. Models forget <tool_call> at
    times, so a function is a call without it too.
    """

    def __init__(self, sink: DeltaSink, spell: Spell, *, types: ParameterTypes) -> None:
        self._sink = sink
        self._types = types
        self._open, self._close = spell(OPEN), spell(CLOSE)
        # what ends a text outside of calls, after a function in its block, and between parameters
        self._in_text = (self._open, FUNCTION)
        self._in_block = (FUNCTION, self._close, self._open)
        self._in_function = (PARAMETER, END_FUNCTION, self._close)
        self._place = _Place.GAP
        self._gap = Gap(sink, self._in_text, is_after_call=False)
        self._held = ""  # what stands before a name, while it may be none
        self._name = ""
        self._is_parameter = False  # what the name is of
        self._function = ""
        self._num_parameters = 0
        self._value: _Value | None = None

    def push(self, text: str) -> None:
        while text:
            match self._place:
                case _Place.GAP:
                    text = self._read_gap(text)
                case _Place.OPENED:
                    text = self._read_opened(text)
                case _Place.NAME:
                    text = self._read_name(text)
                case _Place.VALUE:
                    text = self._read_value(text)

    def flush(self) -> None:
        """The output is over: a call that was not delivered is content."""
        match self._place:
            case _Place.GAP:
                self._gap.flush()
            case _Place.OPENED | _Place.NAME:
                self._sink.add_content(self._held + self._name)
            case _Place.VALUE:
                assert self._value is not None, "it is being read"
                self._value.flush()

    def _read_gap(self, text: str) -> str:
        marker, rest = self._gap.push(text)
        if marker == self._open:
            self._place, self._held, self._name = _Place.OPENED, self._gap.layout + marker, ""
        elif marker in (FUNCTION, PARAMETER):
            self._place, self._held, self._name = _Place.NAME, self._gap.layout + marker, ""
            self._is_parameter = marker == PARAMETER
        elif marker:
            if self._function:  # the end of a block ends its function too
                self._sink.add_arguments("}" if self._num_parameters else "{}")
                self._function = ""
            markers = self._in_text if marker == self._close else self._in_block
            self._go_on(markers, is_after_call=True)
        return rest

    def _read_opened(self, text: str) -> str:
        """Reads what stands between <tool_call> and <function=."""
        text, self._name = self._name + text, ""
        layout, rest = split_whitespace(text)
        if rest.startswith(FUNCTION) and len(layout) <= MAX_LAYOUT:
            self._place, self._held = _Place.NAME, self._held + layout + FUNCTION
            self._is_parameter = False
            return rest[len(FUNCTION) :]
        if FUNCTION.startswith(rest) and len(layout) <= MAX_LAYOUT:
            self._name = text
            return ""
        layout = layout[:MAX_LAYOUT]
        self._sink.add_content(self._held + layout)
        self._go_on(self._in_text)
        return text[len(layout) :]

    def _read_name(self, text: str) -> str:
        run = _NAME_RUN.match(text)
        name = run[0] if run else ""
        taken = name[: MAX_NAME - len(self._name)]
        self._name += taken
        rest = text[len(taken) :]
        if not rest:
            return ""
        if rest[0] != ">" or not self._name:
            self._sink.add_content(self._held + self._name)
            self._go_on(self._in_function if self._is_parameter else self._in_text)
            return rest
        if self._is_parameter:
            self._begin_parameter()
        else:
            self._function, self._num_parameters = self._name, 0
            self._sink.open_call(self._name)
            self._go_on(self._in_function, is_after_call=True)
        return rest[1:]

    def _read_value(self, text: str) -> str:
        assert self._value is not None, "it is being read"
        rest, is_over = self._value.push(text)
        if is_over:
            self._go_on(self._in_function)
        return rest

    def _begin_parameter(self) -> None:
        lead = ", " if self._num_parameters else "{"
        self._sink.add_arguments(f"{lead}{json.dumps(self._name, ensure_ascii=False)}: ")
        self._num_parameters += 1
        types = self._types.get(self._function, {}).get(self._name, frozenset())
        self._place, self._value = _Place.VALUE, _Value(self._sink, types)

    def _go_on(self, markers: tuple[str, ...], *, is_after_call: bool = False) -> None:
        is_after_call = is_after_call or markers is self._in_function
        self._place = _Place.GAP
        self._gap = Gap(self._sink, markers, is_after_call=is_after_call)


class _Value:
    """One parameter's value: a newline at its start and one at its end are layout."""

    def __init__(self, sink: DeltaSink, types: frozenset[str]) -> None:
        self._sink = sink
        self._types = types
        self._search = MarkerSearch(("\n" + END_PARAMETER, END_PARAMETER))
        self._held = ""
        self._is_begun = False
        self._is_text = types <= {"string"}
        self._whole: list[str] = []  # of a value that is no string
        self._num_whole = 0
        if self._is_text:
            sink.add_arguments('"')

    def push(self, text: str) -> tuple[str, bool]:
        """Takes text; returns what follows the value, and whether it is over."""
        text = self._held + text
        at, marker = self._search.find(text)
        cut = at if marker else self._search.held_from(text)
        self._held = "" if marker else text[cut:]
        self._give(text[:cut])
        if marker:
            self._end()
        return text[at + len(marker) :] if marker else "", bool(marker)

    def flush(self) -> None:
        """The output is over in the middle of the value."""
        self._give(self._held)
        if not self._is_text:
            self._sink.add_arguments("".join(self._whole))

    def _give(self, text: str) -> None:
        if text and not self._is_begun:
            self._is_begun = True
            text = text.removeprefix("\n")
        if not self._is_text:
            self._whole.append(text)
            self._num_whole += len(text)
            if self._num_whole <= MAX_HELD:
                return
            self._is_text, text = True, "".join(self._whole)
            self._sink.add_arguments('"')
        self._sink.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end(self) -> None:
        if self._is_text:
            self._sink.add_arguments('"')
        else:
            self._sink.add_arguments(_as_json("".join(self._whole), self._types))


# What models write for Python's sake.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPE_NAMES: Final = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
    (dict, "object"), (type(None), "null"),
)  # fmt: skip


def _as_json(text: str, types: frozenset[str]) -> str:
    """Returns a value of one of the types as it was written, else the text as a string."""
    bare = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(bare, parse_constant=float)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = type_name(value)
    is_wanted = kind in types or (kind == "integer" and "number" in types)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return bare if is_wanted and is_finite else json.dumps(text, ensure_ascii=False)


def type_name(value: object) -> str:
    """Returns a JSON value's type in the words of JSON Schema."""
    return next(name for kind, name in _TYPE_NAMES if isinstance(value, kind))
