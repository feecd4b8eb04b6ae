"""Messages to records: what is set, what is not, and what cannot be read."""

import pytest
from google.protobuf import duration_pb2

from jaxserve.client.requests import build_generate
from jaxserve.client.results import FINISH_REASONS as READ_REASONS
from jaxserve.engine import ServedModel
from jaxserve.errors import InvalidRequestError
from jaxserve.gen import generation_pb2
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from jaxserve.server import convert

MODEL = ServedModel(
    name="m",
    max_model_tokens=40,
    vocab_size=300,
    eos_ids=frozenset({7, 2}),
    bos_id=0,
    architecture="llama",
    dtype="bfloat16",
    quantization="Q4_1",
    has_chat_template=True,
    sampling_defaults={"temperature": 0.25, "top_k": 50},
)


def read(message: generation_pb2.GenerateRequest) -> GenerationRequest:
    return convert.read_generate(message, request_id="r", deadline_s=None, model=MODEL)


def test_what_is_not_set_is_the_models_default_then_ours() -> None:
    asked = read(generation_pb2.GenerateRequest(text="x"))
    assert asked.sampling == SamplingParams(temperature=0.25, top_k=50)
    assert asked.prompt == "x"


def test_a_zero_that_is_set_is_not_the_default() -> None:
    message = generation_pb2.GenerateRequest(text="")
    message.sampling.temperature = 0.0
    message.sampling.top_k = 0
    message.sampling.seed = 0
    message.output.skip_special_tokens = False
    asked = read(message)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed) == (0.0, 0, 0)
    assert not asked.sampling.skip_special_tokens
    assert asked.prompt == ""


def test_every_option_of_the_client_arrives() -> None:
    message = build_generate(
        [1, 2],
        {
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "min_p": 0.125,
            "presence_penalty": -1.5,
            "frequency_penalty": 1.5,
            "repetition_penalty": 2.0,
            "seed": 2**64 - 1,
            "logit_bias": {5: -2.0},
            "max_tokens": 9,
            "min_tokens": 4,
            "stop_strings": ["a", "b"],
            "stop_token_ids": [8],
            "ignore_eos": True,
            "include_stop_text": True,
            "skip_special_tokens": False,
            "priority": -2,
            "queue_timeout_s": 1.25,
        },
    )
    assert read(message) == GenerationRequest(
        prompt=(1, 2),
        id="r",
        priority=-2,
        queue_timeout_s=1.25,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            presence_penalty=-1.5,
            frequency_penalty=1.5,
            repetition_penalty=2.0,
            seed=2**64 - 1,
            logit_bias={5: -2.0},
            max_tokens=9,
            min_tokens=4,
            stop_strings=("a", "b"),
            stop_token_ids=(8,),
            ignore_eos=True,
            include_stop_text=True,
            skip_special_tokens=False,
        ),
    )


def test_a_conversation_arrives_with_its_variables() -> None:
    conversation = ChatPrompt(
        messages=(ChatMessage(role="user", content="é", name="Ann"),),
        add_generation_prompt=False,
        template_kwargs={"think": False, "depth": [1, {"a": None}]},
    )
    assert read(build_generate(conversation, {})).prompt == conversation


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "3", '"a"', "null", '{"a": NaN}', "[" * 100_000, '{"a": ' * 65 + "1" + "}" * 65],
)
def test_template_variables_must_be_a_json_object_of_some_depth(text: str) -> None:
    message = generation_pb2.GenerateRequest()
    message.chat.template_kwargs_json = text
    with pytest.raises(InvalidRequestError, match="template_kwargs_json") as caught:
        read(message)
    assert caught.value.field == "chat.template_kwargs_json"


def test_a_prompt_is_needed() -> None:
    with pytest.raises(InvalidRequestError, match="set one of text, token_ids and chat"):
        read(generation_pb2.GenerateRequest(request_id="r"))


def test_too_many_ids_are_refused_by_their_count() -> None:
    message = generation_pb2.GenerateRequest()
    message.token_ids.ids.extend(range(41))
    with pytest.raises(InvalidRequestError, match="41 tokens, but this model's limit is 40"):
        read(message)


def test_an_interval_of_nothing_is_refused() -> None:
    message = generation_pb2.GenerateRequest(text="x")
    message.output.stream_interval = 0
    with pytest.raises(InvalidRequestError, match="stream_interval is 0"):
        read(message)


def test_a_timeout_keeps_its_fraction_and_zero_stays_zero_to_be_refused() -> None:
    for duration, seconds in (
        (duration_pb2.Duration(seconds=2, nanos=5), 2.000000005),
        (None, None),
    ):
        message = generation_pb2.GenerateRequest(text="x", queue_timeout=duration)
        assert read(message).queue_timeout_s == seconds
    message = generation_pb2.GenerateRequest(text="x", queue_timeout=duration_pb2.Duration())
    assert read(message).queue_timeout_s == 0.0


def test_every_reason_has_a_number_of_its_own_and_the_client_knows_it() -> None:
    assert convert.FINISH_REASONS.keys() == set(FinishReason)
    assert {number: reason for reason, number in convert.FINISH_REASONS.items()} == READ_REASONS


def test_a_model_tells_its_facts() -> None:
    message = convert.build_model(MODEL)
    assert (message.name, list(message.architectures)) == ("m", ["llama"])
    assert (list(message.eos_token_ids), message.bos_token_id) == ([2, 7], 0)
    assert message.HasField("bos_token_id")
    assert (message.weight_dtype, message.quantization) == ("bfloat16", "Q4_1")
    assert message.default_sampling_json == '{"temperature": 0.25, "top_k": 50}'
    assert (message.vocab_size, message.max_model_tokens) == (300, 40)
