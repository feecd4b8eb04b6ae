"""One output's place in its grammar: what may come next."""

import copy
from collections.abc import Collection, Iterable
from typing import Final

from jaxserve.errors import BadGrammarError
from jaxserve.plan import TokenMask
from jaxserve.text.grammar_compiler import GrammarCompiler, explain

MAX_ANEW_S: Final = 0.05  # the engine's thread waits for it
# Seconds of a core. llguidance's limits bound what it builds for a mask, not its searches in that:
# an ambiguous grammar's masks take longer with every token, up to seconds.
TOKEN_S: Final = 0.005
SAVED_S: Final = 0.2


class Grammar:
    """A matcher that has read the output so far; one thread.

    Copies of a matcher share the states of their lexer, whose number is bounded. Where a grammar
    that others used before meets that bound, it is compiled anew and reads the output again; one
    that meets it alone is too complex, and so is one that takes long to compile.

    Each token may take `TOKEN_S` of a core, and of what earlier ones left at most `SAVED_S`: who
    measures it tells by `charge`.

    Attributes:
      matcher: another after each error.
      is_ended: by EOS; there is nothing more to read or to ask then.
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
        self.matcher = self._compiled.matcher.deep_copy()
        self._output: list[int] = []
        self._left_s = SAVED_S
        self.is_ended = False

    def fork(self) -> "Grammar":
        """Returns a copy that goes on by itself."""
        fork = copy.copy(self)
        fork.matcher = self.matcher.deep_copy()
        fork._output = list(self._output)
        return fork

    def read(self, token_ids: Iterable[int]) -> None:
        """Read more of the output; what comes behind an EOS is none of it.

        Raises:
          BadGrammarError: a token does not fit, or the grammar is too complex.
          QueueFullError: as `GrammarCompiler.compile_anew`; so does `mend`.
        """
        for token_id in token_ids:
            if token_id in self._eos_ids:
                self.is_ended = True
            if self.is_ended:
                return
            self._output.append(token_id)
            if not self.matcher.consume_token(token_id):
                self._start_anew()

    def mend(self, mask_V: TokenMask) -> None:
        """Write once more what the matcher was to write, where it met an error with it: which
        tokens may come next, EOS where the output is complete; never nothing.

        Raises:
          BadGrammarError: nothing can come next, or the grammar is too complex.
        """
        if not self.matcher.is_error():
            return
        self._start_anew()
        self.matcher.unsafe_compute_mask_ptr(mask_V.ctypes.data, mask_V.nbytes)
        if self.matcher.is_error():
            raise self._refusal()

    def charge(self, seconds: float) -> None:
        """Take in what a token took: its mask, and reading those before it.

        Raises:
          BadGrammarError: that is too much.
        """
        self._left_s = min(SAVED_S, self._left_s + TOKEN_S) - seconds
        if self._left_s < 0:
            raise BadGrammarError(
                f"the grammar takes more than {TOKEN_S * 1e3:g} ms a token to follow; make it "
                "simpler, above all less ambiguous",
                field=self._field,
            )

    def _start_anew(self) -> None:
        self._compiler.forget(self._source)  # the next request shall not meet the same bound
        if not self._compiled.is_shared or self._compiled.compile_s > MAX_ANEW_S:
            raise self._refusal()
        self._compiled = self._compiler.compile_anew(self._source, field=self._field)
        self.matcher = self._compiled.matcher.deep_copy()
        if not self.matcher.consume_tokens(self._output):
            raise self._refusal()

    def _refusal(self) -> BadGrammarError:
        return BadGrammarError(explain(self.matcher.get_error()), field=self._field)
