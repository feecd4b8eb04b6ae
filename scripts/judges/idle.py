"""A server after its judge: all calls have ended and nothing of them is left.

    python -m scripts.judges.idle URL [--key KEY]

Exit code 1: something runs, waits or holds pages, or a call ended with 500.
"""

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from scripts.judges.checks import Checks

PATIENCE_S: Final = 30.0
PREFIX: Final = "jaxserve_"
LEVELS: Final = (
    "requests_running", "requests_waiting", "waiting_tokens", "tenant_requests_live",
    "kv_usage_ratio", "kv_reserved_bytes", "kv_used_bytes",
)  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


class Scrape:
    """The metrics of a server at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [
            Sample(sample.name.removeprefix(PREFIX), sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples that have these labels; 0 where there is none."""
        return sum(sample.value for sample in self.find(name, **labels))

    def find(self, name: str, **labels: str) -> Iterator[Sample]:
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample

    @property
    def is_idle(self) -> bool:
        return all(self.value(level) == 0 for level in LEVELS)


def read_metrics(url: str, key: str = "") -> Scrape:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = httpx.get(f"{url}/metrics", headers=headers, timeout=60.0)
    return Scrape(response.raise_for_status().text)


def wait_idle(url: str, key: str = "", *, patience_s: float = PATIENCE_S) -> Scrape:
    """Returns the metrics once nothing runs, or when the patience is over."""
    end_s = time.monotonic() + patience_s
    while True:
        scrape = read_metrics(url, key)
        if scrape.is_idle or time.monotonic() > end_s:
            return scrape
        time.sleep(0.2)


def rss_bytes(pid: int) -> int:
    """Returns a process's resident memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


def check_idle(checks: Checks, scrape: Scrape) -> None:
    """Adds what must hold of any server at rest, whatever was asked of it."""
    for level in LEVELS:
        checks.same(f"{level} at the end", scrape.value(level), 0.0)
    submitted = scrape.value("requests_submitted_total")
    checks.same("each accepted request ended", scrape.value("requests_finished_total"), submitted)
    of_tenants = scrape.value("tenant_requests_submitted_total")
    checks.same("and was a tenant's", of_tenants, submitted)
    tokens = scrape.value("output_tokens_total")
    checks.same("its tokens too", scrape.value("tenant_output_tokens_total"), tokens)
    checks.same("HTTP 500", scrape.value("http_requests_total", status="500"), 0.0)
    for code in ("INTERNAL", "UNKNOWN"):
        checks.same(f"gRPC {code}", scrape.value("rpcs_total", code=code), 0.0)
    checks.same("programs compiled while serving", scrape.value("recompiles_total"), 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of its HTTP door")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    checks = Checks("idle")
    check_idle(checks, wait_idle(options.url, options.key))
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
