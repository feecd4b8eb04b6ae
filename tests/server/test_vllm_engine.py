"""VllmEngine's Generate and Abort: tokens in, tokens out, as a gateway asks for them."""

import asyncio
import dataclasses
import json
import re
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2

from jaxserve.config import LimitsSection
from jaxserve.engine import EngineState
from jaxserve.request import FinishReason, SamplingParams
from jaxserve.server.vllm_engine.replies import FINISH_REASONS
from tests.fake_logprobs import expected_logprobs, expected_prompt_logprobs
from tests.fakes import EOS_ID, VOCAB_SIZE, say
from tests.server.harness import Steps, connect, until
from tests.server.vllm_stub import ask, connect_gateway, read, reason_of, run_worker

pytestmark = pytest.mark.asyncio

PROMPT = tuple(b"Hello, you!")
LETTERS = tuple(b"abcdefghij")


async def test_a_stream_has_chunks_and_then_all_ids_once_more() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        chunks, (complete,) = await read(stub.Generate(ask(stream=True, max_tokens=10)))
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == LETTERS
    assert sum(chunk.completion_tokens for chunk in chunks) == 10
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    assert tuple(complete.output_ids) == LETTERS
    assert (complete.prompt_tokens, complete.completion_tokens) == (3, 10)
    assert (complete.finish_reason, complete.index) == ("length", 0)
    assert complete.WhichOneof("matched_stop") is None


async def test_without_streaming_there_is_one_message() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        chunks, (complete,) = await read(stub.Generate(ask(max_tokens=10)))
    assert chunks == []
    assert tuple(complete.output_ids) == LETTERS
    assert (complete.prompt_tokens, complete.completion_tokens) == (3, 10)


async def test_text_is_tokenized_here() -> None:
    async with run_worker(script=say({tuple(b"abc"): b"xyz"})) as running:
        async with connect_gateway(running) as stub:
            asked = ask(max_tokens=3)
            asked.text = "abc"
            _, (complete,) = await read(stub.Generate(asked))
    assert (bytes(complete.output_ids), complete.prompt_tokens) == (b"xyz", 3)


async def test_reasons_are_the_gateways_words() -> None:
    script = say({tuple(b"eos"): [*b"ab", EOS_ID], None: b"abcdef"})
    async with run_worker(script=script) as running, connect_gateway(running) as stub:
        _, (eos,) = await read(stub.Generate(ask(tuple(b"eos"))))
        _, (text,) = await read(stub.Generate(ask(stop=["cd"], stream=True)))
        _, (token,) = await read(stub.Generate(ask(stop_token_ids=[ord("c")])))
        _, (ignored,) = await read(stub.Generate(ask(tuple(b"eos"), ignore_eos=True, max_tokens=4)))
        _, (context,) = await read(stub.Generate(ask(ignore_eos=True)))
    assert (eos.finish_reason, eos.WhichOneof("matched_stop")) == ("stop", None)
    assert tuple(eos.output_ids) == (*b"ab", EOS_ID)
    assert (text.finish_reason, text.matched_stop_str) == ("stop", "cd")
    assert bytes(text.output_ids) == b"abcd"
    assert (token.finish_reason, token.matched_token_id) == ("stop", ord("c"))
    assert (ignored.finish_reason, ignored.completion_tokens) == ("length", 4)
    assert (context.finish_reason, context.completion_tokens) == ("length", 37)


async def test_every_reason_of_the_engine_has_a_word() -> None:
    assert FINISH_REASONS.keys() == set(FinishReason) - {FinishReason.TOOL_CALLS}
    assert set(FINISH_REASONS.values()) == {"stop", "length", "abort"}


