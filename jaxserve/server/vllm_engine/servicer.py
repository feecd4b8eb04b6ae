"""VllmEngine: each Generate call becomes one request of the engine, as our own service's do."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn, override

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxserve.engine import Engine, Stream
from jaxserve.errors import UnsupportedError
from jaxserve.server.convert import refuse
from jaxserve.server.door import Door
from jaxserve.server.edge import (
    REQUEST_ID_KEY,
    Context,
    Edge,
    Entered,
    check_request_id,
    find_request_id,
)
from jaxserve.server.fields import refuse_fields
from jaxserve.server.load import LoadMeter
from jaxserve.server.submitting import submit_in_thread
from jaxserve.server.vllm_engine import convert, facts
from jaxserve.server.vllm_engine.replies import Replies
from jaxserve.server.vllm_engine.tokenizer_bundle import TokenizerBundle, build_bundle

PREFIX: Final = "VllmEngine/"  # of its methods in the metrics: our own have the same names
INLINE_BYTES: Final = 4096  # a longer request is read in a thread
MAX_ABORTS: Final = 1024  # ids of one call: more would hold other calls up
SECTIONS: Final = frozenset({"core"})  # of the load
NOT_SUPPORTED: Final = {
    "Embed": "this server writes text, and embeds none",
    "FlushCache": "the prefix cache is emptied by AdminService's FlushPrefixCache",
    "StartProfile": "profiles are taken with jaxserve trace",
    "StopProfile": "profiles are taken with jaxserve trace",
    "SubscribeKvEvents": "pages of the prefix cache are not told; poll GetLoads",
}


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped
    """Under the same keys, limits, deadlines and tenants; holds nothing of a request once its call
    is over."""

    def __init__(self, door: Door, edge: Edge) -> None:
        self._door = door
        self._edge = edge
        self._meter = LoadMeter(door.metrics)
        self._bundle: asyncio.Future[TokenizerBundle] | None = None

    @override
    async def Generate(self, message: vllm_engine_pb2.GenerateRequest, context: Context) -> None:
        request_id = find_request_id(message.request_id, context)
        limit = self._door.config.limits.max_message_bytes
        entering = self._edge.call(
            context, f"{PREFIX}Generate", request_id, operation="text_completion"
        )
        async with entering as call:
            if call.span is not None:
                call.span.is_streaming = message.stream
            async with self._open(message, context, request_id, call) as (stream, replies):
                async for event in stream:
                    for reply in replies.push(event):
                        self._edge.check_size(reply)
                        await context.write(reply)
                        stream.acknowledge(replies.take_sent())
                    if replies.num_bytes > 2 * limit:  # no use in waiting for the rest
                        self._edge.refuse_size(replies.num_bytes)

    @override
    async def Abort(
        self, message: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        async with self._edge.call(context, f"{PREFIX}Abort") as call:
            engine = self._door.get_engine()
            refuse_fields(message, convert.ABORT)
            num_ids = len(message.request_ids)
            if num_ids > MAX_ABORTS:
                refuse(f"{num_ids} request_ids, but a call has at most {MAX_ABORTS}", "request_ids")
            for request_id in message.request_ids:
                engine.abort(request_id, call.tenant.name)
        return vllm_engine_pb2.AbortResponse()

    @override
    async def HealthCheck(
        self, message: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        async with self._edge.call(context, f"{PREFIX}HealthCheck"):
            refuse_fields(message, convert.NOTHING)
            return facts.build_health(self._door.find_engine())

    @override
    async def GetModelInfo(
        self, message: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        async with self._edge.call(context, f"{PREFIX}GetModelInfo"):
            refuse_fields(message, convert.NOTHING)
            return facts.build_model_info(self._door.get_engine())

    @override
    async def GetServerInfo(
        self, message: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        async with self._edge.call(context, f"{PREFIX}GetServerInfo"):
            refuse_fields(message, convert.NOTHING)
            engine = self._door.get_engine()
            uptime_s = time.time() - self._door.started_s
            return facts.build_server_info(engine, self._meter.read(engine), uptime_s=uptime_s)

    @override
    async def GetLoads(
        self, message: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        async with self._edge.call(context, f"{PREFIX}GetLoads"):
            refuse_fields(message, convert.LOADS)
            convert.check_rank(message, "dp_rank")
            for section in message.include:
                if section not in SECTIONS:
                    raise UnsupportedError(
                        f"include names {section!r:.40}, but the load has the section core alone; "
                        "leave it out",
                        field="include",
                    )
            return facts.build_loads(self._meter.read(self._door.get_engine()))

    @override
    async def GetTokenizer(self, message: common_pb2.GetTokenizerRequest, context: Context) -> None:
        async with self._edge.call(context, f"{PREFIX}GetTokenizer"):
            refuse_fields(message, convert.NOTHING)
            bundle = await self._get_bundle(self._door.get_engine())
            for chunk in bundle.chunks():
                await context.write(chunk)

    @override
    async def Embed(self, message: object, context: Context) -> NoReturn:
        await self._refuse(context, "Embed")

    @override
    async def FlushCache(self, message: object, context: Context) -> NoReturn:
        await self._refuse(context, "FlushCache")

    @override
    async def StartProfile(self, message: object, context: Context) -> NoReturn:
        await self._refuse(context, "StartProfile")

    @override
    async def StopProfile(self, message: object, context: Context) -> NoReturn:
        await self._refuse(context, "StopProfile")

    @override
    async def SubscribeKvEvents(self, message: object, context: Context) -> NoReturn:
        await self._refuse(context, "SubscribeKvEvents")

    async def _refuse(self, context: Context, method: str) -> NoReturn:
        async with self._edge.call(context, f"{PREFIX}{method}"):
            raise UnsupportedError(f"{method} is not supported: {NOT_SUPPORTED[method]}")
        raise AssertionError("a call that is refused has ended")

    @contextlib.asynccontextmanager
    async def _open(
        self,
        message: vllm_engine_pb2.GenerateRequest,
        context: Context,
        request_id: str,
        call: Entered,
    ) -> AsyncIterator[tuple[Stream, Replies]]:
        """Submits a request, and ends it when the block is left, for whatever reason."""
        stream = await self._submit(message, context, request_id, call)
        params = message.sampling_params
        replies = Replies(
            stream.prompt,
            is_streamed=message.stream,
            has_prompt_logprobs=params.HasField("prompt_logprobs"),
            complete=stream.complete,
        )
        try:
            # Not before this: headers end a client's own retries, which a refusal must not.
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            yield stream, replies
        finally:
            stream.cancel()

    async def _submit(
        self,
        message: vllm_engine_pb2.GenerateRequest,
        context: Context,
        request_id: str,
        call: Entered,
    ) -> Stream:
        with self._edge.counting_refusals():
            check_request_id(request_id)
            engine = self._door.get_engine()
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else engine.now() + remaining_s

        def submit() -> Stream:
            with convert.naming_fields():
                with self._edge.counting_refusals():
                    refuse_fields(message, convert.GENERATE)
                    asked = convert.read_generate(
                        message,
                        request_id=request_id,
                        tenant=call.tenant.name,
                        deadline_s=deadline_s,
                        model=engine.model,
                    )
                if call.span is None:
                    return engine.submit(asked, delivery="acknowledged")
                asked = dataclasses.replace(asked, on_end=call.span.note_end)
                stream = engine.submit(asked, delivery="acknowledged")
                call.span.accept()
                return stream

        if message.sampling_params.WhichOneof("constraint"):
            threads = self._door.form_threads
        elif message.ByteSize() > INLINE_BYTES:
            threads = self._door.threads
        else:
            return submit()
        return await submit_in_thread(threads, submit, stream_of=lambda stream: stream)

    async def _get_bundle(self, engine: Engine) -> TokenizerBundle:
        """Returns what is built once, in a thread, for all who ask."""
        if self._bundle is None:
            self._bundle = asyncio.get_running_loop().run_in_executor(
                self._door.threads, build_bundle, engine.tokenizer, engine.model
            )
        return await asyncio.shield(self._bundle)  # one that is cancelled is not the only one


def add_to_server(server: grpc.aio.Server, door: Door, edge: Edge) -> None:
    """Adds the service, for one engine, to a server."""
    servicer: Any = VllmEngineServicer(door, edge)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
