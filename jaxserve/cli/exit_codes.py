"""What a command's exit code says."""

from typing import Final

OK: Final = 0
REFUSED: Final = 1  # this input, model or machine will not do: the message says why
USAGE: Final = 2  # wrong flags or configuration
SOME_FAILED: Final = 3  # a batch is complete, and some of its lines are errors
INTERNAL: Final = 70  # ours to fix (EX_SOFTWARE of sysexits.h)
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it
PIPE_CLOSED: Final = 141  # 128 + SIGPIPE: whoever read the output went away