async def test_special_tokens_count_as_text_for_stop_strings_where_they_are_not_skipped() -> None:
    script = say({None: [*b"ab", EOS_ID, *b"cd"]})
    async with run_worker(script=script) as running, connect_gateway(running) as stub:
        params: dict[str, Any] = {"ignore_eos": True, "stop": ["</s>"], "max_tokens": 5}
        _, (kept,) = await read(stub.Generate(ask(skip_special_tokens=False, **params)))
        _, (skipped,) = await read(stub.Generate(ask(skip_special_tokens=True, **params)))
    assert (kept.finish_reason, kept.completion_tokens) == ("stop", 3)
    assert (skipped.finish_reason, skipped.completion_tokens) == ("length", 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_each_choice_ends_with_its_own_message(stream: bool) -> None:
    params: dict[str, Any] = {
        "n": 3,
        "temperature": 0.9,
        "seed": 5,
        "max_tokens": 6,
        "ignore_eos": True,
    }
    async with run_worker(script=None) as running, connect_gateway(running) as stub:
        chunks, completes = await read(stub.Generate(ask(stream=stream, **params)))
        async with connect(running) as client:
            whole = await client.generate(tuple(b"Hi!"), include_token_ids=True, **params)
    assert sorted(complete.index for complete in completes) == [0, 1, 2]
    for complete in completes:
        assert tuple(complete.output_ids) == whole.choices[complete.index].token_ids
        own = [chunk for chunk in chunks if chunk.index == complete.index]
        if stream:
            told = [token for chunk in own for token in chunk.token_ids]
            assert told == list(complete.output_ids)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_output_log_probabilities(stream: bool, num_top: int) -> None:
    params: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": num_top}
    async with run_worker(script=None) as running, connect_gateway(running) as stub:
        chunks, (complete,) = await read(stub.Generate(ask(PROMPT, stream=stream, **params)))
    wanted = expected_logprobs(
        PROMPT, list(complete.output_ids), num_top=num_top, vocab_size=VOCAB_SIZE
    )
    assert complete.HasField("output_logprobs") is not stream
    parts = [m.output_logprobs for m in chunks] if stream else [complete.output_logprobs]
    assert [token for part in parts for token in part.token_ids] == list(complete.output_ids)
    values = [value for part in parts for value in part.token_logprobs]
    assert values == pytest.approx([entry.logprob for entry in wanted], abs=1e-5)
    tops = [top for part in parts for top in part.top_logprobs]
    assert [tuple(top.token_ids) for top in tops] == [w.top_ids for w in wanted if num_top]
    for top, want in zip(tops, wanted, strict=False):
        assert list(top.values) == pytest.approx(want.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_log_probabilities_begin_with_an_empty_place(stream: bool) -> None:
    async with run_worker(script=None) as running, connect_gateway(running) as stub:
        asked = ask(PROMPT, stream=stream, max_tokens=3, n=2, prompt_logprobs=2, ignore_eos=True)
        chunks, completes = await read(stub.Generate(asked))
        alone, (one,) = await read(
            stub.Generate(ask((7,), stream=stream, max_tokens=1, prompt_logprobs=0))
        )
    wanted = expected_prompt_logprobs(PROMPT, num_top=2, vocab_size=VOCAB_SIZE)
    firsts = {chunk.index: chunk for chunk in reversed(chunks)}.values() if stream else completes
    assert len(firsts) == 2
    for message in firsts:
        found = message.input_logprobs
        assert tuple(found.token_ids) == PROMPT
        assert not found.token_logprobs[0].HasField("value")
        assert [entry.value for entry in found.token_logprobs[1:]] == pytest.approx(
            [entry.logprob for entry in wanted], abs=1e-5
        )
        assert [tuple(top.token_ids) for top in found.top_logprobs] == [
            (),
            *(entry.top_ids for entry in wanted),
        ]
    told = [message for message in (*chunks, *completes) if message.HasField("input_logprobs")]
    assert len(told) == 2, "once for each choice"
    single = (alone[0] if stream else one).input_logprobs
    assert (list(single.token_ids), len(single.token_logprobs)) == ([7], 1)
    assert not single.token_logprobs[0].HasField("value")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_only_scored_has_them_with_its_end(stream: bool) -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        asked = ask(PROMPT, stream=stream, max_tokens=0, prompt_logprobs=1)
        chunks, (complete,) = await read(stub.Generate(asked))
    assert chunks == []
    assert (complete.finish_reason, complete.completion_tokens) == ("length", 0)
    assert tuple(complete.input_logprobs.token_ids) == PROMPT


SCHEMA = json.dumps(
    {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    | {"additionalProperties": False}
)
CONSTRAINTS = [
    ({"regex": "[ab]{3}c"}, r"[ab]{3}c"),
    ({"grammar": 'start: "x" ("y" | "z")'}, r"x[yz]"),
    ({"choice": vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"])}, r"yes|no"),
    ({"json_schema": SCHEMA}, r'\s*(\{\s*("a"\s*(:\s*("x"\s*(\}\s*)?)?)?)?)?'),
    ({"json_object": True}, r"\s*\{[\s\S]*"),
]


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINTS, ids=[*"rgcso"])
async def test_an_output_has_the_form(constraint: dict[str, Any], pattern: str) -> None:
    async with run_worker(script=None) as running, connect_gateway(running) as stub:
        _, (complete,) = await read(
            stub.Generate(ask(grammar_from_first_token=True, temperature=1.0, seed=1, **constraint))
        )
    text = bytes(token for token in complete.output_ids if token < 256).decode(errors="replace")
    assert re.fullmatch(pattern, text)


async def test_zeros_are_not_asked_for_and_off() -> None:
    """What a client that sets nothing sends; the model's own temperature stands, no other."""
    defaults = {"temperature": 0.4, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.3}
    async with run_worker() as running, connect_gateway(running) as stub:
        engine = running.engine
        engine.model = dataclasses.replace(engine.model, sampling_defaults=defaults)
        asked = vllm_engine_pb2.GenerateRequest(text="Hi!")
        await read(stub.Generate(asked))
        asked.sampling_params.temperature = 0.0
        await read(stub.Generate(asked))
        unset, zero = (request.sampling for request in running.asked)
    assert unset == SamplingParams(temperature=0.4, skip_special_tokens=False)
    assert zero == SamplingParams(temperature=0.0, skip_special_tokens=False)


async def test_what_is_set_reaches_the_engine() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.125,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 4,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "seed": 9,
        "include_stop_str_in_output": True,
    }
    async with run_worker() as running, connect_gateway(running) as stub:
        asked = ask(stop=["q"], logit_bias={65: -2.0, 66: 3.0}, n=2, logprobs=1, **values)
        asked.data_parallel_rank = 0
        before_s = running.engine.now()
        await read(stub.Generate(asked, timeout=50))
        after_s = running.engine.now()
        (request,) = running.asked
    assert request.deadline_s is not None
    assert before_s + 49 < request.deadline_s <= after_s + 50.1
    sampling = request.sampling
    assert sampling == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        min_p=0.125,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=4,
        min_tokens=2,
        stop_strings=("q",),
        stop_token_ids=(5,),
        ignore_eos=True,
        seed=9,
        include_stop_text=True,
        logit_bias={65: -2.0, 66: 3.0},
        num_choices=2,
        logprobs=1,
    )


async def test_an_abort_ends_the_request_with_what_there_is() -> None:
    steps = Steps()
    async with run_worker(steps) as running, connect_gateway(running) as stub:
        call = stub.Generate(ask(request_id="r1", stream=True, max_tokens=30))
        steps.allow(1)
        first = await call.read()
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["nobody", "r1", "r1"]))
        steps.allow(3)
        chunks, (complete,) = await read(call)
        ids = [*first.chunk.token_ids, *(token for chunk in chunks for token in chunk.token_ids)]
        assert list(complete.output_ids) == ids
        assert complete.finish_reason == "abort"
        assert running.finished("cancelled") == 1
        assert running.aborts == ["r1"]
        metrics = running.engine.metrics
        assert metrics.value("rpcs_total", method="VllmEngine/Abort", code="OK") == 1


