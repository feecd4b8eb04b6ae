"""`/v1/completions` in one body: prompts, choices, echo, log-probabilities."""

from typing import Any

import pytest

from jaxserve.request import SamplingParams
from jaxserve.server.openai.reply_models import CompletionReply
from tests.fake_logprobs import expected_logprobs, expected_prompt_logprobs
from tests.fakes import EOS_ID, VOCAB_SIZE, build_byte_tokenizer, expected_output, say
from tests.server.http.harness import COMPLETIONS, error_of, run_app

pytestmark = pytest.mark.asyncio

BYTES = build_byte_tokenizer()


def spell(token_id: int) -> str:
    """A token's name in the endpoint's log-probabilities."""
    spelled = BYTES.token_bytes(token_id)
    return spelled.decode() if token_id < 128 or token_id > 255 else f"bytes:\\x{token_id:02x}"


async def test_a_completion_key_for_key() -> None:
    async with run_app() as running:
        reply = await running.complete(max_tokens=3)
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 1.7e9
    assert reply == {
        "object": "text_completion",
        "model": "bytes",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        ([97, 98], [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_prompts_are_texts_or_tokens_or_lists_of_them(
    prompt: object, prompts: list[bytes]
) -> None:
    async with run_app(script=None) as running:
        reply = await running.complete(
            prompt, max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True
        )
        assert [request.id for request in running.asked][1:] == [
            f"{running.asked[0].id}-{n}" for n in range(1, len(prompts))
        ]
    greedy = SamplingParams(temperature=0.0)
    assert [(choice["index"], choice["token_ids"]) for choice in reply["choices"]] == [
        (index, expected_output(prompt_ids, greedy, 4)) for index, prompt_ids in enumerate(prompts)
    ]
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [*map(list, prompts)]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply["usage"]["completion_tokens"] == 4 * len(prompts)
    CompletionReply.model_validate(reply)


async def test_choices_of_each_prompt_follow_each_other() -> None:
    async with run_app(script=None) as running:
        both = await running.complete(
            ["ab", "c"], n=2, max_tokens=4, seed=5, ignore_eos=True, return_token_ids=True
        )
        alone = await running.complete(
            "c", n=2, max_tokens=4, seed=5, ignore_eos=True, return_token_ids=True
        )
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    ids = [choice["token_ids"] for choice in both["choices"]]
    assert ids[2:] == [choice["token_ids"] for choice in alone["choices"]]
    assert ids[2] != ids[3], "each choice has noise of its own"
    assert both["usage"]["prompt_tokens"] == 3, "a prompt is counted once for all its choices"
    assert both["usage"]["completion_tokens"] == 16


async def test_every_reason_to_end() -> None:
    script = say({None: [*b"abc", EOS_ID]})
    async with run_app(script=script) as running:
        ends = [
            await running.complete(max_tokens=20),
            await running.complete(max_tokens=2),
            await running.complete(max_tokens=20, stop="c"),
            await running.complete(max_tokens=20, stop=["b"], include_stop_str_in_output=True),
            await running.complete(max_tokens=20, stop_token_ids=[98]),
        ]
    found = [(end["choices"][0]["text"], end["choices"][0]["finish_reason"]) for end in ends]
    assert found == [
        ("abc", "stop"), ("ab", "length"), ("ab", "stop"), ("ab", "stop"), ("a", "stop")
    ]  # fmt: skip


async def test_an_output_that_fills_the_context_has_length() -> None:
    async with run_app(max_model_tokens=8) as running:
        response = await running.post(COMPLETIONS, {"prompt": "abcd", "max_tokens": 5})
        assert error_of(response)[2:] == ("max_tokens", "context_length_exceeded")
        reply = await running.complete("abcd", max_tokens=4)
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["Hi €", list("Hi €".encode())])
async def test_echo_begins_the_text_with_the_prompt(prompt: object) -> None:
    async with run_app() as running:
        reply = await running.complete(prompt, echo=True, max_tokens=2, n=2)
        only = await running.complete(prompt, echo=True, max_tokens=0)
    assert [choice["text"] for choice in reply["choices"]] == ["Hi €ab", "Hi €ab"]
    assert only["choices"][0] == {
        "index": 0, "text": "Hi €", "logprobs": None, "finish_reason": "length"
    }  # fmt: skip
    assert only["usage"]["completion_tokens"] == 0


async def test_a_special_token_in_an_echoed_text_stays() -> None:
    async with run_app() as running:
        text = await running.complete("a<s>b", echo=True, max_tokens=1)
        ids = await running.complete([97, 256, 98], echo=True, max_tokens=1)
    assert text["choices"][0]["text"] == "a<s>ba"
    assert ids["choices"][0]["text"] == "aba", "as special tokens of the output are left out"


@pytest.mark.parametrize("num_top", [0, 1, 5])
async def test_log_probabilities_of_the_output(num_top: int) -> None:
    async with run_app() as running:
        reply = await running.complete("xy", max_tokens=3, logprobs=num_top)
    (choice,) = reply["choices"]
    entries = expected_logprobs(b"xy", b"abc", num_top=num_top, vocab_size=VOCAB_SIZE)
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "b", "c"]
    assert found["text_offset"] == [0, 1, 2]
    assert found["token_logprobs"] == pytest.approx([entry.logprob for entry in entries])
    for top, entry in zip(found["top_logprobs"], entries, strict=True):
        wanted = dict(zip(map(spell, entry.top_ids), entry.top_logprobs, strict=True))
        assert top == pytest.approx(wanted | {spell(entry.token_id): entry.logprob})
        assert len(top) <= num_top + 1
    CompletionReply.model_validate(reply)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("prompt", ["word", [*b"word"], "w"])
async def test_echo_with_log_probabilities_as_evaluation_harnesses_read_it(
    prompt: Any,  # noqa: ANN401
    max_tokens: int,
) -> None:
    """lm-eval sends max_tokens 1 and reads [context length:-1] of each list; others send 0."""
    ids = list(prompt.encode() if isinstance(prompt, str) else prompt)
    async with run_app() as running:
        reply = await running.complete(
            prompt, echo=True, logprobs=1, max_tokens=max_tokens, seed=1, temperature=0
        )
    (choice,) = reply["choices"]
    output = list(b"ab"[:max_tokens])
    text = bytes([*ids, *output]).decode()
    found = choice["logprobs"]
    assert choice["text"] == text
    assert found["tokens"] == list(text)
    assert found["text_offset"] == list(range(len(text)))
    entries = [
        *expected_prompt_logprobs(ids, num_top=1, vocab_size=VOCAB_SIZE),
        *expected_logprobs(ids, output, num_top=1, vocab_size=VOCAB_SIZE),
    ]
    first, *rest = found["token_logprobs"]
    assert first is None
    assert found["top_logprobs"][0] is None
    assert rest == pytest.approx([entry.logprob for entry in entries])
    for top, entry in zip(found["top_logprobs"][1:], entries, strict=True):
        is_greedy = entry.rank == 1
        assert (max(top.values()) == top[spell(entry.token_id)]) == is_greedy
    assert reply["usage"]["completion_tokens"] == max_tokens
    CompletionReply.model_validate(reply)


async def test_tokens_that_are_no_characters_have_names_of_their_own() -> None:
    """Two bytes of one character must not share a key, and offsets count characters."""
    script = say({None: ["€".encode()[0], "€".encode()[1], "€".encode()[2], *b"!"]})
    async with run_app(script=script) as running:
        reply = await running.complete("é", echo=True, max_tokens=4, logprobs=0)
        named = await running.complete(
            "é", max_tokens=2, logprobs=0, return_tokens_as_token_ids=True
        )
    (choice,) = reply["choices"]
    assert choice["text"] == "é€!"
    found = choice["logprobs"]
    assert found["tokens"] == [
        "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "!"
    ]  # fmt: skip
    assert found["text_offset"] == [0, 0, 1, 1, 1, 2]
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:226", "token_id:130"]


async def test_log_probabilities_of_the_prompt_as_vllm_has_them() -> None:
    async with run_app() as running:
        reply = await running.complete("xyz", max_tokens=1, prompt_logprobs=2)
    (choice,) = reply["choices"]
    assert choice["logprobs"] is None
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    entries = expected_prompt_logprobs(b"xyz", num_top=2, vocab_size=VOCAB_SIZE)
    for found, entry in zip(rest, entries, strict=True):
        own = found[str(entry.token_id)]
        assert own["logprob"] == pytest.approx(entry.logprob)
        assert own["rank"] == entry.rank
        assert own["decoded_token"] == chr(entry.token_id)
        assert {int(token_id) for token_id in found} == {*entry.top_ids, entry.token_id}
    CompletionReply.model_validate(reply)


async def test_a_form_of_the_output_holds() -> None:
    forms: list[dict[str, object]] = [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "(yes|no)"}},
        {"guided_regex": "yes|no"},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"structured_outputs": {"json": {"enum": ["yes", "no"]}}},
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "answer", "schema": {"enum": ["yes", "no"]}}}},
    ]  # fmt: skip
    async with run_app(script=None) as running:
        for form in forms:
            reply = await running.complete("x", max_tokens=12, **form)
            (choice,) = reply["choices"]
            assert choice["text"].strip('"') in ("yes", "no"), form
            assert choice["finish_reason"] == "stop"


