"""Which fields of each request message work, and the refusal of all others by name."""

from collections.abc import Iterator, Mapping, Set
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.errors import UnsupportedError
from jaxserve.gen import generation_pb2, model_pb2

_CHAT: Final = frozenset(
    f"chat{rest}"
    for rest in (
        "",
        ".messages",
        ".messages.role",
        ".messages.content",
        ".messages.name",
        ".messages.tool_call_id",
        ".messages.tool_calls_json",
        ".messages.reasoning",
        ".tools_json",
        ".add_generation_prompt",
        ".template_kwargs_json",
        ".tool_choice",
        ".tool_choice.mode",
        ".tool_choice.function",
    )
)

# Paths from the message, by its type. A path that is in neither table is refused too; the tests
# walk the protos, so that a new field must be put in one of them.
SUPPORTED: Final[Mapping[str, frozenset[str]]] = {
    generation_pb2.GenerateRequest.DESCRIPTOR.full_name: _CHAT
    | {
        "request_id",
        "model",
        "text",
        "token_ids",
        "token_ids.ids",
        "sampling",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.min_p",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.repetition_penalty",
        "sampling.seed",
        "sampling.n",
        "sampling.logit_bias",
        "sampling.allowed_token_ids",
        "sampling.allowed_token_ids.ids",
        "sampling.bad_words",
        "stop",
        "stop.max_tokens",
        "stop.min_tokens",
        "stop.stop_strings",
        "stop.stop_token_ids",
        "stop.ignore_eos",
        "stop.include_stop_text",
        "output",
        "output.echo",
        "output.logprobs",
        "output.prompt_logprobs",
        "output.omit_text",
        "output.include_token_ids",
        "output.skip_special_tokens",
        "output.stream_interval",
        "output.include_execution_info",
        "output.raw_text",
        "structured_output",
        "structured_output.json_schema",
        "structured_output.json_object",
        "structured_output.regex",
        "structured_output.choice",
        "structured_output.choice.choices",
        "structured_output.lark_grammar",
        "priority",
        "cache_salt",
        "queue_timeout",
    },
    generation_pb2.ScoreRequest.DESCRIPTOR.full_name: frozenset(
        {
            "request_id",
            "model",
            "items",
            "items.context_text",
            "items.context_token_ids",
            "items.context_token_ids.ids",
            "items.continuation_text",
            "items.continuation_token_ids",
            "items.continuation_token_ids.ids",
            "include_token_logprobs",
            "priority",
        }
    ),
    generation_pb2.CancelGenerationRequest.DESCRIPTOR.full_name: frozenset({"request_id"}),
    generation_pb2.TokenizeRequest.DESCRIPTOR.full_name: _CHAT
    | {"model", "text", "add_special_tokens", "include_offsets"},
    generation_pb2.DetokenizeRequest.DESCRIPTOR.full_name: frozenset(
        {"model", "token_ids", "skip_special_tokens"}
    ),
    model_pb2.ListModelsRequest.DESCRIPTOR.full_name: frozenset(),
    model_pb2.GetModelRequest.DESCRIPTOR.full_name: frozenset({"name"}),
}
REFUSED: Final[Mapping[str, frozenset[str]]] = {
    generation_pb2.GenerateRequest.DESCRIPTOR.full_name: frozenset({"adapter"}),
    generation_pb2.ScoreRequest.DESCRIPTOR.full_name: frozenset({"adapter"}),
}


def refuse_unsupported(message: Message) -> None:
    """Checks every field that is set, at any depth.

    Raises:
      UnsupportedError: names the first field that this version does not support, or the number of
        one that it does not know (a newer client's).
    """
    refuse_fields(message, SUPPORTED[message.DESCRIPTOR.full_name])


def refuse_fields(message: Message, supported: Set[str]) -> None:
    """The same, with the paths that are supported.

    Args:
      supported: from the message down, through messages of its own package.
    """
    for path in _set_paths(message, ""):
        if path not in supported:
            raise UnsupportedError(
                f"{path} is not supported by this version; leave it out", field=path
            )


def _set_paths(message: Message, prefix: str) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"{prefix}{unknown[index].field_number}"
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        yield path
        entry = field.message_type
        if entry is None or entry.GetOptions().map_entry:
            continue
        if entry.file.package != message.DESCRIPTOR.file.package:
            continue
        for child in (value,) if isinstance(value, Message) else value:
            yield from _set_paths(child, f"{path}.")
