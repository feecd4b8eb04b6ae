"""The HTTP endpoint of the metrics: threads of its own, from the first second to the last."""

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Literal, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from jaxserve.config import MetricsSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics, MetricsView

logger = logging.getLogger(__name__)

PATHS: Final = frozenset({"/", "/metrics"})
MAX_SCRAPES: Final = 16  # at once; more wait their turn
PATIENCE_S: Final = 10.0  # a client that has not asked and read by then is given up
MAX_SHARE: Final = 0.05  # of one processor, for making answers
MAX_REST_S: Final = 0.5
ANSWER_DEPENDS_ON: Final = (
    "REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING"
)  # fmt: skip
POLL_S: Final = 0.1  # how soon `close` is seen
OPENMETRICS: Final = "application/openmetrics-text"

_Environ = dict[str, Any]
_Answer = tuple[str, list[tuple[str, str]], bytes]
_App = Callable[[_Environ, Callable[..., Any]], Iterable[bytes]]


class MetricsEndpoint:
    """Serves one engine's metrics until it is closed; a `with` block closes it.

    It shares nothing with the engine but the counters, whose locks are held for an addition.

    Attributes:
      port: the bound one.
    """

    def __init__(self, metrics: Metrics, section: MetricsSection) -> None:
        """Binds and answers from now on.

        Raises:
          ConfigError: the address cannot be bound.
        """
        assert section.port is not None, "no port was asked for"
        self._server = _bind(section)
        self._server.set_app(_only_known_paths(build_metrics_app(metrics, section.prefix)))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="jaxserve-metrics", daemon=True
        )
        self._thread.start()
        host = f"[{section.host}]" if ":" in section.host else section.host
        url = f"http://{host}:{self.port}/metrics"
        logger.info("serving metrics url=%s prefix=%s", url, section.prefix)

    def close(self) -> None:
        """Stops listening, whoever waits; an answer that has begun may still be given."""
        self._server.is_closing = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def serving_metrics(metrics: Metrics, section: MetricsSection) -> Iterator[None]:
    """Serves `metrics` while the block runs, where the configuration asks for it."""
    if section.port is None:
        yield
        return
    with MetricsEndpoint(metrics, section):
        yield


def build_metrics_app(metrics: Metrics, prefix: Literal["jaxserve", "vllm"]) -> _App:
    """Returns a WSGI application that writes the metrics, whatever the path."""
    registry = CollectorRegistry()
    registry.register(MetricsView(metrics, prefix))
    ProcessCollector(registry=registry)
    return _keep_colons(Paced(make_wsgi_app(registry)))


class Paced:
    """Makes answers during a small share of the time only, however many scrapers ask.

    Making one takes some milliseconds of a processor that the model may need too. Each is made
    after its scraper asked, so it is never stale; who waits for the same one shares it.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._turn = threading.Lock()
        self._next_s = 0.0
        self._last: tuple[tuple[str, ...], float, _Answer] | None = None

    def __call__(self, environ: _Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked_s = time.monotonic()
        key = tuple(str(environ.get(name, "")) for name in ANSWER_DEPENDS_ON)
        with self._turn:
            answer = self._find_last(key, asked_s) or self._make(key, environ)
        status, headers, body = answer
        start_response(status, headers)
        return [body]

    def _find_last(self, key: tuple[str, ...], asked_s: float) -> _Answer | None:
        if self._last is None or self._last[0] != key or self._last[1] <= asked_s:
            return None
        return self._last[2]

    def _make(self, key: tuple[str, ...], environ: _Environ) -> _Answer:
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        start: list[Any] = []
        body = b"".join(self._app(environ, lambda *parts: start.extend(parts)))
        answer = (start[0], start[1], body)
        rest_s = (time.thread_time() - begun_cpu_s) * (1 / MAX_SHARE - 1)
        self._next_s = time.monotonic() + min(rest_s, MAX_REST_S)
        self._last = (key, begun_s, answer)
        return answer


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each scrape, a bounded number at once and each for a bounded time.

    Attributes:
      is_closing: nobody waits for room any more.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[Any, ...], family: socket.AddressFamily) -> None:
        self.address_family = family
        self.is_closing = False
        self._room = threading.Semaphore(MAX_SCRAPES)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without asking a name server for the host's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        while not self._room.acquire(timeout=POLL_S):
            if self.is_closing:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        # for all of it: a timeout of the socket is one of each byte, and some send them singly
        cut = threading.Timer(PATIENCE_S, _hang_up, (request,))
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that goes away in the middle is nobody's fault."""
        logger.debug("a scrape failed client=%s", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has gone by itself
        request.shutdown(socket.SHUT_RDWR)


def _bind(section: MetricsSection) -> _Server:
    try:
        infos = socket.getaddrinfo(
            section.host, section.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        return _Server(address, family)
    except OSError as error:
        raise ConfigError(
            f"metrics.host {section.host!r}, metrics.port {section.port}: cannot be bound "
            f"({error.strerror}); is the host an address of this machine, and no other server on "
            "the port? --metrics-port 0 picks a free one"
        ) from error


def _only_known_paths(app: _App) -> _App:
    def answer(environ: _Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] in PATHS:
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"the metrics are at /metrics\n"]

    return answer


def _keep_colons(app: _App) -> _App:
    """Has OpenMetrics keep the colon of vLLM's names: prometheus-client 0.26 writes `vllm_` in the
    samples' lines otherwise (prometheus/client_python#1177)."""

    def answer(environ: _Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if OPENMETRICS in environ.get("HTTP_ACCEPT", ""):
            environ["HTTP_ACCEPT"] = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"
        return app(environ, start_response)

    return answer
