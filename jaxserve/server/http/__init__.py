"""The HTTP front end: OpenAI's API, its health and its metrics, on the event loop of gRPC's."""

from jaxserve.server.http.listener import HttpServer

__all__ = ["HttpServer"]
