"""The replies as pydantic models: for the API's description, and for tests that hold replies to
them. What is written is made elsewhere, as plain dicts."""

from typing import Literal

import pydantic


class _Reply(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class TokensDetails(_Reply):
    """Of the prompt's tokens."""

    cached_tokens: int


class UsageReply(_Reply):
    """Tokens of all choices together; each prompt's are counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokensDetails


class PromptToken(_Reply):
    """A token that might stand in a prompt's place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
FinishWord = Literal["stop", "length", "tool_calls"]


class CompletionLogprobs(_Reply):
    """Parallel lists; a prompt's first token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionReplyChoice(_Reply):
    """One output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None


class CompletionReply(_Reply):
    """Of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionReplyChoice]
    usage: UsageReply


class TopToken(_Reply):
    """A token that might stand in an output's place."""

    token: str
    logprob: float
    bytes: list[int]


class ContentToken(TopToken):
    """A token of the output."""

    top_logprobs: list[TopToken]


class ChatLogprobs(_Reply):
    """Of the output's tokens."""

    content: list[ContentToken]
    refusal: None


class CalledFunction(_Reply):
    """What is called, with which arguments in JSON."""

    name: str
    arguments: str


class ReplyCall(_Reply):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ReplyMessage(_Reply):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ReplyCall] = []


class ChatReplyChoice(_Reply):
    """One output."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    token_ids: list[int] = []


class ChatReply(_Reply):
    """Of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatReplyChoice]
    usage: UsageReply
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunkChoice(_Reply):
    """More of one output; the prompt's tokens come with its first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionChunk(_Reply):
    """Of a stream of `/v1/completions`. Only the usage's own chunk has no choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageReply | None = None


class CallPieceFunction(_Reply):
    """Its name first, then its arguments in pieces."""

    name: str = ""
    arguments: str


class CallPiece(_Reply):
    """More of one call; its id comes with its first piece."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: CallPieceFunction


class ChatDelta(_Reply):
    """What is new: the role, a piece of one of the others, or, at the end, nothing."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallPiece] = []


class ChatChunkChoice(_Reply):
    """More of one output."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    token_ids: list[int] = []


class ChatChunk(_Reply):
    """Of a stream of `/v1/chat/completions`. Only the usage's own chunk has no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None


class TokenizeReply(_Reply):
    """Of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(_Reply):
    """Of `/detokenize`."""

    prompt: str


class TokenizerInfo(pydantic.BaseModel):
    """Of `/tokenizer_info`: as in a tokenizer_config.json."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None = None


class ModelReply(_Reply):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(_Reply):
    """Of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelReply]


class StatusReply(_Reply):
    """What the engine is doing."""

    status: Literal["starting", "serving", "draining", "stopped", "failed"]


class ErrorFacts(_Reply):
    """What was wrong.

    `code` is stable; `param` is the field at fault, null where it is not about one.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(_Reply):
    """Of every refusal."""

    error: ErrorFacts
