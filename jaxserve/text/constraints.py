"""What tokens an output may take next: a grammar, allowed ids and bad words together."""

import copy
import threading
from collections.abc import Collection, Set
from typing import Final

import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.plan import TokenMask
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.bad_words import BadWords, tokenize_bad_words
from jaxserve.text.grammar import Grammar
from jaxserve.text.grammar_compiler import GrammarCompiler
from jaxserve.text.grammar_source import FIELDS, build_source
from jaxserve.text.grammar_vocabulary import build_vocabulary
from jaxserve.text.tokenizer import Tokenizer

WORD_BITS: Final = 32
MAX_GRAMMAR_BYTES: Final = 64 << 10


class Constraints:
    """Builds the constraint of a request; one for each engine, for any thread.

    The vocabulary is prepared for grammars when the first one comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
        padded_vocab_size: int,
        max_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        """Args:
        vocab_size: ids the model can give; the tokenizer may know more, or fewer.
        max_bytes: UTF-8 of a grammar.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_words = -(-padded_vocab_size // WORD_BITS)
        self._max_bytes = max_bytes
        self._eos_ids: Final = frozenset(id for id in eos_ids if 0 <= id < vocab_size)
        self._everything: Final = self._mask(range(vocab_size))
        self._compiler: GrammarCompiler | None = None
        self._building = threading.Lock()

    def build(
        self, sampling: SamplingParams, structured: StructuredOutput | None
    ) -> "Constraint | None":
        """Returns what the request's first choice must keep; None where it may write anything.

        Args:
          sampling: checked; with a form, it has neither `min_tokens` nor `ignore_eos`.

        Raises:
          BadGrammarError: the grammar is wrong, matches nothing, or costs too much.
          InvalidRequestError: a bad word is none, or only ends are allowed before `min_tokens`.
          UnsupportedError: a form for a model that has no EOS, or joins its tokens by spaces.
          QueueFullError: others' grammars are being compiled and take long.
        """
        if structured is None and sampling.allowed_token_ids is None and not sampling.bad_words:
            return None
        end_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_ids)}
        eos_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        words = tokenize_bad_words(sampling.bad_words, self._tokenizer, eos_ids=eos_ids)
        return Constraint(
            allowed=self._read_allowed(sampling, eos_ids=eos_ids, end_ids=end_ids),
            eos=self._mask(eos_ids),
            not_ends=~self._mask(end_ids),
            min_tokens=sampling.min_tokens,
            bad_words=BadWords(words) if words else None,
            grammar=None if structured is None else self._open_grammar(structured),
            vocab_size=self._vocab_size,
            everything=self._everything,
        )

    def close(self) -> None:
        """End the process in which new grammars are tried."""
        with self._building:
            if self._compiler is not None:
                self._compiler.close()

    def _open_grammar(self, asked: StructuredOutput) -> Grammar:
        field = asked.field or FIELDS[asked.kind]
        source = build_source(asked, max_bytes=self._max_bytes)
        return Grammar(self._get_compiler(), source, field=field, eos_ids=self._eos_ids)

    def _get_compiler(self) -> GrammarCompiler:
        with self._building:
            if self._compiler is None:
                vocabulary = build_vocabulary(
                    self._tokenizer, eos_ids=self._eos_ids, vocab_size=self._vocab_size
                )
                self._compiler = GrammarCompiler(vocabulary)
            return self._compiler

    def _read_allowed(
        self, sampling: SamplingParams, *, eos_ids: Set[int], end_ids: Set[int]
    ) -> TokenMask:
        """Returns a mask of what may ever come."""
        ids = sampling.allowed_token_ids
        if ids is None:
            return self._everything
        if sampling.min_tokens and end_ids >= set(ids):
            raise InvalidRequestError(
                f"allowed_token_ids holds only tokens that end the output, but min_tokens is "
                f"{sampling.min_tokens}; allow others or lower min_tokens",
                field="sampling.allowed_token_ids",
            )
        return self._mask({*ids, *eos_ids, *sampling.stop_token_ids})

    def _mask(self, ids: Collection[int]) -> TokenMask:
        return build_mask(ids, self._num_words)


