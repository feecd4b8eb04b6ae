"""Turns what a caller asks into the grammar engine's language, and refuses what cannot be kept."""

import json
import re
from collections.abc import Mapping
from typing import Final

import llguidance

from jaxserve.errors import BadGrammarError
from jaxserve.request import StructuredOutput
from jaxserve.text.json_schemas import narrow_formats

FIELDS: Final[Mapping[str, str]] = {
    "json_schema": "structured_output.json_schema",
    "json_object": "structured_output.json_object",
    "regex": "structured_output.regex",
    "choice": "structured_output.choice",
    "lark": "structured_output.lark_grammar",
}
# Between two parts of a JSON text: at most two spaces, or one new line and its indent. A model
# that likes white space would else write it until its tokens are spent.
WHITE_SPACE: Final = r"[ \t]{1,2}|\r?\n[ \t]{0,32}"
# Tokens that the grammar leaves no choice in are drawn like the others. Forcing the tokenizer's
# own spelling of such a text costs a tokenization of all of it at each of its tokens.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'
OWN_KEY: Final = "x-guidance"
# How a JSON text may be laid out and spelled. "\u00e9" for "é" is allowed, as JSON does.
JSON_STYLE: Final[Mapping[str, object]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "json_allow_general_unicode_escapes": True,
}
_QUOTED: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"'  # a string
    r"|/(?![/*])(?:\\.|[^/\\\n])+/"  # a regular expression
    r"|(?://|#)[^\n]*"  # a comment
)
# Attributes of Lark rules that act on the sampler or hide text, neither of which happens here.
_RULE_OPTION: Final = re.compile(r"\[[^\[\]\n]*\b(temperature|stop|stop_capture)\s*=")


def build_source(asked: StructuredOutput, *, max_bytes: int) -> str:
    """Returns the grammar as one text, the same for the same request.

    Raises:
      BadGrammarError: too large, not readable, or it asks for what is not supported.
    """
    _check_size(asked, max_bytes)
    field = asked.field or FIELDS[asked.kind]
    match asked.kind:
        case "json_object":
            return _join({"type": "object"})
        case "json_schema":
            return _join(_read_schema(asked.text, field))
        case "regex":
            return _wrap(_regex_rule(asked.text))
        case "choice":
            return _wrap(_choice_rule(asked.choices, field))
        case "lark":
            _check_lark(asked.text, field)
            return _wrap(asked.text)


def _check_size(asked: StructuredOutput, max_bytes: int) -> None:
    field = asked.field or FIELDS[asked.kind]
    try:
        num_bytes = sum(len(text.encode()) + 1 for text in asked.choices) + len(asked.text.encode())
    except UnicodeEncodeError:
        raise BadGrammarError(
            f"{field} holds a lone surrogate, but must be valid Unicode; repair the text",
            field=field,
        ) from None
    if num_bytes > max_bytes:
        raise BadGrammarError(
            f"{field} is {num_bytes} bytes, but this server's limit is {max_bytes}; shorten it",
            field=field,
        )


def _wrap(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark + _OPTIONS}]})


def _join(schema: Mapping[str, object]) -> str:
    """Returns a schema behind a start rule that carries the options."""
    parts = [
        {"lark_grammar": "start: @schema" + _OPTIONS},
        {"name": "schema", "json_schema": {**schema, OWN_KEY: JSON_STYLE}},
    ]
    return json.dumps({"grammars": parts})


def _read_schema(text: str, field: str) -> Mapping[str, object]:
    try:
        schema = narrow_formats(json.loads(text))
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise BadGrammarError(f"the JSON Schema is {what}; repair it", field=field) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        what = "allows nothing" if schema is False else "is not an object"
        raise BadGrammarError(f"the JSON Schema {what}; send a schema object", field=field)
    if OWN_KEY in schema:
        raise BadGrammarError(
            f"the JSON Schema has the key {OWN_KEY!r}, which is not supported; leave it out",
            field=field,
        )
    return schema


def _regex_rule(text: str) -> str:
    return f"start: /{llguidance.regex_to_lark(text, '')}/" if text else 'start: ""'


def _choice_rule(choices: tuple[str, ...], field: str) -> str:
    if not choices:
        raise BadGrammarError(
            "choice is empty, but must have at least one text; add it", field=field
        )
    # one terminal, so that texts with a common start cost no more than one
    texts = " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
    return f"start: CHOICE\nCHOICE: {texts}"


def _check_lark(text: str, field: str) -> None:
    if found := _RULE_OPTION.search(_QUOTED.sub('""', text)):
        raise BadGrammarError(
            f"the grammar has the rule option {found[1]!r}, which is not supported; leave it out, "
            "or write suffix= for stop=",
            field=field,
        )
