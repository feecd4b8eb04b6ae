"""What comes from models and files, on a terminal or in a pipe."""

import sys
from typing import Final

# A terminal would obey these; a file or a pipe gets them as they are.
CONTROLS: Final = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def write_text(text: str) -> None:
    """Writes to stdout at once."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
