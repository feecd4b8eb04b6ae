"""The endpoint: what it answers, to whom, and that nobody disturbs it or the engine through it."""

import concurrent.futures
import contextlib
import http.client
import logging
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

import jaxserve.engine.start
from jaxserve.cli.main import main
from jaxserve.config import MetricsSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server import metrics_http
from jaxserve.server.metrics_http import MAX_SCRAPES, MetricsEndpoint, serving_metrics
from tests.engines import ask, build_engine, gather, serve
from tests.fakes import say

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.model_name = "tiny"
    metrics.output_tokens.inc(7)
    return metrics


@pytest.fixture
def endpoint(metrics: Metrics) -> Iterator[MetricsEndpoint]:
    with MetricsEndpoint(metrics, MetricsSection(port=0)) as endpoint:
        yield endpoint


def scrape(port: int, path: str = "/metrics", **headers: str) -> tuple[str, str]:
    """Returns the content type and the text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request) as response:
        return response.headers["Content-Type"], response.read().decode()


def parse(reader: Callable[[str], Iterable[Metric]], text: str) -> dict[str, Metric]:
    return {family.name: family for family in reader(text)}


def read(port: int, sample: str) -> float:
    _, text = scrape(port)
    return next(s.value for f in read_text(text) for s in f.samples if s.name == sample)


def test_it_serves_text_and_the_process_too(endpoint: MetricsEndpoint) -> None:
    kind, text = scrape(endpoint.port)
    assert kind.startswith("text/plain; version=0.0.4")
    families = parse(read_text, text)
    assert families["jaxserve_output_tokens"].samples[0].value == 7
    if sys.platform == "linux":
        assert families["process_resident_memory_bytes"].samples[0].value > 1e6


def test_openmetrics_is_served_to_who_asks_for_it(endpoint: MetricsEndpoint) -> None:
    kind, text = scrape(endpoint.port, Accept=f"{OPENMETRICS},text/plain;version=0.0.4;q=0.5")
    assert kind.startswith("application/openmetrics-text")
    families = parse(read_openmetrics, text)
    assert families["jaxserve_output_tokens"].samples[0].value == 7


@pytest.mark.parametrize("accept", ["*/*", OPENMETRICS, f"{OPENMETRICS}; escaping=underscores"])
def test_vllms_names_keep_their_colon_in_every_format(metrics: Metrics, accept: str) -> None:
    with MetricsEndpoint(metrics, MetricsSection(port=0, prefix="vllm")) as endpoint:
        kind, text = scrape(endpoint.port, Accept=accept)
    assert ("openmetrics" in kind) == ("openmetrics" in accept)
    families = parse(read_openmetrics if "openmetrics" in kind else read_text, text)
    (tokens,) = families["vllm:generation_tokens"].samples
    assert (tokens.name, tokens.value) == ("vllm:generation_tokens_total", 7)
    assert not any(name.startswith("vllm_") for name in families)


def test_one_family_can_be_asked_for(metrics: Metrics) -> None:
    with MetricsEndpoint(metrics, MetricsSection(port=0, prefix="vllm")) as endpoint:
        _, text = scrape(endpoint.port, "/metrics?name[]=vllm:generation_tokens_total")
    assert [family.name for family in read_text(text)] == ["vllm:generation_tokens"]


def test_other_paths_and_methods_are_refused(endpoint: MetricsEndpoint) -> None:
    for method, path, status in (("GET", "/generate", 404), ("POST", "/metrics", 405)):
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port)
        connection.request(method, path)
        assert connection.getresponse().status == status
        connection.close()
    assert read(endpoint.port, "jaxserve_output_tokens_total") == 7


def test_a_port_that_is_taken_is_one_line(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    section = MetricsSection(port=endpoint.port)
    with pytest.raises(
        ConfigError, match=f"metrics.port {endpoint.port}: cannot be bound"
    ) as error:
        MetricsEndpoint(metrics, section)
    assert "\n" not in str(error.value)


def test_a_host_of_another_machine_is_one_line(metrics: Metrics) -> None:
    with pytest.raises(ConfigError, match=r"metrics.host '192\.0\.2\.1'.*cannot be bound"):
        MetricsEndpoint(metrics, MetricsSection(port=0, host="192.0.2.1"))


def test_serve_ends_before_it_loads_where_the_port_is_taken(
    endpoint: MetricsEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load_engine(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    assert main(["serve", "--port", "0", "--metrics-port", str(endpoint.port)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(
        f"jaxserve: error: metrics.host '127.0.0.1', metrics.port {endpoint.port}"
    )


def test_the_port_that_was_picked_is_logged(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        with MetricsEndpoint(metrics, MetricsSection(port=0)) as endpoint:
            assert f"url=http://127.0.0.1:{endpoint.port}/metrics" in caplog.text


def test_nothing_is_served_where_no_port_is_set(metrics: Metrics) -> None:
    before = threading.active_count()
    with serving_metrics(metrics, MetricsSection()):
        assert threading.active_count() == before


def test_the_port_is_free_again_afterwards(metrics: Metrics) -> None:
    with MetricsEndpoint(metrics, MetricsSection(port=0)) as endpoint:
        scrape(endpoint.port)
    with MetricsEndpoint(metrics, MetricsSection(port=endpoint.port)) as again:
        scrape(again.port)
    with pytest.raises(urllib.error.URLError):
        scrape(again.port)


def test_scrapes_under_load_all_succeed_and_change_no_output() -> None:
    """K5: and what they read only rises."""
    engine, runner = build_engine(script=say({None: b"abcdefghij" * 9}))
    with serve(engine, runner), MetricsEndpoint(engine.metrics, MetricsSection(port=0)) as endpoint:
        is_over = threading.Event()

        def work(n: int) -> int:
            num_done = 0
            while not is_over.is_set():
                output = gather(engine.submit(ask((n, num_done % 200), max_tokens=20)))
                assert output.text == "abcdefghijabcdefghij"
                num_done += 1
            return num_done

        def look() -> None:
            seen = [read(endpoint.port, "jaxserve_output_tokens_total") for _ in range(10)]
            assert seen == sorted(seen)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            workers = [pool.submit(work, n) for n in range(4)]
            for scraper in [pool.submit(look) for _ in range(4)]:
                scraper.result()
            is_over.set()
            num_done = sum(worker.result() for worker in workers)
        assert read(endpoint.port, "jaxserve_output_tokens_total") == 20 * num_done > 0


class Scrapes:
    """An endpoint's app that counts its answers, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cpu_s: float) -> None:
        self.now_s = 100.0
        self.made_at: list[float] = []
        self.num_looks = 0
        self._cpu_s = cpu_s
        monkeypatch.setattr(metrics_http, "time", self)
        self.paced = metrics_http.Paced(self._make)

    def _make(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        self.made_at.append(self.now_s)
        start_response("200 OK", [("X", environ["QUERY_STRING"])])
        return [b"%d" % len(self.made_at)]

    def monotonic(self) -> float:
        self.num_looks += 1
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def thread_time(self) -> float:
        return len(self.made_at) * self._cpu_s

    def ask(self, query: str = "") -> tuple[str, bytes]:
        started: list[Any] = []
        body = self.paced({"QUERY_STRING": query}, lambda *parts: started.extend(parts))
        return started[1][0][1], b"".join(body)


def test_answers_take_a_twentieth_of_the_time_and_are_made_after_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scrapes = Scrapes(monkeypatch, cpu_s=0.01)
    assert [scrapes.ask() for _ in range(3)] == [("", b"1"), ("", b"2"), ("", b"3")]
    assert scrapes.made_at == pytest.approx([100, 100.19, 100.38])
    scrapes.now_s += 60
    assert scrapes.ask("a") == ("a", b"4")
    assert scrapes.made_at[-1] == pytest.approx(160.38)  # at once
    slow = Scrapes(monkeypatch, cpu_s=7.0)
    slow.ask(), slow.ask()
    assert slow.made_at == pytest.approx([100, 100 + metrics_http.MAX_REST_S])


def test_who_waits_for_the_same_answer_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes = Scrapes(monkeypatch, cpu_s=0.01)
    scrapes.ask()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with scrapes.paced._turn:
            num_looks = scrapes.num_looks
            asked = [pool.submit(scrapes.ask, "a") for _ in range(3)]
            while scrapes.num_looks < num_looks + 3:
                threading.Event().wait(0.001)
        answers = [future.result() for future in asked]
    assert answers == [("a", b"2")] * 3
    assert scrapes.ask("a") == ("a", b"3"), "who asks later gets a later one"


def test_who_waits_for_another_answer_gets_that(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes = Scrapes(monkeypatch, cpu_s=0.01)
    scrapes.ask()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with scrapes.paced._turn:
            num_looks = scrapes.num_looks
            asked = [pool.submit(scrapes.ask, query) for query in ("a", "b")]
            while scrapes.num_looks < num_looks + 2:
                threading.Event().wait(0.001)
        answers = [future.result() for future in asked]
    assert [query for query, _ in answers] == ["a", "b"]
    assert {body for _, body in answers} == {b"2", b"3"}


def test_clients_that_say_nothing_keep_nobody_out(endpoint: MetricsEndpoint) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(MAX_SCRAPES - 1)
    ]
    try:
        assert read(endpoint.port, "jaxserve_output_tokens_total") == 7
    finally:
        for connection in silent:
            connection.close()


def drip(endpoint: MetricsEndpoint, done: threading.Event) -> contextlib.ExitStack:
    """Takes all the room with clients that send a byte now and then, and never a whole question."""
    stack = contextlib.ExitStack()
    sockets = [
        stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port)))
        for _ in range(MAX_SCRAPES + 4)
    ]

    def send() -> None:
        while not done.wait(0.01):
            for connection in sockets:
                with contextlib.suppress(OSError):  # the endpoint has given it up
                    connection.sendall(b"G")

    sender = threading.Thread(target=send)
    sender.start()
    stack.callback(sender.join)
    stack.callback(done.set)
    return stack


