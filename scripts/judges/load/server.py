"""The server under load: a process with keys, two tenants and tight bounds, and what it takes."""

import collections
import contextlib
import dataclasses
import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from jaxserve.server.keys_file import add_key, make_key
from scripts.judges.idle import Scrape, read_metrics, rss_bytes

START_S: Final = 600.0
END_S: Final = 60.0
TENANTS: Final = ("alpha", "beta")
RUN: Final = "import sys; from jaxserve.cli.main import main; sys.exit(main())"
# Bounds that a crowd runs into: some of it must be refused, preempted, ended or cut off.
CONFIG: Final = """\
[auth]
keys_file = "{keys}"
[model]
max_model_tokens = 1024
[kv]
num_pages = 257
[limits]
max_waiting_requests = {queue}
stream_buffer_bytes = 65536
total_buffer_bytes = 262144
[server]
http_write_timeout_s = 5.0
[tenants.named.alpha]
queue_share = 0.9
max_concurrent_requests = {alpha}
[tenants.named.beta]
queue_share = 0.5
max_concurrent_requests = {beta}
requests_per_minute = {rate}
tokens_per_minute = {tokens}
max_priority = 0
"""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Taken:
    """What the process has taken, at one moment.

    Attributes:
      threads: how many there are by name; Python's own have the process's.
    """

    rss_bytes: int
    threads: collections.Counter[str]
    num_files: int


class Served:
    """A process that serves.

    Attributes:
      keys: by tenant; of "" one that is not valid.
      log: JSON lines.
    """

    def __init__(self, folder: Path, words: list[str], *, streams: int) -> None:
        self.keys = {"": f"jsk_{'0' * 43}"}
        self.log = folder / "server.log"
        keys = folder / "keys.jsonl"
        for tenant in TENANTS:
            text, key = make_key(tenant, now=datetime.datetime.now(datetime.UTC))
            add_key(keys, key)
            self.keys[tenant] = text
        config = folder / "server.toml"
        config.write_text(
            CONFIG.format(
                keys=keys,
                queue=streams * 4 // 5,
                alpha=streams * 23 // 40,  # of twelve
                beta=streams * 15 // 40,  # of eight
                rate=streams * 20,
                tokens=streams * 1500,
            )
        )
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-c", RUN, "serve", *words, "--config", str(config),
                    "--port", "0", "--http-port", "0", "--metrics-port", "0",
                    "--log-format", "json",
                ],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )  # fmt: skip
        self._find(r'"event": "serving", "model"')
        self.target = self._find(r'"event": "listening", "address": "([^"]+)"')
        self.url = self._find(r'"event": "serving HTTP", "url": "([^"]+)"')
        self.metrics_url = self._find(r"(http://127\.0\.0\.1:\d+)/metrics")

    @property
    def address(self) -> tuple[str, int]:
        """Of HTTP."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def scrape(self) -> Scrape:
        return read_metrics(self.metrics_url)

    def wait_idle(self, patience_s: float) -> Scrape:
        """Returns the metrics once nothing runs and no call is open, or when the time is over."""
        end_s = time.monotonic() + patience_s
        while True:
            scrape = self.scrape()
            is_idle = scrape.is_idle and not scrape.value("open_calls")
            if is_idle or time.monotonic() > end_s:
                return scrape
            time.sleep(0.2)

    def taken(self) -> Taken:
        process = Path(f"/proc/{self._process.pid}")
        return Taken(
            rss_bytes=rss_bytes(self._process.pid),
            threads=collections.Counter(_read_names(process / "task")),
            num_files=len(os.listdir(process / "fd")),
        )

    def stop(self) -> int:
        """Ends it as an operator does; returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Returns the exit code, once it has ended."""
        return self._process.wait(END_S)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _find(self, pattern: str) -> str:
        """Returns the first match in the log, as soon as there is one."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            found = re.search(pattern, self.log.read_text())
            if found is not None:
                return found.group(found.lastindex or 0)
            time.sleep(0.2)
        self.kill()
        raise SystemExit(f"the server did not start:\n{self.log.read_text()[-3000:]}")


def _read_names(folder: Path) -> Iterator[str]:
    for thread in folder.iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield (thread / "comm").read_text().strip()


@contextlib.contextmanager
def serving(words: list[str], *, streams: int, keep: Path | None = None) -> Iterator[Served]:
    """Runs a server; its files go at the end, unless they are to be kept somewhere."""
    with tempfile.TemporaryDirectory() as folder:
        place = keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "keys.jsonl").unlink(missing_ok=True)
        served = Served(place, words, streams=streams)
        try:
            yield served
        finally:
            served.kill()
