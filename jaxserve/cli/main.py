"""`jaxserve`: logging, interrupts, and the way from an error to an exit code.

It imports little, so that an interrupt is seen to from the first moment; the commands come later.
"""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType

from jaxserve.cli.exit_codes import INTERNAL, INTERRUPTED, PIPE_CLOSED, REFUSED, USAGE
from jaxserve.cli.terminal import CONTROLS
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    JaxserveError,
    RecompileError,
    ShapeError,
)

# A full disk, a quota, a device's fault; other errors of files are told where they come up.
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
CANNOT_MAP = "failed to map segment"  # what the loader says of a library that does not fit
INTERRUPTED_LINE = "jaxserve: interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; `--help` and wrong usage raise SystemExit."""
    is_process = arguments is None
    if is_process:
        _exit_on_interrupt()  # an import may swallow KeyboardInterrupt
        sys.excepthook = _report_internal_error
        _prepare_streams()
    from jaxserve.cli.log import set_up_logging
    from jaxserve.cli.parser import build_parser  # half a second of imports

    options = build_parser().parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    set_up_logging(options.log_level, getattr(options, "log_format", None) or "text")
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
        if is_process:
            _exit_interrupted()
        print(INTERRUPTED_LINE, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and CANNOT_MAP not in str(error):
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        line = f"not enough memory: {what}; free some, raise its limit, or use a smaller model"
        print(f"jaxserve: error: {line}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        _drop_stdout()
        print(f"jaxserve: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return REFUSED


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


def _exit_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: nohup
        signal.signal(signal.SIGINT, _exit_interrupted)


def _exit_interrupted(number: int = 0, frame: FrameType | None = None) -> None:
    """Ends the process now: an ordinary exit would wait for threads that compile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # whoever read them may be gone too
        sys.stdout.flush()
        print(INTERRUPTED_LINE, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _fail(error: JaxserveError, code: int) -> int:
    line = " ".join(str(error).split()).translate(CONTROLS)  # a name in a file may hold any
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