def test_clients_that_send_a_byte_now_and_then_are_given_up_too(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "PATIENCE_S", 0.2)
    with drip(endpoint, threading.Event()):
        assert "jaxserve_output_tokens_total 7.0" in scrape(endpoint.port)[1]


class Room(threading.Semaphore):
    """Says when somebody did not get in."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.is_full = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        has_room = super().acquire(blocking, timeout)
        if not has_room:
            self.is_full.set()
        return has_room


def test_it_closes_at_once_while_all_its_room_is_taken(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "PATIENCE_S", 3600.0)
    endpoint = MetricsEndpoint(metrics, MetricsSection(port=0))
    endpoint._server._room = room = Room(MAX_SCRAPES)
    with drip(endpoint, threading.Event()):
        room.is_full.wait()
        endpoint.close()  # a `close` that waits for one of them never ends
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", endpoint.port))


def test_a_client_that_leaves_in_the_middle_makes_no_noise(
    endpoint: MetricsEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        connection = socket.create_connection(("127.0.0.1", endpoint.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        connection.close()  # with a reset
    for garbage in (b"\0" * 99 + b"\r\n\r\n", b"GET\r\n\r\n", b"X" * 70000 + b"\r\n\r\n"):
        connection = socket.create_connection(("127.0.0.1", endpoint.port))
        connection.sendall(garbage)
        connection.close()
    assert read(endpoint.port, "jaxserve_output_tokens_total") == 7
    assert capfd.readouterr().err == ""


def test_it_answers_while_the_engine_drains_and_after_it_has_stopped() -> None:
    """K6."""
    engine, runner = build_engine()
    with serve(engine, runner), MetricsEndpoint(engine.metrics, MetricsSection(port=0)) as endpoint:
        runner.gate.clear()
        stream = engine.submit(ask("hi", ignore_eos=True))
        next(iter(stream))  # it runs
        drain = threading.Thread(target=engine.drain, args=(600.0,))
        drain.start()
        assert read(endpoint.port, "jaxserve_requests_submitted_total") == 1
        runner.gate.set()
        drain.join()
        for level in ("requests_running", "requests_waiting", "kv_usage_ratio"):
            assert read(endpoint.port, f"jaxserve_{level}") == 0


def test_it_answers_after_the_engine_has_failed() -> None:
    """K3: nothing is shown as running that is not."""

    def fail(_: object) -> None:
        raise RuntimeError("the device is gone")

    engine, runner = build_engine(on_result=fail)
    with serve(engine, runner), MetricsEndpoint(engine.metrics, MetricsSection(port=0)) as endpoint:
        runner.gate.clear()
        streams = [engine.submit(ask((n,))) for n in range(9)]  # more than rows
        runner.gate.set()
        for stream in streams:
            with pytest.raises(Exception, match="engine failed"):
                list(stream)
        engine._thread.join()
        _, text = scrape(endpoint.port)
        values = {s.name: s.value for f in read_text(text) for s in f.samples if not s.labels}
        for level in ("requests_running", "requests_waiting", "waiting_tokens", "kv_usage_ratio",
                      "kv_reserved_bytes", "kv_used_bytes", "kv_stranded_bytes"):  # fmt: skip
            assert values[f"jaxserve_{level}"] == 0, level
        assert engine.metrics.value("requests_finished_total", reason="error_engine_dead") == 9
