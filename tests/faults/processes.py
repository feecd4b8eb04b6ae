"""jaxserve as real processes: commands run to their end, and servers that are up."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from jaxserve.client import Client
from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.text.vocabularies import byte_backend

ROOT: Final = Path(__file__).parents[2]
RUN: Final = (
    sys.executable,
    "-c",
    "import sys; from jaxserve.cli.main import main; sys.exit(main())",
)
MAX_MODEL_TOKENS: Final = 8192
MODEL: Final = dataclasses.replace(T1, layers=T1.layers[:1], max_position=MAX_MODEL_TOKENS)
NOT_A_NUMBER: Final = "~"  # a text with this letter has logits that are not finite
CONFIG: Final = """\
[model]
dtype = "float32"
[kv]
num_pages = 2049
[scheduler]
max_seqs = 4
[buckets]
decode_seqs = [4]
chunk_tokens = [16]
chunk_decode_seqs = [4]
"""
# Buffered as in a user's shell: a full disk may show only at the end.
ENVIRONMENT: Final = {
    **{key: os.environ[key] for key in os.environ if key != "PYTHONUNBUFFERED"},
    "PYTHONPATH": str(ROOT),
}
EXIT_S: Final = 120.0  # a hang is a failure, not a matter of speed


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """A model, a configuration and a cache that the processes of a test use."""

    model: Path
    config: Path
    cache: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Of a command: the model and all that is its own here."""
        return (str(self.model), "--config", str(self.config), *self.cache_option)

    @property
    def cache_option(self) -> tuple[str, ...]:
        return ("--set", f"runner.cache_dir={self.cache}")


def make_place(folder: Path) -> Place:
    """Writes the tiny model and its configuration. One letter's embedding is NaN, and its row of
    the head is zero, so that no output has it."""
    weights = make_weights(MODEL)
    token_id = byte_backend().token_to_id(NOT_A_NUMBER)
    weights["model.embed_tokens.weight"][token_id] = float("nan")
    weights["lm_head.weight"][token_id] = 0.0
    config = folder / "config.toml"
    config.write_text(CONFIG)
    return Place(
        model=write_hf(folder / "model", MODEL, weights), config=config, cache=folder / "cache"
    )


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    out: bytes
    err: str

    @property
    def error_line(self) -> str:
        """The one line that a failed command says."""
        (line,) = self.err.splitlines()
        assert line.startswith("jaxserve: error: ")
        return line


def run_command(*words: str, prefix: Sequence[str] = RUN, **how: object) -> Done:
    done = subprocess.run(
        [*prefix, *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
        timeout=EXIT_S,
        **({"stdout": subprocess.PIPE} | how),  # type: ignore[call-overload]
    )
    return Done(code=done.returncode, out=done.stdout or b"", err=done.stderr.decode())


def generate(place: Place, *words: str, prompt: str = "Hi", **how: object) -> Done:
    """Runs `generate` for twelve tokens; its summary and progress are left out."""
    wanted = ("--prompt", prompt, "--max-tokens", "12", "--ignore-eos", "--quiet")
    return run_command("generate", *place.options, *wanted, *words, **how)  # type: ignore[arg-type]


class ServerProcess:
    """`jaxserve serve` as a process, from its first line to its exit code.

    Attributes:
      lines: of its stderr so far.
    """

    def __init__(self, words: Sequence[str], *, prefix: Sequence[str] = RUN) -> None:
        self.lines: list[str] = []
        self._has_line = threading.Condition()
        self._process = subprocess.Popen(
            [*prefix, "serve", *words, "--port", "0"],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.target = self._find(r"listening.*?(127\.0\.0\.1:\d+)")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def metrics_url(self) -> str:
        """Where it serves its metrics, if `--metrics-port` was given."""
        return self._find(r"(http://127\.0\.0\.1:\d+/metrics)")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def send_until_it_ends(self, number: signal.Signals) -> int:
        """Sends it again and again, through all that a process does at its end."""
        while self._process.poll() is None:
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.002)
        return self.wait()

    def wait(self) -> int:
        """Returns the exit code, once all of stderr is in `lines`."""
        code = self._process.wait(EXIT_S)
        self._reader.join(EXIT_S)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with self._has_line:
                    self.lines.append(line.rstrip("\n"))
                    self._has_line.notify_all()
        with self._has_line:
            self._has_line.notify_all()

    def _find(self, pattern: str) -> str:
        """Returns the group of the first line that matches, as soon as there is one."""

        def match() -> re.Match[str] | None:
            return next((m for m in (re.search(pattern, line) for line in self.lines) if m), None)

        with self._has_line:
            self._has_line.wait_for(
                lambda: match() is not None or not self._reader.is_alive(), EXIT_S
            )
            found = match()
        assert found is not None, "\n".join(self.lines)
        return found.group(1)


@contextlib.contextmanager
def serving(
    place: Place, *words: str, prefix: Sequence[str] = RUN
) -> Iterator[tuple[ServerProcess, Client]]:
    """Runs a server of the tiny model that is ready, with a client; kills it at the end."""
    server = ServerProcess([*place.options, *words], prefix=prefix)
    try:
        with Client(server.target) as client:
            client.wait_ready(timeout_s=EXIT_S)
            yield server, client
    finally:
        server.close()
