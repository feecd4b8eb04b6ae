"""The model's vocabulary as the grammar engine needs it: the bytes of each token."""

from collections.abc import Collection, Sequence
from typing import Final

import llguidance

from jaxserve.errors import UnsupportedError
from jaxserve.text.tokenizer import Tokenizer

_SPECIAL_MARK: Final = b"\xff"  # llguidance takes a longer token that begins with it for special


class _Words:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens: Sequence[bytes] = tokens
        self.special_token_ids: Sequence[int] = special_ids
        self.eos_token_id = eos_id
        self.bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("grammars are built without forced tokens, so nothing is tokenized")


def build_vocabulary(
    tokenizer: Tokenizer, *, eos_ids: Collection[int], vocab_size: int
) -> llguidance.LLTokenizer:
    """Returns the first `vocab_size` ids, which is what the model can give.

    Special tokens, EOS and BOS never match a grammar's text; a grammar may name them. Ids that the
    tokenizer does not know, and tokens without text, match nothing.

    Raises:
      UnsupportedError: the model has no EOS that could end a text, or its tokenizer joins tokens
        by spaces, so that the text is not its tokens' bytes.
    """
    ends = sorted(id for id in eos_ids if 0 <= id < vocab_size)
    if not ends:
        raise UnsupportedError(
            "this model has no end-of-sequence token, which structured output needs to end; "
            "leave structured_output out",
            field="structured_output",
        )
    if tokenizer.separator:
        raise UnsupportedError(
            "this model's tokenizer joins its tokens by spaces, which structured output cannot "
            "follow; leave structured_output out",
            field="structured_output",
        )
    special = {*tokenizer.special_ids, *ends}
    if tokenizer.bos_id is not None:
        special.add(tokenizer.bos_id)
    special = {id for id in special if 0 <= id < vocab_size}
    tokens = [_spell(tokenizer, id, id in special) for id in range(vocab_size)]
    # the stub asks for llguidance's own wrapper, which calls the tokenizer once to try it
    words = _Words(tokens, sorted(special), ends[0])
    return llguidance.LLTokenizer(words, n_vocab=vocab_size, eos_token=ends)  # type: ignore[arg-type]


def _spell(tokenizer: Tokenizer, token_id: int, is_special: bool) -> bytes:
    word = tokenizer.token_bytes(token_id)
    if is_special:
        return word or b"<|token_%d|>" % token_id
    is_marked = len(word) > 1 and word.startswith(_SPECIAL_MARK)
    return b"" if is_marked else word
