"""Values outside the vocabulary, sizes at their limits, and readers that do not read."""

import asyncio
import math

import grpc
import pytest

from jaxserve.client import AsyncClient, BadRequestError, OverloadedError
from jaxserve.config import LimitsSection
from jaxserve.engine.reader_account import ReaderAccount
from jaxserve.engine.stream import Delivery, Stream
from jaxserve.engine.waker import Waker
from jaxserve.errors import SlowReaderError
from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs
from jaxserve.request import GenerationRequest
from tests.engines import Clock
from tests.fakes import VOCAB_SIZE
from tests.server.harness import Running, Steps, connect, raw_stub, read_rest, run_server, until

pytestmark = pytest.mark.asyncio

MIB = 1 << 20
OUTSIDE = [VOCAB_SIZE, 319, 1 << 31, (1 << 32) - 1]  # 319: a padded vocabulary's last row


def ask_with(field: str, token_id: int) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest()
    request.stop.max_tokens = 1
    request.token_ids.ids.append(5)
    match field:
        case "token_ids":
            request.token_ids.ids.append(token_id)
        case "stop.stop_token_ids":
            request.stop.stop_token_ids.append(token_id)
        case "sampling.logit_bias":
            request.sampling.logit_bias[token_id] = 1.0
        case "sampling.allowed_token_ids":
            request.sampling.allowed_token_ids.ids.append(token_id)
    return request


FIELDS = [
    "token_ids",
    "stop.stop_token_ids",
    "sampling.logit_bias",
    "sampling.allowed_token_ids",
]


@pytest.mark.parametrize("field", FIELDS)
async def test_an_id_outside_the_vocabulary_fails_alone_beside_a_healthy_stream(field: str) -> None:
    steps = Steps()
    async with run_server(steps) as running, raw_stub(running) as stub:
        healthy = generation_pb2.GenerateRequest(text="Hi!")
        healthy.stop.max_tokens = 6
        healthy.stop.ignore_eos = True
        call = stub.StreamGenerate(healthy)
        steps.allow(1)
        assert (await call.read()).HasField("start")
        for token_id in OUTSIDE:
            with pytest.raises(grpc.RpcError, match=str(token_id)) as caught:
                await stub.Generate(ask_with(field, token_id))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        steps.open()
        assert (await read_rest(call))[-1].finish.usage.completion_tokens == 6
        # the last id of the vocabulary is fine, and the server is well (K6)
        response = await stub.Generate(ask_with(field, VOCAB_SIZE - 1))
        assert response.usage.completion_tokens == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_bias_that_is_no_number_is_refused(value: float) -> None:
    async with run_server() as running, connect(running) as client:
        with pytest.raises(BadRequestError, match="logit_bias") as caught:
            await client.generate("x", logit_bias={5: value})
        assert caught.value.field == "sampling.logit_bias"
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_ids_outside_are_refused_by_detokenize_too() -> None:
    async with run_server() as running, connect(running) as client:
        for token_id in OUTSIDE:
            with pytest.raises(BadRequestError, match=str(token_id)) as caught:
                await client.detokenize([1, token_id])
            assert caught.value.field == "token_ids"


async def test_messages_larger_than_grpcs_own_4_mib_pass_both_ways() -> None:
    """Both sides set their limits: the default of either would cut these off."""
    async with run_server() as running, connect(running) as client:
        for num_bytes in (int(3.9 * MIB), int(4.1 * MIB)):
            with pytest.raises(BadRequestError, match=f"{num_bytes} tokens"):  # it has arrived
                await client.generate(bytes(num_bytes))
        pads = [VOCAB_SIZE - 1] * 860_000  # two bytes of request each, five of reply
        text = await client.detokenize(pads, skip_special_tokens=False)
        assert len(text) == 4_300_000


@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_a_request_at_the_limit_passes_and_one_beyond_is_refused_clearly(more: int) -> None:
    limit = 50_000
    bounds = LimitsSection(max_message_bytes=limit)
    request = generation_pb2.GenerateRequest()
    request.token_ids.ids.extend([200] * 24_990)  # two bytes each
    request.request_id = "r" * (limit + more - request.ByteSize() - 2)
    assert request.ByteSize() == limit + more
    async with run_server(bounds=bounds) as running, raw_stub(running) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Generate(request)
        if more > 0:
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(limit) in (caught.value.details() or "")
        else:  # it has arrived, and is refused for what it says
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "24990 tokens" in (caught.value.details() or "")
        small = generation_pb2.GenerateRequest(text="x")
        small.stop.max_tokens = 1
        assert (await stub.Generate(small)).usage.completion_tokens == 1


