"""Compiles grammars that strangers send, within bounds, and keeps the most recent ones."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Final

import llguidance

from jaxserve.errors import BadGrammarError, QueueFullError
from jaxserve.text.grammar_engine import Vocabulary, build_tokenizer, open_matcher
from jaxserve.text.grammar_trial import Trial

STACK_BYTES: Final = 16 << 20  # four times what the trial's process has
MAX_WAIT_S: Final = 5.0
CACHE_ENTRIES: Final = 16  # each may come to hold 30 MB of lexer states
CACHE_BYTES: Final = 1 << 20
MAX_REFUSED: Final = 256
_TOO_COMPLEX: Final = ("too big", "too large", "too many", "fuel", "toocomplex", "row has")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class CompiledGrammar:
    """A grammar as it was compiled.

    Attributes:
      matcher: stands at the start; copied, never moved.
      compile_s: seconds that it took.
      is_shared: others use it too, and with it the states of its lexer.
    """

    matcher: llguidance.LLMatcher
    compile_s: float
    is_shared: bool = False


class GrammarCompiler:
    """Turns sources into matchers that stand at the start of their grammar; for any thread.

    A new grammar is tried in another process first, one at a time. The most recent ones are kept,
    and so is what was wrong with those that were refused.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self._tokenizer = build_tokenizer(vocabulary)
        self._trial = Trial(vocabulary)
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._kept: collections.OrderedDict[str, CompiledGrammar] = collections.OrderedDict()
        self._refused: collections.OrderedDict[str, str] = collections.OrderedDict()

    def compile(self, source: str, *, field: str) -> CompiledGrammar:
        """Returns a grammar, kept or compiled now; waits for others' compiles.

        Raises:
          BadGrammarError: it is wrong, matches nothing or costs too much.
          QueueFullError: others' grammars are being compiled and take long.
        """
        if (kept := self._find(source, field)) is not None:
            return kept
        if not self._compiling.acquire(timeout=MAX_WAIT_S):
            raise QueueFullError(
                "the server is busy compiling other grammars; try again soon", retry_after_s=2.0
            )
        try:
            kept = self._find(source, field)  # it may have come while this one waited
            return kept or self._compile(source, field)
        finally:
            self._compiling.release()

    def compile_anew(self, source: str, *, field: str) -> CompiledGrammar:
        """Returns a grammar that was compiled before, with a lexer that has no states yet.

        Raises:
          BadGrammarError: it breaks the grammar engine.
          QueueFullError: the system gives no thread for it.
        """
        started = time.monotonic()
        matchers: list[llguidance.LLMatcher] = []
        # llguidance descends a grammar by recursion; what stack callers' threads have is not known
        self._start_thread(lambda: matchers.append(open_matcher(self._tokenizer, source))).join()
        if not matchers:  # the log has the traceback
            raise BadGrammarError("the grammar breaks its compiler; change it", field=field)
        compiled = CompiledGrammar(matcher=matchers[0], compile_s=time.monotonic() - started)
        self._keep(source, compiled)
        return compiled

    def forget(self, source: str) -> None:
        """Compile it anew when it is asked for next."""
        with self._lock:
            self._kept.pop(source, None)

    def close(self) -> None:
        """End the process of the trials; the next new grammar starts another."""
        with self._compiling:
            self._trial.close()

    def _find(self, source: str, field: str) -> CompiledGrammar | None:
        with self._lock:
            if (refusal := self._refused.get(source)) is not None:
                raise BadGrammarError(refusal, field=field)
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _compile(self, source: str, field: str) -> CompiledGrammar:
        if error := self._trial.run(source, field=field):
            refusal = explain(error)
            with self._lock:
                _keep_newest(self._refused, source, refusal, entries=MAX_REFUSED)
            raise BadGrammarError(refusal, field=field)
        return self.compile_anew(source, field=field)

    def _start_thread(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="jaxserve-grammar", daemon=True)
        # The size is of the whole process: a thread that others start just now may get it too,
        # which is more address space for it and no harm.
        with self._lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            except RuntimeError as error:
                raise QueueFullError(
                    f"the server has no room to compile a grammar ({error}); try again soon"
                ) from error
            finally:
                threading.stack_size(before)
        return thread

    def _keep(self, source: str, compiled: CompiledGrammar) -> None:
        with self._lock:
            shared = dataclasses.replace(compiled, is_shared=True)
            _keep_newest(self._kept, source, shared, entries=CACHE_ENTRIES)


def explain(error: str) -> str:
    """Returns what is wrong with a grammar, for who sent it, by the grammar engine's own words."""
    if error.startswith("NoExtension"):
        what = "nothing that this model's tokens can spell matches it"
    elif "oneOf constraints are not supported" in error:
        what = "oneOf is supported only where its branches exclude each other; use anyOf"
    elif any(word in error.lower() for word in _TOO_COMPLEX):
        what = f"it is too complex ({_shorten(error)}); make it simpler"
    else:
        what = _shorten(error)
    return f"the grammar cannot be used: {what}"


def _shorten(error: str) -> str:
    """Returns the message without the engine's state, in at most 300 characters."""
    for end in ("<non-verbose/>", "<state>", "<backtrace>"):
        error = error.partition(end)[0]
    error = " ".join(error.split())
    return error if len(error) <= 300 else f"{error[:300]}…"


def _keep_newest[T](
    kept: "collections.OrderedDict[str, T]", source: str, value: T, *, entries: int
) -> None:
    """Adds one, and drops the longest unused while there are too many, or too long ones."""
    kept[source] = value
    kept.move_to_end(source)
    num_bytes = sum(map(len, kept))
    while len(kept) > 1 and (len(kept) > entries or num_bytes > CACHE_BYTES):
        oldest, _ = kept.popitem(last=False)
        num_bytes -= len(oldest)
