"""A stream's events as messages."""

import dataclasses
import tracemalloc

import pytest

from jaxserve.client import Start
from jaxserve.client.reading import FINISH_REASONS, EventReader
from jaxserve.engine import (
    ChoiceFinished,
    Delta,
    Event,
    ExecutionInfo,
    Finished,
    ServedModel,
    Started,
    Timings,
    Usage,
)
from jaxserve.gen import generation_pb2
from jaxserve.plan import TokenLogprobs
from jaxserve.request import FinishReason
from jaxserve.server.answers import Response
from jaxserve.server.chat_plan import ChatChoices
from jaxserve.server.choice_reply import ReplyRules
from jaxserve.server.logprobs import build_logprobs
from jaxserve.server.replies import Replies
from jaxserve.text.chat_output import Parsers

MODEL = ServedModel(name="m", max_model_tokens=40, vocab_size=9, eos_ids=frozenset({2}))
STARTED = Started(request_id="r", prompt_tokens=3)
FINISHED = Finished(
    index=0,
    reason=FinishReason.STOP,
    matched_stop="end",
    usage=Usage(prompt_tokens=3, completion_tokens=4),
    timings=Timings(queue_s=0.25, prefill_s=1.5, time_to_first_token_s=1.75, decode_s=2.0),
    execution=ExecutionInfo(prefill_chunks=2, padding_fraction=0.5),
)


def rules(
    options: generation_pb2.OutputOptions,
    *,
    interval: int,
    max_bytes: int = 1 << 20,
    echo: str = "",
) -> ReplyRules:
    return ReplyRules(
        options=options,
        interval=interval,
        max_bytes=max_bytes,
        token_bytes=spell,
        echo=echo,
    )


def spell(token_id: int) -> bytes:
    return b"t%d" % token_id


def build(
    options: generation_pb2.OutputOptions,
    *,
    interval: int,
    max_bytes: int = 1 << 20,
    echo: str = "",
    chat: ChatChoices | None = None,
) -> Replies:
    chosen = rules(options, interval=interval, max_bytes=max_bytes, echo=echo)
    return Replies(chosen, MODEL, complete=lambda finished: finished, chat=chat)


def delta(text: str, *token_ids: int) -> Delta:
    return Delta(index=0, text=text, token_ids=token_ids)


def kinds(messages: list[generation_pb2.StreamGenerateResponse]) -> list[str | None]:
    return [message.WhichOneof("event") for message in messages]


def test_the_start_waits_for_the_first_output() -> None:
    replies = build(generation_pb2.OutputOptions(), interval=1)
    assert list(replies.push(STARTED)) == []
    assert kinds(list(replies.push(delta("a", 1)))) == ["start", "delta"]
    assert kinds(list(replies.push(delta("b", 2)))) == ["delta"]
    assert kinds(list(replies.push(FINISHED))) == ["finish"]


def test_the_first_output_brings_the_start_though_its_text_is_held_back() -> None:
    replies = build(generation_pb2.OutputOptions(), interval=5)
    list(replies.push(STARTED))
    assert kinds(list(replies.push(delta("", 1)))) == ["start"]


def test_an_output_of_nothing_has_a_start_and_a_finish() -> None:
    replies = build(generation_pb2.OutputOptions(), interval=1)
    list(replies.push(STARTED))
    assert kinds(list(replies.push(FINISHED))) == ["start", "finish"]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 9])
