"""How a request ends well, and that text, ids, usage and reason agree."""

import itertools
from typing import Any

import pytest

from jaxserve.engine import Engine
from jaxserve.request import FinishReason, SamplingParams
from jaxserve.text.detokenizer import SPECIAL_MARK
from tests.engines import Output, ask, build_engine, gather, serve
from tests.fakes import EOS_ID, FakeRunner, Script, expected_output, say

PROMPT = tuple(b"q")
HELLO = [*b"hello world", EOS_ID]
PAD_ID = EOS_ID + 1
FAMILY = "a👨‍👩‍👧b"


def answer(
    script: Script | None,
    *,
    overlap: bool = True,
    prompt: tuple[int, ...] = PROMPT,
    **fields: Any,  # noqa: ANN401
) -> Output:
    engine, runner = build_engine(script=script, overlap=overlap)
    with serve(engine, runner):
        output = gather(engine.submit(ask(prompt, **{"max_tokens": 30, **fields})))
    assert output.finished.usage.completion_tokens == len(output.token_ids)
    assert engine.metrics.value("output_tokens_total") == len(output.token_ids)
    return output


def test_eos_is_charged_but_its_text_is_left_out() -> None:
    output = answer(say({PROMPT: HELLO}))
    assert (output.text, output.token_ids) == ("hello world", HELLO)
    assert output.finished.reason is FinishReason.EOS
    assert output.finished.matched_stop is None


def test_eos_is_shown_where_the_stop_text_is_wanted() -> None:
    output = answer(say({PROMPT: HELLO}), include_stop_text=True, skip_special_tokens=False)
    assert output.text == "hello world</s>"


def test_ignored_eos_is_an_ordinary_token() -> None:
    forced = [*b"ab", EOS_ID, *b"cd"]
    output = answer(say({PROMPT: forced}), ignore_eos=True, max_tokens=5)
    assert (output.text, output.token_ids) == ("abcd", forced)
    assert output.finished.reason is FinishReason.MAX_TOKENS


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello ")])
def test_a_stop_id_ends_the_output(include: bool, text: str) -> None:
    output = answer(say({PROMPT: HELLO}), stop_token_ids=(ord(" "),), include_stop_text=include)
    assert (output.text, output.token_ids) == (text, [*b"hello "])
    assert output.finished.reason is FinishReason.STOP
    assert output.finished.matched_stop == ord(" ")


def test_max_tokens_that_fill_the_context_are_still_max_tokens() -> None:
    output = answer(None, max_tokens=39, ignore_eos=True)
    assert output.finished.reason is FinishReason.MAX_TOKENS
    assert len(output.token_ids) == 39


def test_without_max_tokens_the_context_is_the_end() -> None:
    output = answer(None, max_tokens=None, ignore_eos=True)
    assert output.finished.reason is FinishReason.CONTEXT_LENGTH
    assert output.token_ids == expected_output(PROMPT, SamplingParams(temperature=0.0), 39)


def test_the_text_of_a_cut_character_is_one_replacement() -> None:
    encoded = FAMILY.encode()
    for length in range(1, len(encoded) + 1):
        output = answer(say({PROMPT: list(encoded)}), max_tokens=length)
        assert output.text == encoded[:length].decode(errors="replace")
        assert output.token_ids == list(encoded[:length])


def test_a_prompt_that_ends_inside_a_character_does_not_show_in_the_output() -> None:
    chili = "Hi 🌶".encode()
    for cut in (1, 2, 3):
        prompt = tuple(chili[:-cut])
        rest = [*chili[-cut:], *b" ok"]
        output = answer(say({prompt: rest}), prompt=prompt, max_tokens=len(rest))
        assert output.text.endswith(" ok")
        assert "H" not in output.text


def test_bytes_that_are_no_text_never_stop_a_stream() -> None:
    for seed in range(20):
        prompt = (seed,)
        ids = expected_output(prompt, SamplingParams(temperature=0.0), 30)
        output = answer(None, prompt=prompt, ignore_eos=True)
        assert output.token_ids == ids
        shown = bytes(token_id for token_id in ids if token_id < 256)
        assert output.text == shown.decode(errors="replace")


STOP_SETS = [
    ("two",),
    (", t",),
    ("e, two, th",),
    ("three four",),
    ("one, two, three four",),
    ("o, x", "two"),
    ("ab", "abc", "bc"),
    ("fourth",),  # begins and is never completed
    ("q",),  # only in the prompt
    ("🙂", "thr"),
]


