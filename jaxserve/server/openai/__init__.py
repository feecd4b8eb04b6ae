"""The OpenAI bodies: JSON in, requests out; results in, JSON out. Neither jax nor gRPC nor HTTP."""

from jaxserve.server.openai.bodies import ENDPOINTS, ChatBody, CompletionBody, read_body
from jaxserve.server.openai.conversation import open_chat, read_asked
from jaxserve.server.openai.errors import build_error, http_status
from jaxserve.server.openai.replies import WholeReply, build_reply
from jaxserve.server.openai.requests import Asked, check_model, read_request
from jaxserve.server.openai.writer import ReplyWriter

__all__ = [
    "ENDPOINTS",
    "Asked",
    "ChatBody",
    "CompletionBody",
    "ReplyWriter",
    "WholeReply",
    "build_error",
    "build_reply",
    "check_model",
    "http_status",
    "open_chat",
    "read_asked",
    "read_body",
    "read_request",
]
