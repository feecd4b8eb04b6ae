"""The OpenAI bodies: JSON in, requests out; results in, JSON out. Neither jax nor gRPC nor HTTP."""

from jaxserve.server.openai.bodies import ENDPOINTS, ChatBody, CompletionBody, read_body
from jaxserve.server.openai.errors import build_error, http_status
from jaxserve.server.openai.replies import build_reply
from jaxserve.server.openai.requests import Asked, read_request

__all__ = [
    "ENDPOINTS",
    "Asked",
    "ChatBody",
    "CompletionBody",
    "build_error",
    "build_reply",
    "http_status",
    "read_body",
    "read_request",
]