def cut_at_the_first_stop(
    text: str, stops: tuple[str, ...], include: bool
) -> tuple[str, str | None]:
    """The reference: the stop that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOP_SETS)
def test_a_stop_string_cuts_the_text_exactly(stops: tuple[str, ...], include: bool) -> None:
    for text in ("one, two, three four", "xabcd 🙂 four"):
        encoded = text.encode()
        wanted, stop = cut_at_the_first_stop(text, stops, include)
        output = answer(
            say({PROMPT: [*encoded, EOS_ID]}), stop_strings=stops, include_stop_text=include
        )
        assert output.text == wanted
        assert output.finished.matched_stop == stop
        assert output.finished.reason is (FinishReason.STOP if stop else FinishReason.EOS)
        if stop:  # ids and usage end with the token that completed it
            shown, _ = cut_at_the_first_stop(text, stops, True)
            assert output.token_ids == list(shown.encode())


@pytest.mark.parametrize("stops", [(), ("zz",), ("<pad>",)])
def test_a_kept_special_token_is_text_after_a_mark_with_and_without_stops(
    stops: tuple[str, ...],
) -> None:
    output = answer(
        say({PROMPT: [*b"ab", PAD_ID, *b"c", EOS_ID]}),
        stop_strings=stops,
        kept_special_ids=frozenset({PAD_ID}),
    )
    is_cut = stops == ("<pad>",)
    assert output.text == f"ab{SPECIAL_MARK}{'' if is_cut else '<pad>c'}"


def test_a_stop_that_is_never_completed_is_released_at_max_tokens() -> None:
    output = answer(say({PROMPT: HELLO}), stop_strings=("hellish",), max_tokens=4)
    assert output.text == "hell"
    assert output.finished.reason is FinishReason.MAX_TOKENS


def test_a_stop_string_on_the_last_token_wins_over_max_tokens() -> None:
    output = answer(say({PROMPT: HELLO}), stop_strings=("lo",), max_tokens=5)
    assert (output.text, output.finished.reason) == ("hel", FinishReason.STOP)


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "aXb"), (4, "aXb"), (5, "aXbSTcd"), (8, "aXbSTcd"), (9, "aXbSTcdSTe")],
)
def test_stops_before_min_tokens_do_not_count(min_tokens: int, text: str) -> None:
    # "ST" is complete with tokens 5 and 9; what ends the output comes after min_tokens others
    output = answer(
        say({PROMPT: [*b"aXbSTcdSTe", EOS_ID]}), stop_strings=("ST",), min_tokens=min_tokens
    )
    assert output.text == text


@pytest.mark.parametrize("stop_strings", [(), ("absent",)])
@pytest.mark.parametrize(
    ("min_tokens", "text"), [(1, "hello"), (5, "hello"), (6, "hello world"), (10, "hello world")]
)
def test_a_stop_id_counts_from_min_tokens_on(
    min_tokens: int, text: str, stop_strings: tuple[str, ...]
) -> None:
    """The space is the sixth token: five come before it. With stop strings the text is made here,
    without them by the reader."""
    output = answer(
        say({PROMPT: HELLO}),
        stop_token_ids=(ord(" "),),
        stop_strings=stop_strings,
        min_tokens=min_tokens,
    )
    assert output.text == text
    wanted = FinishReason.STOP if text == "hello" else FinishReason.EOS
    assert output.finished.reason is wanted


def test_text_held_back_for_a_stop_that_does_not_come_is_released_in_place() -> None:
    output = answer(say({PROMPT: HELLO}), stop_strings=("lox", "world!"), max_tokens=12)
    assert (output.text, output.finished.reason) == ("hello world", FinishReason.EOS)


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_changes_no_output(overlap: bool) -> None:
    output = answer(None, overlap=overlap, stop_strings=("zz",), ignore_eos=True)
    assert output.token_ids == expected_output(PROMPT, SamplingParams(temperature=0.0), 30)


def test_many_requests_get_what_each_would_alone() -> None:
    engine, runner = build_engine()
    prompts = [tuple(range(n, 2 * n)) for n in range(1, 20)]
    with serve(engine, runner):
        streams = [engine.submit(ask(prompt, ignore_eos=True)) for prompt in prompts]
        outputs = [gather(stream) for stream in streams]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == expected_output(prompt, SamplingParams(temperature=0.0), 8)


def run_preempted(sampling: dict[str, Any], preempt_at: set[int]) -> tuple[Output, int]:
    """Runs one request and takes its pages back after the given numbers of results."""
    results = itertools.count(1)
    engine: Engine
    runner: FakeRunner

    def on_result(_: object) -> None:
        if next(results) in preempt_at:
            (live,) = engine._intake.live()
            engine._scheduler.preempt(live.request)

    engine, runner = build_engine(
        script=say({PROMPT: [*"one, two, thr🌶e".encode()]}), on_result=on_result
    )
    with serve(engine, runner):
        output = gather(engine.submit(ask(PROMPT, **{"max_tokens": 19, **sampling})))
    return output, output.finished.execution.preemptions


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop_strings": ("thr🌶",)},
        {"stop_strings": ("two",), "min_tokens": 6, "temperature": 0.8, "seed": 7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 30, "ignore_eos": True},
    ],
)
def test_preemption_at_any_token_leaves_the_stream_as_it_was(sampling: dict[str, Any]) -> None:
    undisturbed, _ = run_preempted(sampling, set())
    times = [{index} for index in range(1, 13)] + [{2, 9}, {4, 5, 6}]
    for preempt_at in times:
        output, num_preemptions = run_preempted(sampling, preempt_at)
        assert (output.text, output.token_ids) == (undisturbed.text, undisturbed.token_ids)
        assert output.finished.reason is undisturbed.finished.reason
        assert output.finished.matched_stop == undisturbed.finished.matched_stop
        assert output.finished.usage == undisturbed.finished.usage
        assert num_preemptions >= (1 if max(preempt_at) < len(output.token_ids) else 0)


def test_pages_come_back_after_each_of_many_requests() -> None:
    engine, runner = build_engine()
    with serve(engine, runner):
        for index in range(60):
            gather(engine.submit(ask((index, 7), max_tokens=5)))
        whole = gather(engine.submit(ask(tuple(range(9)), max_tokens=31, ignore_eos=True)))
    assert len(whole.token_ids) == 31
