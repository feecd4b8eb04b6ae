"""The process in which a stranger's grammar is compiled first: it may hang, grow or die of it.

Reads frames from standard input, a vocabulary and then one grammar after another, and answers each
with a frame: empty, or what is wrong. A frame is its length in four bytes, and its bytes. It ends
with its input, so with the process that began it.
"""

import array
import contextlib
import json
import os
import resource
import struct
import sys
import threading
from collections.abc import Mapping
from typing import IO, Final

import llguidance

from jaxserve.text.grammar_engine import Vocabulary, build_tokenizer, open_matcher

STACK_BYTES: Final = 4 << 20
MORE_BYTES: Final = 128 << 20  # memory that grammars may take
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Returns the next frame; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    return stream.read(length)


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(struct.pack("<I", len(frame)) + frame)
    stream.flush()


def pack_vocabulary(vocabulary: Vocabulary) -> list[bytes]:
    """Returns the frames that the process begins with."""
    lengths = array.array("I", map(len, vocabulary.tokens))
    facts = json.dumps({"eos_ids": list(vocabulary.eos_ids)}).encode()
    return [facts, lengths.tobytes(), b"".join(vocabulary.tokens)]


def _read_vocabulary(stream: IO[bytes]) -> Vocabulary | None:
    frames = [read_frame(stream) for _ in range(3)]
    if None in frames:
        return None
    facts, packed, text = (frame or b"" for frame in frames)
    lengths = array.array("I", packed)
    tokens, at = [], 0
    for length in lengths:
        tokens.append(text[at : at + length])
        at += length
    read: Mapping[str, list[int]] = json.loads(facts)
    return Vocabulary(tokens=tokens, eos_ids=read["eos_ids"])


def _bound_memory() -> None:
    """Sets a limit above what is in use now, where the system knows such a limit."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[0]) * _PAGE_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MORE_BYTES, hard))


def _try(tokenizer: llguidance.LLTokenizer, source: str) -> str:
    """Returns what is wrong with a grammar; compiles it on a stack of a known size."""
    errors: list[str] = []

    def run() -> None:
        matcher = open_matcher(tokenizer, source)
        errors.append(matcher.get_error() if matcher.is_error() else "")

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0]


def main() -> None:
    source, answer = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = _read_vocabulary(source)
    if vocabulary is None:
        return
    tokenizer = build_tokenizer(vocabulary)
    del vocabulary
    _bound_memory()
    write_frame(answer, b"")  # ready
    # from here on it dies by design, and what it says then is not for the server's log
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    while (frame := read_frame(source)) is not None:
        write_frame(answer, _try(tokenizer, frame.decode()).encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
