"""The life of a serving process: listen, load, serve, drain, leave with an exit code."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import uvloop

from jaxserve.config import Config
from jaxserve.engine import Engine, EngineState
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.app import Server

logger = logging.getLogger(__name__)

FLUSH_S: Final = 5.0  # for the last messages to leave, once every request has ended
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def serve(
    load_engine: Callable[[], Engine],
    config: Config,
    metrics: Metrics,
    *,
    read_config: Callable[[], Config] | None = None,
) -> int:
    """Serves until a signal, a call of Drain or a failure; returns the process's exit code.

    The port is open at once, so that the process can be probed while `load_engine` works. The first
    SIGTERM or SIGINT refuses new requests and lets running ones end for `server.drain_timeout_s`;
    the rest end with a status. A second signal ends them now. Both exit with 0, a failed engine
    with 1. Afterwards signals are ignored: it is the last thing that a process does. SIGHUP has
    keys, tenants and certificates read again, where there are any.

    Args:
      load_engine: called in a thread; its engine is started here if it is not yet.
      metrics: those of that engine.
      read_config: reads the configuration again, for its tenants; None leaves them as they are.

    Raises:
      ConfigError: an address cannot be bound or may not be, or keys or certificates are wrong.
      JaxserveError: what `load_engine` raised.
    """

    async def run() -> int:
        # made inside: grpc binds to the loop
        return await Service(load_engine, config, metrics, read_config=read_config).run()

    try:
        return asyncio.run(run(), loop_factory=uvloop.new_event_loop)
    finally:
        for number in SIGNALS:  # the exit code is decided: one that comes now changes nothing
            signal.signal(number, signal.SIG_IGN)


class Service:
    """One server, one engine, and the signals that came.

    Attributes:
      server: has its port once `run` has begun to listen.
    """

    def __init__(
        self,
        load_engine: Callable[[], Engine],
        config: Config,
        metrics: Metrics,
        *,
        read_config: Callable[[], Config] | None = None,
    ) -> None:
        """Args are those of `serve`.

        Raises:
          ConfigError: keys or certificates are missing or wrong.
        """
        self._load_engine = load_engine
        self.server = Server(config, metrics, read_config=read_config)
        self.server.door.drain = self._on_drain
        self._grace_s = config.server.drain_timeout_s
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # that nobody waits for

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if self.server.door.credentials.has_sources:  # else it ends the process, as it does others
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            await self.server.start()
            return await self._serve(await self._load())
        finally:
            await self.server.stop(0.0)  # the loop takes its handlers back when it is closed

    def _on_signal(self, number: int) -> None:
        logger.info("signal came signal=%s", signal.Signals(number).name)
        event = self._second_signal if self._first_signal.is_set() else self._first_signal
        event.set()

    def _on_hangup(self) -> None:
        logger.info("signal came signal=SIGHUP")
        self._keep(asyncio.create_task(self._reload()))

    async def _reload(self) -> None:
        with contextlib.suppress(ConfigError):  # it is in the log
            await asyncio.to_thread(self.server.door.credentials.reload)

    def _on_drain(self, grace_s: float | None) -> None:
        """An administrator asks; a later one can only cut short what an earlier one began."""
        if not self._first_signal.is_set():
            self._grace_s = self._grace_s if grace_s is None else grace_s
            self._first_signal.set()
            return
        engine = self.server.door.find_engine()
        if grace_s is not None and engine is not None:
            self._keep(asyncio.create_task(asyncio.to_thread(engine.drain, grace_s)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> Engine:
        """Returns the engine; a signal that comes before it ends the process."""
        loader = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-load")
        loaded = asyncio.get_running_loop().run_in_executor(loader, self._load_engine)
        if not await _is_first(loaded, self._first_signal.wait()):
            await self.server.stop(0.0)
            logging.shutdown()
            os._exit(0)  # an ordinary exit would wait for the compiler, which nothing can stop
        return await loaded

    async def _serve(self, engine: Engine) -> int:
        if engine.state is EngineState.STARTING:
            engine.start()
        self.server.attach(engine)
        logger.info("serving model=%s address=%s", engine.model.name, self.server.address)
        ended = asyncio.create_task(self.server.wait_ended())
        if not await _is_first(ended, self._first_signal.wait()):
            await self._drain(engine)
        await ended
        await _is_first(asyncio.create_task(self.server.stop(FLUSH_S)), self._second_signal.wait())
        return 1 if engine.state is EngineState.FAILED else 0

    async def _drain(self, engine: Engine) -> None:
        timeout_s = self._grace_s
        logger.info("draining timeout_s=%.1f", timeout_s)
        drained = asyncio.create_task(asyncio.to_thread(engine.drain, timeout_s))
        if not await _is_first(drained, self._second_signal.wait()):
            await asyncio.to_thread(engine.stop)
        await drained


async def _is_first(wanted: Awaitable[object], other: Coroutine[Any, Any, object]) -> bool:
    """Waits for one of two; returns whether `wanted` is done, and gives `other` up."""
    first, second = asyncio.ensure_future(wanted), asyncio.ensure_future(other)
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    return first.done()
