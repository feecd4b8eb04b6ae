"""Help as a new user reads it: an example for each command, and no line that a terminal breaks."""

import argparse
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxserve.cli.parser import build_parser


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers_of(child)


PARSERS = list(parsers_of(build_parser()))


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: str(parser.prog))
def test_help_fits_eighty_columns_and_says_what_the_command_does(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert parser.description


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: str(parser.prog))
def test_each_command_has_an_example(parser: argparse.ArgumentParser) -> None:
    is_action = parser.prog.count(" ") > 1  # `jaxserve config` has those of its actions
    assert is_action or f"\n  {parser.prog}" in parser.format_help()


def test_every_command_and_action_is_here() -> None:
    names = {parser.prog for parser in PARSERS}
    assert {"jaxserve", "jaxserve generate", "jaxserve serve", "jaxserve config show"} <= names


def test_reading_the_options_brings_neither_jax_nor_grpc() -> None:
    """Every command starts with it; and what sets grpc's own log must come before grpc."""
    code = (
        "import sys, jaxserve.cli.parser\n"
        "sys.exit(' '.join({'jax', 'grpc', 'httpx', 'matplotlib'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
