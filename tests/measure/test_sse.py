"""Events out of bytes, however they are cut."""

import pytest

from jaxserve.measure.targets import sse
from jaxserve.measure.targets.sse import EventReader

STREAM = (
    b": a comment\n\ndata: one\n\nevent: x\r\ndata: two\r\ndata: more\r\n\r\ndata:three\r\r"
    b'data: {"text": "\xe2\x80\xa8\xc2\x85\x0b"}\n\ndata: [DONE]\n\n'
)
EVENTS = ["one", "two\nmore", "three", '{"text": "\u2028\u0085\u000b"}', "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_wherever_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    found = [
        event
        for start in range(0, len(STREAM), size)
        for event in reader.feed(STREAM[start : start + size])
    ]
    assert found == EVENTS


def test_an_event_that_is_not_over_is_none_yet() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: one\n")) == []
    assert list(reader.feed(b"\n")) == ["one"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        list(EventReader().feed(b"data: " + b"x" * 200))
