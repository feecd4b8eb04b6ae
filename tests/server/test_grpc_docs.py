"""docs/grpc.md says what is so."""

import asyncio
import re
import textwrap
from pathlib import Path

import pytest

from jaxserve.server.status import TABLE
from tests.fakes import CHAT_TEMPLATE
from tests.server.harness import run_server

TEXT = (Path(__file__).parents[2] / "docs" / "grpc.md").read_text()


def test_every_reason_is_documented_with_its_status() -> None:
    rows = set(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", TEXT, flags=re.MULTILINE))
    reasons = {
        (row.reason or getattr(kind, "reason", "INTERNAL"), row.code) for kind, row in TABLE.items()
    }
    assert rows == {(reason, code) for reason, code in reasons if reason != "BAD_HTTP"}


@pytest.mark.asyncio
async def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^    from jaxserve.*?(?=^\S)", TEXT, flags=re.MULTILINE | re.DOTALL)
    async with run_server(
        script=None, chat_template=CHAT_TEMPLATE, max_model_tokens=200, num_pages=201
    ) as running:
        code = textwrap.dedent(program).replace("127.0.0.1:50051", running.target)
        await asyncio.to_thread(exec, compile(code, "docs/grpc.md", "exec"), {})
        assert running.num_submitted == 4
    assert "Finish(" in capsys.readouterr().out
