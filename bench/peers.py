"""This engine and its peers, in turn, in one run: same prompts, same weights, same cores.

    python -m bench.peers
    python -m bench.peers --seqs 1 8 --rounds 5 --only jaxserve --only llama.cpp
    python -m bench.peers --json peers.json --plot peers.html

Batches: 128 tokens in, 128 out, greedy, the model's end ignored, at 1, 8 and 32 sequences. Every
engine has a process of its own, which stands still while another is measured; each round asks all
of them, with prompts that none has seen. Of an engine's two float types both are measured once, and
the faster goes on. Then each engine with an OpenAI server of its own is replayed alone: Poisson
arrivals, the same for all, judged by limits that are fixed before.

Peers and the weights' forms are made in --peers-dir when they are missing: environments by pip, and
llama.cpp from source, with a C++ compiler, for some minutes. What cannot be had is named, with why.
Exits with 1 where a bar of `bench/peer/report.py` was missed or not measured. Needs Linux.
"""

import argparse
import dataclasses
import datetime
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.peer import report
from bench.peer.absent import Absent
from bench.peer.batches import PROMPT_LEN, Plan, measure_batches
from bench.peer.replay import ReplayLoad, replay
from bench.peer.report import Findings
from bench.peer.setup import Environment, Setup
from bench.peer.variants import ENGINES, Engine, Variant, build_variants
from jaxserve.checkpoint.registry import find_model
from jaxserve.config.load import default_cache_dir

MODEL: Final = "smollm2-135m-instruct"
LIMITS: Final = ("ttft=1", "itl_p95=0.2")


def main() -> int:
    options = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that peers are ended too
    os.sched_setaffinity(0, options.cores)  # what is started from here inherits it
    setup = Setup(
        folder=options.peers_dir.resolve(), base_python=options.python, given=dict(options.venv)
    )
    found = Findings()
    chosen = choose(build_variants(setup.weights, max_seqs=max(options.seqs)), options.only)
    environments = make_environments(setup, {variant.engine for variant in chosen}, found)
    variants = [variant for variant in chosen if variant.engine in environments]
    found.variants = [variant.name for variant in variants]
    found.lossy = {variant.name for variant in variants if variant.is_lossy}
    for name, reason in found.absent.items():
        print(f"absent: {name}: {reason}", flush=True)
    if options.setup_only:
        return 0
    plan = Plan(rounds=options.rounds, all_seqs=options.seqs, num_tokens=options.tokens)
    measure_batches(variants, environments, setup, plan, found)
    if options.replay_requests:
        measure_replays(variants, environments, setup, options, found)
    return tell(found, options)


def make_environments(
    setup: Setup, wanted: Collection[Engine], found: Findings
) -> dict[Engine, Environment]:
    """Returns how to run what can be had, and makes the weights; notes what is absent."""
    source = find_model(MODEL).path
    environments: dict[Engine, Environment] = {}
    for engine in reversed(ENGINES):  # those that write weights come first
        if engine not in wanted and setup.has_weights(engine):
            continue
        try:
            environment = setup.build_environment(engine)
            setup.make_weights(engine, environment, source)
        except Absent as absent:
            found.absent[engine] = str(absent)
        else:
            environments[engine] = environment
    return environments


def choose(variants: Sequence[Variant], only: Sequence[str]) -> list[Variant]:
    """Returns the variants whose names have one of `only` in them; all, where that is empty."""
    return [
        variant
        for variant in variants
        if not only or any(part.lower() in variant.name.lower() for part in only)
    ]


def measure_replays(
    variants: Sequence[Variant],
    environments: Mapping[Engine, Environment],
    setup: Setup,
    options: argparse.Namespace,
    found: Findings,
) -> None:
    """Replays the same load against each server, one after the other."""
    load = ReplayLoad(
        rate=options.rate,
        num_requests=options.replay_requests,
        prompt_tokens=f"{PROMPT_LEN}",
        output_tokens="uniform:64:128",
        limits=options.limit or LIMITS,
        seed=options.seed,
    )
    for variant in variants:
        try:
            found.replays[variant.name] = replay(
                variant, environments[variant.engine], load, setup, threads=len(options.cores)
            )
        except Absent as absent:
            found.unreplayed[variant.name] = str(absent)
            print(f"no replay: {variant.name}: {absent}", flush=True)
        else:
            print(f"replayed {variant.name}", flush=True)