async def test_a_call_that_is_cut_ends_its_request_once() -> None:
    """As smg does it: the stream is dropped, and its request aborted."""
    steps = Steps()
    async with run_worker(steps) as running, connect_gateway(running) as stub:
        call = stub.Generate(ask(request_id="gone", stream=True, max_tokens=30))
        steps.allow(1)
        await call.read()
        call.cancel()
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["gone"]))
        await until(lambda: bool(running.aborts))
        steps.allow(2)
        await until(lambda: running.finished("cancelled") == 1)
        assert running.aborts == ["gone"]
        await until(lambda: running.num_open_calls == 0)


async def test_one_abort_has_a_bound() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="1025 request_ids") as caught:
            await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["x"] * 1025))
    assert reason_of(caught.value) == ("INVALID_FIELD", "request_ids")


async def test_the_request_id_is_echoed_and_unique() -> None:
    steps = Steps()
    async with run_worker(steps) as running, connect_gateway(running) as stub:
        call = stub.Generate(ask(request_id="r1", stream=True, max_tokens=2))
        assert ("x-request-id", "r1") in [*await call.initial_metadata()]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub.Generate(ask(request_id="r1")))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        steps.open()
        await read(call)
        nameless = stub.Generate(ask(max_tokens=1), metadata=(("x-request-id", "mine"),))
        await read(nameless)
        assert ("x-request-id", "mine") in [*await nameless.initial_metadata()]


async def test_an_answer_too_large_for_a_message_is_refused_before_all_of_it_is_there() -> None:
    bounds = LimitsSection(max_message_bytes=4096)
    async with run_worker(
        script=None, bounds=bounds, max_model_tokens=4000, num_pages=1001
    ) as running:
        async with connect_gateway(running) as stub:
            params: dict[str, Any] = {"ignore_eos": True, "logprobs": 20, "max_tokens": 3000}
            with pytest.raises(grpc.aio.AioRpcError, match="max_message_bytes") as caught:
                await read(stub.Generate(ask(**params)))
        assert reason_of(caught.value)[0] == "INVALID_FIELD"
        await until(lambda: running.finished("cancelled") == 1)
        assert running.engine.metrics.value("output_tokens_total") < 1000


async def test_a_server_that_drains_says_so() -> None:
    async with run_worker() as running, connect_gateway(running) as stub:
        await asyncio.to_thread(running.engine.drain, 1.0)
        assert running.engine.state is EngineState.STOPPED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub.Generate(ask()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "stopped")
