"""Options that several commands share."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from jaxserve.cli.log import set_up_logging
from jaxserve.config import Resolved, resolve_config
from jaxserve.engine import ServedModel
from jaxserve.engine.limits import merge_sampling
from jaxserve.errors import ConfigError
from jaxserve.request import SamplingParams

DEFAULT_MODEL: Final = "smollm2-135m-instruct"


# Options that stand for a key of their own, so that `--set` of the same key is a contradiction.
_FLAGS: Final[Mapping[str, str]] = {
    "model.dtype": "dtype",
    "server.host": "host",
    "server.port": "port",
    "server.vllm_engine": "vllm_engine",
    "server.http_host": "http_host",
    "server.http_port": "http_port",
    "metrics.port": "metrics_port",
    "metrics.host": "metrics_host",
    "metrics.prefix": "metrics_prefix",
    "log.format": "log_format",
}


def add_model_options(parser: argparse.ArgumentParser, *, log_level: str) -> None:
    """Adds MODEL, `--dtype`, `--config`, `--set` and `--log-level`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a Hugging Face folder, a .gguf file, a bundle, or a built-in name "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of weights and activations; over model.dtype of the configuration",
    )
    add_config_options(parser, log_level=log_level)


def add_config_options(parser: argparse.ArgumentParser, *, log_level: str) -> None:
    """Adds `--config`, `--set` and `--log-level`."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file, such as configs/cpu.toml; keys left out keep their defaults",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="one key of the configuration, over the file and the environment; may be repeated; "
        "`jaxserve config show` lists the keys",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=log_level,
        help="of the log on stderr (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="of the log on stderr; over log.format"
    )


def add_metrics_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--metrics-port`, `--metrics-host` and `--metrics-prefix`."""
    group = parser.add_argument_group("metrics over HTTP (docs/metrics.md)")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="serve them here; 0 picks a free port; over metrics.port (default: not served)",
    )
    group.add_argument("--metrics-host", metavar="H", help="address to bind; over metrics.host")
    group.add_argument(
        "--metrics-prefix",
        choices=("jaxserve", "vllm"),
        help="vllm serves vLLM's names; over metrics.prefix",
    )


def read_config(options: argparse.Namespace) -> Resolved:
    """Returns what the file, the environment and this command's flags say; the log follows it.

    Raises:
      ConfigError: as `resolve_options`.
    """
    resolved = resolve_options(options)
    set_up_logging(options.log_level, resolved.config.log.format)
    return resolved


def resolve_options(options: argparse.Namespace) -> Resolved:
    """Returns what the file, the environment and this command's flags say; changes nothing.

    Raises:
      ConfigError: see `load_config`; or a flag that is no SECTION.KEY=VALUE, or a key set twice.
    """
    flags: dict[str, object] = {}
    for text in options.set:
        key, separator, value = text.partition("=")
        if not (separator and value and "." in key):
            raise ConfigError(
                f"--set {text!r} is not SECTION.KEY=VALUE, such as --set scheduler.max_seqs=8"
            )
        flags[key.strip()] = value.strip()
    for key, name in _FLAGS.items():
        value = getattr(options, name, None)
        if value is not None and key in flags:
            name = name.replace("_", "-")
            raise ConfigError(f"--{name} and --set {key} set the same key; leave one out")
        if value is not None:
            flags[key] = value
    return resolve_config(options.config, flags=flags)


def add_sampling_options(group: "argparse._ArgumentGroup") -> None:
    """Adds what `read_sampling` reads."""
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: the rest of the context"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely; 0 is off")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest P in all; 1 is off"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="drop below P of the likeliest; 0 is off"
    )
    group.add_argument(
        "--seed", type=int, metavar="S", help="64 bits; default: a fresh one each time"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's EOS")


def read_sampling(options: argparse.Namespace, model: ServedModel) -> SamplingParams:
    """Returns what the options say, then the model's own defaults, then greedy."""
    asked = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "stop_strings": tuple(options.stop) if options.stop else None,
        "ignore_eos": options.ignore_eos,
    }
    return merge_sampling(asked, {"temperature": 0.0, **model.sampling_defaults})