async def test_the_clients_own_limit_is_an_error_of_the_same_kind() -> None:
    async with (
        run_server() as running,
        AsyncClient(running.target, max_message_bytes=900) as client,
    ):
        with pytest.raises(OverloadedError, match="900"):
            await client.generate("x" * 2000)
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_a_reply_beyond_the_limit_is_an_error_that_names_it() -> None:
    bounds = LimitsSection(max_message_bytes=4000)
    async with run_server(bounds=bounds) as running, connect(running) as client:
        pad = [VOCAB_SIZE - 1]  # two bytes of request, five of reply
        assert len(await client.detokenize(pad * 790, skip_special_tokens=False)) == 790 * 5
        with pytest.raises(
            BadRequestError, match=r"500\d bytes, but the limit of a message is 4000"
        ):
            await client.detokenize(pad * 1000, skip_special_tokens=False)


async def test_prompt_bytes_stops_and_biases_are_bounded_in_number() -> None:
    bounds = LimitsSection(
        max_prompt_bytes=30,
        max_stop_strings=2,
        max_stop_string_bytes=4,
        max_stop_token_ids=2,
        max_logit_bias=2,
    )
    async with run_server(bounds=bounds) as running, connect(running) as client:
        for field, fitting, beyond in (
            ("stop_strings", ["a", "b"], ["a", "b", "c"]),
            ("stop_strings", ["abcd"], ["abcde"]),
            ("stop_token_ids", [1, 2], [1, 2, 3]),
            ("logit_bias", {1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}),
        ):
            await client.generate("x", max_tokens=1, **{field: fitting})  # type: ignore[arg-type]
            with pytest.raises(BadRequestError) as caught:
                await client.generate("x", max_tokens=1, **{field: beyond})  # type: ignore[arg-type]
            assert caught.value.field.rpartition(".")[2] == field
        assert (await client.generate("x" * 30, max_tokens=1)).usage.prompt_tokens == 30
        with pytest.raises(BadRequestError, match="31 bytes"):
            await client.generate("x" * 31)


class HandFed:
    """In an engine's place for the request "slow": its stream is written by the test."""

    def __init__(self, running: Running) -> None:
        self.cancelled: list[str] = []
        self._submit = running.engine.submit
        self._reader = ReaderAccount(running.engine.metrics, Clock(), times_decoding=False)
        self._waker = Waker()
        self._stream: Stream | None = None
        running.engine.submit = self.submit  # type: ignore[method-assign]

    def submit(self, asked: GenerationRequest, *, delivery: Delivery = "taken") -> Stream:
        if asked.id != "slow":
            return self._submit(asked, delivery=delivery)
        self._stream = Stream(
            request_id=asked.id,
            prompt_tokens=1,
            max_bytes=MIB,
            decoders=[None],
            waker=self._waker,
            on_cancel=lambda: self.cancelled.append(asked.id),
            reader=self._reader,
            delivery=delivery,
        )
        self._stream.start()
        return self._stream

    async def stream(self) -> Stream:
        await until(lambda: self._stream is not None)
        assert self._stream is not None
        return self._stream

    async def fill(self, piece: str) -> int:
        """Writes until the unread output is at its bound; returns the pieces that were taken."""
        stream = await self.stream()
        count = 0
        while stream.put(count, now_s=0.0, text=f"{count:08d}{piece}"):
            count += 1
            self._waker.flush()
            await asyncio.sleep(0)  # the writer's turn: only a blocked one lets the bound be met
        return count

    async def fill_with_logprobs(self, entry: TokenLogprobs) -> int:
        """The same, without text."""
        stream = await self.stream()
        count = 0
        while stream.put(entry.token_id, now_s=0.0, text="", logprobs=entry):
            count += 1
            self._waker.flush()
            await asyncio.sleep(0)
        return count

    async def finish(self, error: SlowReaderError) -> None:
        (await self.stream()).finish(error)
        self._waker.flush()

    async def put(self, texts: str) -> None:
        """Writes a token for each letter, without a turn for the reader."""
        stream = await self.stream()
        for text in texts:
            stream.put(1, now_s=0.0, text=text)
        self._waker.flush()


