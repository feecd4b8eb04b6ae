"""Sends random messages of every request type to a server: each must end well, or be refused.

    python -m scripts.judges.proto_fuzz 127.0.0.1:50051 --count 10000

Exit code 1: a call ended with INTERNAL or UNKNOWN, or hung, or the server then no longer served.
"""

import argparse
import asyncio
import collections
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from jaxserve.client import AsyncClient
from jaxserve.gen import generation_pb2, generation_pb2_grpc

TIMEOUT_S: Final = 60.0
BAD: Final = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
TEXTS: Final = (
    "", "a", "Hi!", "é🌶", "\x00", "</s>", "x" * 300, "{", "[]", "{}", "null", '{"type": "object"}',
    '[{"type": "function", "function": {"name": "f"}}]', "start: \"a\"", "(a|b)*", "(", "\\",
    "user", "assistant", "tool", "call_1", "{{ x }}", "[" * 200, "\u202e", "a\nb",
)  # fmt: skip
NUMBERS: Final = (0, 1, 2, 3, 5, 64, 257, 258, 259, 300, 49152, 1 << 16, (1 << 31) - 1)
FLOATS: Final = (
    0.0, -0.0, 1.0, 0.5, 1e-6, 1e-45, -1.0, 2.0, 1e6, 1e20, 3e38,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip

METHODS: Final[Mapping[str, type[Message]]] = {
    "Generate": generation_pb2.GenerateRequest,
    "StreamGenerate": generation_pb2.GenerateRequest,
    "Score": generation_pb2.ScoreRequest,
    "CancelGeneration": generation_pb2.CancelGenerationRequest,
    "Tokenize": generation_pb2.TokenizeRequest,
    "Detokenize": generation_pb2.DetokenizeRequest,
}


class FaultError(Exception):
    """A message did what none may."""


def build_message(kind: type[Message], rng: random.Random) -> Message:
    """Returns a message in which a few fields are set, some of them to what no one should send."""
    message = kind()
    _fill(message, rng, share=rng.choice((0.08, 0.2, 0.5)), depth=0)
    if isinstance(message, generation_pb2.GenerateRequest):
        if message.WhichOneof("prompt") is None and rng.random() < 0.9:
            message.text = rng.choice(("Hi!", "x"))
        if not message.stop.max_tokens or rng.random() < 0.8:  # or it would fill the context
            message.stop.max_tokens = rng.choice((1, 2, 4))
    if isinstance(message, generation_pb2.ScoreRequest) and rng.random() < 0.7:
        del message.items[:]
        for _ in range(rng.choice((1, 2, 5))):
            item = message.items.add(context_text=rng.choice(("a", "Hi! </s>", "é")))
            item.continuation_token_ids.ids.extend(rng.choices((1, 2, 65, 200), k=3))
    if rng.random() < 0.7:  # or most would be refused for these alone
        for name in ("adapter", "cache_salt", "model", "request_id", "queue_timeout"):
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
    return message


def _fill(message: Message, rng: random.Random, *, share: float, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < share and depth < 6:
            _set(message, field, rng, share=share, depth=depth)


def _set(
    message: Message,
    field: Any,  # noqa: ANN401  # protobuf has two classes of them
    rng: random.Random,
    *,
    share: float,
    depth: int,
) -> None:
    value = getattr(message, field.name)
    child = field.message_type
    if child is not None and child.GetOptions().map_entry:
        for _ in range(rng.choice((1, 2, 5))):
            value[rng.choice(NUMBERS)] = rng.choice(FLOATS)
    elif isinstance(value, Message):
        value.SetInParent()
        _fill(value, rng, share=max(share, 0.4), depth=depth + 1)
    elif child is not None:
        for _ in range(rng.choice((0, 1, 2, 4))):
            _fill(value.add(), rng, share=max(share, 0.5), depth=depth + 1)
    elif hasattr(value, "extend"):
        value.extend(_scalar(field, rng) for _ in range(rng.choice((0, 1, 2, 5))))
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: Any, rng: random.Random) -> Any:  # noqa: ANN401  # by its type
    kinds: dict[int, Callable[[], Any]] = {
        FieldDescriptor.CPPTYPE_STRING: lambda: rng.choice(TEXTS),
        FieldDescriptor.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(FLOATS),
        FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(FLOATS),
        FieldDescriptor.CPPTYPE_UINT32: lambda: rng.choice((*NUMBERS, (1 << 32) - 1)),
        FieldDescriptor.CPPTYPE_UINT64: lambda: rng.choice((*NUMBERS, (1 << 64) - 1)),
        FieldDescriptor.CPPTYPE_INT32: lambda: rng.choice((*NUMBERS, -1, -(1 << 31))),
        FieldDescriptor.CPPTYPE_INT64: lambda: rng.choice((*NUMBERS, -1, (1 << 63) - 1)),
        FieldDescriptor.CPPTYPE_ENUM: lambda: rng.choice((0, 1, 2, 3, 99)),
    }
    return kinds[field.cpp_type]()


async def send(stub: generation_pb2_grpc.GenerationServiceStub, number: int) -> tuple[str, str]:
    """Sends the message of this number; returns its method and the status it ended with.

    Raises:
      FaultError: it ended with a status that no message may cause.
    """
    rng = random.Random(number)
    method = rng.choice(list(METHODS))
    message = build_message(METHODS[method], rng)
    call = getattr(stub, method)(message, timeout=TIMEOUT_S)
    try:
        if method == "StreamGenerate":
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        code = error.code()
        is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED and not _has_timeout(message)
        if code in BAD or is_late:
            raise FaultError(
                f"message {number}, {method}: {code.name} {error.details()}\n{message}"
            ) from error
        return method, code.name
    return method, "OK"


def _has_timeout(message: Message) -> bool:
    return isinstance(message, generation_pb2.GenerateRequest) and message.HasField("queue_timeout")


async def fuzz(
    target: str, *, count: int, first: int = 0, at_once: int = 16
) -> collections.Counter[str]:
    """Sends that many messages; returns how many ended how."""
    ends: collections.Counter[str] = collections.Counter()
    numbers = iter(range(first, first + count))
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def work() -> None:
            for number in numbers:
                method, end = await send(stub, number)
                ends[f"{method} {end}"] += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
    async with AsyncClient(target) as client:  # it still serves
        done = await client.generate("x", max_tokens=1, timeout_s=TIMEOUT_S)
        if done.usage.completion_tokens != 1:
            raise FaultError("the server does not serve any more")
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="HOST:PORT")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first message")
    options = parser.parse_args()
    try:
        ends = asyncio.run(fuzz(options.target, count=options.count, first=options.first))
    except FaultError as fault:
        print(fault)
        return 1
    for end, number in sorted(ends.items()):
        print(f"{number:6d}  {end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
