"""Turns output token ids into text piece by piece."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Final

from jaxserve.text.tokenizer import Tokenizer

# Before each special token that is kept: half a surrogate pair, which no bytes decode to. So what a
# token says is told from text that spells it.
SPECIAL_MARK: Final = "\udc00"


class Detokenizer:
    """The text of one output, released as soon as its bytes are complete.

    Every piece is valid text: the bytes of a character that is not complete yet are held, and
    `flush` gives U+FFFD for what never was completed. All pieces joined equal the one-shot decode
    of all ids. The prompt's text plays no part, so nothing of it can appear. Work is constant a
    token: a token's bytes do not depend on its neighbours.

    A sentencepiece vocabulary writes the space before a word into the word, and `Tokenizer.decode`
    drops the first one, because an encoded text begins with it. An output continues its prompt's
    text, so here that space stays; after a prompt without any text (BOS alone) it goes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        kept_special_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] | None = None,
    ) -> None:
        """Args:
        kept_special_ids: are text even where special tokens are skipped, each after SPECIAL_MARK.
        prompt: the ids that the output continues; None if they are some text.
        """
        self._tokenizer = tokenizer
        opens_text = prompt is not None and not tokenizer.has_text(prompt)
        self._opens_with = b" " if opens_text and tokenizer.strips_first_space else b""
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._marked = kept_special_ids
        self._skipped = skipped - kept_special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._separator = b""
        self._is_joined = not (kept_special_ids or tokenizer.separator)  # bytes behind bytes

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these ids complete; unknown ids give none."""
        if self._is_joined and not self._opens_with:  # as nearly always
            skipped, spell = self._skipped, self._tokenizer.token_bytes
            return self._decoder.decode(b"".join([spell(i) for i in token_ids if i not in skipped]))
        texts: list[str] = []
        pieces: list[bytes] = []
        for token_id in token_ids:
            piece = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
            if piece:
                piece, self._opens_with = piece.removeprefix(self._opens_with), b""
                pieces.append(self._separator)
                if token_id in self._marked:
                    texts += (self._decoder.decode(b"".join(pieces), final=True), SPECIAL_MARK)
                    pieces = []
                pieces.append(piece)
                self._separator = self._tokenizer.separator
        return "".join([*texts, self._decoder.decode(b"".join(pieces))])

    def flush(self) -> str:
        """Returns U+FFFD for bytes still held; the output ends here."""
        return self._decoder.decode(b"", final=True)
