"""A jaxserve server over gRPC as a target."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Final, Literal

import grpc

from jaxserve.client import AsyncClient, Delta, Finish, ServerError, Tls
from jaxserve.measure.server_metrics import Snapshot
from jaxserve.measure.targets.base import (
    Ask,
    End,
    Levels,
    Message,
    TargetError,
    TargetFacts,
    read_end,
)
from jaxserve.measure.targets.scrape import Scraper, levels_of

# Codes with which a server turns a request away before it does anything for it.
REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
DESCRIBE_TIMEOUT_S: Final = 60.0


class GrpcTarget:
    """Replays against one address, over one channel; token ids and usage come from the server."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        metrics_url: str | None = None,
        tls: Tls | None = None,
        key: str = "",
    ) -> None:
        """Args:
        address: "host:port".
        model: the name to ask for; "" is the one that is served.
        metrics_url: of the server's metrics over HTTP; None is none.
        tls: None is plaintext.
        key: for a server that asks for one; empty for none.
        """
        self._address = address
        self._client = AsyncClient(address, tls=tls, key=key)
        self._model = model
        self._scraper = None if metrics_url is None else Scraper(metrics_url)

    async def describe(self) -> TargetFacts:
        try:
            models = await self._client.models(timeout_s=DESCRIBE_TIMEOUT_S)
        except ServerError as error:
            raise TargetError(self._explain(error, has_begun=False), outcome="refused") from error
        found = next((model for model in models if self._model in ("", model.name)), None)
        if found is None:
            names = ", ".join(model.name for model in models)
            raise TargetError(
                f"model {self._model!r} is not served there, but {names}", outcome="refused"
            )
        bos = frozenset() if found.bos_token_id is None else frozenset({found.bos_token_id})
        return TargetFacts(
            backend="jaxserve gRPC",
            model=found.name,
            vocab_size=found.vocab_size,
            special_ids=bos | frozenset(found.eos_token_ids),
            max_model_tokens=found.max_model_tokens,
        )

    async def stream(self, ask: Ask, *, left_s: float | None) -> AsyncGenerator[Message | End]:
        has_begun = False
        calls = self._client.stream(
            ask.prompt,
            timeout_s=left_s,
            request_id=ask.request_id,
            model=self._model,
            priority=ask.priority,
            include_token_ids=True,
            **ask.sampling,  # type: ignore[arg-type]  # names and types are the client's
        )
        try:
            async with contextlib.aclosing(calls) as events:
                async for event in events:
                    match event:
                        case Delta():
                            has_begun = True
                            yield Message(
                                num_tokens=len(event.token_ids),
                                has_text=bool(event.text or event.reasoning or event.tool_calls),
                            )
                        case Finish():
                            yield read_end(event, by="server")
        except ServerError as error:
            outcome = _outcome(error, has_begun=has_begun)
            raise TargetError(self._explain(error, has_begun=has_begun), outcome=outcome) from error
        except LookupError as error:  # no reason of ours, or a message without an event
            raise TargetError(
                f"the stream is not jaxserve's: its end has the reason {error}", outcome="failed"
            ) from error

    async def read_metrics(self) -> Snapshot | None:
        return await self._scraper.read() if self._scraper else None

    async def read_levels(self) -> Levels:
        return levels_of(await self.read_metrics())

    def _explain(self, error: ServerError, *, has_begun: bool) -> str:
        """Returns what a person is told: an error without a reason did not come from jaxserve."""
        if error.reason:
            return str(error)
        match error.code:
            case grpc.StatusCode.UNAVAILABLE if has_begun:
                return f"the connection to {self._address} was lost"
            case grpc.StatusCode.UNAVAILABLE:
                return (
                    f"no gRPC server answers at {self._address}; is it running, and is the "
                    "address right?"
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return f"the gRPC server at {self._address} is not jaxserve; is the address right?"
            case _:
                return str(error)

    async def close(self) -> None:
        await self._client.close()
        if self._scraper is not None:
            await self._scraper.close()


def _outcome(error: ServerError, *, has_begun: bool) -> Literal["refused", "failed", "timed_out"]:
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "timed_out"
    return "refused" if error.code in REFUSALS and not has_begun else "failed"
