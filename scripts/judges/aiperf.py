"""aiperf beside `jaxserve bench` on one load: `scripts/judges/aiperf`.

Both count from the send of a request to its first text, and from there to its last; lengths are the
server's usage. So their figures differ by what the tools themselves cost, and by the runs.
"""

import argparse
import dataclasses
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.judges.checks import Checks

WORDS: Final = (
    "river", "stone", "letter", "garden", "engine", "window", "paper", "market", "silver",
    "road", "song", "harbour", "cloud", "doctor", "village", "number", "bridge", "forest",
)  # fmt: skip
SEED: Final = 12
OWN_TOLERANCE: Final = 0.02  # a first message of two tokens, the last bytes after the last text


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    at_s: float
    text: str
    num_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Seen:
    """A request as a tool saw it: seconds of one clock, and output tokens."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def itl_s(self) -> float:
        """As aiperf has it: of a request, if its first message is one token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


def draw_load(num_requests: int, rate: float) -> list[Asked]:
    """Returns requests at Poisson times, of 20 to 80 words and 16 to 48 tokens each."""
    rng = random.Random(SEED)  # no secret
    at_s, load = 0.0, []
    for _ in range(num_requests):
        text = " ".join(rng.choices(WORDS, k=rng.randint(20, 80)))
        load.append(Asked(at_s=round(at_s, 3), text=text, num_tokens=rng.randint(16, 48)))
        at_s += rng.expovariate(rate)
    return load


def write_load(load: Sequence[Asked], folder: Path) -> None:
    """Writes the load in each tool's own format, and the tokenizer's folder that aiperf wants."""
    from jaxserve.checkpoint.registry import find_model
    from jaxserve.measure.workload import Header, WorkloadEntry, save_workload
    from jaxserve.measure.workload.entry import build_workload

    entries = [
        WorkloadEntry(index=n, at_s=asked.at_s, prompt=asked.text, wanted_tokens=asked.num_tokens)
        for n, asked in enumerate(load)
    ]
    save_workload(
        build_workload(Header(name="judge", prompts="fixed"), entries), folder / "ours.jsonl"
    )
    with (folder / "aiperf.jsonl").open("w") as file:
        for asked in load:
            extra = {"min_tokens": asked.num_tokens, "ignore_eos": True, "temperature": 0}
            line = {
                "timestamp": asked.at_s * 1000,
                "text_input": asked.text,
                "output_length": asked.num_tokens,
                "extra": extra,
            }
            file.write(json.dumps(line) + "\n")
    (folder / "tokenizer").mkdir()
    files = find_model("smollm2-135m-instruct").load_header().tokenizer.as_files()
    for name, content in files.items():
        if name == "tokenizer_config.json":
            settings = json.loads(content) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            content = json.dumps(settings)
        (folder / "tokenizer" / name).write_text(content)


def run_aiperf(program: str, folder: Path, url: str, out: Path) -> list[Seen]:
    line = [
        program, "profile", "--model", "smollm2-135m-instruct", "--url", url,
        "--endpoint-type", "completions", "--streaming",
        "--use-server-token-count", "--tokenizer", str(folder / "tokenizer"),
        "--input-file", str(folder / "aiperf.jsonl"), "--custom-dataset-type", "mooncake-trace",
        "--fixed-schedule", "--random-seed", str(SEED), "--workers-max", "1",
        "--record-processors", "1", "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry",
        "--artifact-dir", str(out),
    ]  # fmt: skip
    _run(line, out.with_suffix(".log"))
    return list(read_aiperf(out))


def read_aiperf(out: Path) -> Iterator[Seen]:
    """Yields the requests of `profile_export.jsonl`.

    Raises:
      RuntimeError: aiperf counts one as failed.
    """
    for line in (out / "profile_export.jsonl").read_text().splitlines():
        facts = json.loads(line)
        if facts.get("error"):
            raise RuntimeError(f"aiperf: a request failed: {facts['error']}")
        metrics = {name: metric["value"] for name, metric in facts["metrics"].items()}
        sent_s = facts["metadata"]["request_start_ns"] / 1e9
        last_s = sent_s + metrics["request_latency"] / 1e3
        first_s = sent_s + metrics["time_to_first_token"] / 1e3
        yield Seen(
            sent_s=sent_s,
            first_s=first_s,
            last_s=last_s,
            num_tokens=int(metrics["output_sequence_length"]),
        )


def run_ours(_: str, folder: Path, url: str, out: Path) -> list[Seen]:
    line = [
        sys.executable, "-c", "import sys; from jaxserve.cli.main import main; sys.exit(main())",
        "bench", "--target", f"{url}/v1", "--extras", "vllm", "--quiet", "--out", str(out),
        "--workload", str(folder / "ours.jsonl"),
    ]  # fmt: skip
    _run(line, out.with_suffix(".log"))
    return list(read_ours(out))


