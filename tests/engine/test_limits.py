"""The door: every bad value is refused by name, every good one is resolved."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxserve.config import LimitsSection
from jaxserve.engine import ServedModel
from jaxserve.engine.fields import check_number
from jaxserve.engine.limits import merge_sampling, resolve
from jaxserve.errors import InvalidRequestError, NoChatTemplateError, RequestError
from jaxserve.request import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    Request,
    SamplingParams,
    StructuredOutput,
)
from tests.fakes import BOS_ID, CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, build_byte_tokenizer

MODEL = ServedModel(
    name="bytes", max_model_tokens=40, vocab_size=VOCAB_SIZE, eos_ids=frozenset({EOS_ID})
)
BOUNDS = LimitsSection(
    max_prompt_bytes=100,
    max_stop_strings=2,
    max_stop_string_bytes=8,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_request_id_bytes=8,
    max_chat_messages=2,
    max_choices=3,
    max_logprobs=5,
    max_bad_words=2,
    max_allowed_token_ids=4,
    max_tools=2,
    queue_timeout_s=30,
)


def admit(
    prompt: object = (1, 2, 3),
    *,
    template: str | None = None,
    **fields: Any,  # noqa: ANN401
) -> Request:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling = {name: value for name, value in fields.items() if name in names}
    rest = {name: value for name, value in fields.items() if name not in names}
    asked = GenerationRequest(prompt=prompt, sampling=SamplingParams(**sampling), **rest)  # type: ignore[arg-type]  # wrong ones too
    return resolve(
        asked,
        model=MODEL,
        tokenizer=build_byte_tokenizer(chat_template=template),
        limits=BOUNDS,
        now_s=1000.0,
    )


BAD_IDS = [-1, VOCAB_SIZE, 320, 2**31, 2**70, "abc", True, 1.0, None]
BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, -math.inf, True, "1", None, 10**400, 1e7],
    "top_k": [-1, 1.5, True, math.nan, "1", None],
    "top_p": [0.0, -0.1, 1.01, math.nan, True, None],
    "min_p": [-0.01, 1.01, math.nan, False, None],
    "presence_penalty": [-2.01, 2.01, math.nan, math.inf, None],
    "frequency_penalty": [-2.01, 2.01, math.nan, "x"],
    "repetition_penalty": [0, 0.0, -1, math.nan, math.inf, 1e-9, True],
    "seed": [-1, 2**64, 1.0, True, "7"],
    "max_tokens": [0, -1, 38, 2**31, 1.5, True],
    "min_tokens": [-1, 38, 1.0, False, None],
    "stop_strings": [("",), ("a", ""), ("a",) * 3, ("é" * 5,), "ab", (1,), ("\ud800",), None],
    "stop_token_ids": [*((bad,) for bad in BAD_IDS), (1, 2, 3), None, 5],
    "logit_bias": [
        *({bad: 1.0} for bad in BAD_IDS),
        {1: math.nan}, {1: math.inf}, {1: -math.inf}, {1: "x"}, {1: True}, {1: 1e30},
        {1: 0.0, 2: 0.0, 3: 0.0}, None, [(1, 0.0)],
    ],
    "ignore_eos": [1, None, "yes"],
    "include_stop_text": [0],
    "skip_special_tokens": [None],
    "kept_special_ids": [None, (1,), {1}, frozenset({"a"})],
    "num_choices": [0, -1, 4, 2**31, 1.0, True, "2", None],
    "logprobs": [-1, 6, 1.5, True, "1"],
    "prompt_logprobs": [-1, 6, math.nan, False, "1"],
    "bad_words": [("",), ("a", ""), ("a",) * 3, ("é" * 5,), "ab", (1,), ("\ud800",), None],
    "allowed_token_ids": [
        *((bad,) for bad in BAD_IDS), (), (1, 2, 3, 4, 5), (1, 2, 1), "ab", 5, {1, 2},
    ],
    "priority": [2**31, -(2**31) - 1, 0.5, True],
    "deadline_s": [math.nan, math.inf, "soon"],
    "queue_timeout_s": [0.0, -1.0, 30.1, math.nan, True],
    "id": ["x" * 9, "é" * 5, "\udfff", 7],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_VALUES.items() for value in values],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError) as refusal:
        admit(**{name: value})
    wanted = {
        "id": "request_id",
        "deadline_s": "deadline",
        "queue_timeout_s": "queue_timeout",
        "num_choices": "sampling.n",
    }
    assert refusal.value.field.endswith(wanted.get(name, name))
    assert ", but " in str(refusal.value) or "empty string" in str(refusal.value)
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_prompt_id_outside_the_vocabulary_is_refused(bad: object) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt token id is") as refusal:
        admit((1, bad, 2))
    assert refusal.value.field == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ((), "token_ids", "the prompt is empty"),
        ("", "text", "the prompt is empty"),
        ("a" * 101, "text", "text is 101 bytes, but the limit is 100"),
        ("\ud800", "text", "lone surrogate"),
        (7, "prompt", "but must be text, token ids or a conversation"),
        (None, "prompt", "but must be text, token ids or a conversation"),
        (b"hi", "prompt", "but must be text, token ids or a conversation"),
        ((1,) * 40, "token_ids", "the prompt is 40 tokens, but .* limit is 40; shorten it to 39"),
        ((1,) * 41, "token_ids", "the prompt is 41 tokens, but this model's limit is 40"),
        ("a" * 40, "text", "the prompt is 40 tokens"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: object, field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        admit(prompt)
    assert refusal.value.field == field


EXTREMES: list[tuple[str, Any]] = [
    ("temperature", 0), ("temperature", 1e-8), ("temperature", np.float32(0.5)),
    ("top_k", 2**40), ("top_p", 1e-9), ("min_p", 1),
    ("presence_penalty", -2), ("frequency_penalty", 2.0), ("repetition_penalty", 1e-6),
    ("seed", 0), ("seed", 2**64 - 1), ("max_tokens", 37), ("min_tokens", 37),
    ("stop_strings", ("é" * 4,)), ("stop_token_ids", (0, VOCAB_SIZE - 1)),
    ("logit_bias", {0: -1e20, np.int64(VOCAB_SIZE - 1): 5}), ("priority", -(2**31)),
    ("queue_timeout_s", 30.0), ("id", "12345678"), ("deadline_s", 0),
    ("num_choices", np.int64(3)), ("logprobs", 0), ("logprobs", 5), ("prompt_logprobs", 5),
    ("bad_words", ("é" * 4, "a")), ("allowed_token_ids", [0, VOCAB_SIZE - 1, 5, 6]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), EXTREMES)
def test_the_largest_and_smallest_allowed_values_pass(name: str, value: Any) -> None:  # noqa: ANN401
    assert admit(**{name: value}).prompt == (1, 2, 3)


# What a float32 makes of a bound may lie a little beyond it, and gRPC sends float32.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e6), ("temperature", 1e-5), ("top_p", 1e-9), ("min_p", 1),
        ("repetition_penalty", 1e-6), ("repetition_penalty", 1e6), ("presence_penalty", -2),
    ],
)  # fmt: skip
def test_a_bound_that_was_sent_as_a_float32_is_allowed(name: str, value: float) -> None:
    fields: dict[str, Any] = {name: float(np.float32(value))}
    assert admit(**fields).prompt == (1, 2, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e6), ("top_p", 1.0), ("min_p", 1.0), ("repetition_penalty", 1e6),
        ("presence_penalty", 2.0), ("frequency_penalty", -2.0),
    ],
)  # fmt: skip
def test_the_next_number_beyond_a_bound_is_refused(name: str, value: float) -> None:
    fields: dict[str, Any] = {name: math.nextafter(value, 2 * value)}
    with pytest.raises(InvalidRequestError, match=f"{name} is .*, but must be a number in"):
        admit(**fields)


def test_the_next_number_below_the_least_penalty_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"repetition_penalty is .*, but must be"):
        admit(repetition_penalty=math.nextafter(1e-6, 0.0))


@pytest.mark.parametrize("value", [-1e20, 1e20])
def test_a_bias_at_its_bound_may_be_a_float32(value: float) -> None:
    bias = {5: float(np.float32(value))}
    assert admit(logit_bias=bias).sampling.logit_bias == bias
    with pytest.raises(InvalidRequestError, match=r"must be a number in \[-1e\+20, 1e\+20\]"):
        admit(logit_bias={5: math.nextafter(value, 2 * value)})


def test_everything_is_resolved() -> None:
    request = admit(
        "héllo", stop_token_ids=(10, EOS_ID), max_tokens=5, seed=7, priority=2, id="mine",
        deadline_s=1010.0, queue_timeout_s=3.0, top_k=5000, temperature=1,
    )  # fmt: skip
    assert request.prompt == tuple("héllo".encode())
    assert (request.id, request.seed, request.priority) == ("mine", 7, 2)
    assert (request.max_tokens, request.ends_by_context) == (5, False)
    assert request.stop_ids == {10: FinishReason.STOP, EOS_ID: FinishReason.EOS}
    assert (request.arrival_s, request.deadline_s, request.queue_deadline_s) == (1000, 1010, 1003)
    assert request.sampling.top_k == 0  # as many as there are ids: off
    assert isinstance(request.sampling.temperature, float)


def test_unset_max_tokens_is_the_rest_of_the_context() -> None:
    request = admit((1,) * 39)
    assert (request.max_tokens, request.ends_by_context) == (1, True)
    assert admit((1,) * 3).max_tokens == 37


def test_max_tokens_may_be_0_where_only_the_prompt_is_scored() -> None:
    request = admit((1,) * 40, max_tokens=0, prompt_logprobs=0)  # all of the context
    assert (request.max_tokens, request.ends_by_context) == (0, False)
    with pytest.raises(InvalidRequestError, match="limit is 40; shorten it to 40"):
        admit("a" * 41, max_tokens=0, prompt_logprobs=0)
    with pytest.raises(InvalidRequestError, match="at least 1 unless prompt_logprobs is set"):
        admit(max_tokens=0)
    with pytest.raises(InvalidRequestError, match="n is 2, but with max_tokens 0") as refusal:
        admit(max_tokens=0, prompt_logprobs=1, num_choices=2)
    assert refusal.value.field == "sampling.n"


def test_a_request_is_masked_where_something_may_not_be_said() -> None:
    form = StructuredOutput(kind="json_object")
    masked: list[dict[str, Any]] = [
        {"bad_words": ("a",)}, {"allowed_token_ids": (1,)}, {"structured_output": form},
    ]  # fmt: skip
    assert not admit().is_masked
    for fields in masked:
        assert admit(**fields).is_masked
        assert not admit(**fields, max_tokens=0, prompt_logprobs=0).is_masked


def test_the_tenant_is_the_requests() -> None:
    assert (admit().tenant, admit(tenant="a").tenant) == ("", "a")


def test_unset_seeds_differ_and_use_64_bits() -> None:
    seeds = {admit().seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) >= 2**32


def test_ignored_eos_is_no_stop_unless_it_is_listed() -> None:
    assert admit(ignore_eos=True).stop_ids == {}
    listed = admit(ignore_eos=True, stop_token_ids=(EOS_ID,)).stop_ids
    assert listed == {EOS_ID: FinishReason.STOP}


def chat(*contents: str) -> ChatPrompt:
    return ChatPrompt(messages=tuple(ChatMessage(role="user", content=text) for text in contents))


def test_a_conversation_is_rendered_and_its_text_stays_text() -> None:
    request = admit(chat("hi</s>"), template="{{ messages[0].content }}</s>")
    assert request.prompt == (*b"hi</s>", EOS_ID)


def test_a_conversation_needs_a_template() -> None:
    with pytest.raises(NoChatTemplateError, match="no chat template; send the prompt as text"):
        admit(chat("hi"), template=None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (chat("a", "b", "c"), "messages has 3 entries, but this server's limit is 2"),
        (chat("x" * 60, "y" * 60), "bytes, but the limit is"),
        (chat("\udc80"), "lone surrogate"),
        (chat(7), "messages is 7, but must be text"),  # type: ignore[arg-type]  # on purpose
    ],
)
def test_a_bad_conversation_is_refused(prompt: ChatPrompt, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        admit(prompt, template=CHAT_TEMPLATE)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def with_tools(tools: Any) -> ChatPrompt:  # noqa: ANN401
    return dataclasses.replace(chat("a"), tools=tools)


def turn(**fields: Any) -> ChatPrompt:  # noqa: ANN401
    message = ChatMessage(**{"role": "user", "content": "a", **fields})
    return ChatPrompt(messages=(message,))


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        (with_tools((TOOL,) * 3), "chat.tools", "tools has 3 entries"),
        (with_tools(("f",)), "chat.tools", "tools is 'f', but must be"),
        (with_tools(None), "chat.tools", "tools is None, but must be"),
        (with_tools(({"x": "y" * 99},)), "chat.tools", "limit is 100"),
        (with_tools(({"x": {1}},)), "chat.tools", "what is no JSON"),
        (with_tools(({"x": math.nan},)), "chat.tools", "what is no JSON"),
        (with_tools(({"x": "\ud800"},)), "chat.tools", "lone surrogate"),
        (turn(tool_calls=(CALL,) * 3), "chat.messages", "messages has 3 entries"),
        (turn(tool_calls=("f",)), "chat.messages", "messages is 'f', but must be"),
        (turn(tool_call_id="x" * 101), "chat.messages", "limit is"),
        (turn(tool_call_id=5), "chat.messages", "messages is 5, but must be text"),
        (turn(reasoning="x" * 101), "chat.messages", "limit is"),
        (turn(reasoning=None), "chat.messages", "messages is None, but must be text"),
    ],
)
def test_bad_tools_and_calls_are_refused(prompt: ChatPrompt, field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        admit(prompt, template=CHAT_TEMPLATE)
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 250


def test_what_is_set_wins_over_the_models_defaults_and_those_over_ours() -> None:
    params = merge_sampling(
        {"temperature": 0.5, "top_p": None, "seed": None}, {"top_p": 0.9, "temperature": 0.2}
    )
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 0, None)


def test_bos_is_put_before_text_but_never_before_token_ids() -> None:
    tokenizer = build_byte_tokenizer(add_bos=True)

    def prompt_of(prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        asked = GenerationRequest(prompt=prompt)
        return resolve(asked, model=MODEL, tokenizer=tokenizer, limits=BOUNDS, now_s=0.0).prompt

    assert prompt_of("hi") == (BOS_ID, *b"hi")
    assert prompt_of((1, 2)) == (1, 2)


def test_a_special_token_that_the_model_lacks_is_refused_in_text_too() -> None:
    small = dataclasses.replace(MODEL, vocab_size=256)
    asked = GenerationRequest(prompt="a</s>")
    with pytest.raises(InvalidRequestError, match=r"holds token 257, but .* end at 255"):
        resolve(asked, model=small, tokenizer=build_byte_tokenizer(), limits=BOUNDS, now_s=0.0)


def test_refusals_are_errors_of_the_request_alone() -> None:
    attempts: list[Callable[[], Request]] = [lambda: admit(()), lambda: admit(temperature=-1)]
    for attempt in attempts:
        with pytest.raises(RequestError):
            attempt()


@pytest.mark.parametrize("high", [1e39, math.inf])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_within_no_bounds(value: float, high: float) -> None:
    """A float32 of 1e39 is infinity."""
    with pytest.raises(InvalidRequestError, match="top"):
        check_number(value, "sampling.top", low=-high, high=high)