async def test_words_and_tokens_that_may_not_come() -> None:
    async with run_app(script=None) as running:
        only = await running.complete("x", max_tokens=6, allowed_token_ids=[97, 98], min_tokens=6)
        without = await running.complete(
            "x", max_tokens=6, allowed_token_ids=[97, 98], bad_words=["a"], min_tokens=6
        )
    assert set(only["choices"][0]["text"]) <= set("ab")
    assert without["choices"][0]["text"] == "bbbbbb"


async def test_defaults_of_the_model_hold_where_nothing_is_asked() -> None:
    async with run_app() as running:
        await running.complete(temperature=None, top_p=None, n=None, stop=None, seed=None)
        (asked,) = running.asked
    assert asked.sampling == SamplingParams(max_tokens=16)


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 1e-5])
async def test_tiny_temperatures_take_the_best(temperature: float) -> None:
    async with run_app(script=None) as running:
        best = await running.complete("x", temperature=0, max_tokens=5)
        same = await running.complete("x", temperature=temperature, max_tokens=5, seed=9)
        assert [asked.sampling.is_greedy for asked in running.asked] == [True, True]
    assert same["choices"] == best["choices"]


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_nothing_of_a_prompt_that_ends_inside_a_character_shows(cut: int) -> None:
    prompt = list("Hi 🌶".encode())[:-cut]
    async with run_app(script=say({None: [0x9F, 0x8C, 0xB6, *b"ok"]})) as running:
        reply = await running.complete(prompt, max_tokens=5)
        streamed = await running.stream(COMPLETIONS, prompt=prompt, max_tokens=5)
    assert reply["choices"][0]["text"] == "���ok"
    texts = [chunk["choices"][0]["text"] for chunk in streamed]
    assert "".join(texts) == "���ok"


TEXT = "one, two, three"
STOPS = [["two"], [", t"], ["e, two, th"], ["three"], ["abc", "two"], [TEXT], ["three four"]]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("keeps", [True, False])
async def test_a_stop_across_tokens_cuts_exactly(stops: list[str], keeps: bool) -> None:
    """Each byte is a token; the prompt's own stop does not count."""
    ends = [TEXT.find(stop) for stop in stops]
    first = min((end, len(stop)) for end, stop in zip(ends, stops, strict=True))
    wanted, reason = TEXT, "length"
    found = [(end, stop) for end, stop in zip(ends, stops, strict=True) if end >= 0]
    if found:
        end, stop = min(found, key=lambda pair: pair[0] + len(pair[1]))
        wanted, reason = TEXT[: end + len(stop) * keeps], "stop"
    async with run_app(script=say({None: TEXT.encode()}), num_pages=30) as running:
        body = {"max_tokens": len(TEXT), "stop": stops, "include_stop_str_in_output": keeps}
        reply = await running.complete(f"{stops[0][:9]}", **body)
        chunks = await running.stream(COMPLETIONS, prompt=stops[0][:9], **body)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (wanted, reason), first
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
