"""Words that are never written: which tokens would complete one."""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from jaxserve.errors import InvalidRequestError
from jaxserve.text.tokenizer import Tokenizer

FIELD: Final = "sampling.bad_words"


def tokenize_bad_words(
    words: Iterable[str], tokenizer: Tokenizer, *, eos_ids: Collection[int]
) -> frozenset[tuple[int, ...]]:
    """Returns each word's tokens inside a text: as it is, and with a space in front.

    Raises:
      InvalidRequestError: a word has no tokens, or is what ends the output.
    """
    found: set[tuple[int, ...]] = set()
    for word in words:
        spellings = {tuple(tokenizer.encode_inside(text)) for text in (word, f" {word}")} - {()}
        if not spellings:
            raise InvalidRequestError(
                f"bad_words holds {word!r}, which has no tokens; leave it out", field=FIELD
            )
        if any(len(ids) == 1 and ids[0] in eos_ids for ids in spellings):
            raise InvalidRequestError(
                f"bad_words holds {word!r}, which is the token that ends the output; leave it out, "
                "or set ignore_eos",
                field=FIELD,
            )
        found |= spellings
    return frozenset(found)


class BadWords:
    """Which tokens would complete a bad word after the output so far. Immutable.

    Attributes:
      always: words of one token.
      num_needed: tokens of the output that can matter.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.always = tuple(sorted({word[0] for word in words if len(word) == 1}))
        by_end: dict[int, list[tuple[tuple[int, ...], int]]] = collections.defaultdict(list)
        for word in words:
            if len(word) > 1:
                by_end[word[-2]].append((tuple(word[:-1]), word[-1]))
        # by the last token that must be there: most tokens end no beginning of a bad word
        self._by_end: Mapping[int, list[tuple[tuple[int, ...], int]]] = dict(by_end)
        self.num_needed = max((len(word) - 1 for word in words), default=0)

    def find_banned(self, output: Sequence[int]) -> list[int]:
        """Returns the tokens that would complete a longer word.

        Args:
          output: at least its last `num_needed` tokens, or all of it.
        """
        if not output:
            return []
        candidates = self._by_end.get(output[-1], ())
        return [last for start, last in candidates if tuple(output[-len(start) :]) == start]
