"""Random messages of any type, made field by field from its descriptor."""

import random
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from jaxserve.gen import admin_pb2, generation_pb2

MAX_DEPTH: Final = 6
TEXTS: Final = (
    "", "a", "Hi!", "é🌶", "\x00", "</s>", "x" * 300, "{", "[]", "{}", "null", '{"type": "object"}',
    '[{"type": "function", "function": {"name": "f"}}]', "start: \"a\"", "(a|b)*", "(", "\\",
    "user", "assistant", "tool", "call_1", "{{ x }}", "[" * 200, "\u202e", "a\nb", "core",
    "warning",
)  # fmt: skip
NUMBERS: Final = (0, 1, 2, 3, 5, 64, 257, 258, 259, 300, 49152, 1 << 16, (1 << 31) - 1)
FLOATS: Final = (
    0.0, -0.0, 1.0, 0.5, 1e-6, 1e-45, -1.0, 2.0, 1e6, 1e20, 3e38,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
# Most messages that have one of these are refused for it alone.
REFUSED: Final = ("adapter", "cache_salt", "model", "request_id", "queue_timeout", "lora_name")


def build_message(kind: type[Message], rng: random.Random) -> Message:
    """Returns a message in which a few fields are set, some of them to what no one should send.

    Nothing in it makes a server write much, or end.
    """
    message = kind()
    _fill(message, rng, most=rng.choice((1, 2, 4, 8)), depth=0)
    if _chance(rng, 70):
        for name in REFUSED:
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
    _bound(message, rng)
    return message


def damage(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes that are perhaps no message: cut, turned over in places, or any."""
    if not data or _chance(rng, 20):
        return rng.randbytes(rng.choice((1, 7, 300)))
    if _chance(rng, 40):
        return data[: rng.randrange(len(data))]
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 3))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _bound(message: Message, rng: random.Random) -> None:
    match message:
        case generation_pb2.GenerateRequest():
            if message.WhichOneof("prompt") is None and _chance(rng, 90):
                message.text = rng.choice(("Hi!", "x"))
            if not message.stop.max_tokens or _chance(rng, 80):  # or it would fill the context
                message.stop.max_tokens = rng.choice((1, 2, 4))
        case generation_pb2.ScoreRequest() if _chance(rng, 70):
            del message.items[:]
            for _ in range(rng.choice((1, 2, 5))):
                item = message.items.add(context_text=rng.choice(("a", "Hi! </s>", "é")))
                item.continuation_token_ids.ids.extend(rng.choices((1, 2, 65, 200), k=3))
        case admin_pb2.DrainRequest():  # any other would begin the end
            message.grace.seconds = rng.choice((-1, 1 << 40))
        case _ if "sampling_params" in message.DESCRIPTOR.fields_by_name:  # VllmEngine's Generate
            vllm: Any = message
            if not vllm.WhichOneof("input") and _chance(rng, 90):
                vllm.text = rng.choice(("Hi!", "x"))
            vllm.sampling_params.max_tokens = rng.choice((1, 2, 4))


def _chance(rng: random.Random, percent: int) -> bool:
    # not by random(): a float that hypothesis draws is seldom a common one
    return rng.randrange(100) < percent


def _fill(message: Message, rng: random.Random, *, most: int, depth: int) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if depth == MAX_DEPTH or not fields:
        return
    for field in rng.sample(fields, k=rng.randint(0, min(most, len(fields)))):
        _set(message, field, rng, most=most, depth=depth)


def _set(
    message: Message,
    field: Any,  # noqa: ANN401  # protobuf has two classes of them
    rng: random.Random,
    *,
    most: int,
    depth: int,
) -> None:
    value = getattr(message, field.name)
    child = field.message_type
    if child is not None and child.GetOptions().map_entry:
        _fill_map(value, child, rng)
    elif isinstance(value, Message):
        value.SetInParent()
        _fill(value, rng, most=max(most, 3), depth=depth + 1)
    elif child is not None:
        for _ in range(rng.choice((0, 1, 2, 4))):
            _fill(value.add(), rng, most=max(most, 4), depth=depth + 1)
    elif hasattr(value, "extend"):
        value.extend(_scalar(field, rng) for _ in range(rng.choice((0, 1, 2, 5))))
    else:
        setattr(message, field.name, _scalar(field, rng))


def _fill_map(value: Any, entry: Any, rng: random.Random) -> None:  # noqa: ANN401
    key, kept = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if kept.message_type is None:
        for _ in range(rng.choice((1, 2, 5))):
            value[_scalar(key, rng)] = _scalar(kept, rng)


def _scalar(field: Any, rng: random.Random) -> Any:  # noqa: ANN401  # by its type
    kinds: dict[int, Callable[[], Any]] = {
        FieldDescriptor.CPPTYPE_STRING: lambda: _text(field, rng),
        FieldDescriptor.CPPTYPE_BOOL: lambda: _chance(rng, 50),
        FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(FLOATS),
        FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(FLOATS),
        FieldDescriptor.CPPTYPE_UINT32: lambda: rng.choice((*NUMBERS, (1 << 32) - 1)),
        FieldDescriptor.CPPTYPE_UINT64: lambda: rng.choice((*NUMBERS, (1 << 64) - 1)),
        FieldDescriptor.CPPTYPE_INT32: lambda: rng.choice((*NUMBERS, -1, -(1 << 31))),
        FieldDescriptor.CPPTYPE_INT64: lambda: rng.choice((*NUMBERS, -1, (1 << 63) - 1)),
        FieldDescriptor.CPPTYPE_ENUM: lambda: rng.choice((0, 1, 2, 3, 99)),
    }
    return kinds[field.cpp_type]()


def _text(field: Any, rng: random.Random) -> str | bytes:  # noqa: ANN401
    text = rng.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
