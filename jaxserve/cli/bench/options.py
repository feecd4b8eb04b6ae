"""Options of a replay, which `run` and `sweep` share, and what they say."""

import argparse
import math
import secrets
from pathlib import Path
from typing import Final

from jaxserve.cli.options import add_config_options
from jaxserve.cli.workload.options import add_arrival_options, check, read_arrivals
from jaxserve.errors import ConfigError
from jaxserve.measure.bench_options import LAG_BOUND_S, BenchOptions
from jaxserve.measure.limits import Limits, read_limits
from jaxserve.measure.load import Load, load_file, load_memory
from jaxserve.measure.replay import TIMEOUT_S
from jaxserve.measure.workload import Header
from jaxserve.measure.workload.entry import build_workload
from jaxserve.measure.workload.lengths import parse_lengths
from jaxserve.measure.workload.make import ClosedLoop, OpenLoop, PromptClass, make_entries

IN_PROCESS: Final = "in-process"
SIMPLE: Final = (
    "num_requests", "rate", "arrivals", "burstiness", "concurrency", "prompt_tokens",
    "output_tokens",
)  # fmt: skip
# Options that say something of a server elsewhere, and of an engine in this process.
REMOTE_ONLY: Final = (
    "model_name", "metrics_url", "bundle_digest", "hardware", "jax_version", "api_key_env",
)  # fmt: skip
HTTP_ONLY: Final = ("api", "extras", "vocab_size")
GRPCS_ONLY: Final = ("ca_file",)
LOCAL_ONLY: Final = ("dtype", "config", "set")
LIMITS_HELP: Final = """\
Limits, in seconds, that a request must meet for its tokens to count:
  ttft=0.5      time to the first token, from the intended start
  itl_p95=0.1   95 % of its inter-token latencies; itl_max=0.1 all of them;
                gap_p95, gap_max: likewise the gaps between its messages
  tpot=0.05     its mean time per output token after the first message
  e2e=10        to its last byte
  deadline      its own, of the workload
  chat:ttft=1   the same for one prompt class, in place of the common one
"""


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """Adds everything but what only one of the actions has."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a Hugging Face folder, a .gguf file, a bundle or a built-in name; of a server "
        "elsewhere, the files that it serves, for their vocabulary and digest",
    )
    parser.add_argument(
        "--target",
        default=IN_PROCESS,
        metavar="T",
        help="in-process, grpc://HOST:PORT, grpcs://HOST:PORT with TLS, or http://HOST:PORT/v1 "
        "(default: %(default)s)",
    )
    add_load_options(parser)
    group = parser.add_argument_group("measuring")
    add_judging_options(group)
    group.add_argument(
        "--warm-up",
        type=int,
        default=0,
        metavar="N",
        help="requests sent before, and left out of every figure (default: 0)",
    )
    group.add_argument(
        "--prime", action="store_true", help="send every prompt once before, for the caches"
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of made-up prompts and arrivals; another gives others (default: a fresh one)",
    )
    group.add_argument(
        "--max-send-lag",
        type=float,
        default=LAG_BOUND_S,
        metavar="S",
        help="warn where the p99 of the send lag is above this (default: %(default)g)",
    )
    group.add_argument(
        "--cache-state",
        choices=("cold", "primed"),
        help="what the server's caches held at the start, where it cannot be worked out",
    )
    _add_sampling(parser)
    _add_remote(parser)
    group = parser.add_argument_group("engine in this process")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of weights and activations; over model.dtype of the configuration",
    )
    add_config_options(parser, log_level="warning")
    add_output_options(parser)


def add_judging_options(group: "argparse._ArgumentGroup") -> None:
    """Adds what requests are held to, and when they are given up."""
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="L",
        help="such as ttft=0.5, itl_p95=0.1, e2e=10 or deadline; may be repeated; see below",
    )
    group.add_argument("--repeats", type=int, default=1, metavar="N", help="(default: 1)")
    group.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help="of a request, from its intended start (default: %(default)g)",
    )
    group.add_argument(
        "--max-drain",
        type=float,
        metavar="S",
        help="cancel what still runs so long after the last send (default: wait)",
    )


def add_rate_scale(group: argparse._ActionsContainer) -> None:
    """Adds the factor of the load's rate."""
    group.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="2 sends twice as fast, or keeps twice as many in flight (default: 1)",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds where results go, and whether progress is shown."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--overwrite", action="store_true", help="replace results in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is to be sent."""
    parser.add_argument(
        "--workload", type=Path, metavar="FILE", help="of `jaxserve workload`; or, instead:"
    )
    group = parser.add_argument_group("a simple load")
    group.add_argument("--num-requests", type=int, metavar="N", help="(default: 100)")
    add_arrival_options(group)
    group.add_argument(
        "--prompt-tokens",
        metavar="LENGTHS",
        help="N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX] (default: 128)",
    )
    group.add_argument("--output-tokens", metavar="LENGTHS", help="likewise (default: 64)")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds what is asked of every request."""
    group = parser.add_argument_group("sampling; an entry's own goes over it")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="(default: 0, greedy)"
    )
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument(
        "--lengths",
        choices=("exact", "at-most"),
        default="exact",
        help="exact: a request must have all the tokens it wants, or it is short; at-most: "
        "whatever the model ends with is good (default: exact)",
    )


def _add_remote(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server elsewhere")
    group.add_argument("--model-name", metavar="NAME", help="to ask for (default: the first)")
    group.add_argument("--metrics-url", metavar="URL", help="of its metrics in Prometheus' format")
    group.add_argument("--bundle-digest", metavar="HEX", help="of its model, without MODEL here")
    group.add_argument("--hardware", metavar="TEXT", help="what it runs on")
    group.add_argument("--jax-version", metavar="V", help="where its metrics do not tell")
    group.add_argument(
        "--api", choices=("completions", "chat"), help="over HTTP (default: completions)"
    )
    group.add_argument(
        "--extras",
        choices=("none", "vllm", "jaxserve"),
        help="vllm sends ignore_eos, min_tokens and more, which only servers of its kind take; "
        "lengths are exact then (default: none)",
    )
    group.add_argument("--api-key-env", metavar="NAME", help="variable that holds the API key")
    group.add_argument(
        "--ca-file",
        type=Path,
        metavar="PEM",
        help="who may vouch for a grpcs server (default: the system's list)",
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="for made-up prompts over HTTP, without MODEL"
    )


def check_target(options: argparse.Namespace) -> None:
    """Refuses options that say nothing of the chosen target.

    Raises:
      ConfigError: there is one, or the target is none.
    """
    target = options.target
    refused: tuple[str, ...]
    if target == IN_PROCESS:
        refused = (*REMOTE_ONLY, *HTTP_ONLY, *GRPCS_ONLY)
    elif target.startswith("grpcs://"):
        refused = (*LOCAL_ONLY, *HTTP_ONLY)
    elif target.startswith("grpc://"):
        refused = (*LOCAL_ONLY, *HTTP_ONLY, *GRPCS_ONLY)
    elif target.startswith(("http://", "https://")):
        refused = (*LOCAL_ONLY, *GRPCS_ONLY)
    else:
        raise ConfigError(
            f"--target {target!r} is not in-process, grpc://HOST:PORT, grpcs://HOST:PORT or "
            "http://HOST:PORT/v1"
        )
    for name in refused:
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no meaning for --target {target}; leave it out")


def read_load(options: argparse.Namespace, *, seed: int) -> Load:
    """Returns what to replay.

    Raises:
      ConfigError: a workload and a simple load, or a number that will not do.
      WorkloadError: the file will not do.
    """
    given = [name for name in SIMPLE if getattr(options, name) is not None]
    if options.workload is not None:
        if given:
            flag = given[0].replace("_", "-")
            raise ConfigError(f"--{flag} and --workload both say what to send; leave one out")
        return load_file(options.workload)
    arrivals = read_arrivals(options)
    if arrivals is None:
        raise ConfigError(
            "what is to be sent? give --workload FILE, or --rate R (an open loop) or "
            "--concurrency N (a closed one)"
        )
    num_requests = 100 if options.num_requests is None else options.num_requests
    check("--num-requests", num_requests, low=1, high=10**7)
    lengths = PromptClass(
        prompt=parse_lengths(options.prompt_tokens or "128", "--prompt-tokens"),
        output=parse_lengths(options.output_tokens or "64", "--output-tokens"),
    )
    is_closed = isinstance(arrivals, ClosedLoop)
    burstiness = arrivals.burstiness if isinstance(arrivals, OpenLoop) else None
    header = Header(
        name="simple",
        arrivals="closed" if is_closed else "open",
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        seed=seed,
        source="jaxserve bench",
        parameters={
            "prompt_tokens": options.prompt_tokens or "128",
            "output_tokens": options.output_tokens or "64",
            "burstiness": burstiness if burstiness != math.inf else "constant",
        },
    )
    entries = make_entries(arrivals, [lengths], seed=seed, num_requests=num_requests)
    return load_memory(build_workload(header, entries))


def read_seed(options: argparse.Namespace) -> int:
    """Returns the seed; a fresh one where none is given."""
    check("--seed", options.seed, low=0, high=(1 << 63) - 1)
    return secrets.randbits(32) if options.seed is None else int(options.seed)


def read_bench_options(
    options: argparse.Namespace, load: Load, *, seed: int, rate_scale: float
) -> BenchOptions:
    """Returns how to measure.

    Raises:
      ConfigError: a limit or a number will not do.
    """
    check("--repeats", options.repeats, low=1, high=1000)
    check("--warm-up", options.warm_up, low=0, high=load.num_requests)
    check("--timeout", options.timeout, low=0.001, high=1e6)
    check("--max-drain", options.max_drain, low=0, high=1e6)
    check("--max-send-lag", options.max_send_lag, low=0, high=1e6)
    check("--temperature", options.temperature, low=0, high=1e6)
    chosen = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return BenchOptions(
        limits=read_all_limits(options, load),
        seed=seed,
        is_seed_chosen=options.seed is not None,
        repeats=options.repeats,
        warm_up=options.warm_up,
        primes_cache=options.prime,
        rate_scale=rate_scale,
        timeout_s=options.timeout,
        max_drain_s=options.max_drain,
        sampling={name: value for name, value in chosen.items() if value is not None},
        lengths="exact" if options.lengths == "exact" else "at_most",
        cache_state=options.cache_state,
        lag_bound_s=options.max_send_lag,
    )


def read_all_limits(options: argparse.Namespace, load: Load) -> Limits:
    """Returns the limits of the command line and of the workload.

    Raises:
      ConfigError: one is none, or is for a class that no request has, so that it judges nothing.
    """
    limits = read_limits(options.limit, load.header.limits)
    for name in limits.classes.keys() - load.header.limits.keys() - load.classes:
        known = ", ".join(sorted(filter(None, load.classes))) or "none"
        raise ConfigError(
            f"--limit {name}:… is for prompt class {name!r}, but the load's classes are {known}"
        )
    return limits
