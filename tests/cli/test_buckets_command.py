"""`jaxserve buckets`: the list, what compiling took, and what a running server counted."""

import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import override

import jax
import pytest
from prometheus_client import generate_latest

from jaxserve.cli.buckets import Use, parse_uses
from jaxserve.cli.main import main
from jaxserve.metrics import Metrics
from tests.checkpoint.writers import T1, make_weights, write_hf

CONFIG = """\
[model]
dtype = "float32"
max_model_tokens = 64
[kv]
num_pages = 9
[scheduler]
max_seqs = 4
[buckets]
decode_seqs = {first = 2, last = 4, ratio = 2}
chunk_tokens = [16]
chunk_decode_seqs = [4]
"""
FORWARDS = ["2x1+0", "4x1+0", "4x1+16"]
OUTPUTS = [f"{rows} {variant}" for variant in ("greedy", "plain", "full") for rows in (2, 4)]
OTHERS = ["score", "row_load", "counts", "page_copy", "init"]


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """`main` sets it, for a process of its own."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("buckets")
    (folder / "config.toml").write_text(CONFIG)
    small = dataclasses.replace(T1, layers=T1.layers[:1])
    model = write_hf(folder / "tiny", small, make_weights(small))
    cache = f"runner.cache_dir={folder / 'cache'}"
    return ["buckets", str(model), "--config", str(folder / "config.toml"), "--set", cache]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a server of this configuration, and of one bucket more, tells its metrics."""
    metrics = Metrics()
    for bucket, steps in (("2x1+0", 7), ("4x1+0", 0), ("4x1+16", 2), ("8x1+0", 1)):
        metrics.steps.labels(bucket=bucket).inc(steps)
        metrics.real_tokens.labels(bucket=bucket).inc(steps * 2)
        metrics.padded_tokens.labels(bucket=bucket).inc(steps)
    metrics.output_programs.labels(bucket="2 full", variant="full").inc(3)
    metrics.output_programs.labels(bucket="4 full", variant="full")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_there = self.path == "/metrics"
            self.send_response(200 if is_there else 404)
            self.end_headers()
            self.wfile.write(generate_latest(metrics.registry) if is_there else b"lost")

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_dry_run_lists_every_program_and_compiles_none(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["model"], captured.err) == ("tiny", "")
    assert found["programs"] == [
        *({"kind": "forward", "bucket": bucket} for bucket in FORWARDS),
        *({"kind": "output", "bucket": bucket} for bucket in OUTPUTS),
        *({"kind": kind, "bucket": ""} for kind in OTHERS),
    ]
    assert main([*words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "program"
    assert lines[1] == "forward 2x1+0"
    assert lines[-1] == "tiny: 14 programs"


def test_compiling_says_what_each_took_and_the_cache_has_them_after_that(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "--set", "scheduler.max_seqs=2", "--set", "buckets.decode_seqs=[2]"]
    for is_cached in (False, True):
        jax.clear_caches()
        assert main([*words, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == "programs compiled: 10 of 10\n"
        found = json.loads(captured.out)
        for program in found["programs"]:
            assert program["is_cached"] is is_cached, program
            assert program["seconds"] > 0
            assert program["temp_bytes"] >= 0
        assert found["compile_s"] > 0
    assert sum(program["temp_bytes"] for program in found["programs"]) > 0
    jax.clear_caches()
    assert main([*words, "--quiet"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert lines[0].split() == ["program", "seconds", "temp", "MiB", "cached"]
    assert lines[1].startswith("forward 2x1+0 ")
    assert lines[1].endswith(" yes")
    assert "tiny: 10 programs, 0 compiled, 10 from the cache; " in lines[-1]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_running_servers_counts_stand_beside_the_programs(
    path: str, words: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run", "--metrics-url", url + path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {tuple(line.split()[:2]): line.split()[2:] for line in lines[1:] if line}
    assert lines[0].split() == ["program", "hits", "real", "padded"]
    assert cells["forward", "2x1+0"] == ["7", "14", "7"]
    assert cells["forward", "4x1+0"] == ["never", "0", "0"]
    assert lines[OUTPUTS.index("2 full") + 4].split() == ["output", "2", "full", "3"]
    assert lines[OUTPUTS.index("4 full") + 4].split() == ["output", "4", "full", "never"]
    assert lines[-2] == "2 of 5 buckets were never hit"
    assert lines[-1].endswith("its configuration differs: forward 8x1+0")


def test_the_counts_are_in_the_json_too(
    words: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run", "--json", "--metrics-url", url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["programs"][2] == {
        "kind": "forward",
        "bucket": "4x1+16",
        "hits": 2,
        "real_tokens": 4,
        "padded_tokens": 2,
    }
    assert found["others"] == [["forward", "8x1+0"]]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1/metrics", "Connection refused; is the server running"),
        ("{url}/elsewhere", "Not Found"),
        ("file:///etc/hostname", "file is neither http nor https"),
        ("http://[", "Invalid IPv6"),
    ],
)
def test_nobody_to_ask_is_one_line(
    address: str, said: str, words: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run", "--metrics-url", address.format(url=url)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert said in line


def test_metrics_of_somebody_else_are_none_of_ours() -> None:
    assert parse_uses("# TYPE up gauge\nup 1\n") == {}
    assert parse_uses("<html>{") == {}
    assert parse_uses('jaxserve_steps_total{bucket="2x1+0"} NaN\n') == {}
    assert parse_uses('jaxserve_steps_total{bucket="2x1+0"} 3.0\n') == {
        ("forward", "2x1+0"): Use(hits=3)
    }


def test_what_does_not_fit_the_model_is_said_without_compiling(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run", "--set", "model.max_model_tokens=1000"]) == 2
    assert "this model has 256 positions" in capsys.readouterr().err
