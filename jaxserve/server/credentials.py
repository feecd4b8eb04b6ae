"""Keys, tenants and certificates as they are in force, and reading them again: all, or none."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from jaxserve.config import Config, TenantsSection
from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.auth import Authenticator
from jaxserve.server.keys_file import Key, find_exposure, read_keys, tenants_of
from jaxserve.server.tls import Certificates

logger = logging.getLogger(__name__)

_Signature = tuple[tuple[int, int, int] | None, ...]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Reloaded:
    """What is in force after a reload."""

    num_keys: int
    num_tenants: int


class Credentials:
    """What the configuration's sections tls, auth and tenants name; any thread.

    Attributes:
      authenticator: follows each reload.
      certificates: likewise; None without TLS.
    """

    def __init__(
        self, config: Config, metrics: Metrics, *, read_config: Callable[[], Config] | None = None
    ) -> None:
        """Args:
          read_config: reads the configuration again, for its tenants; None leaves them as they are.

        Raises:
          ConfigError: a file is missing or wrong.
        """
        self._config = config
        self._metrics = metrics
        self._read_config = read_config
        self._lock = threading.Lock()
        self._signature = self._look()
        self._keys = self._read_keys()
        self._tenants = config.tenants
        self._listeners: list[Callable[[TenantsSection], None]] = []
        self.authenticator = Authenticator(self._keys, metrics=metrics)
        has_tls = config.tls.cert_file is not None
        self.certificates = Certificates(config.tls, metrics) if has_tls else None
        metrics.tenants.add_names(config.tenants.named)

    @property
    def tenants(self) -> TenantsSection:
        """The limits in force."""
        return self._tenants

    @property
    def has_sources(self) -> bool:
        """Whether there is anything to read again."""
        return bool(self._paths()) or self._config.tenants != TenantsSection()

    @property
    def asks_for_nothing(self) -> bool:
        """Whether everyone who can connect may call."""
        has_mtls = self.certificates is not None and self.certificates.asks_for_certificates
        return self.authenticator.is_open and not has_mtls

    def add_listener(self, listener: Callable[[TenantsSection], None]) -> None:
        """Has `listener` called with the tenants' limits, now and after each reload."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._tenants)

    def reload(self) -> Reloaded:
        """Reads everything again and puts it in force.

        Raises:
          ConfigError: something is wrong; then all is as it was.
        """
        with self._lock:
            try:
                self._signature = self._look()
                reloaded = self._reload()
            except ConfigError as error:
                self._metrics.credential_reloads.labels("failed").inc()
                logger.error("credentials stay as they were: %s", error)
                raise
            self._metrics.credential_reloads.labels("ok").inc()
        logger.info(
            "credentials read keys=%d tenants=%d certificate_expires=%s",
            reloaded.num_keys,
            reloaded.num_tenants,
            self.certificates and self.certificates.expires,
        )
        return reloaded

    async def watch(self) -> None:
        """Reloads whenever one of the files has changed; returns at once where it is not to."""
        interval_s = self._config.auth.reload_interval_s
        if not interval_s or not self._paths():
            return
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.reload_if_changed)

    def reload_if_changed(self) -> bool:
        """Reloads where a file has changed since it was last read; an error is in the log.

        Returns whether one had.
        """
        if self._look() == self._signature:
            return False
        try:
            self.reload()
        except ConfigError:
            logger.debug("a changed file is wrong", exc_info=True)
        return True

    def _reload(self) -> Reloaded:
        keys = self._read_keys()
        tenants = self._read_tenants()
        certificates = self.certificates.read() if self.certificates is not None else None
        # nothing fails from here on
        self._keys, self._tenants = keys, tenants
        self.authenticator.replace(keys)
        if self.certificates is not None and certificates is not None:
            self.certificates.use(certificates)
        for listener in self._listeners:
            listener(tenants)
        return Reloaded(num_keys=len(keys or ()), num_tenants=len(tenants_of(keys or ())))

    def _read_keys(self) -> tuple[Key, ...] | None:
        path = self._config.auth.keys_file
        if path is None:
            return None
        keys = read_keys(path)
        if exposure := find_exposure(path):
            logger.warning("auth.keys_file: %s", exposure)
        if not keys:
            logger.warning("auth.keys_file has no keys: every call is refused path=%s", path)
        return keys

    def _read_tenants(self) -> TenantsSection:
        if self._read_config is None:
            return self._config.tenants
        config = self._read_config()
        kept = self._config.model_copy(update={"tenants": config.tenants})
        if config != kept:
            changed = [
                name
                for name in type(config).model_fields
                if getattr(config, name) != getattr(kept, name)
            ]
            logger.warning("a restart is needed for what changed sections=%s", ",".join(changed))
        return config.tenants

    def _paths(self) -> list[Path]:
        tls = self._config.tls
        paths = (self._config.auth.keys_file, tls.cert_file, tls.key_file, tls.client_ca_file)
        return [path for path in paths if path is not None]

    def _look(self) -> _Signature:
        return tuple(_stat(path) for path in self._paths())


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
