"""A typed client of jaxserve's gRPC services, for asyncio and for threads. Imports no jax.

    with Client("127.0.0.1:50051") as client:
        client.wait_ready(timeout_s=60)
        print(client.generate("The capital of France is", max_tokens=8).text)

An error of the server is a `ServerError`; its tree is drawn in `client/errors.py`.
"""

from jaxserve.client.aio import AsyncClient
from jaxserve.client.blocking import Client
from jaxserve.client.errors import (
    BadRequestError,
    CallCancelledError,
    CallDeadlineError,
    ConflictError,
    NotFoundError,
    NotSupportedError,
    OverloadedError,
    PermissionDeniedError,
    PreconditionError,
    ServerError,
    ServerFaultError,
    UnauthenticatedError,
    UnavailableError,
)
from jaxserve.client.requests import GenerateOptions, ScoreItem
from jaxserve.client.results import (
    Choice,
    Delta,
    Event,
    Execution,
    Finish,
    Generation,
    Health,
    Model,
    Score,
    Scores,
    Start,
    Timings,
    TokenLogprob,
    Tokens,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from jaxserve.client.transport import Tls
from jaxserve.request import ChatMessage, ChatPrompt, FinishReason, StructuredOutput

__all__ = [
    "AsyncClient",
    "BadRequestError",
    "CallCancelledError",
    "CallDeadlineError",
    "ChatMessage",
    "ChatPrompt",
    "Choice",
    "Client",
    "ConflictError",
    "Delta",
    "Event",
    "Execution",
    "Finish",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "Health",
    "Model",
    "NotFoundError",
    "NotSupportedError",
    "OverloadedError",
    "PermissionDeniedError",
    "PreconditionError",
    "Score",
    "ScoreItem",
    "Scores",
    "ServerError",
    "ServerFaultError",
    "Start",
    "StructuredOutput",
    "Timings",
    "Tls",
    "TokenLogprob",
    "Tokens",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
