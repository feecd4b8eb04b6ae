"""`jaxserve config`: what is set and by whom, what is wrong with a file, and the schema."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.cli import exit_codes
from jaxserve.cli.options import add_config_options, read_config
from jaxserve.config import Config, Origin, Resolved, find_problems
from jaxserve.mechanisms import find_conflicts

EPILOG: Final = """\
examples:
  jaxserve config show --config configs/cpu.toml --set scheduler.max_seqs=8
  jaxserve config show --json | jq '.server.port.value'
  jaxserve config check configs/*.toml
  jaxserve config schema > schema.json

A later source wins: defaults, then --config FILE, then the environment, then
flags. Each key has a variable and a flag: scheduler.max_seqs is
JAXSERVE_SCHEDULER__MAX_SEQS=8 and --set scheduler.max_seqs=8. A list is JSON
there, such as [2, 8, 32]. A list of buckets may also be geometric: in a file
{first = 2, last = 32, ratio = 2}, else {"first": 2, "last": 32, "ratio": 2}.
"""
SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SHOW: Final = "print the configuration as TOML, each value with its source"
CHECK: Final = "check files, each alone, and list all that is wrong"
SCHEMA: Final = "print the JSON schema of a file, for editors"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "config",
        help="show, check or describe the configuration",
        description="Show the configuration with the source of each value; check files of it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help=SHOW, description=f"{_sentence(SHOW)}.")
    add_config_options(show, log_level="warning")
    show.add_argument("--json", action="store_true", help="one JSON object instead of TOML")
    show.set_defaults(run=run_show)
    check = actions.add_parser(
        "check",
        help=CHECK,
        description=f"{_sentence(CHECK)}; environment and flags are left out. Exit code "
        f"{exit_codes.USAGE} if any file is wrong. What depends on a model is checked by "
        "`jaxserve buckets MODEL --config FILE --dry-run`.",
    )
    check.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a TOML file")
    check.set_defaults(run=run_check, log_level="warning")
    schema = actions.add_parser("schema", help=SCHEMA, description=f"{_sentence(SCHEMA)}.")
    schema.set_defaults(run=run_schema, log_level="warning")


def run_show(options: argparse.Namespace) -> int:
    """Prints the resolved configuration."""
    resolved = read_config(options)
    print(json.dumps(as_json(resolved), indent=2) if options.json else as_toml(resolved))
    return exit_codes.OK


def run_check(options: argparse.Namespace) -> int:
    """Prints OK for each file that is right, one line per problem for the others."""
    has_problem = False
    for path in options.files:
        config, problems = find_problems(path)
        if config is not None:
            problems = [f"{path}: {conflict}" for conflict in find_conflicts(config)]
        for problem in problems:
            print(f"jaxserve: error: {' '.join(problem.split())}", file=sys.stderr)
        if problems:
            has_problem = True
        else:
            print(f"{path}: OK")
    return exit_codes.USAGE if has_problem else exit_codes.OK


def run_schema(options: argparse.Namespace) -> int:
    """Prints the schema."""
    print(schema_text())
    return exit_codes.OK


def schema_text() -> str:
    """Returns the JSON schema of a configuration file; configs/schema.json holds it too."""
    schema = {"$schema": SCHEMA_DIALECT} | Config.model_json_schema()
    schema |= {"title": "jaxserve configuration", "description": "A jaxserve TOML file."}
    return json.dumps(schema, indent=2, ensure_ascii=False)


def as_json(resolved: Resolved) -> dict[str, dict[str, object]]:
    """Returns `{section: {key: {value, source, from}}}`; its keys are API."""
    return {
        section: {
            key: {
                "value": value,
                "source": resolved.origins[f"{section}.{key}"].kind,
                "from": resolved.origins[f"{section}.{key}"].name or None,
            }
            for key, value in keys.items()
        }
        for section, keys in _sections(resolved.config).items()
    }


def as_toml(resolved: Resolved) -> str:
    """Returns a file that says the same, its comments the sources; what is unset is a comment."""
    lines: list[tuple[str, str]] = []
    for section, keys in _sections(resolved.config).items():
        lines += [("", ""), (f"[{section}]", "")] if lines else [(f"[{section}]", "")]
        for key, value in keys.items():
            said = f"# {key} is unset" if value is None else f"{key} = {_toml_value(value)}"
            lines.append((said, f"# {_word(resolved.origins[f'{section}.{key}'])}"))
    width = max(len(said) for said, _ in lines)
    return "\n".join(f"{said:{width}}  {source}".rstrip() for said, source in lines)


def _sections(config: Config) -> Mapping[str, Mapping[str, Any]]:
    dumped: dict[str, dict[str, Any]] = config.model_dump(mode="json")
    return dumped


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        items = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None]
        return f"{{ {', '.join(items)} }}" if items else "{}"
    # JSON's texts, numbers, lists and booleans are TOML's too, but for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return _toml_value(name) if "." in name else name  # names of tenants need no other quotes


def _word(origin: Origin) -> str:
    match origin.kind:
        case "file" | "environment":
            return " ".join(origin.name.split())  # a comment ends with its line
        case "default" | "flag":
            return origin.kind


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
