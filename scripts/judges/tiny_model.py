"""Writes a tiny random model that calls tools: `python -m scripts.judges.tiny_model FOLDER`."""

import dataclasses
import sys
from pathlib import Path

from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.server.harness import TOOL_TEMPLATE


def write_tiny_model(folder: Path, *, max_position: int = 1024) -> Path:
    """Writes a model of two small layers whose tokens are bytes, or little more."""
    config = dataclasses.replace(T1, max_position=max_position)
    write_hf(folder, config, make_weights(config))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


if __name__ == "__main__":
    print(write_tiny_model(Path(sys.argv[1])))
