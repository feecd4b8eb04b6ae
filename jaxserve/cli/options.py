"""Options that several commands share."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from jaxserve.cli.log import set_up_logging
from jaxserve.config import Resolved, resolve_config
from jaxserve.errors import ConfigError

DEFAULT_MODEL: Final = "smollm2-135m-instruct"


# Options that stand for a key of their own, so that `--set` of the same key is a contradiction.
_FLAGS: Final[Mapping[str, str]] = {
    "model.dtype": "dtype",
    "server.host": "host",
    "server.port": "port",
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
        help="a Hugging Face folder, a .gguf file, or a built-in name (default: %(default)s)",
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
    resolved = resolve_config(options.config, flags=flags)
    set_up_logging(options.log_level, resolved.config.log.format)
    return resolved