def test_tokens_are_gathered_and_none_is_lost(interval: int) -> None:
    options = generation_pb2.OutputOptions(include_token_ids=True)
    replies = build(options, interval=interval)
    list(replies.push(STARTED))
    messages = []
    for i, text in enumerate("abcd"):
        messages += list(replies.push(delta(text, i)))
    messages += list(replies.push(delta("é")))  # text alone, held back until the end
    messages += list(replies.push(FINISHED))
    deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
    assert "".join(delta.text for delta in deltas) == "abcdé"
    assert [id for delta in deltas for id in delta.token_ids] == [0, 1, 2, 3]
    assert all(len(delta.token_ids) == interval for delta in deltas[: 4 // interval])


def test_a_token_without_text_is_sent_where_ids_are_asked_for_and_else_not() -> None:
    for wanted, expected in ((True, ["start", "delta"]), (False, ["start"])):
        options = generation_pb2.OutputOptions(include_token_ids=wanted)
        replies = build(options, interval=1)
        list(replies.push(STARTED))
        assert kinds(list(replies.push(delta("", 7)))) == expected


def test_the_finish_carries_the_accounts() -> None:
    for wanted in (True, False):
        options = generation_pb2.OutputOptions(include_execution_info=wanted)
        (_, message) = [
            *build(options, interval=1).push(STARTED),
            *_with_start(options).push(FINISHED),
        ]
        finish = message.finish
        assert finish.reason == generation_pb2.FINISH_REASON_STOP_SEQUENCE
        assert finish.stop_string == "end"
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 4)
        assert finish.timings.queue.ToNanoseconds() == 250_000_000
        assert finish.timings.time_to_first_token.ToNanoseconds() == 1_750_000_000
        assert finish.HasField("execution") is wanted


def _with_start(options: generation_pb2.OutputOptions) -> Replies:
    replies = build(options, interval=1)
    list(replies.push(STARTED))
    return replies


def test_a_token_is_sent_with_the_message_that_carries_it() -> None:
    """So that what is gathered does not count as delivered before its message is written."""
    replies = build(generation_pb2.OutputOptions(), interval=3)
    events: list[Event] = [
        Delta(index=0, text="a", token_ids=(place,), ready_s=(float(place),)) for place in range(4)
    ]
    sent = [
        (message.WhichOneof("event"), replies.take_sent())
        for event in [*events, FINISHED]
        for message in replies.push(event)
    ]
    assert sent == [("delta", [0, 1, 2]), ("delta", [3]), ("finish", [])]


def test_the_end_is_completed_when_all_before_it_has_gone_out() -> None:
    """So that its delivery is that of the last token too, which was still gathered."""
    told: list[str | None] = []

    def complete(finished: Finished) -> Finished:
        told.append("complete")
        return dataclasses.replace(finished, timings=Timings(delivery_s=0.5, delivery_sum_s=1.25))

    replies = Replies(rules(generation_pb2.OutputOptions(), interval=3), MODEL, complete=complete)
    finish = generation_pb2.GenerationFinish()
    for event in (STARTED, delta("a", 1), FINISHED):
        for message in replies.push(event):
            told.append(message.WhichOneof("event"))
            finish = message.finish
    assert told == ["start", "delta", "complete", "finish"]
    assert finish.timings.delivery.ToNanoseconds() == 500_000_000
    assert finish.timings.delivery_sum.ToNanoseconds() == 1_250_000_000


def entry(token_id: int, *, num_top: int = 0) -> TokenLogprobs:
    top_ids = tuple(range(100, 100 + num_top))
    return TokenLogprobs(
        token_id=token_id,
        logprob=-token_id / 8,
        rank=token_id + 1,
        top_ids=top_ids,
        top_logprobs=tuple(-top_id / 8 for top_id in top_ids),
    )


def ask(replies: Replies, *events: Event) -> list[generation_pb2.StreamGenerateResponse]:
    return [message for event in events for message in replies.push(event)]


def put_together(
    messages: list[generation_pb2.StreamGenerateResponse],
) -> generation_pb2.GenerateResponse:
    response = Response()
    for message in messages:
        response.add(message)
    return response.build()


def deltas_of(
    messages: list[generation_pb2.StreamGenerateResponse],
) -> list[generation_pb2.GenerationDelta]:
    return [message.delta for message in messages if message.HasField("delta")]


def test_logprobs_are_in_step_with_the_tokens_though_their_ids_are_not_asked_for() -> None:
    for wanted in (True, False):
        options = generation_pb2.OutputOptions(include_token_ids=wanted, logprobs=2)
        events = [
            Delta(
                index=0,
                text="",
                token_ids=(3, 4),
                logprobs=(entry(3, num_top=2), entry(4, num_top=2)),
            )
        ]
        (_, message) = ask(build(options, interval=1), STARTED, *events)
        delta = message.delta
        assert list(delta.token_ids) == ([3, 4] if wanted else [])
        assert list(delta.logprobs.token_ids) == [3, 4]
        assert list(delta.logprobs.logprobs) == [-0.375, -0.5]
        assert list(delta.logprobs.ranks) == [4, 5]
        assert list(delta.logprobs.token_bytes) == [b"t3", b"t4"]
        assert [list(top.token_ids) for top in delta.logprobs.top] == [[100, 101]] * 2
        assert [list(top.token_bytes) for top in delta.logprobs.top] == [[b"t100", b"t101"]] * 2


def test_alternatives_that_are_not_asked_for_are_no_empty_lists() -> None:
    assert len(build_logprobs([entry(1), entry(2)], spell).top) == 0


def test_choices_are_gathered_and_end_each_by_itself() -> None:
    replies = build(generation_pb2.OutputOptions(include_token_ids=True), interval=2)
    ended = ChoiceFinished(index=1, reason=FinishReason.EOS, matched_stop=None)
    messages = ask(
        replies,
        STARTED,
        Delta(index=1, text="x", token_ids=(7,)),
        Delta(index=0, text="a", token_ids=(1,)),
        Delta(index=0, text="b", token_ids=(2,)),
        ended,
        Delta(index=0, text="c", token_ids=(3,)),
        FINISHED,
    )
    assert kinds(messages) == ["start", "delta", "delta", "finish", "delta", "finish"]
    assert [(delta.index, delta.text) for delta in deltas_of(messages)] == [
        (0, "ab"), (1, "x"), (0, "c"),
    ]  # fmt: skip
    early, last = messages[3].finish, messages[5].finish
    assert (early.index, early.reason) == (1, generation_pb2.FINISH_REASON_EOS)
    assert not any(early.HasField(field) for field in ("usage", "timings", "execution"))
    assert (last.index, last.usage.completion_tokens) == (0, 4)
    whole = put_together(messages)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "abc"), (1, "x")]
    assert [list(choice.token_ids) for choice in whole.choices] == [[1, 2, 3], [7]]
    assert [choice.stop_string for choice in whole.choices] == ["end", ""]
    assert whole.usage == last.usage


