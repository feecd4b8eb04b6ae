"""The model's vocabulary as the grammar engine needs it: the bytes of each token."""

from collections.abc import Collection

from jaxserve.errors import UnsupportedError
from jaxserve.text.grammar_engine import SPECIAL_MARK, Vocabulary
from jaxserve.text.tokenizer import Tokenizer


def build_vocabulary(
    tokenizer: Tokenizer, *, eos_ids: Collection[int], vocab_size: int
) -> Vocabulary:
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
    tokens = [_spell(tokenizer, id, is_special=id in special) for id in range(vocab_size)]
    return Vocabulary(tokens=tokens, eos_ids=ends)


def _spell(tokenizer: Tokenizer, token_id: int, *, is_special: bool) -> bytes:
    word = tokenizer.token_bytes(token_id)
    return SPECIAL_MARK + (word or b"<|token_%d|>" % token_id) if is_special else word
