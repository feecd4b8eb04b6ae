"""Messages to records: what is set, what is not, and what cannot be read."""

import json
from collections.abc import Callable

import pytest
from google.protobuf import duration_pb2

from jaxserve.client.reading import FINISH_REASONS as READ_REASONS
from jaxserve.client.requests import build_generate
from jaxserve.config import LimitsSection
from jaxserve.engine import ServedModel
from jaxserve.errors import InvalidRequestError
from jaxserve.gen import generation_pb2
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StructuredOutput,
)
from jaxserve.server import answers, convert
from jaxserve.server.conversation import Conversation, read_conversation
from jaxserve.server.models import build_model
from jaxserve.text.chat_output import ToolChoice
from tests.engines import build_engine
from tests.server.harness import TOOL_TEMPLATE

PB_CHAT = generation_pb2.ChatPrompt
PB_CHOICE = generation_pb2.ToolChoice

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


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CONVERSATION = ChatPrompt(messages=(ChatMessage(role="user", content="é"),), tools=(TOOL,))


def read(message: generation_pb2.GenerateRequest) -> GenerationRequest:
    conversation = (
        read_conversation(message.chat, LimitsSection()) if message.HasField("chat") else None
    )
    return convert.read_generate(
        message, conversation, request_id="r", tenant="t", deadline_s=None, model=MODEL
    )


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
            "n": 3,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "bad_words": ["c", "d"],
            "allowed_token_ids": [9, 4],
            "priority": -2,
            "queue_timeout_s": 1.25,
        },
    )
    assert read(message) == GenerationRequest(
        prompt=(1, 2),
        id="r",
        tenant="t",
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
            num_choices=3,
            logprobs=2,
            prompt_logprobs=1,
            bad_words=("c", "d"),
            allowed_token_ids=(9, 4),
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


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(-1, 2_000_000_000), (0, 1_000_000_000), (1, -1), (-1, 1)]
)
def test_a_timeout_that_is_no_duration_is_refused(seconds: int, nanos: int) -> None:
    duration = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    message = generation_pb2.GenerateRequest(text="x", queue_timeout=duration)
    with pytest.raises(InvalidRequestError, match="queue_timeout has seconds"):
        read(message)


def test_every_reason_has_a_number_of_its_own_and_the_client_knows_it() -> None:
    assert answers.FINISH_REASONS.keys() == set(FinishReason)
    assert {number: reason for reason, number in answers.FINISH_REASONS.items()} == READ_REASONS


def test_options_that_are_zero_are_set_and_those_left_out_are_not() -> None:
    message = generation_pb2.GenerateRequest(text="x")
    asked = read(message).sampling
    assert (asked.num_choices, asked.logprobs, asked.prompt_logprobs) == (1, None, None)
    assert (asked.bad_words, asked.allowed_token_ids) == ((), None)
    message.sampling.n = 0
    message.output.logprobs = 0
    message.output.prompt_logprobs = 0
    message.stop.max_tokens = 0
    message.sampling.allowed_token_ids.SetInParent()
    asked = read(message).sampling
    assert (asked.num_choices, asked.logprobs, asked.prompt_logprobs) == (0, 0, 0)
    assert (asked.max_tokens, asked.allowed_token_ids) == (0, ())


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput(kind="json_schema", text='{"type": "object"}'),
        StructuredOutput(kind="json_object"),
        StructuredOutput(kind="regex", text="a+"),
        StructuredOutput(kind="choice", choices=("a", "b")),
        StructuredOutput(kind="lark", text='start: "a"'),
    ],
    ids=lambda form: form.kind,
)
def test_every_form_of_output_arrives(form: StructuredOutput) -> None:
    assert read(build_generate("x", {"structured_output": form})).structured_output == form
    assert read(build_generate("x", {})).structured_output is None


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (generation_pb2.StructuredOutput(), "structured_output"),
        (
            generation_pb2.StructuredOutput(json_object=False),
            "structured_output.json_object",
        ),
    ],
)
def test_a_form_that_is_none_is_refused(form: generation_pb2.StructuredOutput, field: str) -> None:
    message = generation_pb2.GenerateRequest(text="x", structured_output=form)
    with pytest.raises(InvalidRequestError, match="leave it out") as caught:
        read(message)
    assert caught.value.field == field


