"""Outputs read in one piece or in many, and what comes of them put together for comparing."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from jaxserve.text.chat_output import CallDelta, ContentDelta, OutputDelta, ReasoningDelta
from jaxserve.text.chat_output.parsers import Parsers

TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "s": {"type": "string"},
                    "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "g.h-1"}},
)

# ("content", text), ("reasoning", text), or ("call", name, arguments)
Part = tuple[str, ...]


def read(
    text: str,
    tool: str = "",
    *,
    cuts: Iterable[int] = (),
    reasoning: str = "",
    tail: str = "",
) -> list[Part]:
    """Returns an output's parts; pushed in pieces that end at `cuts`."""
    numbers = itertools.count()
    output = Parsers(tool=tool, reasoning=reasoning).open(
        tools=TOOLS, tail=tail, make_id=lambda: f"id{next(numbers)}"
    )
    deltas: list[OutputDelta] = []
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        deltas += output.push(text[start:end])
    return join([*deltas, *output.flush()])


def join(deltas: Sequence[OutputDelta]) -> list[Part]:
    """Returns deltas put together, as a client does; ids and indices must be in order."""
    parts: list[Part] = []
    num_calls = 0
    for delta in deltas:
        match delta:
            case ContentDelta(text=text) | ReasoningDelta(text=text):
                kind = "content" if isinstance(delta, ContentDelta) else "reasoning"
                assert text, "an empty delta says nothing"
                before = parts.pop()[1] if parts and parts[-1][0] == kind else ""
                parts.append((kind, before + text))
            case CallDelta(id="", name=""):
                assert delta.arguments, "an empty delta says nothing"
                assert delta.index == num_calls - 1, "arguments of the newest call"
                at = max(n for n, part in enumerate(parts) if part[0] == "call")
                parts[at] = (*parts[at][:2], parts[at][2] + delta.arguments)
            case CallDelta():
                assert (delta.index, delta.id) == (num_calls, f"id{num_calls}")
                num_calls += 1
                parts.append(("call", delta.name, delta.arguments))
    return parts


def random_cuts(text: str, seed: int, num: int) -> Iterator[list[int]]:
    """Yields places to cut a text at: after every character, and `num` random choices."""
    yield list(range(1, len(text)))
    draw = random.Random(seed)
    for _ in range(num):
        yield sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 8)))
