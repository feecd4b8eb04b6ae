"""The page at `/`, and the figures that it shows at `/load`."""

import time
from collections.abc import Callable
from typing import Final

from jaxserve.server.door import Door
from jaxserve.server.http.call import Call
from jaxserve.server.http.reply import Reply
from jaxserve.server.page import build_document, build_load_reply

KEPT_S: Final = 0.25  # how old the figures may be: however many look, they are gathered so seldom
_SAFE: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Page:
    """The document, and the latest figures of its server."""

    def __init__(self, door: Door, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._door = door
        self._clock = clock
        self._begun_s = clock()
        document = build_document()
        headers = {
            "content-security-policy": document.policy,
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "x-frame-options": "DENY",
            "cache-control": "no-cache",
        }
        self._document = Reply(
            body=document.body, content_type="text/html; charset=utf-8", headers=_SAFE | headers
        )
        self._load: tuple[float, Reply] | None = None

    async def show(self, call: Call) -> None:
        await call.reply(self._document)

    async def load(self, call: Call) -> None:
        now_s = self._clock()
        if self._load is None or now_s - self._load[0] >= KEPT_S:
            self._load = now_s, self._gather(now_s)
        await call.reply(self._load[1])

    def _gather(self, now_s: float) -> Reply:
        reply = build_load_reply(
            self._door.metrics, self._door.find_engine(), uptime_s=now_s - self._begun_s
        )
        body = reply.model_dump_json().encode()
        return Reply(body=body, headers=_SAFE | {"cache-control": "no-store"})