def test_an_echo_needs_a_text_to_stand_before() -> None:
    for message, match in (
        (build_generate(CONVERSATION, {"echo": True}), "with a conversation"),
        (build_generate("x", {"echo": True, "omit_text": True}), "echo and omit_text"),
    ):
        with pytest.raises(InvalidRequestError, match=match) as caught:
            read(message)
        assert caught.value.field == "output.echo"


def read_chat(message: generation_pb2.GenerateRequest) -> Conversation:
    return read_conversation(message.chat, LimitsSection(max_tools=1))


def test_tools_and_earlier_calls_arrive() -> None:
    conversation = ChatPrompt(
        messages=(
            ChatMessage(role="user", content="1 + 1?"),
            ChatMessage(role="assistant", content="", tool_calls=(CALL,), reasoning="Adding."),
            ChatMessage(role="tool", content="2", tool_call_id="c1"),
        ),
        tools=(TOOL,),
    )
    read = read_chat(build_generate(conversation, {}))
    assert read == Conversation(prompt=conversation, tool_choice=ToolChoice(mode="auto"))


def test_every_choice_of_a_tool_arrives() -> None:
    for options, choice in (
        ({"tool_choice": "auto"}, ToolChoice(mode="auto")),
        ({"tool_choice": "required"}, ToolChoice(mode="required")),
        ({"tool_function": "add"}, ToolChoice(mode="auto", function="add")),
    ):
        read = read_chat(build_generate(CONVERSATION, options))  # type: ignore[arg-type]
        assert (read.tool_choice, read.prompt.tools) == (choice, (TOOL,))
        assert read.tool_choice.is_forced is (options != {"tool_choice": "auto"})
    none = read_chat(build_generate(CONVERSATION, {"tool_choice": "none"}))
    assert (none.tool_choice.mode, none.prompt.tools) == ("none", ())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda chat: chat.tool_choice.MergeFrom(
                PB_CHOICE(mode="MODE_REQUIRED", function="add")
            ),
            "both a mode",
        ),
        (lambda chat: chat.tool_choice.MergeFrom(PB_CHOICE(function="sub")), "'sub'"),
        (lambda chat: chat.MergeFrom(PB_CHAT(tools_json="[3]")), r"tools\[0\] is not a tool"),
        (lambda chat: chat.MergeFrom(PB_CHAT(tools_json="{}")), "not a list"),
        (lambda chat: chat.MergeFrom(PB_CHAT(tools_json="[")), "tools_json is not JSON"),
        (lambda chat: chat.MergeFrom(PB_CHAT(tools_json=json.dumps([TOOL, TOOL]))), "limit is 1"),
        (lambda chat: chat.messages.add(tool_calls_json='[{"a": 1}]'), "is not a call"),
        (lambda chat: chat.messages.add(tool_calls_json="x"), "tool_calls_json is not JSON"),
    ],
)
def test_what_is_wrong_with_tools_is_refused(
    change: Callable[[generation_pb2.ChatPrompt], object], match: str
) -> None:
    message = build_generate(CONVERSATION, {})
    change(message.chat)
    with pytest.raises(InvalidRequestError, match=match):
        read_chat(message)


def test_a_call_cannot_be_demanded_without_tools() -> None:
    bare = ChatPrompt(messages=CONVERSATION.messages)
    for options in ({"tool_choice": "required"}, {"tool_function": "add"}):
        with pytest.raises(InvalidRequestError, match="there are no tools"):
            read_chat(build_generate(bare, options))  # type: ignore[arg-type]


def test_a_mode_of_a_newer_client_is_refused() -> None:
    message = build_generate(CONVERSATION, {})
    message.chat.tool_choice.MergeFromString(b"\x08\x63")  # mode 99
    with pytest.raises(InvalidRequestError, match="mode is 99"):
        read_chat(message)


def test_a_model_tells_its_facts() -> None:
    engine, _ = build_engine(chat_template=TOOL_TEMPLATE)
    engine.model = MODEL
    message = build_model(engine)
    assert (message.name, list(message.architectures)) == ("m", ["llama"])
    assert (list(message.eos_token_ids), message.bos_token_id) == ([2, 7], 0)
    assert message.HasField("bos_token_id")
    assert (message.weight_dtype, message.quantization) == ("bfloat16", "Q4_1")
    assert message.default_sampling_json == '{"temperature": 0.25, "top_k": 50}'
    assert (message.vocab_size, message.max_model_tokens) == (300, 40)
    assert (message.tool_parser, message.reasoning_parser) == ("hermes", "think")
