"""Reply and error bodies, key for key."""

import pytest

from jaxserve.engine import Choice, Completion, Timings, Usage
from jaxserve.engine.limits import resolve
from jaxserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    NotServingError,
    QueueFullError,
    UnsupportedError,
)
from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.server.openai import Asked, build_error, build_reply, http_status, read_request
from jaxserve.server.openai.choice import FINISH_REASONS
from tests.engines import build_engine
from tests.fakes import build_byte_tokenizer

BYTES = build_byte_tokenizer()


def say(text: str, *, reason: FinishReason = FinishReason.EOS, cached: int = 0) -> Completion:
    choice = Choice(text=text, token_ids=tuple(text.encode()), finish_reason=reason)
    return Completion(
        choices=(choice,),
        usage=Usage(prompt_tokens=3, completion_tokens=len(text), cached_prompt_tokens=cached),
        timings=Timings(),
        prompt_ids=(7, 8, 9),
    )


def ask(*, is_chat: bool, num: int = 1, ids: bool = False) -> Asked:
    requests = (GenerationRequest(prompt="x"),) * num
    return Asked(is_chat=is_chat, requests=requests, return_token_ids=ids)


def test_a_chat_reply_key_for_key() -> None:
    asked = ask(is_chat=True)
    reply = build_reply(
        asked, [say("Hi", cached=2)], model_name="tiny", created_s=17.9, tokenizer=BYTES
    )
    assert str(reply.pop("id")).startswith("chatcmpl-")
    assert reply == {
        "object": "chat.completion",
        "created": 17,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_several_prompts_are_choices_and_their_usage_is_summed() -> None:
    asked = ask(is_chat=False, num=2, ids=True)
    texts = [say("ab"), say("cde", reason=FinishReason.MAX_TOKENS)]
    reply = build_reply(asked, texts, model_name="tiny", created_s=0, tokenizer=BYTES)
    assert str(reply["id"]).startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop",
         "prompt_token_ids": [7, 8, 9], "token_ids": [97, 98]},
        {"index": 1, "text": "cde", "logprobs": None, "finish_reason": "length",
         "prompt_token_ids": [7, 8, 9], "token_ids": [99, 100, 101]},
    ]  # fmt: skip
    assert reply["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_every_reason_has_a_word_that_clients_know() -> None:
    assert set(FINISH_REASONS) == set(FinishReason)
    assert set(FINISH_REASONS.values()) == {"stop", "length", "tool_calls"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (UnsupportedError("n is not supported", field="n"), 400, "invalid_request_error", "n",
         "unsupported"),
        (InvalidRequestError("why"), 400, "invalid_request_error", None, "invalid_field"),
        (QueueFullError("full"), 429, "rate_limit_error", None, "queue_full"),
        (NotServingError("gone"), 503, "server_error", None, "not_serving"),
        (EngineDeadError("secret"), 500, "server_error", None, "engine_dead"),
    ],
)  # fmt: skip
def test_an_error_body_key_for_key(
    error: JaxserveError, status: int, kind: str, param: str | None, code: str
) -> None:
    assert http_status(error) == status
    body = build_error(error)["error"]
    assert "secret" not in str(body.pop("message"))
    assert body == {"type": kind, "param": param, "code": code}


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        ({"temperature": -1}, "temperature", "invalid_field", "temperature is -1.0, but"),
        ({"stop": ["a"] * 17}, "stop", "invalid_field", "stop has 17 entries"),
        ({"prompt": [300]}, "prompt", "invalid_field", "token id is 300"),
        ({"prompt": ""}, "prompt", "invalid_field", "the prompt is empty"),
        ({"max_tokens": 99}, "max_tokens", "context_length_exceeded", "max_tokens is 99"),
        ({"prompt": "a" * 40}, "prompt", "context_length_exceeded", "the prompt is 40 tokens"),
        ({"prompt": [1] * 41}, "prompt", "context_length_exceeded", "the prompt is 41 tokens"),
        ({"stop": [""]}, "stop", "invalid_field", "stop holds an empty string"),
        ({"priority": 2**40}, "priority", "invalid_field", "priority is"),
    ],
)
def test_what_the_engine_refuses_is_named_as_the_body_spells_it(
    body: dict[str, object], param: str, code: str, said: str
) -> None:
    engine, _ = build_engine()
    asked = read_request("/v1/completions", {"prompt": "a"} | body, model=engine.model)
    with pytest.raises(InvalidRequestError) as caught:
        resolve(
            asked.requests[0],
            model=engine.model,
            tokenizer=engine.tokenizer,
            limits=engine.config.limits,
            now_s=0.0,
        )
    error = build_error(caught.value)["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert str(error["message"]).startswith(said) or said in str(error["message"])


def test_a_conversation_that_is_too_long_speaks_of_messages() -> None:
    engine, _ = build_engine(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    body = {"messages": [{"role": "user", "content": "a" * 99}]}
    asked = read_request("/v1/chat/completions", body, model=engine.model)
    engine.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(asked.requests[0])
    finally:
        engine.stop()
    assert build_error(caught.value)["error"]["param"] == "messages"
