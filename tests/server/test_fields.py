"""Every field of every request works or is refused by name, at any depth."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from jaxserve.config import LimitsSection
from jaxserve.errors import UnsupportedError
from jaxserve.gen import generation_pb2, model_pb2
from jaxserve.server.fields import REFUSED, SUPPORTED, refuse_unsupported
from tests.server.harness import raw_stub, run_server

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
INPUTS = {
    method.input_type.full_name: method.input_type
    for service in SERVICES
    for method in service.methods
}


def walk(
    message: Descriptor, prefix: str = ""
) -> Iterator[tuple[str, tuple[FieldDescriptor, ...]]]:
    """Every path of a message, and the fields on the way to it."""
    for field in message.fields:
        path = f"{prefix}{field.name}"
        yield path, (field,)
        child = field.message_type
        if child is None or child.GetOptions().map_entry:
            continue
        if child.file.package != message.file.package:
            continue
        for inner, fields in walk(child, f"{path}."):
            yield inner, (field, *fields)


def fill(message: Message, fields: tuple[FieldDescriptor, ...]) -> None:
    """Sets the last of the fields to something that is not its default."""
    field, *rest = fields
    value = getattr(message, field.name)
    child = field.message_type
    if child is not None and child.GetOptions().map_entry:
        value[1] = 1.0
    elif child is not None:
        child_message = value if isinstance(value, Message) else value.add()
        child_message.SetInParent()
        if rest:
            fill(child_message, tuple(rest))
    else:
        plain = {str: "x", bytes: b"x", bool: True, int: 1, float: 1.0}
        if isinstance(value, tuple(plain)):
            setattr(message, field.name, plain[type(value)])
        else:
            value.append("x" if field.type == FieldDescriptor.TYPE_STRING else 1)


def build(name: str, fields: tuple[FieldDescriptor, ...]) -> Message:
    module = model_pb2 if hasattr(model_pb2, name.rpartition(".")[2]) else generation_pb2
    message: Message = getattr(module, name.rpartition(".")[2])()
    fill(message, fields)
    return message


PATHS = [(name, path, fields) for name, kind in INPUTS.items() for path, fields in walk(kind)]


def test_every_request_of_every_service_is_in_the_table() -> None:
    assert SUPPORTED.keys() == INPUTS.keys()
    assert REFUSED.keys() <= INPUTS.keys()


@pytest.mark.parametrize("name", INPUTS)
def test_each_field_is_in_one_table_and_each_entry_is_a_field(name: str) -> None:
    paths = {path for path, _ in walk(INPUTS[name])}
    supported, refused = SUPPORTED[name], REFUSED.get(name, frozenset())
    assert not supported & refused
    top_of_refused = {path for path in paths if any(path.startswith(f"{r}.") for r in refused)}
    assert paths == supported | refused | top_of_refused


@pytest.mark.parametrize(("name", "path", "fields"), PATHS, ids=[f"{n}.{p}" for n, p, _ in PATHS])
def test_a_field_passes_or_is_refused_by_its_path(
    name: str, path: str, fields: tuple[FieldDescriptor, ...]
) -> None:
    message = build(name, fields)
    if path in SUPPORTED[name]:
        refuse_unsupported(message)
        assert message.ListFields()
        return
    with pytest.raises(UnsupportedError, match="not supported by this version") as caught:
        refuse_unsupported(message)
    assert path == caught.value.field or path.startswith(f"{caught.value.field}.")


def test_a_field_of_a_newer_client_is_refused_by_its_number() -> None:
    known = generation_pb2.GenerateRequest(text="x")
    known.output.omit_text = True
    at_top = generation_pb2.GenerateRequest.FromString(known.SerializeToString() + b"\xc0\x0c\x01")
    with pytest.raises(UnsupportedError, match="200"):
        refuse_unsupported(at_top)
    # field 8 of the request is the output options: two bytes more in it
    inner = known.output.SerializeToString() + b"\xc0\x0c\x01"
    nested = generation_pb2.GenerateRequest.FromString(b"\x42" + bytes([len(inner)]) + inner)
    with pytest.raises(UnsupportedError, match=r"output\.200"):
        refuse_unsupported(nested)


@pytest.mark.asyncio
async def test_refusals_reach_the_client_with_the_field() -> None:
    name = generation_pb2.GenerateRequest.DESCRIPTOR.full_name
    async with run_server() as running, raw_stub(running) as stub:
        for path in sorted(REFUSED[name]):
            fields = dict(walk(INPUTS[name]))[path]
            message = generation_pb2.GenerateRequest(token_ids={"ids": [1]})
            fill(message, fields)
            for call in (stub.Generate(message), stub.StreamGenerate(message).read()):
                with pytest.raises(grpc.RpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert path in (caught.value.details() or "")
        score = generation_pb2.ScoreRequest(items=[{"continuation_text": "x"}], adapter="a")
        with pytest.raises(grpc.RpcError, match="adapter") as caught:
            await stub.Score(score)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert running.num_submitted == 0


@pytest.mark.asyncio
async def test_the_number_of_choices_is_bounded() -> None:
    bounds = LimitsSection(max_choices=3)
    async with run_server(bounds=bounds) as running, raw_stub(running) as stub:
        message = generation_pb2.GenerateRequest(text="x")
        message.stop.max_tokens = 1
        for count in (1, 3):
            message.sampling.n = count
            assert len((await stub.Generate(message)).choices) == count
        for count in (0, 4):
            message.sampling.n = count
            with pytest.raises(grpc.RpcError, match=f"n is {count}") as caught:
                await stub.Generate(message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
