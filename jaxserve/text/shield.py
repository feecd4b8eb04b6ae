"""Keeps a caller's text from turning into special tokens inside a rendered chat.

Before rendering, every character of a special token's string in the caller's text gets a mark
after it:  "a<s>b" → "a<‗s‗>‗b".  Whatever the template then does (trim, cut, join), the marked
characters are found again and encoded as plain text, while the template's own strings are parsed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

# Private-use characters; one that occurs nowhere in the input is taken as the mark.
_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


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
        self._strings = frozenset(special_strings)
        self._heads = frozenset(t[:n] for t in self._strings for n in range(2, len(t)))
        self._tails = frozenset(t[-n:] for t in self._strings for n in range(2, len(t)))
        self._normalize = normalize
        # A vocabulary may have thousands of special tokens, so nothing tries them one by one.
        self._starts = _starts_pattern(self._strings)
        self._lengths = _lengths(self._strings)
        self._part_lengths = _lengths(self._heads)

    def pick_mark(self, texts: Iterable[str]) -> str:
        """Returns a private-use character that occurs in none of the texts, nor as an escape."""
        text = "".join(texts)
        used = {*text, *(chr(int(code, 16)) for code in _ESCAPE.findall(text))}
        return next(chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in used)

    def apply(self, value: object, mark: str) -> object:
        """Returns the JSON value with every string in it marked, keys too."""
        match value:
            case str():
                return self._mark(value, mark)
            case Mapping():
                return {
                    self.apply(key, mark): self.apply(item, mark) for key, item in value.items()
                }
            case list() | tuple():
                return [self.apply(item, mark) for item in value]
        return value

    def _mark(self, text: str, mark: str) -> str:
        spans = self._find(text)
        if self._normalize and len(self._find(self._normalize(text))) > len(spans):
            return _mark_all(text, mark)
        pieces, end = [], 0
        for start, stop in spans:
            pieces += [text[end:start], _mark_all(text[max(start, end) : stop], mark)]
            end = max(end, stop)
        return "".join([*pieces, text[end:]])

    def _find(self, text: str) -> list[tuple[int, int]]:
        """Returns the spans to mark, by where they begin but for the last; they may overlap."""
        spans = []
        cuts = (text[:size] for size in self._part_lengths)
        if tail := next((cut for cut in cuts if cut in self._tails), ""):
            spans.append((0, len(tail)))
        for found in self._starts.finditer(text):
            start = found.start()
            cuts = (text[start : start + size] for size in self._lengths)
            if special := next((cut for cut in cuts if cut in self._strings), ""):
                spans.append((start, start + len(special)))
        cuts = (text[-size:] for size in self._part_lengths)
        if head := next((cut for cut in cuts if cut in self._heads), ""):
            spans.append((len(text) - len(head), len(text)))
        return spans


def split_marked(text: str, mark: str) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of a rendered text, marks removed, and whether each is the caller's.

    Some templates write JSON in ASCII: there a mark is an escape.
    """
    text = text.replace(f"\\u{ord(mark):04x}", mark)
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


def _lengths(strings: Iterable[str]) -> list[int]:
    return sorted({len(text) for text in strings}, reverse=True)


def _starts_pattern(strings: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches, and takes none, where the first two characters of one are.

    For "<s>", "<|x|>" and "]": (?=<[s|]|\\]).
    """
    seconds: dict[str, set[str]] = {}
    for text in strings:
        seconds.setdefault(text[0], set()).add(text[1:2])
    parts = [
        re.escape(first)
        if "" in after
        else f"{re.escape(first)}[{re.escape(''.join(sorted(after)))}]"
        for first, after in sorted(seconds.items())
    ]
    return re.compile(f"(?={'|'.join(parts)})" if parts else r"(?!)", re.DOTALL)
