"""A gRPC server as a target: a real one over a fake device, and one that is scripted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.gen import generation_pb2, generation_pb2_grpc
from jaxserve.measure import latency
from jaxserve.measure.records import RequestRecord
from jaxserve.measure.replay import Replay
from jaxserve.measure.targets.base import Ask, Target, TargetError
from jaxserve.measure.targets.grpc_server import GrpcTarget
from tests.server.credentials import Files, sections, write_keys
from tests.server.harness import run_server

Response = generation_pb2.StreamGenerateResponse
MAX_TOKENS = generation_pb2.FINISH_REASON_MAX_TOKENS


def build_ask(index: int = 0, **facts: Any) -> Ask:  # noqa: ANN401  # fields
    chosen: dict[str, Any] = {
        "index": index,
        "request_id": f"r{index}",
        "at_s": 0.0,
        "prompt": (5, 6, 7),
        "sampling": {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True},
        "wanted_tokens": 4,
    }
    return Ask(**{**chosen, **facts})


async def replay(target: Target, asks: Sequence[Ask], **options: Any) -> dict[int, RequestRecord]:  # noqa: ANN401
    records: dict[int, RequestRecord] = {}

    def take(record: RequestRecord) -> None:
        records[record.index] = record

    await Replay(target=target, asks=iter(asks), on_record=take, **options).run()
    return records


@contextlib.asynccontextmanager
async def opened(address: str, **options: Any) -> AsyncIterator[GrpcTarget]:  # noqa: ANN401
    target = GrpcTarget(address, **options)
    try:
        yield target
    finally:
        await target.close()


def test_a_real_server_tells_ids_usage_and_phases() -> None:
    async def work() -> None:
        async with run_server() as running, opened(running.target) as target:
            facts = await target.describe()
            assert (facts.model, facts.vocab_size) == ("bytes", 259)
            assert 257 in facts.special_ids
            records = await replay(target, [build_ask(n) for n in range(5)])
            assert [records[n].outcome for n in range(5)] == ["ok"] * 5
            record = records[3]
            assert (record.prompt_tokens, record.output_tokens) == (3, 4)
            cached = [records[n].cached_prompt_tokens for n in range(5)]
            assert 0 in cached  # the first; the others ask the same
            assert set(cached) == {0, 2}
            assert sum(arrival.num_tokens for arrival in record.arrivals) == 4
            assert record.finish_reason == "max_tokens"
            assert None not in (record.phases.queue_s, record.phases.delivery_s)
            assert {asked.id for asked in running.asked} == {f"r{n}" for n in range(5)}
            assert latency.ttft_s(record) is not None

    asyncio.run(work())


def test_what_a_real_server_refuses_is_refused() -> None:
    async def work() -> None:
        async with run_server() as running, opened(running.target) as target:
            long = build_ask(0, prompt=tuple(range(1, 60)))
            unknown = build_ask(1, prompt=(999_999,))
            records = await replay(target, [long, unknown])
            assert [records[n].outcome for n in (0, 1)] == ["refused", "refused"]
            assert "limit" in records[0].error

    asyncio.run(work())


def test_nobody_there_is_refused_and_has_no_models() -> None:
    async def work() -> None:
        async with opened("127.0.0.1:1") as target:
            records = await replay(target, [build_ask()])
            assert records[0].outcome == "refused"
            wanted = (
                "no gRPC server answers at 127.0.0.1:1; is it running, and is the address right?"
            )
            assert records[0].error == wanted
            with pytest.raises(TargetError) as caught:
                await target.describe()
            assert str(caught.value) == wanted

    asyncio.run(work())


def test_a_name_that_is_not_served_is_an_error_with_those_that_are() -> None:
    async def work() -> None:
        async with run_server() as running, opened(running.target, model="other") as target:
            with pytest.raises(TargetError, match="'other' is not served there, but bytes"):
                await target.describe()

    asyncio.run(work())


def test_a_server_with_tls_and_keys_is_replayed_against(tmp_path: Path) -> None:
    files = Files(folder=tmp_path)
    keys, (key,) = write_keys(tmp_path, "acme")

    async def work() -> None:
        async with run_server(sections=sections(keys, files.section())) as running:
            async with opened(running.target, tls=files.trust(), key=key) as target:
                assert (await target.describe()).model == "bytes"
                assert (await replay(target, [build_ask()]))[0].outcome == "ok"
            async with opened(running.target, tls=files.trust()) as target:
                with pytest.raises(TargetError, match="a valid key is needed"):
                    await target.describe()

    asyncio.run(work())


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Answers by the request's id."""

    def __init__(self) -> None:
        self.left_s: dict[str, float | None] = {}

    async def StreamGenerate(  # noqa: N802  # grpc's name
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[Response]:
        self.left_s[request.request_id] = context.time_remaining()
        assert request.output.include_token_ids
        match request.request_id:
            case "r0":  # tokens without text, text without tokens, several at once
                yield start(request)
                yield delta("", [1, 2])
                yield delta("ab", [])
                yield delta("cd", [3, 4])
                yield finish(4)
            case "r1":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            case "r2":
                yield start(request)
                yield delta("a", [1])
                await context.abort(grpc.StatusCode.INTERNAL, "broke")
            case "r3":
                await context.abort(grpc.StatusCode.INTERNAL, "broke at once")
            case "r4":
                yield finish(0)
            case "r5":
                yield start(request)
                yield delta("a", [1])
                yield finish(1)
            case "r6":
                yield start(request)
                yield delta("a", [1])
                yield finish(1, generation_pb2.FINISH_REASON_DEADLINE)
            case "r7":
                yield start(request)
                yield delta("a", [1])
                await asyncio.sleep(600)
            case "r8":
                yield start(request)
                yield delta("a", [1])
            case "r9":
                yield start(request)
                yield delta("a", [1])
                yield finish(1, generation_pb2.FINISH_REASON_CANCELLED)
            case "r10":
                yield delta("a", [1])
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow a reader")
            case "r11":  # a reason that only another version has
                yield delta("a", [1])
                unknown = Response.FromString(b"\x1a\x02\x10\x63")  # a finish with reason 99
                yield unknown
            case "r12":
                yield Response()
            case "r13":  # an end without its accounts
                yield start(request)
                yield delta("abcd", [1, 2, 3, 4])
                yield Response(finish=generation_pb2.GenerationFinish(reason=MAX_TOKENS))


def start(request: generation_pb2.GenerateRequest) -> Response:
    return Response(start=generation_pb2.GenerationStart(request_id=request.request_id))


def delta(text: str, token_ids: Sequence[int]) -> Response:
    return Response(delta=generation_pb2.GenerationDelta(text=text, token_ids=token_ids))


def finish(
    num_tokens: int,
    reason: generation_pb2.FinishReason = MAX_TOKENS,
) -> Response:
    usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=num_tokens)
    return Response(finish=generation_pb2.GenerationFinish(reason=reason, usage=usage))