def test_each_choice_begins_with_the_echo_though_it_has_nothing_else() -> None:
    replies = build(generation_pb2.OutputOptions(echo=True), interval=1, echo="Hi! ")
    ended = ChoiceFinished(index=1, reason=FinishReason.EOS, matched_stop=None)
    messages = ask(replies, STARTED, delta("a", 1), delta("b", 2), ended, FINISHED)
    assert [(delta.index, delta.text) for delta in deltas_of(messages)] == [
        (0, "Hi! a"), (0, "b"), (1, "Hi! "),
    ]  # fmt: skip


@pytest.mark.parametrize("max_bytes", [60, 61, 200, 1000, 1 << 20])
def test_large_prompt_logprobs_are_cut_and_none_is_lost(max_bytes: int) -> None:
    entries = tuple(entry(token_id, num_top=2) for token_id in range(1, 40))
    started = Started(request_id="r", prompt_tokens=40, prompt_logprobs=entries)
    replies = build(generation_pb2.OutputOptions(), interval=1, max_bytes=max_bytes)
    messages = ask(replies, started, delta("a", 1), FINISHED)
    starts = [message.start for message in messages if message.HasField("start")]
    assert kinds(messages) == ["start"] * len(starts) + ["delta", "finish"]
    assert (len(starts) > 1) is (max_bytes < 1 << 20)
    assert {(start.request_id, start.model, start.prompt_tokens) for start in starts} == {
        ("r", "m", 40)
    }
    for start in starts:
        pieces = start.prompt_logprobs
        assert pieces.ByteSize() <= max_bytes or len(pieces.token_ids) == 1
    whole = put_together(messages)
    assert whole.prompt_logprobs == build_logprobs(entries, spell)


def test_the_client_makes_one_start_of_several() -> None:
    entries = tuple(entry(token_id, num_top=2) for token_id in range(1, 40))
    started = Started(request_id="r", prompt_tokens=40, prompt_logprobs=entries)
    replies = build(generation_pb2.OutputOptions(), interval=1, max_bytes=300)
    messages = ask(replies, started, delta("a", 1), FINISHED)
    reader = EventReader()
    start, *rest = [event for message in messages for event in reader.read(message)]
    assert isinstance(start, Start)
    assert [found.token_id for found in start.prompt_logprobs] == list(range(1, 40))
    assert len(rest) == 2


@pytest.mark.parametrize("max_bytes", [64, 100, 1000])
@pytest.mark.parametrize("wanted", [True, False])
def test_large_deltas_are_cut_and_nothing_is_lost(max_bytes: int, wanted: bool) -> None:
    text = "né🌶" * 50
    entries = tuple(entry(token_id, num_top=1) for token_id in range(30))
    options = generation_pb2.OutputOptions(include_token_ids=wanted, logprobs=1)
    replies = build(options, interval=1, max_bytes=max_bytes)
    big = Delta(index=0, text=text, token_ids=tuple(range(30)), logprobs=entries)
    messages = ask(replies, STARTED, big, FINISHED)
    deltas = deltas_of(messages)
    assert len(deltas) > 2
    assert all(
        delta.ByteSize() <= max_bytes + 16 or len(delta.logprobs.token_ids) == 1 for delta in deltas
    )
    for delta in deltas:
        assert list(delta.token_ids) == (list(delta.logprobs.token_ids) if wanted else [])
    (choice,) = put_together(messages).choices
    assert choice.text == text
    assert choice.logprobs == build_logprobs(entries, spell)


