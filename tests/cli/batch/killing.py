"""A real `jaxserve batch` process on a tiny random model, killed where its output has grown to."""

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.cli.batch.files import BAD, good, outcome, read, write

COMMAND = [sys.executable, "-c", "import sys; from jaxserve.cli.main import main; sys.exit(main())"]
SETTINGS = (
    "model.dtype=float32",
    "model.max_model_tokens=64",
    "buckets.capture=false",  # few programs: a start takes seconds
    "kv.num_pages=120",  # not enough for all rows: there are preemptions
    "scheduler.max_seqs=32",
)


def write_input(path: Path, *, num_lines: int, num_bad: int, seed: int) -> None:
    """Greedy and sampled requests of many lengths, with bad lines anywhere among them."""
    rng = random.Random(seed)
    lines: list[dict[str, Any] | bytes] = [
        good(
            f"request-{n}",
            [rng.randrange(4, 270) for _ in range(rng.randrange(1, 40))],
            max_tokens=rng.randrange(1, 24),
            temperature=rng.choice([0.0, 0.7, 1.0]),
        )
        for n in range(num_lines - num_bad)
    ]
    # the tiny model puts a token before an empty prompt, which so is none
    kinds = [line for line, said in BAD if said != "the prompt is empty"]
    for n in range(num_bad):
        bad = kinds[n % len(kinds)]
        for name in (b'id": "m', b'id": "\\'):  # ids of bad lines come once too
            bad = bad.replace(name, name[:6] + b"%d-" % n + name[6:])
        lines.insert(rng.randrange(len(lines)), bad)
    write(path, lines)


class KilledBatch:
    """One job in a folder: run to the end, and run again with kills."""

    def __init__(self, folder: Path, *, num_lines: int, num_bad: int, seed: int) -> None:
        self.num_lines, self.num_bad = num_lines, num_bad
        self._rng = random.Random(seed)
        self._source = folder / "in.jsonl"
        self._folder = folder
        self._model = write_hf(folder / "model", T1, make_weights(T1))
        write_input(self._source, num_lines=num_lines, num_bad=num_bad, seed=seed)

    def run(self, name: str, *, kill_at: int | None = None) -> int:
        """Runs the command; returns its exit code, or -9 where it was killed in time.

        Args:
          kill_at: bytes of the output at which the process gets SIGKILL.
        """
        out = self._folder / name
        words = ["batch", "-i", str(self._source), "-o", str(out), str(self._model)]
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        process = subprocess.Popen(
            [*COMMAND, *words, *sets, "--quiet"], cwd=Path(__file__).parents[3]
        )
        partial = out.with_name(f"{name}.partial")
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=0.002 if kill_at is not None else None)
                except subprocess.TimeoutExpired:
                    if kill_at is not None and _size(partial) >= kill_at:
                        process.kill()
        finally:
            process.kill()
            process.wait()
        return process.returncode

    def compare(self, num_kills: int, say: Callable[[str], None] = lambda _: None) -> int:
        """Asserts that a run with kills gives what a run without gives, each line once.

        Returns how many kills came before the run had ended.
        """
        assert self.run("whole.jsonl") == 3
        whole = read(self._folder / "whole.jsonl")
        say(f"uninterrupted: {_count(whole)}")
        num_bytes = _size(self._folder / "whole.jsonl")
        places = sorted(self._rng.randrange(1, num_bytes) for _ in range(num_kills))
        num_done = sum(self._kill(place, say) for place in places)
        if not (self._folder / "killed.jsonl").exists():
            assert self.run("killed.jsonl") == 3
        killed = read(self._folder / "killed.jsonl")
        say(f"resumed to the end: {_count(killed)}")
        ids = [line["custom_id"] for line in killed if line["custom_id"] is not None]
        assert len(killed) == self.num_lines
        assert len(ids) == len(set(ids)), "each id once"
        assert sum(line["error"] is not None for line in killed) == self.num_bad
        assert [outcome(line) for line in killed] == [outcome(line) for line in whole]
        assert {path.name for path in self._folder.glob("killed*")} == {"killed.jsonl"}
        return num_done

    def _kill(self, place: int, say: Callable[[str], None]) -> bool:
        """Runs up to a place of the output; False where the end came first."""
        if (self._folder / "killed.jsonl").exists():
            return False
        code = self.run("killed.jsonl", kill_at=place)
        assert code in (-9, 3), "killed, or ended as it should"
        if code == -9:
            kept = (self._folder / "killed.jsonl.partial").read_bytes()
            torn = "" if kept.endswith(b"\n") else ", and half of one"
            num_lines = kept.count(b"\n")
            say(f"killed with {num_lines} lines{torn}")
        return code == -9


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _count(lines: Sequence[dict[str, Any]]) -> str:
    failed = sum(line["error"] is not None for line in lines)
    return f"{len(lines)} lines, {failed} of them errors"
