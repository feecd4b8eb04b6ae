"""Compiles grammars that strangers send: bounded in size, stack, work and time; keeps the last."""

import collections
import dataclasses
import threading
import time
from typing import Final

import llguidance
import numpy as np

from jaxserve.errors import BadGrammarError, QueueFullError

# What llguidance may spend; it counts, so the same grammar meets the same end on every machine.
# The numbers behind these values are in docs/structured.md.
LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=50_000,
    step_lexer_fuel=100_000,
    max_lexer_states=10_000,
    step_max_items=20_000,
    max_items_in_row=1_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # else its work at the start is not counted
    verbose_errors=False,  # they hold the whole grammar
)
STACK_BYTES_PER_BYTE: Final = 2048  # of grammar; the deepest found needs 250
MIN_STACK_BYTES: Final = 64 << 20
MAX_COMPILE_S: Final = 5.0
MAX_WAIT_S: Final = 10.0
MAX_GIVEN_UP: Final = 2  # threads still at work on what nobody waits for
CACHE_ENTRIES: Final = 32
CACHE_BYTES: Final = 1 << 20


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

    llguidance descends a grammar by recursion, and a grammar of 64 KiB can overflow the 8 MiB of
    an ordinary thread's stack, which kills the process. So each compile gets a thread of its own,
    whose stack is large enough for `max_bytes`; one at a time, and one that takes too long is given
    up. The most recent grammars are kept.
    """

    def __init__(self, vocabulary: llguidance.LLTokenizer, *, max_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._stack_bytes = max(MIN_STACK_BYTES, STACK_BYTES_PER_BYTE * max_bytes)
        self._compiling = threading.Lock()
        self._given_up: list[threading.Thread] = []
        self._kept_lock = threading.Lock()
        self._kept: collections.OrderedDict[str, CompiledGrammar] = collections.OrderedDict()

    def compile(self, source: str, *, field: str) -> CompiledGrammar:
        """Returns a grammar, kept or compiled now; waits for others' compiles.

        Raises:
          BadGrammarError: it is wrong, matches nothing or costs too much.
          QueueFullError: others' grammars are being compiled and take long.
        """
        kept = self._find(source)
        if kept is not None:
            return kept
        if not self._compiling.acquire(timeout=MAX_WAIT_S):
            raise _busy()
        try:
            kept = self._find(source)  # while it waited
            return kept or self._compile(source, field)
        finally:
            self._compiling.release()

    def compile_anew(self, source: str, *, field: str) -> CompiledGrammar:
        """Returns a grammar whose lexer has no states yet; waits for nobody.

        Raises:
          BadGrammarError, QueueFullError: as `compile`.
        """
        return self._compile(source, field)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _find(self, source: str) -> CompiledGrammar | None:
        with self._kept_lock:
            if source not in self._kept:
                return None
            self._kept.move_to_end(source)
            return self._kept[source]

    def _keep(self, source: str, grammar: CompiledGrammar) -> None:
        with self._kept_lock:
            self._kept[source] = dataclasses.replace(grammar, is_shared=True)
            while len(self._kept) > 1 and (
                len(self._kept) > CACHE_ENTRIES or sum(map(len, self._kept)) > CACHE_BYTES
            ):
                self._kept.popitem(last=False)

    def _compile(self, source: str, field: str) -> CompiledGrammar:
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if len(self._given_up) >= MAX_GIVEN_UP:
            raise _busy()
        job = _Job(vocabulary=self._vocabulary, source=source)
        started = time.monotonic()
        thread = self._start(job)
        if not job.is_done.wait(MAX_COMPILE_S):
            self._given_up.append(thread)
            raise BadGrammarError(
                f"the grammar is not compiled after {MAX_COMPILE_S:g} s; make it simpler",
                field=field,
            )
        if job.matcher is None:  # its traceback is in the log
            raise BadGrammarError("the grammar breaks its compiler; change it", field=field)
        if job.matcher.is_error():
            raise bad_grammar(job.matcher, field)
        compiled = CompiledGrammar(matcher=job.matcher, compile_s=time.monotonic() - started)
        self._keep(source, compiled)
        return compiled

    def _start(self, job: "_Job") -> threading.Thread:
        # Of the whole process; a thread that others start just now gets the large stack too, which
        # costs it address space only.
        before = threading.stack_size(self._stack_bytes)
        try:
            thread = threading.Thread(target=job.run, name="jaxserve-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        return thread


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    """One compile. It ends with a matcher, which may hold an error."""

    vocabulary: llguidance.LLTokenizer
    source: str
    is_done: threading.Event = dataclasses.field(default_factory=threading.Event)
    matcher: llguidance.LLMatcher | None = None

    def run(self) -> None:
        try:
            matcher = llguidance.LLMatcher(self.vocabulary, self.source, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                # a grammar that matches nothing shows at its first mask
                words = np.empty(-(-self.vocabulary.vocab_size // 32), np.uint32)
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self.matcher = matcher
        finally:
            self.is_done.set()


def bad_grammar(matcher: llguidance.LLMatcher, field: str) -> BadGrammarError:
    """Returns what is wrong with a matcher that is in error, in words for who sent the grammar."""
    return BadGrammarError(f"the grammar cannot be used: {_explain(matcher)}", field=field)


def _explain(matcher: llguidance.LLMatcher) -> str:
    text = matcher.get_error()
    if text.startswith("NoExtension"):
        return "nothing that this model's tokens can spell matches it"
    if "oneOf constraints are not supported" in text:
        return "oneOf is supported only where its branches exclude each other; use anyOf"
    if "is too big" in text or "too big" in text or "Too many" in text or "too large" in text:
        return f"it is too complex ({_first_lines(text)}); make it simpler"
    return _first_lines(text)


def _first_lines(text: str) -> str:
    """Returns the message without the engine's state, in at most 300 characters."""
    for end in ("<non-verbose/>", "<state>", "<backtrace>"):
        text = text.partition(end)[0]
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}…"


def _busy() -> QueueFullError:
    return QueueFullError(
        "the server is busy compiling other grammars; try again soon", retry_after_s=2.0
    )
