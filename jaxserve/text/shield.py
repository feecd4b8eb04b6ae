"""Keeps a caller's text from turning into special tokens inside a rendered chat.

Before rendering, every character of a special token's string in the caller's text gets a mark
after it:  "a<s>b" → "a<‗s‗>‗b".  Whatever the template then does (trim, cut, join), the marked
characters are found again and encoded as plain text, while the template's own strings are parsed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

# Private-use characters; one that occurs nowhere in the input is taken as the mark.
_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF


class Shield:
    """Marks and finds the special tokens' strings.

    Parts of a special string that could grow together with neighbouring text are marked too: an
    end of the text that begins a special string, and a start that ends one. A lone character is
    left alone, else half of all texts would be cut at "<" or ">".
    """

    def __init__(
        self, special_strings: Iterable[str], normalize: Callable[[str], str] | None = None
    ) -> None:
        """Args:
        normalize: what the tokenizer does to a text before it looks for special strings; a text
          in which that makes new ones is marked whole.
        """
        strings = sorted(set(special_strings), key=lambda text: (-len(text), text))
        heads = {text[:n] for text in strings for n in range(2, len(text))}
        tails = {text[-n:] for text in strings for n in range(2, len(text))}
        parts = [_alternation(strings)] if strings else []
        parts += [f"\\A(?:{_alternation(tails)})", f"(?:{_alternation(heads)})\\Z"] if heads else []
        self._pattern = re.compile("|".join(parts) or r"(?!)")
        self._normalize = normalize

    def pick_mark(self, texts: Iterable[str]) -> str:
        """Returns a private-use character that occurs in none of the texts."""
        used = set("".join(texts))
        return next(chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in used)

    def apply(self, value: object, mark: str) -> object:
        """Returns the JSON value with every string in it marked, keys too."""
        match value:
            case str():
                if self._normalize and self._count(self._normalize(value)) > self._count(value):
                    return _mark_all(value, mark)
                return self._pattern.sub(lambda found: _mark_all(found[0], mark), value)
            case Mapping():
                return {
                    self.apply(key, mark): self.apply(item, mark) for key, item in value.items()
                }
            case list() | tuple():
                return [self.apply(item, mark) for item in value]
        return value

    def _count(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text))


def split_marked(text: str, mark: str) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of a rendered text, marks removed, and whether each is the caller's."""
    position = 0
    for found in re.finditer(f"(?:[^{mark}]?{mark})+", text):
        if found.start() > position:
            yield text[position : found.start()], False
        if plain := found[0].replace(mark, ""):
            yield plain, True
        position = found.end()
    if position < len(text):
        yield text[position:], False


def strings_in(value: object) -> Iterator[str]:
    """Yields every string of a JSON value, keys too."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from strings_in(key)
                yield from strings_in(item)
        case list() | tuple():
            for item in value:
                yield from strings_in(item)


def _mark_all(text: str, mark: str) -> str:
    return "".join(char + mark for char in text)


def _alternation(strings: Iterable[str]) -> str:
    longest_first = sorted(strings, key=lambda text: (-len(text), text))
    return "|".join(re.escape(text) for text in longest_first)
