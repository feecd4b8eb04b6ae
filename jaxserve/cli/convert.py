"""`jaxserve convert`: any model that can be loaded, as a bundle that loads fast and is checked."""

import argparse
import sys
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.progress import StartProgress

TITLES: Final = {"convert": "weights written, MiB", "verify": "parts verified"}
EPILOG: Final = """\
examples:
  jaxserve convert path/to/model models/mine
  jaxserve convert model.Q8_0.gguf models/mine --dtype bfloat16
  jaxserve serve models/mine

The bundle (docs/checkpoints.md) appears under its name only when all of it is
written and was read back; what an interrupted conversion leaves beside it, in
DST.converting, no command takes for a model, and the next conversion to DST
removes it.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "convert",
        help="make a bundle of a model",
        description="Make a bundle of a model: its weights in Orbax form, checked by digest,\n"
        "with a manifest and its tokenizer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face folder, a .gguf file, a built-in name, or another bundle",
    )
    parser.add_argument("target", metavar="DST", type=Path, help="the bundle; must not exist")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the weights; auto: bfloat16 if the source is stored in it, else float32, which "
        "loses nothing (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="of the log on stderr (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Converts; returns the exit code."""
    import jax

    from jaxserve.checkpoint.convert import convert
    from jaxserve.checkpoint.registry import find_model

    jax.config.update("jax_platforms", "cpu")  # a GPU's memory would be taken for nothing
    source = find_model(options.source)
    with StartProgress(is_quiet=options.quiet, titles=TITLES) as progress:
        manifest = convert(source, options.target, dtype=options.dtype, progress=progress)
    if not options.quiet:
        print(f"{options.target}: {manifest.name} in {manifest.dtype}", file=sys.stderr)
    return exit_codes.OK
