"""Prometheus' own word on what is served, on the rules, and on the dashboard."""

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import yaml

from jaxserve.client import Client, ServerError
from tests.deploy import promql

ROOT: Final = Path(__file__).parents[2]
PROMETHEUS: Final = ROOT / "deploy" / "prometheus"
SCRAPES_S: Final = 24.0  # of a scrape a second: rates need two, and the rules five turns
# What has no samples on this server: it has no TLS, no collector, and nobody is limited.
EMPTY: Final = ("certificate_expiry", "quota_refusals", "changes(")


def check(*arguments: str, cwd: Path = PROMETHEUS, stdin: str | None = None) -> None:
    """Runs promtool; leaves where it finds something."""
    done = subprocess.run(
        ["promtool", *arguments], cwd=cwd, input=stdin, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr).strip()
    print(
        f"promtool {' '.join(arguments)}: {' '.join(said.split()) or 'nothing to complain about'}"
    )
    if done.returncode:
        sys.exit(done.returncode)


@contextlib.contextmanager
def serving(model: list[str]) -> Iterator[dict[str, str]]:
    """Serves; yields where, and sees that it leaves with 0."""
    command = [str(ROOT / ".venv" / "bin" / "jaxserve"), "serve", *model]
    flags = ["--port", "0", "--http-port", "0", "--metrics-port", "0", "--log-format", "json"]
    server = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stderr is not None
    where: dict[str, str] = {}
    try:
        for text in server.stderr:
            line = json.loads(text) if text.startswith("{") else {"event": text}
            match line["event"]:
                case "serving metrics":
                    where["metrics"] = line["url"]
                case "serving HTTP":
                    where["http"] = line["url"]
                case "serving":
                    where["grpc"] = line["address"]
                    break
        assert "grpc" in where, f"the server ended with {server.wait()}"
        yield where
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait() == 0
    finally:
        server.kill()


def use(where: dict[str, str]) -> None:
    """Asks for a little of everything through both doors."""
    ignored = {"max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=where["http"], timeout=120) as http:
        for body in (
            {"prompt": "Once"},
            {"prompt": ["a", "b"], "n": 2},
            {"prompt": "x", "top_p": 9},
        ):
            http.post("/v1/completions", json=ignored | body)
        messages = [{"role": "user", "content": "Hi"}]
        http.post("/v1/chat/completions", json={**ignored, "messages": messages, "stream": True})
    with Client(where["grpc"]) as client:
        client.generate("Twice upon a time", max_tokens=8)
        with contextlib.suppress(ServerError):
            client.generate("x", temperature=-1.0)


@contextlib.contextmanager
def scraping(url: str, folder: Path) -> Iterator[str]:
    """Runs a Prometheus that reads the server; yields its address."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    target = url.removeprefix("http://").removesuffix("/metrics")
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = promql.RULES.read_text().replace("interval: 30s", "interval: 1s")
    (folder / promql.RULES.name).write_text(rules)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    prometheus = subprocess.Popen(command)
    try:
        yield f"http://{address}"
    finally:
        prometheus.terminate()
        prometheus.wait()


def query(base: str, expression: str) -> int:
    """Returns how many series an expression has."""
    answer = httpx.get(f"{base}/api/v1/query", params={"query": expression}, timeout=30).json()
    if answer["status"] != "success":
        sys.exit(f"{expression}: {answer['error']}")
    return len(answer["data"]["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="default: the demo model")
    model = parser.parse_args().model
    expressions = [promql.as_prometheus_reads(e) for e in promql.dashboard_expressions()]
    recorded = [rule["record"] for rule in promql.load_rules() if "record" in rule]
    check("check", "config", "prometheus.yml")
    check("check", "rules", "--lint=all", "--lint-fatal", promql.RULES.name)
    check("test", "rules", "jaxserve.rules_test.yml")
    with tempfile.TemporaryDirectory() as name, serving(model) as where:
        folder = Path(name)
        with scraping(where["metrics"], folder) as base:
            end_s = time.monotonic() + SCRAPES_S
            while time.monotonic() < end_s:
                use(where)
                time.sleep(1)
            check("check", "metrics", stdin=httpx.get(where["metrics"], timeout=30).text)
            counts = {e: query(base, e) for e in [*expressions, *recorded]}
            alerts = query(base, 'ALERTS{alertstate="firing"}')
    empty = [e for e, count in counts.items() if not count]
    unexplained = [e for e in empty if not any(word in e for word in EMPTY)]
    print(
        f"Prometheus: {len(counts)} expressions answered, {sum(counts.values())} series, "
        f"{len(empty)} empty as they should be, {alerts} alerts"
    )
    if unexplained or alerts:
        sys.exit("\n".join(["empty, or alerts:", *unexplained]))


if __name__ == "__main__":
    main()
