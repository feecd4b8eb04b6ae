"""How a server ends: on signals, when it is killed, when it cannot start, when its engine fails."""

import re
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.cli import exit_codes
from jaxserve.client import Client, Finish, FinishReason, ServerError, Start, UnavailableError
from tests.faults.processes import MAX_MODEL_TOKENS, Place, run_command, serving

BROKEN = (sys.executable, str(Path(__file__).parent / "broken_engine.py"))


class Reading:
    """A stream that a thread reads to its end; an error is its last event."""

    def __init__(self, client: Client, *, max_tokens: int) -> None:
        self.events: list[object] = []
        self._stream = client.stream("Hi", max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.events.append(next(self._stream))
        self.events.append(next(self._stream))  # its first token: it is running
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.events.extend(self._stream)
        except ServerError as error:
            self.events.append(error)

    def result(self) -> list[object]:
        self._thread.join()
        return self.events


def check_one_end(events: Iterable[object], wanted: type[object]) -> None:
    start, *between, end = events
    assert isinstance(start, Start)
    assert isinstance(end, wanted), end
    assert not [event for event in between if isinstance(event, Finish | ServerError)]


def wait_refused(client: Client) -> UnavailableError:
    while client.health().is_ready:
        pass  # a hang is the test's timeout
    with pytest.raises(UnavailableError) as caught:
        client.generate("x", max_tokens=1)
    return caught.value


def test_after_sigterm_four_streams_finish_and_a_fifth_is_refused(place: Place) -> None:
    with serving(place) as (server, client):
        streams = [Reading(client, max_tokens=1000) for _ in range(4)]
        server.send(signal.SIGTERM)
        assert wait_refused(client).reason == "NOT_SERVING"
        for stream in streams:
            events = stream.result()
            check_one_end(events, Finish)
            assert isinstance(events[-1], Finish)
            assert events[-1].reason is FinishReason.MAX_TOKENS
            assert events[-1].usage is not None
            assert events[-1].usage.completion_tokens == 1000
        assert server.wait() == exit_codes.OK


def test_what_does_not_finish_in_the_drains_time_ends_with_one_error(place: Place) -> None:
    with serving(place, "--set", "server.drain_timeout_s=0.2") as (server, client):
        streams = [Reading(client, max_tokens=MAX_MODEL_TOKENS - 10) for _ in range(4)]
        server.send(signal.SIGTERM)
        for stream in streams:
            check_one_end(stream.result(), UnavailableError)
        assert server.wait() == exit_codes.OK


def test_a_second_signal_means_now(place: Place) -> None:
    with serving(place, "--set", "server.drain_timeout_s=3600") as (server, client):
        stream = Reading(client, max_tokens=MAX_MODEL_TOKENS - 10)
        server.send(signal.SIGTERM)
        wait_refused(client)
        server.send(signal.SIGTERM)
        check_one_end(stream.result(), UnavailableError)
        assert server.wait() == exit_codes.OK


def test_signals_that_come_until_the_process_is_gone_change_nothing(place: Place) -> None:
    with serving(place) as (server, _):
        assert server.send_until_it_ends(signal.SIGTERM) == exit_codes.OK


def test_a_server_that_is_killed_ends_its_streams_once_and_starts_again_from_its_cache(
    place: Place,
) -> None:
    with serving(place) as (server, client):
        before = client.generate("Hi", max_tokens=8, temperature=0.0)
        streams = [Reading(client, max_tokens=MAX_MODEL_TOKENS - 10) for _ in range(2)]
        server.send(signal.SIGKILL)
        for stream in streams:
            check_one_end(stream.result(), UnavailableError)
        with pytest.raises(UnavailableError):
            client.generate("x", max_tokens=1)
        assert server.wait() == -signal.SIGKILL
    with serving(place) as (server, client):
        assert client.generate("Hi", max_tokens=8, temperature=0.0).text == before.text
        assert [line for line in server.lines if "is_cached=true" in line]
        assert not [line for line in server.lines if "is_cached=false" in line or "entry" in line]


def test_an_engine_that_fails_ends_every_request_turns_health_and_exits_with_70(
    place: Place,
) -> None:
    with serving(place, prefix=(*BROKEN, "400")) as (server, client):
        with grpc.insecure_channel(server.target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            health = [next(watch).status]
            streams = [Reading(client, max_tokens=6000) for _ in range(3)]
            for stream in streams:
                events = stream.result()
                check_one_end(events, ServerError)
                assert isinstance(events[-1], ServerError)
                assert events[-1].reason == "ENGINE_DEAD"
                assert "planted" not in str(events[-1]), "the log has the cause, not the client"
            health.append(next(watch).status)
            watch.cancel()
        assert health == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        ]
        assert server.wait() == exit_codes.INTERNAL
        assert [line for line in server.lines if "planted" in line]


def test_a_port_that_is_taken_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_command("serve", "no/such/model", "--port", str(port))
    assert done.code == exit_codes.USAGE
    assert f"server.port {port}: cannot be bound" in done.error_line


def test_a_pool_larger_than_the_machine_is_refused_with_both_numbers(place: Place) -> None:
    done = run_command("serve", *place.options, "--port", "0", "--set", "kv.num_pages=2000000000",
                       "--log-level", "error")  # fmt: skip
    assert done.code == exit_codes.REFUSED
    wanted, there_is = map(int, re.findall(r"\d{9,}", done.error_line))
    assert wanted > there_is > 0
    assert "lower kv.num_pages" in done.error_line


def test_a_broken_checkpoint_ends_the_start_with_one_line(place: Place, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in place.model.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    options = (str(model), "--config", str(place.config), *place.cache_option)
    done = run_command("serve", *options, "--port", "0", "--log-level", "error")
    assert done.code == exit_codes.REFUSED
    assert "model.safetensors" in done.error_line
