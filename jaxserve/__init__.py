"""jaxserve: a measured serving runtime for language models on one node, in Python on JAX."""

from typing import TYPE_CHECKING

from jaxserve.request import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Brings `LLM` when it is asked for: `import jaxserve` stays light."""
    if name == "LLM":
        from jaxserve.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
