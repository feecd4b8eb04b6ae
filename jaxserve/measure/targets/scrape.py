"""Metrics of a server elsewhere, over HTTP."""

from typing import Final

import httpx

from jaxserve.measure.server_metrics import Snapshot
from jaxserve.measure.targets.base import Levels

TIMEOUT_S: Final = 5.0


class Scraper:
    """Reads one address in Prometheus' text format."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, transport=transport)

    async def read(self) -> Snapshot | None:
        """Returns what is there now; None where there is no answer, or another one than metrics."""
        try:
            response = await self._client.get(self._url, headers={"Accept": "text/plain"})
            response.raise_for_status()
            return Snapshot.of_text(response.text)
        except (httpx.HTTPError, ValueError):
            return None

    async def close(self) -> None:
        await self._client.aclose()


def levels_of(snapshot: Snapshot | None) -> Levels:
    if snapshot is None:
        return Levels()
    return Levels(
        running=snapshot.value("requests_running"),
        waiting=snapshot.value("requests_waiting"),
        kv_usage=snapshot.value("kv_usage_ratio"),
        memory_bytes=snapshot.value("process_resident_memory_bytes"),
    )