def tell(found: Findings, options: argparse.Namespace) -> int:
    """Prints and writes what was found; returns 1 where something wanted was not reached."""
    print("\noutput tokens/s, medians; in brackets what this engine's are of them")
    print(report.tell(report.build_throughput(found)))
    if found.replays:
        limits = " ".join(options.limit or LIMITS)
        print(f"\nreplay at {options.rate:g} requests/s, limits {limits}; times in ms")
        print(report.tell(report.build_replays(found)))
    for name, reason in found.absent.items():
        print(f"absent: {name}: {reason}")
    for name, reason in found.unreplayed.items():
        print(f"no replay: {name}: {reason}")
    for caution in report.find_cautions(found):
        print(f"caution: {caution}")
    verdicts = report.judge(report.find_medians(found.samples))
    for line, holds in verdicts:
        print(f"{line}: {'holds' if holds else 'not reached'}")
    if options.json:
        options.json.write_text(json.dumps(as_json(found, options), indent=1))
    if options.plot:
        lines = [f"{PROMPT_LEN} tokens in, {options.tokens} out, {len(options.cores)} cores"]
        options.plot.write_text(report.build_page(found, lines))
        print(f"page {options.plot}")
    return 0 if all(holds for _, holds in verdicts) else 1


def as_json(found: Findings, options: argparse.Namespace) -> dict[str, object]:
    medians = report.find_medians(found.samples)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": MODEL,
        "cores": len(options.cores),
        "prompt_tokens": PROMPT_LEN,
        "versions": found.versions,
        "absent": found.absent,
        "unreplayed": found.unreplayed,
        "medians": [
            {
                "variant": variant,
                "num_seqs": num_seqs,
                "tokens_per_s": rate,
                "ratio": report.find_ratio(medians, variant, num_seqs),
            }
            for (variant, num_seqs), rate in medians.items()
        ],
        "peak_bytes": {
            name: {"start": first, "serving": later}
            for name, (first, later) in found.memory.items()
        },
        "first_token_agreement": report.find_agreement(found),
        "replay": {"rate": options.rate, "limits": options.limit or LIMITS, "of": found.replays},
        "samples": [dataclasses.asdict(sample) for sample in found.samples],
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--seqs", type=int, nargs="+", default=[1, 8, 32], metavar="N",
        help="at once (default: 1 8 32)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="out (default: 128)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help="variants with this in their names; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--peers-dir", type=Path, default=default_cache_dir() / "peers", metavar="DIR",
        help="where peers are, or are made (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), metavar="FILE",
        help="makes the peers' environments; some have wheels for some Pythons only (default: "
        "this one)",
    )  # fmt: skip
    parser.add_argument(
        "--venv", action="append", type=read_venv, default=[], metavar="ENGINE=PYTHON",
        help=f"an interpreter that has an engine already, of {', '.join(ENGINES)}; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--cores", type=read_cores, default=os.sched_getaffinity(0), metavar="0,1",
        help="of every engine (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--replay-requests", type=int, default=40, metavar="N", help="0 is none (default: 40)"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s (default: 2)")
    parser.add_argument(
        "--limit", action="append", metavar="L",
        help=f"as of `jaxserve bench`; may be repeated (default: {' '.join(LIMITS)})",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the replay")
    parser.add_argument("--setup-only", action="store_true", help="make peers, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample and result")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a page with figures")
    return parser.parse_args()


def read_venv(text: str) -> tuple[Engine, Path]:
    name, _, python = text.partition("=")
    for engine in ENGINES:
        if engine == name and python:
            return engine, Path(python)
    raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=PYTHON, of {', '.join(ENGINES)}")


def read_cores(text: str) -> set[int]:
    return {int(core) for core in text.split(",")}


if __name__ == "__main__":
    sys.exit(main())
