"""One output's place in its grammar: what may come next."""

import copy
from collections.abc import Collection
from typing import Final

from jaxserve.errors import BadGrammarError
from jaxserve.plan import TokenMask
from jaxserve.text.grammar_compiler import GrammarCompiler, explain

MAX_ANEW_S: Final = 0.05  # the engine's thread waits for it


class Grammar:
    """A matcher that has read the output so far; one thread.

    Copies of a matcher share the states of their lexer, whose number is bounded. Where a grammar
    that others used before meets that bound, it is compiled anew and reads the output again; one
    that meets it alone is too complex, and so is one that takes long to compile.
    """

    def __init__(
        self, compiler: GrammarCompiler, source: str, *, field: str, eos_ids: Collection[int]
    ) -> None:
        """Raises:
        BadGrammarError, QueueFullError: as `GrammarCompiler.compile`.
        """
        self._compiler, self._source, self._field = compiler, source, field
        self._eos_ids = frozenset(eos_ids)
        self._compiled = compiler.compile(source, field=field)
        self._matcher = self._compiled.matcher.deep_copy()
        self._output: list[int] = []
        self.is_ended = False

    def fork(self) -> "Grammar":
        """Returns a copy that goes on by itself."""
        fork = copy.copy(self)
        fork._matcher = self._matcher.deep_copy()
        fork._output = list(self._output)
        return fork

    def advance(self, token_id: int) -> None:
        """Read a token of the output.

        Raises:
          BadGrammarError: the token does not fit, or reading it costs too much.
        """
        if token_id in self._eos_ids:
            self.is_ended = True
            return
        self._output.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._start_anew()

    def fill(self, words: TokenMask) -> None:
        """Write which tokens may come next, EOS where the output is complete; never nothing.

        Args:
          words: as many as the vocabulary needs without padding.

        Raises:
          BadGrammarError: nothing can come next, or finding out costs too much.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._start_anew()
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                raise self._refusal()

    def _start_anew(self) -> None:
        self._compiler.forget(self._source)  # the next request shall not meet the same bound
        if not self._compiled.is_shared or self._compiled.compile_s > MAX_ANEW_S:
            raise self._refusal()
        self._compiled = self._compiler.compile_anew(self._source)
        self._matcher = self._compiled.matcher.deep_copy()
        if not self._matcher.consume_tokens(self._output):
            raise self._refusal()

    def _refusal(self) -> BadGrammarError:
        return BadGrammarError(explain(self._matcher.get_error()), field=self._field)
