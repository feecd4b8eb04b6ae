"""Tries a grammar in a process of its own, which is killed where it takes too long or too much."""

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import time
import weakref
from typing import Final

from jaxserve.errors import BadGrammarError, CapacityError
from jaxserve.text.grammar_engine import Vocabulary
from jaxserve.text.grammar_trial_child import pack_vocabulary, write_frame

logger = logging.getLogger(__name__)

MAX_TRIAL_S: Final = 2.0  # wall clock; a large schema needs 0.1 of a core
MAX_START_S: Final = 60.0
_COMMAND: Final = (sys.executable, "-m", "jaxserve.text.grammar_trial_child")


class Trial:
    """Owns the process. It starts with the first grammar, and again after it was lost.

    llguidance bounds its own work, but not in every corner: grammars of 64 KiB were found that take
    minutes, gigabytes, or so deep a recursion that the process dies. What passes here in time does
    the same work in the server. Not for several threads at once.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Trial] | None = None

    def run(self, source: str, *, field: str) -> str:
        """Returns what is wrong with a grammar; empty for nothing.

        Raises:
          BadGrammarError: it takes too long, which on another day it may not.
          CapacityError: the process does not start.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        started_s = time.monotonic()
        answer = _ask(self._process, source.encode(), timeout_s=MAX_TRIAL_S)
        if answer is not None:
            return answer.decode("utf-8", "replace")
        took_s = time.monotonic() - started_s
        self.close()
        logger.info("grammar trial ended bytes=%d seconds=%.2f", len(source), took_s)
        if took_s < MAX_TRIAL_S:
            return "it is nested too deeply, or takes too much memory; make it simpler"
        raise BadGrammarError(
            f"the grammar is not compiled after {MAX_TRIAL_S:g} s; make it simpler", field=field
        )

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        # Modules are found where this process finds them. Under a limit of memory each thread's own
        # arena fails to come, slowly: one arena for all. Ctrl-C of a terminal does not reach it.
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = os.environ | {"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"}
        process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _kill, process)
        if _ask(process, *pack_vocabulary(self._vocabulary), timeout_s=MAX_START_S) is None:
            self.close()
            raise CapacityError(
                "the process that tries grammars does not start; standard error has its reason"
            )
        return process


def _ask(process: subprocess.Popen[bytes], *frames: bytes, timeout_s: float) -> bytes | None:
    """Returns the answer to some frames; None if the process ends or the time does first."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for frame in frames:
            write_frame(process.stdin, frame)
    except BrokenPipeError:
        return None
    deadline = time.monotonic() + timeout_s
    answer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(answer) < 4 or len(answer) < 4 + int.from_bytes(answer[:4], "little"):
            if not selector.select(deadline - time.monotonic()):
                return None
            more = os.read(process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            answer += more
    return answer[4:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # of what it never read
            pipe.close()
    process.wait()
