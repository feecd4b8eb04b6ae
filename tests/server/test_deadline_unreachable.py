"""With policy edf, what cannot meet its deadline is told so at once, through both doors."""

import contextlib
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxserve.config import SchedulerSection, ServerSection
from jaxserve.gen import generation_pb2
from jaxserve.plan import Bucket
from jaxserve.scheduler.step_time import StepWork
from tests.server.harness import Running, raw_stub, run_server

pytestmark = pytest.mark.asyncio

STEP_S = 5.0  # as the engine has learned


@contextlib.asynccontextmanager
async def run_slow() -> AsyncIterator[Running]:
    scheduler = SchedulerSection(policy="edf", max_seqs=4)
    listening = {"server": ServerSection(port=0, http_port=0)}
    async with run_server(scheduler=scheduler, sections=listening) as running:
        bucket = Bucket(decode_seqs=4, verify_tokens=1, chunk_tokens=64)
        for kv in range(20):
            running.engine.step_times.observe(bucket, StepWork(kv, kv), STEP_S)
        yield running


def ask() -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(text="hello")
    request.stop.max_tokens = 5
    request.stop.ignore_eos = True
    return request


async def test_grpc_says_how_late_it_would_be_and_when_to_try_again() -> None:
    async with run_slow() as running, raw_stub(running) as stub:
        waiting = ask()
        waiting.queue_timeout.seconds = 3
        for request, timeout_s, what in (
            (ask(), 8.0, "deadline"),
            (waiting, None, "queue_timeout"),
        ):
            with pytest.raises(grpc.RpcError, match=f"would miss its {what} by") as caught:
                await stub.Generate(request, timeout=timeout_s)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]  # it is a call too
            assert status is not None
            told, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            assert any(detail.Unpack(told) for detail in status.details)
            assert any(detail.Unpack(retry) for detail in status.details)
            assert told.reason == "DEADLINE_UNREACHABLE"
            assert retry.retry_delay.seconds > 0
        fine = await stub.Generate(ask(), timeout=1000.0)
        assert fine.usage.completion_tokens == 5
        assert running.finished("error_deadline_unreachable") == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_http_says_it_with_429_before_a_stream_begins(is_stream: bool) -> None:
    async with run_slow() as running:
        assert running.server.http is not None
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "stream": is_stream}
        async with httpx.AsyncClient(base_url=f"http://{running.server.http.address}") as http:
            for field, name in (("timeout", "deadline"), ("queue_timeout", "queue_timeout")):
                reply = await http.post("/v1/completions", json=body | {field: 3})
                assert reply.status_code == 429
                assert int(reply.headers["retry-after"]) > 0
                error = reply.json()["error"]
                assert (error["code"], error["param"]) == ("deadline_unreachable", name)
            assert (await http.post("/v1/completions", json=body)).status_code == 200
