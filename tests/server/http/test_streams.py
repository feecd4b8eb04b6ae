"""Streams: what is sent, in which order, and that it is the whole reply cut into pieces."""

import asyncio
import collections
import itertools
import time
from typing import Any

import httpx
import pytest

from jaxserve.config import LimitsSection, ServerSection
from tests.engines import NO_CACHE
from tests.fakes import CHAT_TEMPLATE, say
from tests.server.harness import Steps, until
from tests.server.http.harness import CHAT, COMPLETIONS, HI, read_events, run_app
from tests.server.http.test_chat import CALL, OTHER, TOOLS, writes

pytestmark = pytest.mark.asyncio

ROOMY: dict[str, Any] = {"num_pages": 200, "max_model_tokens": 200}


async def test_a_chat_begins_with_the_role_and_ends_with_usage_and_done() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        body = {"messages": HI, "max_tokens": 3, "stream": True}
        response = await running.post(CHAT, body | {"stream_options": {"include_usage": True}})
        assert response.headers["cache-control"] == "no-cache"
        first, *middle, finish, usage, done = read_events(response.text)
    assert done == "[DONE]"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
         "finish_reason": None}
    ]  # fmt: skip
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "abc"
    assert finish["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    chunks = (first, *middle, finish, usage)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_there_is_no_usage_unless_it_is_asked_for() -> None:
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        for url in (CHAT, COMPLETIONS):
            choices: list[dict[str, Any]] = [{}, {"stream_options": None}, {"stream_options": {}}]
            for options in choices:
                chunks = await running.stream(url, max_tokens=2, **options)
                assert all("usage" not in chunk for chunk in chunks)
                assert all(chunk["choices"] for chunk in chunks)


async def test_the_usage_of_each_chunk_is_of_its_tokens_and_those_before() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with run_app(chat_template=CHAT_TEMPLATE) as running:
        chat = await running.stream(CHAT, max_tokens=4, stream_options=options)
        text = await running.stream(COMPLETIONS, max_tokens=4, stream_options=options)
    for chunks in (chat, text):
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert told == sorted(told)
        assert told[-1] == 4
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert chat[0]["usage"]["completion_tokens"] == 0, "a role is no token"


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "one", "max_tokens": 6}),
    (COMPLETIONS, {"prompt": ["one", [98, 99]], "n": 2, "max_tokens": 6, "seed": 1}),
    (COMPLETIONS, {"prompt": "one", "echo": True, "max_tokens": 3}),
    (COMPLETIONS, {"prompt": "one", "echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "one", "echo": True, "max_tokens": 3, "logprobs": 2, "n": 2}),
    (COMPLETIONS, {"prompt": "é", "echo": True, "max_tokens": 6, "logprobs": 0,
                   "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "one", "max_tokens": 9, "stop": ["z", "ef"], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "one", "max_tokens": 7, "stream_interval": 3}),
    (CHAT, {"max_tokens": 6}),
    (CHAT, {"max_tokens": 6, "n": 3, "logprobs": True, "top_logprobs": 2, "seed": 4}),
    (CHAT, {"max_tokens": 6, "return_token_ids": True, "stop": "d"}),
]  # fmt: skip


@pytest.mark.parametrize(("url", "body"), BODIES)
@pytest.mark.parametrize("letters", [True, False])
async def test_a_stream_put_together_is_the_whole_reply(
    url: str, body: dict[str, Any], letters: bool
) -> None:
    """Also with broken characters and an end (not letters: random bytes)."""
    script: dict[str, Any] = {} if letters else {"script": None}
    script["prefix_cache"] = NO_CACHE
    async with run_app(chat_template=CHAT_TEMPLATE, **script, **ROOMY) as running:
        body = {"temperature": 0.7, "seed": 1} | body
        chunks = await running.stream(url, **body, stream_options={"include_usage": True})
        whole = {key: value for key, value in body.items() if key != "stream_interval"}
        start: dict[str, Any] = {"messages": HI} if url == CHAT else {}
        reply = (await running.post(url, start | whole)).json()
    *chunks, last = chunks
    assert last["usage"] == reply["usage"]
    by_index: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    assert sorted(by_index) == [choice["index"] for choice in reply["choices"]]
    for choice in reply["choices"]:
        check_choice(url, by_index[choice["index"]], choice)


def check_choice(url: str, parts: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    if url == CHAT:
        assert parts[0]["delta"]["role"] == "assistant"
        assert all("role" not in part["delta"] for part in parts[1:])
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["message"]["content"]
        content = [e for part in parts for e in (part["logprobs"] or {}).get("content", [])]
        assert content == (whole["logprobs"] or {}).get("content", [])
    else:
        assert "".join(part["text"] for part in parts) == whole["text"]
        for key in whole["logprobs"] or ():
            found = [part["logprobs"][key] for part in parts if part["logprobs"] is not None]
            assert list(itertools.chain(*found)) == whole["logprobs"][key]
    for key in ("token_ids", "prompt_token_ids"):
        assert [id_ for part in parts for id_ in part.get(key, [])] == whole.get(key, [])


async def test_several_prompts_are_written_side_by_side() -> None:
    steps = Steps()
    async with run_app(steps) as running:
        reading = asyncio.create_task(
            running.stream(COMPLETIONS, prompt=["a", "b", "c"], max_tokens=6)
        )
        for num_tokens in range(1, 13):
            steps.allow(1)
            await until(lambda n=num_tokens: running.num_output >= n)  # type: ignore[misc]
        steps.open()
        chunks = await reading
    order = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["text"]]
    assert set(order) == {0, 1, 2}
    assert order != sorted(order), "none waits for another's end"


async def test_an_interval_gathers_tokens() -> None:
    steps = Steps()
    async with run_app(steps, num_pages=60) as running:
        steps.open()
        chunks = await running.stream(
            COMPLETIONS, max_tokens=7, stream_interval=3, return_token_ids=True
        )
    counts = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-1]]
    assert sum(counts) == 7
    assert all(count >= 3 for count in counts[:-1])


async def test_tool_calls_come_in_pieces_that_sdks_put_together() -> None:
    text = f"Yes.{CALL}{OTHER}"
    async with run_app(**writes(text)) as running:
        chunks = await running.stream(CHAT, tools=TOOLS, stream_options={"include_usage": True})
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        for piece in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if piece["index"] not in calls:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                assert piece["id"]
                calls[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
            else:
                assert set(piece) == {"index", "function"}
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert list(calls.values()) == [
        {"name": "add", "arguments": '{"a": 1}'}, {"name": "stop", "arguments": "{}"}
    ]  # fmt: skip
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


async def test_reasoning_comes_before_the_answer() -> None:
    async with run_app(**writes("<think>hm</think>yes")) as running:
        chunks = await running.stream(CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


async def test_an_error_in_the_middle_is_an_event_and_the_last_one() -> None:
    script = say({None: [*b"ab", "not_finite"]})  # type: ignore[list-item]
    async with run_app(script=script) as running:
        response = await running.post(COMPLETIONS, {"prompt": "x", "stream": True})
        assert response.status_code == 200
        *chunks, error = read_events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert list(error) == ["error"]
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "numerics")


async def test_an_error_before_the_first_token_has_a_status() -> None:
    script = say({None: ["not_finite"]})  # type: ignore[list-item]
    async with run_app(script=script) as running:
        response = await running.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "numerics"


async def test_of_several_prompts_one_that_fails_ends_the_stream_and_the_others() -> None:
    script = say({(98,): ["not_finite"], None: b"abcdefghij" * 3})  # type: ignore[list-item]
    async with run_app(script=script) as running:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 30, "stream": True}
        response = await running.post(COMPLETIONS, body)
        text = response.text
        assert response.json() if response.status_code == 500 else "numerics" in text
        await until(lambda: not running.engine._intake.live())
        assert running.finished("error_numerics") == 1
        assert running.finished("cancelled") + running.finished("max_tokens") == 2


async def test_a_refused_prompt_among_several_lets_none_begin() -> None:
    bounds = LimitsSection(max_waiting_requests=2)
    steps = Steps()
    async with run_app(steps, bounds=bounds) as running:
        response = await running.post(COMPLETIONS, {"prompt": ["a", "b", "c", "d"]})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert float(response.headers["retry-after-ms"]) > 0
        steps.open()
        await until(lambda: not running.engine._intake.live())
        assert running.finished("cancelled") == running.num_submitted


async def test_a_deadline_that_passes_keeps_what_there_is() -> None:
    steps = Steps()
    async with run_app(steps, clock=time.monotonic) as running:
        steps.allow(2)
        body = {"prompt": "x", "max_tokens": 30, "timeout": 0.3, "ignore_eos": True}
        response_of = running.post(COMPLETIONS, body)
        task = asyncio.create_task(response_of)
        await until(lambda: running.engine.metrics.value("output_tokens_total") >= 1)
        await asyncio.sleep(0.35)
        steps.open()
        response: httpx.Response = await task
    reply = response.json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert 1 <= reply["usage"]["completion_tokens"] < 30
    assert running.finished("deadline") == 1


async def test_time_that_is_over_in_the_queue_is_504() -> None:
    steps = Steps()
    async with run_app(steps, clock=time.monotonic) as running:
        first = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "x" * 5, "n": 4}))
        await until(lambda: running.runner.num_steps >= 1)
        late = asyncio.create_task(running.post(COMPLETIONS, {"prompt": "x", "timeout": 0.05}))
        await until(lambda: running.num_submitted == 2)
        await asyncio.sleep(0.1)
        steps.open()
        response = await late
        assert (await first).status_code == 200
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline"


async def test_a_body_says_how_long_it_may_wait() -> None:
    async with run_app(section=ServerSection(http_port=0)) as running:
        await running.complete(queue_timeout=1.5, max_tokens=1)
        response = await running.post(COMPLETIONS, {"prompt": "x", "queue_timeout": 1e9})
        assert response.json()["error"]["param"] == "queue_timeout"
        assert running.asked[0].queue_timeout_s == 1.5
