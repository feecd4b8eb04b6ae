"""`jaxserve info`: the machine, versions, devices, settings and caches, for a report of a fault."""

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jaxserve
from jaxserve.cli import exit_codes
from jaxserve.cli.options import add_config_options, read_config
from jaxserve.config import GIB, MIB, default_cache_dir
from jaxserve.errors import CheckpointError, ConfigError

EPILOG: Final = """\
examples:
  jaxserve info
  jaxserve info path/to/model
  jaxserve info --json > report.json

Paste it into a report of a fault. It reads no weights and sends nothing
anywhere; of the environment it shows only JAXSERVE_*, JAX_*, XLA_* and what
chooses devices and folders.
"""
PACKAGES: Final = ("jax", "jaxlib", "flax", "numpy", "grpcio", "protobuf", "tokenizers")
VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
PREFIXES: Final = ("JAXSERVE_", "JAX_", "XLA_")
# A section's rows by name; a list has a line for each of its items.
Facts = dict[str, Any]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "info",
        help="show the machine, versions, devices and caches",
        description="Show the machine, versions, devices, settings and caches.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="also what is known of this model"
    )
    add_config_options(parser, log_level="error")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Gathers and prints; what cannot be found out is said in its place."""
    environment = find_environment(os.environ)  # first: jax adds to it
    facts: Facts = {
        "machine": find_machine(),
        "versions": find_versions(),
        "devices": find_devices(),
        "environment": environment,
        "cache": find_cache(options),
        "models": find_models(),
    }
    if options.model is not None:
        facts["model"] = find_model_facts(options.model)
    print(json.dumps(facts, indent=2) if options.json else as_text(facts))
    return exit_codes.OK


def find_machine() -> Facts:
    """Returns what the machine is, and how much of it this process may use."""
    from jaxserve.engine.machine import read_machine

    return read_machine()


def find_versions() -> Facts:
    """Returns the version of each package; None is not installed."""
    versions: Facts = {"jaxserve": jaxserve.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def find_devices() -> Facts:
    """Returns JAX's devices, or why there are none."""
    from jaxserve.engine.machine import read_devices

    try:
        return {"found": read_devices()}
    except RuntimeError as error:
        return {"error": " ".join(str(error).split())}


def find_environment(environment: Mapping[str, str]) -> Facts:
    """Returns the variables that change what runs."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in VARIABLES or name.upper().startswith(PREFIXES)
    }


def find_cache(options: argparse.Namespace) -> Facts:
    """Returns the compilation cache's folder and what lies in it, or why it cannot be read."""
    facts: Facts = {}
    try:
        folder = read_config(options).config.runner.cache_dir or default_cache_dir()
    except ConfigError as error:
        facts["configuration_error"] = str(error)
        folder = default_cache_dir()
    facts["folder"] = str(folder)
    try:
        versions = sorted(path for path in folder.iterdir() if path.is_dir())
        facts["versions"] = [_describe_folder(path) for path in versions]
    except FileNotFoundError:
        facts["versions"] = []
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        facts["error"] = getattr(error, "strerror", None) or str(error)
    return facts


def _describe_folder(folder: Path) -> Facts:
    sizes = [path.stat().st_size for path in folder.glob("*-cache")]
    return {"name": folder.name, "entries": len(sizes), "size_bytes": sum(sizes)}


def find_models() -> Facts:
    """Returns where each built-in model lies, or how to get it."""
    from jaxserve.checkpoint.registry import DEMO_NAME, find_demo_file

    try:
        return {DEMO_NAME: str(find_demo_file())}
    except CheckpointError as error:
        return {DEMO_NAME: None, "error": str(error)}


def find_model_facts(name: str) -> Facts:
    """Returns what a model's header says.

    Raises:
      CheckpointError: it is missing, damaged or not supported.
    """
    from jaxserve.checkpoint.registry import find_model

    source = find_model(name)
    header = source.load_header()
    return {
        "name": header.name,
        "path": str(source.path),
        "architecture": header.architecture,
        "stored_as": header.quantization,
        "layers": header.config.num_layers,
        "hidden_size": header.config.hidden_size,
        "vocabulary": header.config.vocab_size,
        "positions": header.config.max_position,
        "eos_ids": sorted(header.eos_ids),
        "chat_template": header.tokenizer.chat_template is not None,
        "weight_bytes": sum(path.stat().st_size for path in header.weight_files),
    }


def as_text(facts: Mapping[str, Facts]) -> str:
    """Returns a block per section, a line per fact or item of a list; no line is wrapped."""
    blocks = []
    for section, rows in facts.items():
        width = max((len(_title(name)) for name in rows), default=0)
        lines = [
            f"  {_title(name) if i == 0 else '':{width}}  {line}"
            for name, value in rows.items()
            for i, line in enumerate(_lines(name, value))
        ]
        blocks.append("\n".join([section, *(lines or ["  none"])]))
    return "\n\n".join(blocks)


def _lines(name: str, value: object) -> Sequence[str]:
    match value:
        case list() if any(isinstance(item, dict) for item in value):
            return [", ".join(_words(item)) for item in value]
        case list():
            return [", ".join(map(str, value)) or "none"]
        case _:
            return [_said(name, value)]


def _words(item: Mapping[str, object]) -> Sequence[str]:
    return [
        f"{_title(key)} {_said(key, value)}" for key, value in item.items() if value is not None
    ]


def _said(name: str, value: object) -> str:
    match value:
        case None:
            return "not found"
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("bytes"):
            return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"
        case _:
            return str(value)


def _title(name: str) -> str:
    """Returns a name as it is read; a variable's stays as it is."""
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ")
