"""`[model]` and `[sampling]`: what is served, and how it writes where nobody asks."""

from pathlib import Path
from typing import Literal

import pydantic

from jaxserve.config.section import Section


class ModelSection(Section):
    """The model as it is served."""

    dtype: Literal["auto", "float32", "bfloat16"] = pydantic.Field(
        "auto",
        description="Weights and activations. auto: bfloat16 where the machine is fast at it.",
    )
    max_model_tokens: int | None = pydantic.Field(
        None, ge=2, description="Longest prompt + output. Unset: min(model, pool)."
    )
    chat_template: Path | None = pydantic.Field(
        None, description="File with a chat template in place of the model's own. Unset: its own."
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "qwen", "qwen_coder"] = (
        pydantic.Field(
            "auto",
            description="How tool calls are read from a chat's output. auto: by the chat "
            "template; none: they stay in the text; qwen is hermes.",
        )
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = pydantic.Field(
        "auto",
        description="How reasoning is read from a chat's output. auto: by the chat template; "
        "none: it stays in the text.",
    )


class SamplingSection(Section):
    """What a request gets that leaves a field out; over the model's own generation configuration.

    Unset: the model's own, else what generation.proto says.
    """

    temperature: float | None = pydantic.Field(
        None, ge=0, le=1e6, description="Up to 1e-5 the most likely token is always taken."
    )
    top_p: float | None = pydantic.Field(
        None, gt=0, le=1, description="Smallest set of tokens with this probability; 1 is off."
    )
    top_k: int | None = pydantic.Field(
        None, ge=0, lt=1 << 32, description="So many of the most likely tokens; 0 is off."
    )
    min_p: float | None = pydantic.Field(
        None, ge=0, le=1, description="Least share of the most likely token's; 0 is off."
    )
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2, description="0 is off.")
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2, description="0 is off.")
    repetition_penalty: float | None = pydantic.Field(
        None, ge=1e-6, le=1e6, description="1 is off."
    )

    def as_params(self) -> dict[str, float | int]:
        """Returns what is set, by `SamplingParams` field name."""
        return self.model_dump(exclude_none=True)
