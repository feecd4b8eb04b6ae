"""Every field of VllmEngine's requests works or is refused by its name there."""

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2

from jaxserve.errors import UnsupportedError
from jaxserve.server.fields import refuse_fields
from jaxserve.server.vllm_engine.convert import ABORT, GENERATE, LOADS, find_name
from tests.server.harness import until
from tests.server.test_fields import fill, walk
from tests.server.vllm_stub import PREFIX, ask, connect_gateway, read, reason_of, run_worker

REFUSED = frozenset(
    {
        "kv_transfer_params",
        "kv_transfer_params_json",
        "media_refs",
        "mm_inputs",
        "extra_mm_inputs",
        "sampling_params.structural_tag",
        "sampling_params.truncate_prompt_tokens",
    }
)
PATHS = {
    path: fields
    for path, fields in walk(vllm_engine_pb2.GenerateRequest.DESCRIPTOR)
    if not any(path.startswith(f"{refused}.") for refused in REFUSED)
}


def test_each_field_is_in_one_table() -> None:
    assert PATHS.keys() == GENERATE | REFUSED
    assert not GENERATE & REFUSED
    assert {path for path, _ in walk(vllm_engine_pb2.AbortRequest.DESCRIPTOR)} == ABORT
    assert {path for path, _ in walk(vllm_engine_pb2.GetLoadsRequest.DESCRIPTOR)} == LOADS


@pytest.mark.parametrize("path", PATHS)
def test_a_field_passes_or_is_refused_by_its_path(path: str) -> None:
    message: Message = vllm_engine_pb2.GenerateRequest()
    fill(message, PATHS[path])
    assert message.ListFields()
    if path in GENERATE:
        refuse_fields(message, GENERATE)
        return
    with pytest.raises(UnsupportedError, match="not supported by this version") as caught:
        refuse_fields(message, GENERATE)
    assert path == caught.value.field


def test_names_of_the_engine_become_names_of_the_protocol() -> None:
    assert find_name("sampling.top_p") == "sampling_params.top_p"
    assert find_name("stop.stop_strings") == "sampling_params.stop"
    assert find_name("stop.max_tokens") == "sampling_params.max_tokens"
    assert find_name("output.logprobs") == "sampling_params.logprobs"
    assert find_name("token_ids") == "tokenized.input_ids"
    assert [find_name(name) for name in ("text", "request_id", "")] == ["text", "request_id", ""]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"frequency_penalty": 3.0}, "frequency_penalty"),
    ({"presence_penalty": -3.0}, "presence_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"min_tokens": 100}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"n": 1000}, "n"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"seed": -1}, "seed"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": ""}, "json_schema"),
    ({"regex": "("}, "regex"),
    ({"grammar": 'root ::= "x"'}, "grammar"),
    ({"json_object": False}, "json_object"),
    ({"choice": vllm_engine_pb2.ChoiceConstraint()}, "choice"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"structural_tag": "x"}, "structural_tag"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]


@pytest.mark.asyncio
async def test_a_wrong_value_is_refused_by_its_field_and_counted() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        for params, field in WRONG:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(stub.Generate(ask(**params)))
            code = caught.value.code()
            wanted = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
            assert code in wanted, (params, code)
            assert reason_of(caught.value)[1] == f"sampling_params.{field}", params
        assert running.num_submitted == 0
        assert running.engine.metrics.total("requests_refused_total") == len(WRONG)


@pytest.mark.asyncio
async def test_a_prompt_must_be_one() -> None:
    def tokens(*ids: int) -> Any:  # noqa: ANN401
        return vllm_engine_pb2.GenerateRequest(
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=ids)
        )

    asks = [
        (vllm_engine_pb2.GenerateRequest(), "input"),
        (vllm_engine_pb2.GenerateRequest(text=""), "text"),
        (tokens(), "tokenized.input_ids"),
        (tokens(500), "tokenized.input_ids"),
        (tokens(*range(41)), "tokenized.input_ids"),
        (tokens(*range(40)), "tokenized.input_ids"),
        (vllm_engine_pb2.GenerateRequest(text="x", data_parallel_rank=1), "data_parallel_rank"),
        (vllm_engine_pb2.GenerateRequest(text="x", request_id="\n"), "request_id"),
    ]
    async with run_worker() as running, connect_gateway(running) as stub:
        for asked, field in asks:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(stub.Generate(asked))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(caught.value)[1] == field
        assert running.num_submitted == 0


@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_a_bad_request() -> None:
    async with run_worker() as running, grpc.aio.insecure_channel(running.target) as channel:
        for method in ("Generate", "Abort"):
            call: Any = channel.unary_unary(f"{PREFIX}{method}")  # type: ignore[call-arg]  # stubs
            with pytest.raises(grpc.aio.AioRpcError, match=f"no.* message of VllmEngine/{method}"):
                await call(b"\xff\xff")
        metrics = running.engine.metrics
        for method in ("Generate", "Abort"):
            name = f"VllmEngine/{method}"
            await until(
                lambda name=name: (  # type: ignore[misc]  # of its own value
                    metrics.value("rpcs_total", method=name, code="INVALID_ARGUMENT") == 1
                )
            )
