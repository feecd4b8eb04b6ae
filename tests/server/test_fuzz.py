"""Random messages of every type end well or are refused, and leave nothing behind."""

import asyncio
from pathlib import Path

import pytest

from jaxserve.config import AdminSection, ServerSection
from scripts.judges.proto_fuzz import ADMIN, PUBLIC, Caller, fuzz, vllm_methods
from tests.server.harness import TOOL_TEMPLATE, run_server, until

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("seed", [0, 1])
async def test_no_message_is_a_fault_or_a_leak(seed: int, tmp_path: Path) -> None:
    admin = f"unix:{tmp_path / 'admin'}"
    methods = [*PUBLIC, *ADMIN, *vllm_methods()]
    async with run_server(
        script=None,
        chat_template=TOOL_TEMPLATE,
        max_model_tokens=400,
        num_pages=401,
        sections={
            "admin": AdminSection(address=admin),
            "server": ServerSection(port=0, vllm_engine=True),
        },
    ) as running:

        def send() -> dict[str, int]:
            with Caller(running.target, admin=admin) as caller:
                return fuzz(caller, methods, count=480, seed=seed)

        ends = await asyncio.to_thread(send)
        assert sum(ends.values()) >= 400
        for method in ("GenerationService/Generate", "GenerationService/StreamGenerate",
                       "GenerationService/Score", "VllmEngine/Generate"):  # fmt: skip
            assert ends.get(f"{method} OK", 0) > 0  # not all are refused
            assert ends.get(f"{method} INVALID_ARGUMENT", 0) > 0  # and not all pass
        await until(lambda: running.num_open_calls == 0)
        assert not running.engine._intake.live()
