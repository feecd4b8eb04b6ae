"""The one engine thread, and the streams it feeds. Imports no jax; `load_engine` does, when called."""

from jaxserve.engine.engine import Engine
from jaxserve.engine.events import Delta, Event, ExecutionInfo, Finished, Started, Timings, Usage
from jaxserve.engine.intake import EngineState
from jaxserve.engine.served_model import ServedModel
from jaxserve.engine.stream import Stream

__all__ = [
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
    "Usage",
]
