"""Options that several of the actions share, and what their values are."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.measure.workload import WorkloadEnd
from jaxserve.measure.workload.make import ClosedLoop, OpenLoop

NAMED_BURSTINESS: Mapping[str, float] = {"poisson": 1.0, "constant": float("inf")}


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds `-o`, `--name`, `--overwrite`, `--quiet` and `--log-level`."""
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the workload to write"
    )
    parser.add_argument("--name", metavar="NAME", help="of the workload (default: FILE's own)")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")
    parser.add_argument("--quiet", action="store_true", help="no summary on stderr")
    add_log_option(parser)


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--log-level`."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="of the log on stderr (default: %(default)s)",
    )


def add_arrival_options(group: "argparse._ArgumentGroup") -> None:
    """Adds what `read_arrivals` reads."""
    group.add_argument("--rate", type=float, metavar="R", help="requests a second: an open loop")
    group.add_argument(
        "--arrivals",
        choices=("poisson", "gamma", "constant"),
        help="gaps of the open loop: exponential, of a gamma distribution with --burstiness, or "
        "all alike (default: poisson)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="shape of the gamma distribution, as in vllm bench: below 1 comes in bursts, above "
        "1 is more even, 1 is poisson",
    )
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="a closed loop instead: N requests at any time, so that a slow server is asked less",
    )


def read_arrivals(options: argparse.Namespace) -> OpenLoop | ClosedLoop | None:
    """Returns the arrivals; None where neither a rate nor a concurrency is given.

    Raises:
      ConfigError: options contradict each other, or a number will not do.
    """
    burstiness, kind = options.burstiness, options.arrivals
    if options.concurrency is not None:
        for name in ("rate", "arrivals", "burstiness"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} is of an open loop, --concurrency of a closed one")
        check("--concurrency", options.concurrency, low=1, high=1 << 20)
        return ClosedLoop(concurrency=options.concurrency)
    if options.rate is None:
        if kind is not None or burstiness is not None:
            raise ConfigError("--arrivals and --burstiness need a --rate")
        return None
    check("--rate", options.rate, low=1e-6, high=1e6)
    if burstiness is not None:
        if kind not in (None, "gamma"):
            raise ConfigError(f"--burstiness goes with --arrivals gamma, not with {kind}")
        check("--burstiness", burstiness, low=1e-3, high=1e6)
        return OpenLoop(rate=options.rate, burstiness=burstiness)
    if kind == "gamma":
        raise ConfigError("--arrivals gamma needs a --burstiness")
    return OpenLoop(rate=options.rate, burstiness=NAMED_BURSTINESS[kind or "poisson"])


def check(name: str, value: float | None, *, low: float, high: float) -> None:
    """Refuses a number out of its range; None is not given.

    Raises:
      ConfigError: it is out of it.
    """
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{name} is {value:g}, but must be from {low:g} to {high:g}")


def report(options: argparse.Namespace, end: WorkloadEnd) -> None:
    """Says on stderr what was written."""
    if options.quiet:
        return
    line = f"{options.output}: {end.num_entries} requests, hash {end.content_hash[:12]}"
    for reason, count in sorted(end.counts.items()):
        line += f"; {count} dropped: {reason.replace('_', ' ')}"
    print(line, file=sys.stderr)
