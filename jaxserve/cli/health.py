"""`jaxserve health`: asks a server whether it is alive and takes requests, for probes."""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.errors import ConfigError

EPILOG: Final = """\
examples:
  jaxserve health
  jaxserve health --target 127.0.0.1:50053 --alive
  jaxserve health --target models.example:50051 --ca-file root.pem

Exit code 0: it takes requests (with --alive: its engine has not failed). 1: it
does not, or nobody answers. No key is needed.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "health",
        help="ask a server whether it takes requests",
        description="Ask a server, over gRPC, whether it is alive and takes requests.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="its gRPC port, or server.health_port (default: %(default)s)",
    )
    parser.add_argument(
        "--alive", action="store_true", help="be content with a server that is not ready"
    )
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="PEM of its root: use TLS; default: plaintext"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds (default: %(default)s)"
    )
    parser.set_defaults(run=run, log_level="warning")


def run(options: argparse.Namespace) -> int:
    """Prints what the server says; returns 0 where that is good."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from jaxserve.client import Client, ServerError, Tls  # here: grpc, for this command only

    if not options.timeout > 0:
        raise ConfigError(f"--timeout is {options.timeout}, but must be more than 0 seconds")
    tls = None
    if options.ca_file is not None:
        try:
            tls = Tls(root_certificates=options.ca_file.read_bytes())
        except OSError as error:
            raise ConfigError(f"--ca-file {options.ca_file}: {error.strerror}") from error
    try:
        with Client(options.target, tls=tls) as client:
            health = client.health(timeout_s=options.timeout)
    except ServerError as error:
        print(f"alive=false ready=false error={error.code.name}")
        if error.code.name == "UNAVAILABLE":
            hint = "has it TLS, of this root" if tls else "has it TLS (--ca-file)"
            print(
                f"jaxserve: nobody answers at {options.target}: "
                f"is it a server's gRPC port, {hint}?",
                file=sys.stderr,
            )
        return exit_codes.REFUSED
    print(f"alive={str(health.is_alive).lower()} ready={str(health.is_ready).lower()}")
    is_good = health.is_alive if options.alive else health.is_ready
    return exit_codes.OK if is_good else exit_codes.REFUSED