def test_a_small_message_takes_no_room_for_the_largest() -> None:
    """One token a message is what a stream sends thousands of in a second."""
    replies = build(generation_pb2.OutputOptions(include_token_ids=True), interval=1)
    ask(replies, STARTED, delta("a", 1))
    tracemalloc.start()
    try:
        ask(replies, delta("b", 2))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 16_384


def test_gathered_logprobs_are_sent_before_they_grow_too_large() -> None:
    options = generation_pb2.OutputOptions(logprobs=5)
    replies = build(options, interval=1000, max_bytes=1000)
    events = [
        Delta(index=0, text="a", token_ids=(n,), logprobs=(entry(n, num_top=5),)) for n in range(40)
    ]
    messages = ask(replies, STARTED, *events)  # before the end
    assert len(deltas_of(messages)) > 4
    assert all(message.ByteSize() < 1100 for message in messages)


def open_chat() -> ChatChoices:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    parsers = Parsers(tool="hermes", reasoning="think")
    ids = iter(f"call-{n}" for n in range(9))
    return ChatChoices(lambda: parsers.open(tools=(tool,), make_id=lambda: next(ids)))


ANSWER = (
    "<think>Add them.</think>Let me see."
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("max_bytes", [64, 1 << 20])
def test_reasoning_and_calls_are_taken_out_of_the_text(size: int, max_bytes: int) -> None:
    options = generation_pb2.OutputOptions()
    replies = build(options, interval=1, max_bytes=max_bytes, chat=open_chat())
    pieces = [ANSWER[first : first + size] for first in range(0, len(ANSWER), size)]
    end = dataclasses.replace(FINISHED, reason=FinishReason.EOS, matched_stop=None)
    messages = ask(replies, STARTED, *(delta(piece, 1) for piece in pieces), end)
    whole = put_together(messages)
    (choice,) = whole.choices
    (call,) = choice.tool_calls
    assert (choice.reasoning, choice.text) == ("Add them.", "Let me see.")
    assert (call.id, call.name, call.arguments_json) == ("call-0", "add", '{"a": 1, "b": 2}')
    assert choice.finish_reason == generation_pb2.FINISH_REASON_TOOL_CALLS
    begun = [call for delta in deltas_of(messages) for call in delta.tool_calls if call.name]
    assert [(call.index, call.id) for call in begun] == [(0, "call-0")]


def test_what_could_have_been_a_call_is_text_at_the_end() -> None:
    replies = build(generation_pb2.OutputOptions(), interval=1, chat=open_chat())
    end = dataclasses.replace(FINISHED, reason=FinishReason.MAX_TOKENS, matched_stop=None)
    messages = ask(replies, STARTED, delta("See <tool_", 1), end)
    assert [delta.text for delta in deltas_of(messages)] == ["See", " <tool_"]
    assert kinds(messages)[-2:] == ["delta", "finish"]


def test_a_stop_token_after_a_call_is_no_matched_stop() -> None:
    end = dataclasses.replace(FINISHED, reason=FinishReason.STOP, matched_stop=7)
    replies = build(generation_pb2.OutputOptions(), interval=1, chat=open_chat())
    *_, last = ask(replies, STARTED, delta(ANSWER, 1), end)
    assert last.finish.reason == generation_pb2.FINISH_REASON_TOOL_CALLS
    assert last.finish.WhichOneof("matched_stop") is None


def test_an_output_that_a_limit_cut_did_not_end_for_its_calls() -> None:
    for reason in (FinishReason.MAX_TOKENS, FinishReason.STOP):
        end = dataclasses.replace(FINISHED, reason=reason)
        replies = build(generation_pb2.OutputOptions(), interval=1, chat=open_chat())
        *_, last = ask(replies, STARTED, delta(ANSWER, 1), end)
        assert FINISH_REASONS[last.finish.reason] is reason


def test_without_text_the_reason_still_tells_of_calls() -> None:
    options = generation_pb2.OutputOptions(omit_text=True)
    end = dataclasses.replace(FINISHED, reason=FinishReason.EOS, matched_stop=None)
    replies = build(options, interval=1, chat=open_chat())
    messages = ask(replies, STARTED, delta(ANSWER, 1), end)
    assert kinds(messages) == ["start", "finish"]
    assert messages[-1].finish.reason == generation_pb2.FINISH_REASON_TOOL_CALLS
