"""The objects inside OpenAI bodies: messages, tools, forms of the output, options of a stream."""

from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic


class Part(pydantic.BaseModel):
    """An object in a body. Null is unset in it, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if value is not None}


class TextPart(Part):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Part):
    """What a tool call asks for."""

    name: str
    arguments: str = pydantic.Field(description="JSON, as the model wrote it.")
    parsed_arguments: object = pydantic.Field(
        None, description="The arguments again, left by an SDK's parse; does nothing."
    )


class ToolCall(Part):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = pydantic.Field(None, description="Left from a stream; does nothing.")


class Message(Part):
    """One turn. `developer` is the system's newer name, which templates do not know."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    reasoning_content: str = ""
    reasoning: str = pydantic.Field("", description="Another name of reasoning_content.")
    parsed: object = pydantic.Field(
        None, description="The content again, left by an SDK's parse; does nothing."
    )

    @property
    def text(self) -> str:
        """The content as one text: parts are joined by newlines, as vLLM does."""
        match self.content:
            case None:
                return ""
            case str() as text:
                return text
            case parts:
                return "\n".join(part.text for part in parts)


class Function(Part):
    """A function that the model may call."""

    name: str = pydantic.Field(min_length=1)
    description: str | None = None
    parameters: dict[str, object] | None = pydantic.Field(
        None, description="A JSON Schema of its arguments."
    )
    strict: bool | None = pydantic.Field(
        None,
        description="Arguments always follow the schema where a call is forced by tool_choice; "
        "where the model decides, they are what it wrote.",
    )


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """A function, by its name."""

    name: str


class NamedChoice(Part):
    """A tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Part):
    """What a stream carries besides the output."""

    include_usage: bool = pydantic.Field(
        False, description="A last chunk without choices has the usage."
    )
    continuous_usage_stats: bool = pydantic.Field(
        False, description="Every chunk has the usage so far (vLLM's extra)."
    )
    include_obfuscation: Literal[False] = False


class JsonSchema(Part):
    """A schema that the output must follow; it does so with and without `strict`."""

    name: str = ""
    description: str = ""
    # `schema` is a word of pydantic's own
    schema_: dict[str, object] = pydantic.Field(alias="schema")
    strict: bool = False


class ResponseFormat(Part):
    """The form of the output, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """The form of the output, in vLLM's words: exactly one of these."""

    json_: str | dict[str, object] | None = pydantic.Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str] | None, pydantic.Field(min_length=1)] = None
    grammar: str | None = pydantic.Field(None, description="In Lark's notation.")
    json_object: bool | None = None
