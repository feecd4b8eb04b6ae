"""A parser whose errors are one line, with a did-you-mean for a slip of the pen."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, override

from jaxserve.cli.exit_codes import USAGE


class CommandParser(argparse.ArgumentParser):
    """Of a command, and of those below it. Abbreviations of options are slips too."""

    @override
    def parse_known_args(  # type: ignore[override]  # typeshed overloads it for other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Looks for unknown options first: argparse misses a required one before it sees them."""
        if args is not None and self._subparsers is None:
            self._check_options(args)
        return super().parse_known_args(args, namespace)

    @override
    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(USAGE, f"jaxserve: error: {line}; see `{self.prog} --help`\n")

    def _check_options(self, args: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in args:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in known:
                self.error(f"{self.prog} has no option {name}{_did_you_mean(name, known)}")

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = _did_you_mean(str(value), known) or f"; choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
