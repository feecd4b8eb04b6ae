"""Random messages of every type end well or are refused, and leave nothing behind."""

import pytest

from scripts.judges.proto_fuzz import METHODS, fuzz
from tests.server.harness import TOOL_TEMPLATE, run_server, until

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("first", [0, 1_000_000])
async def test_no_message_is_a_fault_or_a_leak(first: int) -> None:
    async with run_server(
        script=None, chat_template=TOOL_TEMPLATE, max_model_tokens=400, num_pages=401
    ) as running:
        ends = await fuzz(running.target, count=400, first=first)
        assert sum(ends.values()) == 400
        for method in METHODS:  # not all are refused, and not all pass
            assert ends[f"{method} OK"] > 0
        assert ends["Generate INVALID_ARGUMENT"] > 3
        await until(lambda: running.num_open_calls == 0)
        assert not running.engine._intake.live()