def read_ours(out: Path) -> Iterator[Seen]:
    """Yields the requests of `requests.jsonl`.

    Raises:
      RuntimeError: one did not end as it was asked to.
    """
    from jaxserve.measure.request_lines import read_records

    for _, record in read_records(out / "requests.jsonl"):
        if record.outcome != "ok" or record.output_tokens is None:
            raise RuntimeError(f"jaxserve bench: a request is {record.outcome}: {record.error}")
        first, last = record.arrivals[0], record.arrivals[-1]
        yield Seen(
            sent_s=record.sent_s,
            first_s=first.time_s,
            last_s=last.time_s,
            num_tokens=record.output_tokens,
        )


def _run(line: Sequence[str], log: Path) -> None:
    with log.open("w") as file:
        done = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{line[:2]} ended with {done.returncode}: {log.read_text()[-3000:]}")


def read_aiperf_figures(out: Path) -> dict[str, float]:
    """Returns what aiperf itself makes of its records."""
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return {
        "requests/s": found["request_throughput"]["avg"],
        "output tokens/s": found["output_token_throughput"]["avg"],
        "ttft p50 ms": found["time_to_first_token"]["p50"],
        "ttft p95 ms": found["time_to_first_token"]["p95"],
        "itl p50 ms": found["inter_token_latency"]["p50"],
        "itl p95 ms": found["inter_token_latency"]["p95"],
    }


def read_our_figures(out: Path) -> dict[str, float]:
    """Likewise; its ttft counts from when a request should have been sent, and so is longer."""
    found = json.loads((out / "result.json").read_text())
    return {
        "requests/s": found["request_throughput"],
        "output tokens/s": found["output_throughput"],
        "ttft p50 ms": found["p50_ttft_ms"],
        "ttft p95 ms": found["p95_ttft_ms"],
        "itl p50 ms": found["p50_tpot_ms"],
        "itl p95 ms": found["p95_tpot_ms"],
    }


def quantile(values: Sequence[float], q: float) -> float:
    """Returns a percentile, interpolated as numpy does by default."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarize(seen: Sequence[Seen]) -> dict[str, float]:
    """Returns the figures of a run; latencies in milliseconds."""
    duration_s = max(s.last_s for s in seen) - min(s.sent_s for s in seen)
    ttft = [(s.first_s - s.sent_s) * 1e3 for s in seen]
    itl = [s.itl_s * 1e3 for s in seen]
    return {
        "requests/s": len(seen) / duration_s,
        "output tokens/s": sum(s.num_tokens for s in seen) / duration_s,
        "ttft p50 ms": quantile(ttft, 0.5),
        "ttft p95 ms": quantile(ttft, 0.95),
        "itl p50 ms": quantile(itl, 0.5),
        "itl p95 ms": quantile(itl, 0.95),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tool, in turn")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of each ratio from 1")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs' files")
    options = parser.parse_args()
    load = draw_load(options.requests, options.rate)
    write_load(load, options.folder)
    tools: dict[str, Callable[[str, Path, str, Path], list[Seen]]] = {
        "aiperf": run_aiperf,
        "jaxserve bench": run_ours,
    }
    read_figures = {"aiperf": read_aiperf_figures, "jaxserve bench": read_our_figures}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    checks = Checks("aiperf and jaxserve bench")
    for round_ in range(options.rounds):
        for name, run in tools.items():
            out = options.folder / f"{name.split()[0]}_{round_}"
            seen = run(options.program, options.folder, options.url, out)
            lengths = sorted(s.num_tokens for s in seen)
            wanted = sorted(asked.num_tokens for asked in load)
            checks.same(f"round {round_}, {name}: lengths of outputs", lengths == wanted, True)
            runs[name].append(summarize(seen))
            own = read_figures[name](out)
            shown = ", ".join(f"{figure} {value:.2f}" for figure, value in own.items())
            differences = [
                abs(own[figure] / value - 1)
                for figure, value in runs[name][-1].items()
                if name == "aiperf" or "ttft" not in figure
            ]
            good = max(differences) <= OWN_TOLERANCE
            checks.holds(f"round {round_}, {name}: its own figures", good, shown)
    for figure in runs["aiperf"][0]:
        theirs, ours = (statistics.median(run[figure] for run in runs[name]) for name in tools)
        checks.holds(
            f"median {figure}",
            abs(ours / theirs - 1) <= options.tolerance,
            f"aiperf {theirs:10.3f}   jaxserve bench {ours:10.3f}   ratio {ours / theirs:.3f}",
        )
    if options.keep:
        shutil.copytree(options.folder, options.keep)
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
