"""Options that several commands share."""

import argparse
from pathlib import Path
from typing import Final

DEFAULT_MODEL: Final = "smollm2-135m-instruct"


def add_model_options(parser: argparse.ArgumentParser, *, log_level: str) -> None:
    """Adds MODEL, `--dtype`, `--config` and `--log-level`."""
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
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file, such as configs/cpu.toml; keys left out keep their defaults",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=log_level,
        help="of the log on stderr (default: %(default)s)",
    )
