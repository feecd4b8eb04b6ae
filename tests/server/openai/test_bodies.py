"""OpenAI bodies become requests; what is wrong, unknown or not supported is refused by name."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from jaxserve.engine import ServedModel
from jaxserve.errors import InvalidRequestError, ModelNotFoundError, RequestError, UnsupportedError
from jaxserve.request import ChatMessage, ChatPrompt, SamplingParams
from jaxserve.server.json_text import parse_json
from jaxserve.server.openai import ENDPOINTS, Asked, read_request
from jaxserve.server.openai.fields import (
    HARMLESS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = ServedModel(
    name="tiny",
    max_model_tokens=40,
    vocab_size=259,
    eos_ids=frozenset({257}),
    sampling_defaults={"temperature": 0.3, "top_k": 5},
)
HI = [{"role": "user", "content": "hi"}]


def complete(**body: Any) -> Asked:  # noqa: ANN401  # wrong types too
    return read_request(COMPLETIONS, {"prompt": "a"} | body, model=MODEL)


def chat(**body: Any) -> Asked:  # noqa: ANN401
    return read_request(CHAT, {"messages": HI} | body, model=MODEL)


def sampling(asked: Asked) -> SamplingParams:
    return asked.requests[0].sampling


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [2]], ("a", (2,))),
        ("", ("",)),
        ([[]], ((),)),  # the engine says that a prompt is empty
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_them(prompt: object, prompts: object) -> None:
    assert tuple(request.prompt for request in complete(prompt=prompt).requests) == prompts


def test_what_is_unset_or_null_is_the_models_own_default() -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "seed", "stop", "n", "logprobs", "model"))
    for asked in (complete(), complete(**nothing)):
        expected = SamplingParams(temperature=0.3, top_k=5, max_tokens=16)
        assert sampling(asked) == expected
    assert sampling(chat()).max_tokens is None
    assert sampling(complete(temperature=0, top_k=0)).temperature == 0.0
    assert sampling(complete(temperature=0, top_k=0)).top_k == 0, "0 is not unset"


def test_every_field_reaches_the_request() -> None:
    asked = complete(
        max_tokens=3, temperature=0.5, top_p=0.6, presence_penalty=0.1, frequency_penalty=0.2,
        seed=2**64 - 1, stop=["x", "y"], logit_bias={"5": -1, "258": 2.5}, top_k=7, min_p=0.1,
        repetition_penalty=1.1, min_tokens=2, stop_token_ids=[9], ignore_eos=True,
        include_stop_str_in_output=True, skip_special_tokens=False, priority=3,
        return_token_ids=True, n=3, logprobs=4, prompt_logprobs=5, bad_words=["x"],
        allowed_token_ids=[1, 2], queue_timeout=1.5, timeout=2.5,
        return_tokens_as_token_ids=True,
    )  # fmt: skip
    assert sampling(asked) == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.6, presence_penalty=0.1, frequency_penalty=0.2,
        seed=2**64 - 1, stop_strings=("x", "y"), logit_bias={5: -1.0, 258: 2.5}, top_k=7,
        min_p=0.1, repetition_penalty=1.1, min_tokens=2, stop_token_ids=(9,), ignore_eos=True,
        include_stop_text=True, skip_special_tokens=False, num_choices=3, logprobs=4,
        prompt_logprobs=5, bad_words=("x",), allowed_token_ids=(1, 2),
    )  # fmt: skip
    (request,) = asked.requests
    assert (request.priority, request.queue_timeout_s, asked.timeout_s) == (3, 1.5, 2.5)
    assert (asked.num_choices, asked.logprobs, asked.prompt_logprobs) == (3, 4, 5)
    assert asked.return_token_ids
    assert asked.tokens_as_ids
    mine = {field.name for field in dataclasses.fields(SamplingParams)} - {"kept_special_ids"}
    same = {
        "stop_strings": "stop",
        "include_stop_text": "include_stop_str_in_output",
        "num_choices": "n",
    }
    body = ENDPOINTS[COMPLETIONS].model_fields
    assert {same.get(name, name) for name in mine} <= body.keys(), "a parameter has no field"


def test_small_liberties_of_other_servers_are_taken() -> None:
    assert sampling(complete(stop="x")).stop_strings == ("x",)
    assert sampling(complete(top_k=-1)).top_k == 0
    assert sampling(chat(max_completion_tokens=4)).max_tokens == 4
    assert sampling(chat(max_tokens=4, max_completion_tokens=4)).max_tokens == 4


def test_messages_become_a_conversation() -> None:
    asked = chat(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": "Al"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
            {"role": "user", "content": ""},
        ],
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert asked.is_chat
    assert asked.requests[0].prompt == ChatPrompt(
        messages=(
            ChatMessage(role="system", content="Be kind."),
            ChatMessage(role="user", content="a\nb", name="Al"),
            ChatMessage(role="assistant", content="c"),
            ChatMessage(role="user", content=""),
        ),
        add_generation_prompt=False,
        template_kwargs={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("url", "body", "field", "said"),
    [
        (COMPLETIONS, [1], "", "the body is a list, but must be a JSON object"),
        (COMPLETIONS, {}, "prompt", "prompt is missing"),
        (COMPLETIONS, {"prompt": None}, "prompt", "prompt is missing"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least one prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt", "is a number, but must be a text, a list"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "something else beside token ids"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "something else beside token ids"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt", "257 prompts, but the limit is 256"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "'5', but must be an int"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5.0}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"prompt": "a", "seed": True}, "seed", "True, but must be an integer"),
        (COMPLETIONS, {"prompt": "a", "ignore_eos": 1}, "ignore_eos", "must be true or false"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x", 3]}, "stop[1]", "3, but must be a string"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias", "must be an object"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "has the key 'x'"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias", "id 5 twice"),
        (COMPLETIONS, {"prompt": "a", "timeout": 0}, "timeout", "0, but must be above 0"),
        (COMPLETIONS, {"prompt": "a", "stream_interval": 0}, "stream_interval", "be at least 1"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature?"),
        (COMPLETIONS, {"prompt": "a", "zzz": None}, "zzz", "zzz is not a known field; leave it"),
        (COMPLETIONS, {"prompt": "a", "": None}, '""', '"" is not a known field; leave it'),
        (CHAT, {"messages": [HI[0] | {"": 1}]}, 'messages[0].""', "not a known field"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"": 1}}, 'stream_options.""', "not a kn"),
        (COMPLETIONS, {"prompt": "a", "messages": HI}, "messages", "not a known field"),
        (CHAT, {"messages": []}, "messages", "needs at least one entry"),
        (CHAT, {"messages": "hi"}, "messages", "'hi', but must be a list"),
        (CHAT, {"stop": 5}, "stop", "5, but must be a string or a list of strings"),
        (CHAT, {"messages": [5]}, "messages[0]", "5, but must be an object"),
        (CHAT, {"messages": [*HI, {"role": "user"}]}, "messages[1].content", "missing"),
        (CHAT, {"messages": [{"role": "me", "content": ""}]}, "messages[0].role", "'developer'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5, but"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "must be a string",
        ),
        (CHAT, {"messages": [HI[0] | {"contnet": ""}]}, "messages[0].contnet", "did you mean"),
        (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2},
         "max_completion_tokens", "mean the same"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(url: str, body: object, field: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(url, body, model=MODEL)
    assert said in str(caught.value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("url", "name"),
    [(COMPLETIONS, name) for name in REFUSED_IN_COMPLETIONS]
    + [(CHAT, name) for name in REFUSED_IN_CHAT],
)
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(url: str, name: str) -> None:
    table = REFUSED_IN_CHAT if url == CHAT else REFUSED_IN_COMPLETIONS
    start: dict[str, object] = {"messages": HI} if url == CHAT else {"prompt": "a"}
    for neutral in (None, *table[name]):
        assert read_request(url, start | {name: neutral}, model=MODEL).requests
    with pytest.raises(UnsupportedError, match=f"^{name} is not supported") as caught:
        read_request(url, start | {name: {"something": "else"}}, model=MODEL)
    assert caught.value.field == name


def test_true_is_no_one_and_one_is_no_true() -> None:
    for wrong in ({"best_of": True}, {"use_beam_search": 0}):
        with pytest.raises(UnsupportedError):
            complete(**wrong)
    for wrong in ({"n": True}, {"echo": 0}):
        with pytest.raises(InvalidRequestError):
            complete(**wrong)


def test_parts_and_roles_of_other_kinds_are_not_supported() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UnsupportedError, match=r"content\[0\]\.type is 'image_url'"):
        chat(messages=[{"role": "user", "content": [image]}])
    with pytest.raises(UnsupportedError, match=r"messages\[0\]\.role is 'function'"):
        chat(messages=[{"role": "function", "content": "5", "name": "f"}])
    for name in REFUSED_IN_MESSAGES:
        with pytest.raises(UnsupportedError, match=rf"messages\[0\]\.{name} is not supported"):
            chat(messages=[HI[0] | {name: "x"}])


def test_labels_and_hints_are_accepted_in_any_form() -> None:
    for name in HARMLESS:
        assert chat(**{name: {"any": "thing"}}).requests == chat().requests
        assert complete(**{name: "x"}).requests == complete().requests


def test_no_field_is_in_two_tables() -> None:
    for url, table in ((CHAT, REFUSED_IN_CHAT), (COMPLETIONS, REFUSED_IN_COMPLETIONS)):
        supported = ENDPOINTS[url].model_fields.keys()
        assert not supported & table.keys()
        assert not HARMLESS & (supported | table.keys())


def test_only_the_served_model_is_served_under_all_its_names() -> None:
    assert complete(model="tiny").requests
    body = {"prompt": "a", "model": "folder/x"}
    assert read_request(COMPLETIONS, body, model=MODEL, names=["folder/x"]).requests
    with pytest.raises(ModelNotFoundError, match="model 'gpt-4' is not served here; use 'tiny'"):
        complete(model="gpt-4")


def test_a_strangers_long_names_do_not_flood_the_message() -> None:
    long = "x" * 1_000_000
    wrong: list[dict[str, Any]] = [
        {long: 1},
        {"model": long},
        {"logit_bias": {long: 1}},
        {"max_tokens": long},
        {"stop": {long: 1}},
    ]
    for body in wrong:
        with pytest.raises(RequestError) as caught:
            complete(**body)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": "\xff"}', "it is not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "it is not UTF-8"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ("[" * 100_000, "deeper than 64"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1', "delimiter"),
        ("9" * 10_000, "digits"),
    ],
)
def test_json_is_strict_and_bounded(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)
    assert parse_json("[" * 63 + "]" * 63)


def test_the_bodies_need_neither_jax_nor_grpc() -> None:
    code = (
        "import sys, jaxserve.server.openai, jaxserve.server.json_text\n"
        "named = {'jax', 'grpc', 'google.protobuf', 'starlette'}\n"
        "sys.exit(' '.join(named & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
