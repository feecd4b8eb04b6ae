"""The one engine thread and the streams it feeds. Imports no jax until an engine is loaded."""

from jaxserve.engine.completion import Choice, Completion, gather
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import (
    ChoiceFinished,
    Delta,
    Event,
    ExecutionInfo,
    Finished,
    Started,
    Timings,
    Usage,
)
from jaxserve.engine.in_order import run_in_order
from jaxserve.engine.intake import EngineState
from jaxserve.engine.served_model import ServedModel
from jaxserve.engine.stream import Stream
from jaxserve.text.tokenizer import Tokenizer

__all__ = [
    "Choice",
    "ChoiceFinished",
    "Completion",
    "Delta",
    "Engine",
    "EngineState",
    "Event",
    "ExecutionInfo",
    "Finished",
    "ServedModel",
    "Started",
    "Stream",
    "Timings",
    "Tokenizer",
    "Usage",
    "gather",
    "run_in_order",
]
