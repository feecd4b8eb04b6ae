"""Markup that is safe by construction: plain strings are escaped, only `Markup` passes as it is."""

import html
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Final

# Cc and Cs are not allowed in XML, and cannot all be written as UTF-8; Cf has the characters that
# turn the direction of text or hide in it.
_NOT_SHOWN: Final = frozenset({"Cc", "Cs", "Cf", "Co", "Cn"})
_REPLACEMENT: Final = "\ufffd"


class Markup(str):
    """A string that is markup already."""

    __slots__ = ()


def clean(text: str) -> str:
    """Returns the text on one line, without characters that do not show or cannot be written."""
    return "".join(
        " "
        if character in "\n\r\t"
        else _REPLACEMENT
        if unicodedata.category(character) in _NOT_SHOWN
        else character
        for character in text
    )


def escape(text: str) -> Markup:
    """Returns the text as markup, for content and for quoted attributes; markup as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(clean(text)))


def element(
    name: str, attributes: Mapping[str, str | float] | None = None, *children: str
) -> Markup:
    """Returns an element; well formed as XML and as HTML.

    Args:
      children: text, which is escaped, or markup.
    """
    pairs = "".join(
        f' {key}="{escape(value if isinstance(value, str) else f"{value:g}")}"'
        for key, value in (attributes or {}).items()
    )
    return Markup(f"<{name}{pairs}>{join(children)}</{name}>")


def void(name: str, attributes: Mapping[str, str | float]) -> Markup:
    """Returns an element that has no content, such as `meta` or `line`."""
    return Markup(element(name, attributes).removesuffix(f"></{name}>") + "/>")


def join(parts: Iterable[str]) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def shorten(text: str, width: int) -> str:
    """Returns the text in at most `width` characters; the middle of a longer one is left out."""
    text = clean(text)
    if len(text) <= width:
        return text
    ahead = (width - 1) * 2 // 3
    return f"{text[:ahead]}…{text[len(text) - (width - 1 - ahead) :]}"
