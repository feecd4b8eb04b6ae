"""From an authorization header to the tenant whose key it holds; for every door."""

import dataclasses
import datetime
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Final

from jaxserve.errors import UnauthenticatedError
from jaxserve.metrics import Metrics
from jaxserve.server.keys_file import Key, digest

logger = logging.getLogger(__name__)

SCHEME: Final = "bearer"
MAX_HEADER_LEN: Final = 4096
# One text for all: it must not tell a wrong key from one that was revoked or has expired.
REFUSED: Final = (
    "a valid key is needed: send `authorization: Bearer KEY`; it may be missing, wrong, revoked or "
    "expired"
)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Tenant:
    """Who calls, as the server derived it from the credentials.

    Attributes:
      name: "" where no keys are asked for: all callers are one tenant then.
      key_id: which of its keys; "" likewise.
    """

    name: str
    key_id: str = ""


ANONYMOUS: Final = Tenant(name="")


class Authenticator:
    """Knows the keys in force; any thread.

    It takes the same time for every key that is wrong. Keys are found by a keyed digest of their
    digest, so that how near a guess comes to an entry of the table depends on a secret of this
    process; and what is found is compared in constant time.
    """

    def __init__(
        self,
        keys: Iterable[Key] | None,
        *,
        metrics: Metrics,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        """Args:
        keys: None asks for no key.
        """
        self._metrics = metrics
        self._now = now
        self._secret = secrets.token_bytes(32)
        self._nobody = Key(tenant="nobody", sha256=secrets.token_hex(32))
        self._keys: dict[bytes, Key] | None = None
        self._told_expired: set[str] = set()
        self.replace(keys)

    @property
    def is_open(self) -> bool:
        """Whether everyone is let in."""
        return self._keys is None

    @property
    def num_keys(self) -> int:
        return len(self._keys or ())

    def replace(self, keys: Iterable[Key] | None) -> None:
        """Has these keys be in force from the next call on."""
        self._keys = None if keys is None else {self._place(key.sha256): key for key in keys}

    def authenticate(self, authorization: str | None) -> Tenant:
        """Returns whose key it is.

        Args:
          authorization: the header's value, `Bearer KEY`; None where there is none.

        Raises:
          UnauthenticatedError: there is no valid key in it; the same whatever is wrong.
        """
        keys = self._keys  # one table for the whole call
        if keys is None:
            return ANONYMOUS
        presented = digest(_find_key(authorization))
        key = keys.get(self._place(presented), self._nobody)
        is_known = hmac.compare_digest(key.sha256, presented)
        if is_known and not key.is_expired(self._now()):
            return Tenant(name=key.tenant, key_id=key.id)
        if is_known and key.id not in self._told_expired:
            self._told_expired.add(key.id)  # once: a client may try for ever
            logger.warning("a key has expired key_id=%s tenant=%s", key.id, key.tenant)
        reason = "expired" if is_known else "unknown" if authorization else "missing"
        self._metrics.auth_failures.labels(reason).inc()
        raise UnauthenticatedError(REFUSED)

    def _place(self, sha256: str) -> bytes:
        return hmac.digest(self._secret, sha256.encode(), "sha256")


def _find_key(authorization: str | None) -> str:
    """Returns the key of a header; of one that has none, a text that is no key."""
    if authorization is None or len(authorization) > MAX_HEADER_LEN:
        return ""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == SCHEME else ""
