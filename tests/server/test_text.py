"""Stop strings and broken characters, through gRPC (C34, C35)."""

import asyncio
from collections.abc import Sequence

import pytest

from jaxserve.client import AsyncClient, Delta, Finish, FinishReason
from tests.fakes import EOS_ID, say
from tests.server.harness import connect, run_server

pytestmark = pytest.mark.asyncio

TEXT = "one, two, thé 🌶 four"
STOPS: list[list[str]] = [
    ["two"],
    [", t"],
    ["e, two, th"],
    ["four"],
    ["é 🌶"],
    ["🌶"],
    [TEXT],
    ["o", "on", "ne"],
    ["ne", "one"],
    ["four and more"],  # begins, and is never completed
    ["Hi!"],  # is in the prompt alone
    ["missing"],
]


def reference(stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """Returns the text up to the stop that ends first, and which it is."""
    hits = [(TEXT.find(stop) + len(stop), TEXT.find(stop), stop) for stop in stops if stop in TEXT]
    if not hits:
        return TEXT, None
    end, begin, stop = min(hits)
    return TEXT[: end if include else begin], stop


async def stream_of(client: AsyncClient, **options: object) -> tuple[str, Finish, list[str]]:
    texts, finish = [], None
    async for event in client.stream("Hi!", **options):  # type: ignore[arg-type]
        match event:
            case Delta():
                texts.append(event.text)
            case Finish():
                finish = event
    assert finish is not None
    return "".join(texts), finish, texts


@pytest.mark.parametrize("include", [True, False])
async def test_a_stop_string_cuts_exactly_wherever_its_tokens_are_cut(include: bool) -> None:
    """A byte is a token: each stop begins and ends inside of some message."""
    answer = [*TEXT.encode(), EOS_ID]
    async with run_server(script=say({None: answer})) as running, connect(running) as client:
        for stops in STOPS:
            text, stop = reference(stops, include=include)
            for interval in (1, 3, 1000):
                options = {
                    "stop_strings": stops,
                    "include_stop_text": include,
                    "stream_interval": interval,
                }
                got, finish, _ = await stream_of(client, **options)
                whole = await client.generate("Hi!", **options)  # type: ignore[arg-type]
                assert got == whole.text == text, (stops, interval)
                assert finish.matched_stop == whole.matched_stop == stop
                reason = FinishReason.EOS if stop is None else FinishReason.STOP
                assert finish.reason is whole.finish_reason is reason


async def test_what_could_become_a_stop_is_let_go_at_a_limit() -> None:
    async with run_server(script=say({None: b"ab two th"})) as running, connect(running) as client:
        got, finish, _ = await stream_of(client, stop_strings=["two three"], max_tokens=9)
        assert (got, finish.reason) == ("ab two th", FinishReason.MAX_TOKENS)


async def test_a_stop_is_no_part_of_reasoning_or_bans_but_of_the_choice_that_wrote_it() -> None:
    """Two choices with the same output stop at the same place, each by itself."""
    async with run_server(script=say({None: b"abcabc"})) as running, connect(running) as client:
        whole = await client.generate("Hi!", n=2, stop_strings=["ca"], max_tokens=6)
        assert [(choice.text, choice.matched_stop) for choice in whole.choices] == [
            ("ab", "ca")
        ] * 2


FAMILY = "x👨‍👩‍👧y"


@pytest.mark.parametrize("max_tokens", range(1, len(FAMILY.encode()) + 1))
async def test_an_output_cut_inside_a_character_ends_with_a_replacement(max_tokens: int) -> None:
    data = FAMILY.encode()
    async with run_server(script=say({None: data})) as running, connect(running) as client:
        got, finish, texts = await stream_of(client, max_tokens=max_tokens)
        whole = await client.generate("Hi!", max_tokens=max_tokens)
    assert got == whole.text == data[:max_tokens].decode("utf-8", "replace")
    assert finish.reason is FinishReason.MAX_TOKENS
    for text in texts[:-1]:  # only the end can be broken
        assert "\ufffd" not in text


@pytest.mark.parametrize("num_missing", [1, 2, 3])
async def test_a_prompt_that_ends_inside_a_character_is_not_told_again(num_missing: int) -> None:
    """Its bytes are no part of the output, though the output completes them."""
    data = "Hi 🌶".encode()
    prompt, rest = data[:-num_missing], data[-num_missing:]
    script = say({tuple(prompt): [*rest, *b" ok", EOS_ID]})
    async with run_server(script=script) as running, connect(running) as client:
        whole = await client.generate(tuple(prompt))
        assert "Hi" not in whole.text
        assert whole.text.endswith(" ok")
        assert whole.text == bytes([*rest, *b" ok"]).decode("utf-8", "replace")
        echoed = await client.generate(tuple(prompt), echo=True)
        assert echoed.text.startswith("Hi ")
        assert echoed.text.endswith(" ok")


async def test_random_tokens_stream_to_their_one_shot_text() -> None:
    async with run_server(script=None, max_model_tokens=40) as running:
        async with connect(running) as client:

            async def compare(seed: int) -> None:
                options = {"temperature": 2.0, "seed": seed, "max_tokens": 30, "ignore_eos": True}
                got, *_ = await stream_of(client, **options)
                whole = await client.generate("Hi!", include_token_ids=True, **options)  # type: ignore[arg-type]
                assert got == whole.text == await client.detokenize(whole.token_ids)

            for seed in range(0, 40, 4):
                await asyncio.gather(*(compare(seed + n) for n in range(4)))
