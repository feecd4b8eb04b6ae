"""Request messages of VllmEngine to the engine's records.

Its numbers without presence cannot say "not set": 0 is what a client sends that says nothing, and
means off, never a default.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Literal

from smg_grpc_proto import vllm_engine_pb2

from jaxserve.engine.limits import merge_sampling
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import RequestError
from jaxserve.request import GenerationRequest, SamplingParams, StructuredOutput
from jaxserve.server.convert import read_token_ids, refuse

# Paths from the message. Any other that is set is refused; the tests walk the proto, so that a
# newer package's field must be looked at.
GENERATE: Final = frozenset(
    {
        "request_id",
        "tokenized",
        "tokenized.original_text",  # for reference: the ids are what is computed
        "tokenized.input_ids",
        "text",
        "sampling_params",
        "stream",
        "data_parallel_rank",
    }
) | {
    f"sampling_params.{name}"
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",  # of text, and an answer has none
        "ignore_eos",
        "n",
        "logprobs",
        "prompt_logprobs",
        "seed",
        "include_stop_str_in_output",  # likewise
        "logit_bias",
        "grammar_from_first_token",  # as it is here in any case
        "json_schema",
        "regex",
        "grammar",
        "json_object",
        "choice",
        "choice.choices",
    )
}
ABORT: Final = frozenset({"request_ids"})
LOADS: Final = frozenset({"dp_rank", "include"})
NOTHING: Final = frozenset[str]()

FIELDS: Final = {  # the engine's names, where the last part is not the same
    "token_ids": "tokenized.input_ids",
    "stop.stop_strings": "sampling_params.stop",
    "stop.include_stop_text": "sampling_params.include_stop_str_in_output",
}
KINDS: Final[dict[str, Literal["json_schema", "regex", "lark"]]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "lark",
}


def read_generate(
    message: vllm_engine_pb2.GenerateRequest,
    *,
    request_id: str,
    tenant: str,
    deadline_s: float | None,
    model: ServedModel,
) -> GenerationRequest:
    """Returns what is asked, its fields having passed `refuse_fields`.

    Raises:
      InvalidRequestError: no prompt, a rank that is not there, a form that is none.
    """
    check_rank(message, "data_parallel_rank")
    return GenerationRequest(
        prompt=_read_prompt(message, model),
        sampling=_read_sampling(message.sampling_params, model),
        structured_output=_read_structured_output(message.sampling_params),
        tenant=tenant,
        id=request_id,
        deadline_s=deadline_s,
    )


def check_rank(message: Any, field: str) -> None:  # noqa: ANN401  # the package has no types
    """Raises InvalidRequestError unless the field is unset or names the one rank there is."""
    rank = getattr(message, field)
    if rank != 0:
        refuse(f"{field} is {rank}, but this server has one rank, 0; leave it out", field)


@contextlib.contextmanager
def naming_fields() -> Iterator[None]:
    """Gives an error that leaves the block this protocol's name of its field."""
    try:
        yield
    except RequestError as error:
        error.field = find_name(error.field)
        raise


def find_name(field: str) -> str:
    """Returns this protocol's name of a field that the engine or our own proto names."""
    head, _, rest = field.partition(".")
    if field in FIELDS:
        return FIELDS[field]
    return f"sampling_params.{rest}" if rest and head in ("sampling", "stop", "output") else field


def _read_prompt(
    message: vllm_engine_pb2.GenerateRequest, model: ServedModel
) -> str | tuple[int, ...]:
    if message.WhichOneof("input") is None:
        refuse("input is missing; set tokenized or text", "input")
    if message.HasField("text"):
        return str(message.text)
    return read_token_ids(message.tokenized.input_ids, model, "tokenized.input_ids")


def _read_sampling(params: vllm_engine_pb2.SamplingParams, model: ServedModel) -> SamplingParams:
    overrides: dict[str, object] = {
        "temperature": _optional(params, "temperature"),
        "top_p": params.top_p or 1.0,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty or 1.0,
        "max_tokens": _optional(params, "max_tokens"),
        "min_tokens": params.min_tokens,
        "stop_strings": tuple(params.stop),
        "stop_token_ids": tuple(params.stop_token_ids),
        "skip_special_tokens": params.skip_special_tokens,  # what stop strings are looked for in
        "ignore_eos": params.ignore_eos,
        "include_stop_text": params.include_stop_str_in_output,
        "num_choices": params.n or 1,
        "logprobs": _optional(params, "logprobs"),
        "prompt_logprobs": _optional(params, "prompt_logprobs"),
        "seed": _optional(params, "seed"),
        "logit_bias": dict(params.logit_bias),
    }
    return merge_sampling(overrides, model.sampling_defaults)


def _read_structured_output(params: vllm_engine_pb2.SamplingParams) -> StructuredOutput | None:
    form = params.WhichOneof("constraint")
    field = f"sampling_params.{form}"
    match form:
        case None:
            return None
        case "json_object":
            if not params.json_object:
                refuse("json_object is false, which is no form; leave it out", field)
            return StructuredOutput(kind="json_object", field=field)
        case "choice":
            choices = tuple(params.choice.choices)
            return StructuredOutput(kind="choice", choices=choices, field=field)
        case _:
            return StructuredOutput(kind=KINDS[form], text=getattr(params, form), field=field)


def _optional(message: Any, name: str) -> Any:  # noqa: ANN401  # as above
    return getattr(message, name) if message.HasField(name) else None
