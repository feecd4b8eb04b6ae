"""jaxserve: a measured serving runtime for language models on one node, in Python on JAX."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.llm import LLM
    from jaxserve.request import SamplingParams, StructuredOutput

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "StructuredOutput", "__version__"]


def __getattr__(name: str) -> object:
    """Brings a name when it is asked for: `import jaxserve` stays light."""
    if name == "LLM":
        from jaxserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jaxserve.request import SamplingParams

        return SamplingParams
    if name == "StructuredOutput":
        from jaxserve.request import StructuredOutput

        return StructuredOutput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
