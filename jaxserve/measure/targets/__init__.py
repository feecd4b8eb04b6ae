"""Where a replay is sent: an engine in this process, a gRPC server, or an OpenAI endpoint."""

from jaxserve.measure.targets.base import (
    Ask,
    End,
    Levels,
    Message,
    Sampling,
    Target,
    TargetError,
    TargetFacts,
)

__all__ = ["Ask", "End", "Levels", "Message", "Sampling", "Target", "TargetError", "TargetFacts"]
