"""The command as a person runs it: a process, the real model, the real runner."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "import sys; from jaxserve.cli.main import main; sys.exit(main())"]


@pytest.mark.demo
def test_generate_writes_one_line_of_json_and_what_the_demo_model_says() -> None:
    prompt = "The capital of France is"
    words = ["generate", "--prompt", prompt, "--max-tokens", "4", "--dtype", "float32", "--json"]
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert "Paris" in result["text"]
    assert len(result["token_ids"]) == result["usage"]["completion_tokens"] == 4
    assert result["finish_reason"] == "max_tokens"