def test_every_kind_of_answer_has_its_outcome() -> None:
    """C46 over gRPC: good, refused, broken in the middle and at once, empty, short, late, hung."""
    servicer = Scripted()

    async def work() -> dict[int, RequestRecord]:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with opened(f"127.0.0.1:{port}") as target:
            asks = [build_ask(n) for n in range(14) if n != 7]
            asks.append(build_ask(7, deadline_s=0.3))
            records = await replay(target, asks)
        await server.stop(None)
        return records

    records = asyncio.run(work())
    assert [records[n].outcome for n in range(14)] == [
        "ok", "refused", "failed", "failed", "short", "short", "timed_out", "timed_out", "failed",
        "failed", "failed", "failed", "failed", "ok",
    ]  # fmt: skip
    assert "not jaxserve's" in records[11].error
    good = records[0]
    assert [arrival.num_tokens for arrival in good.arrivals] == [2, 0, 2]
    assert not good.are_tokens_assumed
    assert records[1].error == "the queue is full"
    untold = records[13]
    assert (untold.prompt_tokens, untold.output_tokens, untold.cached_prompt_tokens) == (None,) * 3
    assert (untold.phases.queue_s, untold.phases.delivery_s) == (None, None)
    assert (len(records[2].arrivals), records[2].error) == (1, "broke")
    assert servicer.left_s["r0"] is None
    left_s = servicer.left_s["r7"]
    assert left_s is not None
    assert 0 < left_s <= 0.3