async def test_a_reader_that_stops_gets_all_up_to_the_bound_and_then_the_reason() -> None:
    piece = "x" * 99_992
    async with run_server() as running, raw_stub(running) as stub, connect(running) as client:
        fed = HandFed(running)
        request = generation_pb2.GenerateRequest(text="x", request_id="slow")
        call = stub.StreamGenerate(request)
        count = await fed.fill(piece)
        await fed.finish(SlowReaderError("more than the bound is unread; read faster"))
        # the transport took some and blocks; nobody else is held up
        assert 10 <= count < 500
        fast = await asyncio.wait_for(client.generate("x", max_tokens=5, ignore_eos=True), 60)
        assert fast.usage.completion_tokens == 5
        # the reader comes back: in order, complete up to the bound, then the status
        messages: list[generation_pb2.StreamGenerateResponse] = []
        with pytest.raises(grpc.RpcError):
            await read_rest(call, messages)
        assert "".join(message.delta.text for message in messages) == "".join(
            f"{i:08d}{piece}" for i in range(count)
        )
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert fed.cancelled == []  # the request had ended
        await until(lambda: running.num_open_calls == 0)


async def test_unread_logprobs_are_bounded_too_and_merge_in_step() -> None:
    """C40: they are far larger than the tokens they belong to."""
    top_ids = tuple(range(64))
    entry = TokenLogprobs(
        token_id=5, logprob=-1.0, rank=2, top_ids=top_ids, top_logprobs=(-1.5,) * 64
    )
    async with run_server() as running, raw_stub(running) as stub, connect(running) as client:
        fed = HandFed(running)
        request = generation_pb2.GenerateRequest(text="x", request_id="slow")
        request.output.logprobs = 20
        call = stub.StreamGenerate(request)
        count = await fed.fill_with_logprobs(entry)
        await fed.finish(SlowReaderError("more than the bound is unread; read faster"))
        fast = await asyncio.wait_for(client.generate("x", max_tokens=5, ignore_eos=True), 60)
        assert fast.usage.completion_tokens == 5
        messages: list[generation_pb2.StreamGenerateResponse] = []
        with pytest.raises(grpc.RpcError):
            await read_rest(call, messages)
        logprobs = [message.delta.logprobs for message in messages if message.HasField("delta")]
        assert sum(len(part.token_ids) for part in logprobs) == count
        assert all(len(part.top) == len(part.token_ids) for part in logprobs)
        assert max(len(part.token_ids) for part in logprobs) > 1  # what piled up came as one
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_cancel_that_meets_a_blocked_write_is_one_abort_and_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_server() as running, raw_stub(running) as stub, connect(running) as client:
        fed = HandFed(running)
        call = stub.StreamGenerate(generation_pb2.GenerateRequest(text="x", request_id="slow"))
        await fed.fill("x" * 99_992)
        call.cancel()
        await until(lambda: running.num_open_calls == 0)
        assert fed.cancelled == ["slow"]
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_a_slow_reader_of_the_engine_itself_is_told_so() -> None:
    """The bound is the engine's; here it is too small for the tokens of one moment."""
    steps = Steps()
    bounds = LimitsSection(stream_buffer_bytes=1)
    async with run_server(steps, bounds=bounds) as running, connect(running) as client:
        steps.open()
        with pytest.raises(OverloadedError, match="unread") as caught:
            await client.generate("x", max_tokens=30)
        assert caught.value.reason == "SLOW_READER"
        assert running.finished("error_slow_reader") == 1


async def test_deltas_that_pile_up_come_as_one() -> None:
    async with run_server() as running, raw_stub(running) as stub:
        fed = HandFed(running)
        call = stub.StreamGenerate(generation_pb2.GenerateRequest(text="x", request_id="slow"))
        await fed.put("abc")
        assert (await call.read()).HasField("start")
        assert (await call.read()).delta.text == "abc"
        call.cancel()
        await until(lambda: running.num_open_calls == 0)
