"""What every front end shares: the engine, who may call, how many calls are open."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from jaxserve.config import Config
from jaxserve.engine import Engine
from jaxserve.errors import NotServingError
from jaxserve.metrics import Metrics
from jaxserve.server.auth import Authenticator
from jaxserve.server.credentials import Credentials
from jaxserve.server.open_calls import OpenCalls
from jaxserve.server.tls import Certificates
from jaxserve.server.tracing import Tracing

NUM_THREADS: Final = 4  # that read and tokenize long requests
NUM_FORM_THREADS: Final = 4  # where requests wait until their grammars are compiled


class Door:
    """One of these for a process; each front end (gRPC, HTTP) is given it.

    Attributes:
      credentials: keys, tenants and certificates in force.
      open_calls: of all front ends together; for the event loop they run on.
      threads: for work that would hold up the event loop.
      form_threads: for requests whose output has a form: a stranger's grammar may take seconds,
        which nobody else shall wait.
      drain: begins to end the process as SIGTERM does, within a grace in seconds, or as the
        configuration says for None; None where nobody listens.
      tracing: makes spans of calls; None where that is off.
      started_s: when the process came up, in seconds since 1970.
    """

    def __init__(
        self, config: Config, metrics: Metrics, *, read_config: Callable[[], Config] | None = None
    ) -> None:
        """Args:
          read_config: see `Credentials`.

        Raises:
          ConfigError: keys or certificates are missing or wrong, or what tracing needs is not here.
        """
        self.config = config
        self.metrics = metrics
        self.credentials = Credentials(config, metrics, read_config=read_config)
        self.open_calls = OpenCalls(config.limits, metrics.open_calls)
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jaxserve-text")
        self.form_threads = ThreadPoolExecutor(NUM_FORM_THREADS, thread_name_prefix="jaxserve-form")
        self.drain: Callable[[float | None], None] | None = None
        self.started_s = time.time()
        is_traced = config.tracing.endpoint is not None
        self.tracing = Tracing(config.tracing, metrics) if is_traced else None
        self._engine: Engine | None = None

    @property
    def authenticator(self) -> Authenticator:
        return self.credentials.authenticator

    @property
    def certificates(self) -> Certificates | None:
        """Those of the listeners; None where they are plaintext."""
        return self.credentials.certificates

    def attach(self, engine: Engine) -> None:
        """Has this engine be the one that is served, within its tenants' limits."""
        self.credentials.add_listener(engine.quotas.set_limits)
        self._engine = engine

    def find_engine(self) -> Engine | None:
        return self._engine

    def find_model(self) -> str:
        """Returns the served model's name; empty while it is loaded."""
        return self._engine.model.name if self._engine else ""

    def get_engine(self) -> Engine:
        """Returns the engine, in whatever state it is.

        Raises:
          NotServingError: it is still being loaded.
        """
        if self._engine is None:
            raise NotServingError("the model is loading; try again later")
        return self._engine

    def close(self) -> None:
        """Lets the threads end when their work is done."""
        if self.tracing is not None:
            self.tracing.end()
        self.threads.shutdown(wait=False)
        self.form_threads.shutdown(wait=False)
