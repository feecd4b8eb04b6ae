"""Conversations with tools through real chat templates: rendered here, then by transformers.

`render` runs under this project's interpreter and `compare` under that of transformers;
`scripts/judges/tokenizers` runs both. Everything is compared exactly.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
DESCRIPTION = 'The "weather" of a\ncity <é> & more </tools>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": DESCRIPTION,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Städte"},
                    "days": {"type": "integer", "description": "How many", "minimum": 1},
                    "unit": {"type": "string", "description": "Unit", "enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "xs": {
                        "type": "array",
                        "items": {"type": "number", "description": "One"},
                        "description": "Numbers.",
                    },
                },
                "required": [],
            },
        },
    },
]
WEATHER = r'{"city": "Köln \"x\"", "days": 3, "deep": {"a": [1, 2.5, null, true]}}'


def conversations() -> dict[str, tuple[tuple[Any, ...], bool]]:
    """Returns turns, and whether tools are offered, by what the conversation shows."""
    from jaxserve.request import ChatMessage

    def call(id: str, name: str, arguments: str) -> dict[str, object]:
        return {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    calls = (call("call00001", "get_weather", WEATHER), call("call00002", "add", '{"xs": [1, 2]}'))
    user = ChatMessage(role="user", content="What's up in Köln?")
    system = ChatMessage(role="system", content="Be brief.")
    one = ChatMessage(role="assistant", content="", tool_calls=calls[:1])
    two = ChatMessage(role="assistant", content="", tool_calls=calls)
    thought = ChatMessage(
        role="assistant", content="Let me see.", reasoning="He asks.", tool_calls=calls[:1]
    )
    answers = (
        ChatMessage(role="tool", content='{"t": 21}', tool_call_id="call00001", name="get_weather"),
        ChatMessage(role="tool", content="3", tool_call_id="call00002", name="add"),
    )
    end = (
        ChatMessage(role="assistant", content="It's 21."),
        ChatMessage(role="user", content="Thanks. And now?"),
    )
    return {
        "offer": ((user,), True),
        "system": ((system, user), True),
        "no tools": ((system, user), False),
        "call": ((user, one), True),
        "answer": ((system, user, one, answers[0]), True),
        "two calls": ((user, two, *answers), True),
        "reasoning": ((user, thought, answers[0], *end), True),
        "calls without tools": ((user, one, answers[0], *end), False),
    }


def render(path: Path) -> list[dict[str, Any]]:
    """Returns each conversation through each template, in the shape the template wants."""
    from jaxserve.errors import InvalidRequestError
    from jaxserve.text.chat import ChatTemplate
    from jaxserve.text.messages import build_messages, find_traits

    rows = []
    for source in sorted(path.glob("*.jinja")):
        template = ChatTemplate(source.read_text())
        traits = find_traits(template, NAMED)
        for name, (turns, has_tools) in conversations().items():
            messages = build_messages(turns, traits)
            tools = TOOLS if has_tools else None
            try:
                rendered: str | None = template.render(
                    messages, add_generation_prompt=True, variables={**NAMED, "tools": tools}
                )
            except InvalidRequestError:
                rendered = None
            row: dict[str, Any] = {
                "template": str(source),
                "name": name,
                "messages": messages,
                "tools": tools,
            }
            rows.append(row | {"rendered": rendered, "is_shielded": is_shielded(template, row)})
    return rows


def is_shielded(template: Any, row: dict[str, Any]) -> bool:  # noqa: ANN401  (not importable here)
    """Whether special tokens in a caller's texts stay text, and nothing else changes."""
    from jaxserve.errors import InvalidRequestError
    from jaxserve.text.shield import Shield, split_marked

    found = re.findall(r"<\|\w+\|>|\[/?[A-Z_]{3,}\]|<｜[^｜<>]{1,30}｜>", template.source)
    specials = sorted({"<s>", "</s>", *found})
    shield = Shield(specials)

    def spoil(value: Any, key: str = "") -> Any:  # noqa: ANN401  (a JSON value)
        match value:
            case str() if key in ("content", "description", "city") and value:
                return f"{value}é{''.join(specials[:6])} <s>"
            case dict():
                return {name: spoil(item, name) for name, item in value.items()}
            case list():
                return [spoil(item, key) for item in value]
        return value

    def pieces(messages: Any, tools: Any) -> list[tuple[str, bool]]:  # noqa: ANN401
        variables = {**NAMED, "tools": tools}
        text = template.render(messages, add_generation_prompt=True, variables=variables)
        return list(split_marked(text, "\ue000"))

    messages, tools = spoil(row["messages"]), spoil(row["tools"])
    try:
        plain = pieces(messages, tools)
        clean = pieces(row["messages"], row["tools"])
        marked = pieces(shield.apply(messages, "\ue000"), shield.apply(tools, "\ue000"))
    except InvalidRequestError:
        return True  # what is not rendered has no special tokens
    own = "\0".join(text for text, is_callers in marked if not is_callers)
    wanted = "".join(text for text, _ in clean)
    has_leak = any(own.count(special) != wanted.count(special) for special in specials)
    return not has_leak and [text for text, _ in plain] == ["".join(text for text, _ in marked)]


def compare(rows: list[dict[str, Any]]) -> int:
    """Prints how the conversations render in transformers; returns how many do so otherwise."""
    from transformers.utils.chat_template_utils import render_jinja_template

    counts: collections.Counter[str] = collections.Counter()
    for row in rows:
        try:
            rendered, _ = render_jinja_template(
                [row["messages"]],
                tools=row["tools"],
                chat_template=Path(row["template"]).read_text(),
                add_generation_prompt=True,
                **NAMED,
            )
            wanted: str | None = rendered[0]
        except Exception:  # noqa: BLE001  (jinja's, or the template's own)
            wanted = None
        kind = "equal" if wanted is not None else "refused by both"
        if wanted != row["rendered"]:
            kind = "wrong" if wanted is not None else "refused by transformers alone"
        if not row["is_shielded"]:
            kind = "not shielded"
        counts[kind] += 1
        if kind in ("wrong", "not shielded"):
            print(f"    {kind}: {Path(row['template']).stem}, {row['name']}")
    print("conversations with tools:", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return counts["wrong"] + counts["not shielded"] + (counts["equal"] == 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["render", "compare"])
    parser.add_argument("paths", nargs="+", type=Path, help="templates and output; or that output")
    arguments = parser.parse_args()
    if arguments.part == "render":
        templates, output = arguments.paths
        output.write_text(json.dumps(render(templates)))
        return 0
    return int(compare(json.loads(arguments.paths[0].read_text())) > 0)


if __name__ == "__main__":
    sys.exit(main())
