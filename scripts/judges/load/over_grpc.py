"""Clients of the gRPC door: a coroutine for each way to use it, to leave it, and to be refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from jaxserve.client.errors import read_error
from jaxserve.client.transport import channel_options
from jaxserve.gen import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from scripts.judges.load.asks import Ask, make_ask, to_message
from scripts.judges.load.books import Call, Cut
from scripts.judges.load.crowd import Crowd
from scripts.judges.load.cutter import Cutter

PATIENCE_S: Final = 120.0  # a call that takes longer hangs
OWN_CONNECTION: Final = ("grpc.use_local_subchannel_pool", 1)
# A client whose connection takes little ahead of its reads.
NARROW: Final = (
    OWN_CONNECTION, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096),
    ("grpc.tcp_receive_buffer_size", 8192),
)  # fmt: skip
REASONS: Final = {
    generation_pb2.FINISH_REASON_EOS: "eos",
    generation_pb2.FINISH_REASON_STOP_SEQUENCE: "stop",
    generation_pb2.FINISH_REASON_MAX_TOKENS: "max_tokens",
    generation_pb2.FINISH_REASON_CONTEXT_LENGTH: "context_length",
    generation_pb2.FINISH_REASON_TOOL_CALLS: "eos",
    generation_pb2.FINISH_REASON_CANCELLED: "cancelled",
    generation_pb2.FINISH_REASON_DEADLINE: "deadline",
}
Stub = generation_pb2_grpc.GenerationServiceStub


class GrpcClients:
    """The channels, and what is done over them."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._rng = crowd.rng
        self._channels = [self._connect(crowd.target, OWN_CONNECTION) for _ in range(6)]
        rows: list[tuple[float, Callable[[str], Awaitable[object]]]] = [
            (30, self.read_stream), (10, self.read_whole), (14, self.cancel_stream),
            (5, self.cancel_whole), (10, self.be_late), (4, self.wait_little),
            (4, self.read_slowly), (3, self.lose_connection), (5, self.end_from_outside),
            (3, self.score), (4, self.ask_facts), (3, self.be_refused), (1, self.have_no_key),
        ]  # fmt: skip
        self._weights = [weight for weight, _ in rows]
        self._ways = [way for _, way in rows]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def act(self, tenant: str) -> None:
        """Makes a call of a random kind, to its end."""
        (way,) = self._rng.choices(self._ways, self._weights)
        await way(tenant)

    # ways to read to the end

    async def read_stream(self, tenant: str, ask: Ask | None = None) -> list[int]:
        call = self._call("StreamGenerate", tenant, "reads a stream")
        return await self._read_stream(self._stub(), call, ask or self._ask())

    async def read_whole(self, tenant: str) -> None:
        ask = self._ask()
        call = self._call("Generate", tenant, "reads a whole reply")
        with self._crowd.recording(call):
            async with self._ending(call):
                response = await self._stub().Generate(
                    to_message(ask, call.id), metadata=self._metadata(tenant), timeout=PATIENCE_S
                )
                self._note_whole(call, ask, response)

    async def read_slowly(self, tenant: str) -> None:
        """Takes little and seldom; some go on, some give up in the middle of what is too much."""
        ask = Ask(
            prompt="hello", max_tokens=self._crowd.mean_tokens * 6, logprobs=20, n=2,
            ignore_eos=True,
        )  # fmt: skip
        call = self._call("StreamGenerate", tenant, "reads slowly")
        gives_up = self._rng.random() < 0.4
        pauses_s = [self._rng.uniform(0.2, 2.0) for _ in range(self._rng.randrange(2, 5))]
        async with self._connecting(self._crowd.target, NARROW) as channel:
            if gives_up:
                call.kind = "reads slowly and gives up"
                await self._read_stream(Stub(channel), call, ask, pauses_s=pauses_s, leaves=True)
            else:
                await self._read_stream(Stub(channel), call, ask, pauses_s=pauses_s)

    # ways to leave

    async def cancel_stream(self, tenant: str) -> None:
        """Leaves at any point: before the first message, among them, or just at the end."""
        ask, rng = self._ask(), self._rng
        call = self._call("StreamGenerate", tenant, "cancels a stream")
        with self._crowd.recording(call):
            stream = self._stub().StreamGenerate(
                to_message(ask, call.id), metadata=self._metadata(tenant), timeout=PATIENCE_S
            )
            num_messages = rng.choice((0, 1, 2, 3, 5, 10, ask.max_tokens))
            async with self._ending(call):
                if num_messages == 0:
                    await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)))
                async for message in stream:
                    self._note_message(call, message)
                    num_messages -= 1
                    if num_messages <= 0:
                        break
                else:
                    call.end = "OK"
            self._give_up(call, stream)

    async def cancel_whole(self, tenant: str) -> None:
        ask = self._ask()
        call = self._call("Generate", tenant, "cancels a whole reply")
        with self._crowd.recording(call):
            asked = self._stub().Generate(
                to_message(ask, call.id), metadata=self._metadata(tenant), timeout=PATIENCE_S
            )
            await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)))
            if not asked.done():
                asked.cancel()
                call.cut = "cancelled"
            async with self._ending(call):
                self._note_whole(call, ask, await asked)

    async def lose_connection(self, tenant: str) -> None:
        """Has a connection cut under a few streams."""
        rng = self._rng
        async with (
            Cutter(self._crowd.target) as cutter,
            self._connecting(cutter.target, (OWN_CONNECTION,)) as channel,
        ):

            async def read() -> None:
                call = self._call("StreamGenerate", tenant, "loses its connection")
                await self._read_stream(Stub(channel), call, self._ask(), is_cut=cutter.is_cut)

            readers = [asyncio.create_task(read()) for _ in range(rng.choice((1, 2, 3)))]
            await asyncio.wait(readers, timeout=rng.choice((0.01, 0.1, 0.5, 1.5)))
            cutter.cut()
            await asyncio.gather(*readers)

    async def be_late(self, tenant: str) -> None:
        """Has less time than most calls take."""
        ask = self._ask()
        method = self._rng.choice(("StreamGenerate", "Generate"))
        call = self._call(method, tenant, "has a deadline")
        timeout_s = self._rng.choice((0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0))
        message, metadata = to_message(ask, call.id), self._metadata(tenant)
        with self._crowd.recording(call):
            async with self._ending(call, may_be_late=True):
                asked = getattr(self._stub(), method)(message, metadata=metadata, timeout=timeout_s)
                if method == "Generate":
                    self._note_whole(call, ask, await asked)
                else:
                    async for part in asked:
                        self._note_message(call, part)
                    call.end = "OK"

    async def wait_little(self, tenant: str) -> None:
        """Has little patience with the queue; this is the server's to keep."""
        ask = self._ask()
        call = self._call("StreamGenerate", tenant, "has a queue_timeout")
        await self._read_stream(
            self._stub(), call, ask, queue_timeout_s=self._rng.choice((0.01, 0.3))
        )

    async def end_from_outside(self, tenant: str) -> None:
        """Is ended by CancelGeneration: of its own tenant, for another's finds nothing."""
        ask, stub = self._ask(), self._stub()
        call = self._call("StreamGenerate", tenant, "is ended by CancelGeneration")
        after = self._rng.choice((0, 1, 1, 3))
        with self._crowd.recording(call):
            stream = stub.StreamGenerate(
                to_message(ask, call.id), metadata=self._metadata(tenant), timeout=PATIENCE_S
            )
            async with self._ending(call):
                if not after:
                    await self._cancel(call.id, tenant)
                async for message in stream:
                    self._note_message(call, message)
                    after -= 1
                    if after == 0:
                        others = next(name for name in self._crowd.keys if name not in ("", tenant))
                        assert not await self._cancel(call.id, others), "ended by another tenant"
                        await self._cancel(call.id, tenant)
                call.end = "OK"

    # what makes no text

    async def score(self, tenant: str) -> None:
        rng = self._rng
        call = self._call("Score", tenant, "scores", num_requests=rng.choice((1, 2, 5)))
        call.is_generating = False
        message = generation_pb2.ScoreRequest(request_id=call.id)
        for _ in range(call.num_requests):
            message.items.add(context_text="hello ", continuation_text=rng.choice(("world", "aba")))
        with self._crowd.recording(call):
            async with self._ending(call):
                response = await self._stub().Score(
                    message, metadata=self._metadata(tenant), timeout=PATIENCE_S
                )
                assert len(response.results) == call.num_requests
                call.usage = (response.usage.prompt_tokens, response.usage.completion_tokens)
                call.end = "OK"

    async def ask_facts(self, tenant: str) -> None:
        method = self._rng.choice(("Tokenize", "Detokenize", "ListModels"))
        call = self._call(method, tenant, "asks for facts", num_requests=0)
        call.is_generating = False
        channel = self._rng.choice(self._channels)
        stub: Any = model_pb2_grpc.ModelServiceStub(channel)
        message: Any = model_pb2.ListModelsRequest()
        if method != "ListModels":
            stub = Stub(channel)
            message = generation_pb2.TokenizeRequest(text="hello world")
            if method == "Detokenize":
                message = generation_pb2.DetokenizeRequest(token_ids=[5, 6, 7])
        with self._crowd.recording(call):
            async with self._ending(call):
                metadata = self._metadata(tenant)
                await getattr(stub, method)(message, metadata=metadata, timeout=PATIENCE_S)
                call.end = "OK"

    async def be_refused(self, tenant: str) -> None:
        """Asks for what nobody gets."""
        call = self._call("Generate", tenant, "asks for nonsense")
        message = to_message(self._ask(), call.id)
        match self._rng.randrange(5):
            case 0:
                message.sampling.temperature = -1.0
            case 1:
                message.model = "gpt-4"
            case 2:
                message.stop.max_tokens = 1 << 20
            case 3:
                message.structured_output.regex = "("
            case 4:
                message.adapter = "mine"
        with self._crowd.recording(call):
            async with self._ending(call):
                await self._stub().Generate(
                    message, metadata=self._metadata(tenant), timeout=PATIENCE_S
                )
                raise AssertionError("nonsense was answered")

    async def have_no_key(self, _: str) -> None:
        call = self._call("StreamGenerate", "", "has a wrong key")
        await self._read_stream(self._stub(), call, self._ask())
        assert call.reason == "unauthenticated", call

    # the parts of these

    def _ask(self) -> Ask:
        return make_ask(self._rng, mean_tokens=self._crowd.mean_tokens)

    def _call(self, method: str, tenant: str, kind: str, *, num_requests: int = 1) -> Call:
        return Call(
            id=self._crowd.next_id(), door="grpc", method=method, tenant=tenant, kind=kind,
            num_requests=num_requests,
        )  # fmt: skip

    def _stub(self) -> Stub:
        return Stub(self._rng.choice(self._channels))

    def _metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._crowd.keys[tenant]}"),)

    def _connect(self, target: str, *options: tuple[str, int]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            target, options=[*channel_options(64 << 20, None), *options]
        )

    @contextlib.asynccontextmanager
    async def _connecting(
        self, target: str, options: tuple[tuple[str, int], ...]
    ) -> AsyncIterator[grpc.aio.Channel]:
        channel = self._connect(target, *options)
        try:
            yield channel
        finally:
            await channel.close(None)

    async def _read_stream(
        self,
        stub: Stub,
        call: Call,
        ask: Ask,
        *,
        pauses_s: list[float] | None = None,
        leaves: bool = False,
        queue_timeout_s: float | None = None,
        is_cut: asyncio.Event | None = None,
    ) -> list[int]:
        """Reads to the end, or until its pauses are over; returns the first choice's tokens."""
        message = to_message(ask, call.id)
        if queue_timeout_s is not None:
            message.queue_timeout.FromNanoseconds(int(queue_timeout_s * 1e9))
        token_ids: list[int] = []
        with self._crowd.recording(call):
            stream = stub.StreamGenerate(
                message, metadata=self._metadata(call.tenant), timeout=PATIENCE_S
            )
            async with self._ending(call, is_cut=is_cut):
                async for part in stream:
                    self._note_message(call, part)
                    if part.HasField("delta") and part.delta.index == 0:
                        token_ids += part.delta.token_ids
                    if pauses_s:
                        await asyncio.sleep(pauses_s.pop())
                    elif leaves:
                        break
                else:
                    call.end = "OK"
            if leaves:
                self._give_up(call, stream)
            is_whole = call.is_done and call.finishes[-1:] == ["max_tokens"]
            self._crowd.check_output(call, ask, token_ids, is_whole=is_whole)
            if call.is_done:
                assert len(call.finishes) == ask.n, f"{len(call.finishes)} of {ask.n} choices ended"
        return token_ids

    def _give_up(self, call: Call, stream: Any) -> None:  # noqa: ANN401  # grpc's own class
        """Ends a call from here where it has not ended: what the server did is its own affair."""
        if not call.end:
            stream.cancel()
            call.cut = "cancelled"

    @contextlib.asynccontextmanager
    async def _ending(
        self, call: Call, *, may_be_late: bool = False, is_cut: asyncio.Event | None = None
    ) -> AsyncIterator[None]:
        """Notes how the call ended, if that was with an error."""
        try:
            yield
        except asyncio.CancelledError:
            if call.cut != "cancelled":
                raise
        except grpc.aio.AioRpcError as error:
            told = read_error(error)
            if told.reason:
                call.end, call.reason, call.quota = (
                    error.code().name,
                    told.reason.lower(),
                    _quota(error),
                )
                return
            call.cut = _find_cut(error.code(), may_be_late, is_cut) or call.cut
            if not call.cut:
                self._crowd.fault(call, f"{error.code().name} {error.details()}")

    def _note_message(self, call: Call, message: generation_pb2.StreamGenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "delta":
                call.num_tokens += len(message.delta.token_ids)
            case "finish":
                finish = message.finish
                call.finishes.append(REASONS[finish.reason])
                call.is_ordered = True
                if finish.HasField("usage"):
                    call.usage = (finish.usage.prompt_tokens, finish.usage.completion_tokens)
                    assert call.num_tokens == finish.usage.completion_tokens, (
                        f"{call.num_tokens} tokens came of {finish.usage.completion_tokens}"
                    )

    def _note_whole(self, call: Call, ask: Ask, response: generation_pb2.GenerateResponse) -> None:
        call.end, usage = "OK", response.usage
        call.finishes = [REASONS[choice.finish_reason] for choice in response.choices]
        call.usage = (usage.prompt_tokens, usage.completion_tokens)
        call.num_tokens = sum(len(choice.token_ids) for choice in response.choices)
        assert call.num_tokens == usage.completion_tokens
        assert len(response.choices) == ask.n
        is_whole = call.finishes[:1] == ["max_tokens"]
        token_ids = list(response.choices[0].token_ids)
        self._crowd.check_output(call, ask, token_ids, is_whole=is_whole)

    async def _cancel(self, request_id: str, tenant: str) -> bool:
        call = self._call("CancelGeneration", tenant, "cancels by id", num_requests=0)
        call.is_generating = False
        message = generation_pb2.CancelGenerationRequest(request_id=request_id)
        with self._crowd.recording(call):
            response = await self._stub().CancelGeneration(
                message, metadata=self._metadata(tenant), timeout=PATIENCE_S
            )
            call.end = "OK"
        return bool(call.end) and bool(response.found)


def _find_cut(code: grpc.StatusCode, may_be_late: bool, is_cut: asyncio.Event | None) -> Cut:
    """Returns why a call ended without the server's word; "" where there is no reason."""
    if may_be_late and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "late"
    if is_cut is not None and is_cut.is_set() and code is grpc.StatusCode.UNAVAILABLE:
        return "killed"
    return ""


def _quota(error: grpc.aio.AioRpcError) -> str:
    """Returns the quota that an error is about; "" where it is about none."""
    # the client of ours does not tell it: it is in the text's first word
    text = error.details() or ""
    return text.partition(" ")[0] if " is used up" in text else ""
