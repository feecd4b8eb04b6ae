"""`jaxserve`: the parser of all commands, logging, and the way from an error to an exit code."""

import argparse
import errno
import importlib.metadata
import io
import logging
import os
import sys
from collections.abc import Sequence
from types import TracebackType

import jaxserve
from jaxserve.cli import config, generate, serve
from jaxserve.cli.exit_codes import INTERNAL, INTERRUPTED, PIPE_CLOSED, REFUSED, USAGE
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    JaxserveError,
    RecompileError,
    ShapeError,
)

# A full disk, a quota, a device's fault; other errors of files are told where they come up.
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
DESCRIPTION = """\
A measured serving runtime for language models on one node.

  jaxserve generate --chat --prompt "Name three rivers."
  jaxserve serve --port 50051
"""
EPILOG = """\
Exit codes: 0 done; 1 the input, the model or the machine will not do; 2 wrong usage or
configuration; 70 internal error; 130 interrupted; 141 the reader of the output went away.
Errors are one line on stderr.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; `--help` and wrong usage raise SystemExit."""
    if arguments is None:
        sys.excepthook = _report_internal_error
        _prepare_streams()
    parser = build_parser()
    options = parser.parse_args(arguments)
    _set_up_logging(options.log_level)
    try:
        code = int(options.run(options))
        sys.stdout.flush()  # here, where a full disk still has an exit code
        return code
    except ConfigError as error:
        return _fail(error, USAGE)
    except (EngineDeadError, RecompileError, ShapeError) as error:
        return _fail(error, INTERNAL)
    except JaxserveError as error:
        return _fail(error, REFUSED)
    except KeyboardInterrupt:
        print("jaxserve: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        _drop_stdout()
        print(f"jaxserve: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return REFUSED


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each sets `run` and `log_level`."""
    parser = argparse.ArgumentParser(
        prog="jaxserve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_parser(commands)
    serve.add_parser(commands)
    config.add_parser(commands)
    return parser


def _version() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    jax = importlib.metadata.version("jax")
    return f"jaxserve {jaxserve.__version__} (jax {jax}, Python {python})"


def _prepare_streams() -> None:
    """Opens what the caller closed, and has no character of an output fail."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  (for the life of the process)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a Latin-1 terminal cannot show all that comes


def _drop_stdout() -> None:
    """Python flushes stdout once more at exit; lets that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=logging.WARNING,  # of other libraries
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("jaxserve").setLevel(level.upper())


def _fail(error: JaxserveError, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"jaxserve: error: {line}", file=sys.stderr)
    return code


def _report_internal_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Has an error nobody foresaw end the process with INTERNAL, after its traceback."""
    sys.__excepthook__(kind, error, trace)
    print(f"jaxserve: internal error: {kind.__name__}: {error}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(INTERNAL)
