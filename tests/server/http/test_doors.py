"""Both doors of one process say the same of the same request, and its accounts add up."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from jaxserve.client import AsyncClient
from jaxserve.config import LimitsSection, ServerSection
from tests.fakes import say
from tests.server.harness import Running, Steps, connect, run_server, until
from tests.server.http.harness import COMPLETIONS, error_of, good

pytestmark = pytest.mark.asyncio

# A request as gRPC's client has it, and as a body has it.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 9}, {"max_tokens": 9}),
    ({"max_tokens": 9, "temperature": 0.8, "top_k": 40, "min_p": 0.01, "top_p": 0.9},
     {"max_tokens": 9, "temperature": 0.8, "top_k": 40, "min_p": 0.01, "top_p": 0.9}),
    ({"max_tokens": 9, "n": 3, "temperature": 0.8}, {"max_tokens": 9, "n": 3, "temperature": 0.8}),
    ({"max_tokens": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5, "temperature": 0.7},
     {"max_tokens": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5, "temperature": 0.7}),
    ({"max_tokens": 9, "allowed_token_ids": [65, 66, 67], "min_tokens": 9},
     {"max_tokens": 9, "allowed_token_ids": [65, 66, 67], "min_tokens": 9}),
    ({"max_tokens": 6, "logit_bias": {65: 50.0}}, {"max_tokens": 6, "logit_bias": {"65": 50}}),
    ({"max_tokens": 5, "echo": True}, {"max_tokens": 5, "echo": True}),
    ({"max_tokens": 20, "ignore_eos": True, "skip_special_tokens": False},
     {"max_tokens": 20, "ignore_eos": True, "skip_special_tokens": False}),
]  # fmt: skip


@contextlib.asynccontextmanager
async def both_doors(
    steps: Steps | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[Running, AsyncClient, httpx.AsyncClient]]:
    sections = {"server": ServerSection(port=0, http_port=0)}
    async with run_server(steps, sections=sections, **options) as running:
        assert running.server.http is not None
        url = f"http://{running.server.http.address}"
        async with connect(running) as client, httpx.AsyncClient(base_url=url) as http:
            yield running, client, http


@pytest.mark.parametrize(("options", "body"), SAME)
@pytest.mark.parametrize("prompt", ["Hi é!", [72, 105]])
async def test_a_request_through_either_door_has_the_same_output(
    options: dict[str, Any],
    body: dict[str, Any],
    prompt: Any,  # noqa: ANN401
) -> None:
    async with both_doors(script=None) as (_, client, http):
        told = await client.generate(prompt, seed=11, include_token_ids=True, **options)
        body = {"prompt": prompt, "seed": 11, "return_token_ids": True} | body
        reply = good(await http.post(COMPLETIONS, json=body))
    assert [(c.text, list(c.token_ids)) for c in told.choices] == [
        (c["text"], c["token_ids"]) for c in reply["choices"]
    ]
    words = {"eos": "stop", "stop_sequence": "stop", "max_tokens": "length"}
    assert [words[c.finish_reason.value] for c in told.choices] == [
        c["finish_reason"] for c in reply["choices"]
    ]
    assert told.usage.prompt_tokens == reply["usage"]["prompt_tokens"]
    assert told.usage.completion_tokens == reply["usage"]["completion_tokens"]


async def test_log_probabilities_through_either_door_are_the_same() -> None:
    async with both_doors(script=None) as (_, client, http):
        told = await client.generate(
            "abc", seed=3, max_tokens=4, logprobs=2, prompt_logprobs=2, include_token_ids=True
        )
        body = {"prompt": "abc", "seed": 3, "max_tokens": 4, "logprobs": 2, "echo": True,
                "return_tokens_as_token_ids": True}  # fmt: skip
        reply = good(await http.post(COMPLETIONS, json=body))
    entries = [*told.prompt_logprobs, *told.logprobs]
    found = reply["choices"][0]["logprobs"]
    assert found["token_logprobs"][1:] == pytest.approx([entry.logprob for entry in entries])
    assert found["tokens"][1:] == [f"token_id:{entry.token_id}" for entry in entries]
    for top, entry in zip(found["top_logprobs"][1:], entries, strict=True):
        wanted = {f"token_id:{top.token_id}": top.logprob for top in entry.top}
        assert top == pytest.approx(wanted | {f"token_id:{entry.token_id}": entry.logprob})


async def test_the_bound_on_open_calls_is_of_both_doors_together() -> None:
    steps = Steps()
    bounds = LimitsSection(max_open_calls=1)
    async with both_doors(steps, bounds=bounds, script=say({None: b"abcdefghij"})) as doors:
        running, client, http = doors
        stream = client.stream("x", max_tokens=3)
        steps.allow(1)
        await anext(stream)
        refused = await http.post(COMPLETIONS, json={"prompt": "x"})
        assert error_of(refused)[::3] == (429, "queue_full")
        steps.open()
        assert [event async for event in stream]
        await until(lambda: running.num_open_calls == 0)
        assert (await http.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200


async def test_every_token_is_accepted_by_its_carrier_once() -> None:
    async with both_doors() as (running, client, http):
        body = {"prompt": ["a", "b"], "max_tokens": 7, "n": 2}
        await http.post(COMPLETIONS, json=body)
        await http.post(COMPLETIONS, json=body | {"stream": True})
        await http.post(COMPLETIONS, json=body | {"stream": True, "stream_interval": 4})
        await client.generate("x", max_tokens=5)
        value = running.engine.metrics.value
        assert value("output_tokens_total") == 3 * 4 * 7 + 5
        assert value("delivery_seconds_count") == 3 * 4 * 7 + 5
        assert value("requests_finished_total", reason="max_tokens") == 3 * 2 + 1
        assert running.aborts == []
