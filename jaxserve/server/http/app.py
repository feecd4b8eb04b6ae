"""The ASGI application: which path is answered by what."""

from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from jaxserve.errors import HttpError
from jaxserve.server.door import Door
from jaxserve.server.edge import REQUEST_ID_KEY
from jaxserve.server.http.call import Call
from jaxserve.server.http.edge import UNKNOWN, Endpoint, Handler
from jaxserve.server.http.facts import Facts
from jaxserve.server.http.generation import GenerationEndpoint
from jaxserve.server.http.page import Page
from jaxserve.server.openai import ENDPOINTS
from jaxserve.server.tracing import TRACE_HEADERS, Operation

READ: Final = ("GET", "HEAD")
WRITE: Final = ("POST",)


class App:
    """The application, and what it owns besides the door."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._facts = Facts(door)
        self.asgi = self._build()

    def close(self) -> None:
        """Gives up what it owns."""
        self._facts.close()

    def _build(self) -> ASGIApp:
        facts, page = self._facts, Page(self._door)
        routes = [
            *(
                self._route(
                    url,
                    GenerationEndpoint(self._door, url),
                    WRITE,
                    operation="chat" if url == "/v1/chat/completions" else "text_completion",
                )
                for url in ENDPOINTS
            ),
            self._route("/v1/models", facts.list_models, READ),
            self._route("/v1/models/{model:path}", facts.get_model, READ),
            self._route("/tokenize", facts.tokenize, WRITE),
            self._route("/detokenize", facts.detokenize, WRITE),
            self._route("/tokenizer_info", facts.tokenizer_info, READ),
            self._route("/metrics", facts.metrics, READ),
            self._route("/load", page.load, READ),
            self._route("/health", facts.health, READ, is_free=True),
            self._route("/ready", facts.ready, READ, is_free=True),
            self._route("/openapi.json", facts.openapi, READ, is_free=True),
        ]
        if self._door.config.server.page:
            routes.append(self._route("/", page.show, READ, is_free=True))
        unknown = Endpoint(self._door, _refuse_path, route=UNKNOWN)
        app: ASGIApp = Router(routes, default=unknown, redirect_slashes=False)
        origins = self._door.config.server.http_cors_origins
        if not origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=[*READ, *WRITE],
            allow_headers=["authorization", "content-type", REQUEST_ID_KEY, *TRACE_HEADERS],
            expose_headers=[REQUEST_ID_KEY, "retry-after", "retry-after-ms"],
        )

    def _route(
        self,
        path: str,
        handler: Handler,
        methods: tuple[str, ...],
        *,
        is_free: bool = False,
        operation: Operation | None = None,
    ) -> Route:
        endpoint = Endpoint(
            self._door,
            handler,
            route=path.replace(":path", ""),
            methods=methods,
            is_free=is_free,
            operation=operation,
        )
        return Route(path, endpoint)


async def _refuse_path(call: Call) -> None:
    raise HttpError(
        f"there is no {call.path[:64]!r} here; /openapi.json lists what there is",
        status=404,
        reason="NOT_FOUND",
    )