class Constraint:
    """What one choice may take next, by its output so far; one thread.

    Where bad words leave nothing, EOS is left; before `min_tokens`, and in a model without EOS,
    bad words give way instead. Allowed ids that leave nothing of a grammar leave EOS too.
    """

    def __init__(
        self,
        *,
        allowed: TokenMask,
        eos: TokenMask,
        not_ends: TokenMask,
        min_tokens: int,
        bad_words: BadWords | None,
        grammar: Grammar | None,
        vocab_size: int,
        everything: TokenMask,
    ) -> None:
        """Args:
        allowed: all that may ever come, what ends the output too; of the padded vocabulary.
        everything: of the vocabulary.
        eos: nothing set where EOS does not end the output.
        not_ends: all but what ends the output.
        """
        self._eos, self._not_ends, self._min_tokens = eos, not_ends, min_tokens
        self._bad_words, self._grammar = bad_words, grammar
        self._plain, self._allowed = allowed, allowed.copy()
        if bad_words is not None:
            _clear(self._allowed, bad_words.always)
        self._num_real_words = -(-vocab_size // WORD_BITS)
        self._is_grammar_alone = bad_words is None and allowed is everything
        self._num_tokens = 0
        self._tail: list[int] = []
        self._set_mask(np.zeros_like(allowed))

    def fork(self) -> "Constraint":
        """Returns a copy for another choice with the same output so far."""
        fork = copy.copy(self)
        fork._grammar = None if self._grammar is None else self._grammar.fork()
        fork._tail = list(self._tail)
        fork._set_mask(np.zeros_like(self._mask))
        return fork

    def _set_mask(self, mask: TokenMask) -> None:
        self._mask = mask
        real = mask[: self._num_real_words]
        self._address, self._num_bytes = real.ctypes.data, real.nbytes  # slow to ask for each time

    def advance(self, token_id: int) -> None:
        """Read a token of the output.

        Raises:
          BadGrammarError: the grammar costs too much to follow; the request cannot go on.
        """
        self._num_tokens += 1
        if self._bad_words is not None:
            self._tail.append(token_id)
            if len(self._tail) > self._bad_words.num_needed:
                del self._tail[0]
        if self._grammar is not None and not self._grammar.is_ended:
            self._grammar.advance(token_id)

    def fill_mask(self) -> TokenMask:
        """Returns what may come next, at least one token; good until the next call.

        Raises:
          BadGrammarError: the grammar costs too much to follow; the request cannot go on.
        """
        mask = self._mask
        if self._grammar is None:
            mask[:] = self._allowed
        elif self._grammar.is_ended:
            mask[:] = self._eos
            return mask
        else:
            mask[:] = 0
            self._grammar.fill(self._address, self._num_bytes)
            if self._is_grammar_alone:
                return mask
            np.bitwise_and(mask, self._allowed, out=mask)
        if self._bad_words is not None:
            _clear(mask, self._bad_words.find_banned(self._tail))
        if not self._has_choice(mask):
            mask[:] = self._eos if self._may_end and self._eos.any() else self._plain
        return mask

    @property
    def _may_end(self) -> bool:
        return self._num_tokens >= self._min_tokens

    def _has_choice(self, mask: TokenMask) -> bool:
        return bool(mask.any() if self._may_end else (mask & self._not_ends).any())


def build_mask(ids: Collection[int], num_words: int) -> TokenMask:
    """Returns words in which the bits of these ids are set."""
    bits = np.zeros(num_words * WORD_BITS, np.uint8)
    bits[np.fromiter(ids, np.int64, len(ids))] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _clear(mask: TokenMask, ids: Collection[int]) -> None:
    for token_id in ids:
        mask[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
