"""What llguidance is given, the same in this process and in the one that tries grammars first.

Only light modules are imported here: that process shall start soon.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

import llguidance

# What llguidance may spend. It counts, so a grammar meets the same end on every machine; the
# numbers behind these are in docs/structured.md.
LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=50_000,
    step_lexer_fuel=100_000,
    max_lexer_states=30_000,
    step_max_items=200_000,
    max_items_in_row=4_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # else its work at the start is not counted
    verbose_errors=False,  # they hold the whole grammar
)
SPECIAL_MARK: Final = b"\xff"  # a longer token that begins with it is a special one


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Vocabulary:
    """The bytes of each token by id; a special one is its name after `SPECIAL_MARK`.

    Attributes:
      eos_ids: at least one.
    """

    tokens: Sequence[bytes]
    eos_ids: Sequence[int]


class _Words:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None
    special_token_ids: Sequence[int] = ()  # they are marked

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        """Returns no tokens: no grammar here forces the tokenizer's own spelling of a text."""
        return []


def build_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    # the stub asks for llguidance's own wrapper, which is the same by its attributes
    words: llguidance.TokenizerWrapper = _Words(vocabulary)  # type: ignore[assignment]
    return llguidance.LLTokenizer(
        words, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos_ids)
    )


def open_matcher(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """Returns a matcher at the start, in error where the grammar is wrong or matches nothing."""
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what matches nothing shows here
    return matcher
