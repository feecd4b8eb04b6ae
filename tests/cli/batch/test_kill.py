"""The real process with a real tiny model, and SIGKILL; `scripts/judges/batch_kill` does more."""

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.cli.batch.files import good, read, write
from tests.cli.batch.killing import COMMAND, KilledBatch


def test_a_batch_killed_anywhere_ends_as_one_that_was_not(tmp_path: Path) -> None:
    num_kills = KilledBatch(tmp_path, num_lines=300, num_bad=9, seed=1).compare(2)
    assert num_kills > 0, "on a busy machine a run may end before its kill, but not all of them"


FAKE = """\
import sys
import jaxserve.engine.start
from jaxserve.cli.main import main
from tests.engines import build_engine
jaxserve.engine.start.load_engine = lambda *_, **__: build_engine(num_pages=60)[0]
sys.argv = ["jaxserve", *sys.argv[1:]]
sys.exit(main())
"""


def start(source: Path, out: Path, *, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    """A process with a fake engine; it may write no file longer than the limit."""
    code = FAKE
    if limit_bytes is not None:
        code = (
            f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes},) * 2)\n"
            + FAKE
        )
    return subprocess.Popen(
        [COMMAND[0], "-c", code, "batch", "-i", str(source), "-o", str(out)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_file_that_may_not_grow_keeps_what_is_done(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [good(f"g{n}", [n]) for n in range(200)])
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    limited = start(source, out, limit_bytes=10_000)
    _, said = limited.communicate()
    assert limited.returncode == 1, said
    last, error = said.splitlines()[-2:]
    assert error == f"jaxserve: error: cannot write {partial}: File too large"
    num_done = len(read(partial))
    assert last.startswith(f"failed after {num_done} of 200 lines; run it again")
    assert 0 < num_done < 200
    resumed = start(source, out)
    _, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert [line["custom_id"] for line in read(out)] == [f"g{n}" for n in range(200)]


def test_sigterm_and_sigint_end_it_cleanly_with_the_last_word(tmp_path: Path) -> None:
    source, out = tmp_path / "in.fifo", tmp_path / "out.jsonl"
    os.mkfifo(source)
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(source, out)
        assert process.stdin is not None
        with source.open("w") as lines:  # it waits for more when the signal comes
            for n in range(40):
                lines.write(json.dumps(good(f"g{n}", [n])) + "\n")
            lines.flush()
            _wait_for_lines(tmp_path / "out.jsonl.partial", process)
            process.send_signal(number)
            _, said = process.communicate()
        assert process.returncode == 130, said
        assert said.splitlines()[-1].startswith("stopped after ")
        kept = (tmp_path / "out.jsonl.partial").read_bytes()
        assert kept.endswith(b"\n")
        for path in tmp_path.glob("out*"):
            path.unlink()


def _wait_for_lines(path: Path, process: subprocess.Popen[str]) -> None:
    while not (path.exists() and path.stat().st_size):
        try:
            assert process.wait(timeout=0.01) is None, "it ended on its own"
        except subprocess.TimeoutExpired:
            continue
