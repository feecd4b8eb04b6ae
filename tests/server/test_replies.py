"""A stream's events as messages."""

import dataclasses

import pytest

from jaxserve.engine import (
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
from jaxserve.request import FinishReason
from jaxserve.server.replies import Replies

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


def build(options: generation_pb2.OutputOptions, *, interval: int) -> Replies:
    return Replies(options, MODEL, interval=interval, complete=lambda finished: finished)


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

    replies = Replies(generation_pb2.OutputOptions(), MODEL, interval=3, complete=complete)
    finish = generation_pb2.GenerationFinish()
    for event in (STARTED, delta("a", 1), FINISHED):
        for message in replies.push(event):
            told.append(message.WhichOneof("event"))
            finish = message.finish
    assert told == ["start", "delta", "complete", "finish"]
    assert finish.timings.delivery.ToNanoseconds() == 500_000_000
    assert finish.timings.delivery_sum.ToNanoseconds() == 1_250_000_000
