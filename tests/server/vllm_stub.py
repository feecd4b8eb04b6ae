"""A gateway's side of VllmEngine: the package's own stub over a real channel."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from jaxserve.config import Section, ServerSection
from tests.server.harness import EOF, Running, Steps, run_server

ON = ServerSection(port=0, vllm_engine=True)
PREFIX = "/vllm.grpc.engine.VllmEngine/"


def run_worker(
    steps: Steps | None = None,
    *,
    sections: Mapping[str, Section] | None = None,
    **options: Any,  # noqa: ANN401
) -> contextlib.AbstractAsyncContextManager[Running]:
    """As `run_server`, with the service switched on."""
    return run_server(steps, sections={"server": ON, **(sections or {})}, **options)


@contextlib.asynccontextmanager
async def connect_gateway(running: Running) -> AsyncIterator[Any]:  # the package has no types
    async with grpc.aio.insecure_channel(running.target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def ask(
    ids: tuple[int, ...] = tuple(b"Hi!"),
    *,
    request_id: str = "",
    stream: bool = False,
    **params: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Returns a request as smg sends it; `params` are sampling parameters."""
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(original_text="...", input_ids=ids),
        sampling_params=vllm_engine_pb2.SamplingParams(
            **{"skip_special_tokens": True, "spaces_between_special_tokens": True, **params}
        ),
        stream=stream,
    )


async def read(call: Any) -> tuple[list[Any], list[Any]]:  # noqa: ANN401
    """Returns a call's chunks and complete messages, and that the chunks came before."""
    chunks: list[Any] = []
    completes: list[Any] = []
    while (response := await call.read()) is not EOF:
        if response.HasField("chunk"):
            assert response.chunk.index not in {complete.index for complete in completes}
            chunks.append(response.chunk)
        else:
            completes.append(response.complete)
    return chunks, completes


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Returns the reason and the field that an error's details have."""
    metadata: Any = error.trailing_metadata()  # pairs; the stubs disagree
    (value,) = [value for key, value in metadata if key == "grpc-status-details-bin"]
    facts = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(facts)
    return facts.reason, facts.metadata.get("field", "")
