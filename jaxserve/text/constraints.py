"""What tokens an output may take next: a grammar, allowed ids and bad words together."""

import copy
import threading
from collections.abc import Collection, Sequence, Set
from typing import Final

import llguidance
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

    Attributes:
      num_words: of a mask.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
        max_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        """Args:
        vocab_size: ids the model can give; the tokenizer may know more, or fewer.
        max_bytes: UTF-8 of a grammar.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.num_words = -(-vocab_size // WORD_BITS)
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
        # no other can come, and a mask has no bits for it
        words = frozenset(word for word in words if max(word) < self._vocab_size)
        return Constraint(
            allowed=self._read_allowed(sampling, eos_ids=eos_ids, end_ids=end_ids),
            eos=self._mask(eos_ids),
            not_ends=~self._mask(end_ids),
            min_tokens=sampling.min_tokens,
            bad_words=BadWords(words) if words else None,
            grammar=None if structured is None else self._open_grammar(structured),
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
        return build_mask(ids, self.num_words)


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
        everything: TokenMask,
    ) -> None:
        """Args:
        allowed: all that may ever come, what ends the output too.
        everything: of the vocabulary.
        eos: nothing set where EOS does not end the output.
        not_ends: all but what ends the output.
        """
        self._eos, self._not_ends, self._min_tokens = eos, not_ends, min_tokens
        self._bad_words, self._grammar = bad_words, grammar
        self._plain, self._allowed = allowed, allowed.copy()
        if bad_words is not None:
            _clear(self._allowed, bad_words.always)
        self._is_grammar_alone = bad_words is None and allowed is everything
        self._num_tokens = 0
        self._tail: list[int] = []

    def fork(self) -> "Constraint":
        """Returns a copy for another choice with the same output so far."""
        fork = copy.copy(self)
        fork._grammar = None if self._grammar is None else self._grammar.fork()
        fork._tail = list(self._tail)
        return fork

    def read(self, output: Sequence[int]) -> None:
        """Read what the output has got since the last time.

        Args:
          output: all of it.

        Raises:
          BadGrammarError: the grammar costs too much to follow; the request cannot go on.
        """
        token_ids = output[self._num_tokens :]
        self._num_tokens += len(token_ids)
        if self._bad_words is not None:
            self._tail += token_ids
            del self._tail[: max(0, len(self._tail) - self._bad_words.num_needed)]
        if self._grammar is not None:
            self._grammar.read(token_ids)

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        """What is to fill a mask before `finish`; None where nothing is."""
        grammar = self._grammar
        return None if grammar is None or grammar.is_ended else grammar.matcher

    def fill(self, mask_V: TokenMask) -> None:
        """Write what may come next, at least one token.

        Raises:
          BadGrammarError: the grammar costs too much to follow; the request cannot go on.
        """
        if (matcher := self.matcher) is not None:
            matcher.unsafe_compute_mask_ptr(mask_V.ctypes.data, mask_V.nbytes)
        self.finish(mask_V)

    def finish(self, mask_V: TokenMask) -> None:
        """Do the rest of `fill`: the matcher has filled the mask, where there is one.

        Raises:
          BadGrammarError: as `fill`.
        """
        grammar = self._grammar
        if grammar is None:
            mask_V[:] = self._allowed
        elif grammar.is_ended:
            mask_V[:] = self._eos
            return
        else:
            grammar.mend(mask_V)
            if self._is_grammar_alone:
                return
            np.bitwise_and(mask_V, self._allowed, out=mask_V)
        if self._bad_words is not None:
            _clear(mask_V, self._bad_words.find_banned(self._tail))
        if not self._has_choice(mask_V):
            mask_V[:] = self._eos if self._may_end and self._eos.any() else self._plain

    def charge(self, seconds: float) -> None:
        """Take in what `read` and `fill` took for a token, of a core.

        Raises:
          BadGrammarError: the grammar costs too much to follow; the request cannot go on.
        """
        if self._grammar is not None:
            self._grammar.charge(seconds)

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
