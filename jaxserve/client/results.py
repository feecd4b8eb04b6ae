"""What a call gives back, as plain records."""

import dataclasses
from collections.abc import Mapping

from jaxserve.request import FinishReason


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Usage:
    """Tokens of a request, as they are charged."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Timings:
    """Where a request's time went on the server, in seconds.

    Attributes:
      queue_s: until it first ran.
      prefill_s: from then until its first token.
      time_to_first_token_s: the two together.
      decode_s: from its first token until the end.
      compile_s: compilation it waited for; 0 on a warm server.
      delivery_s: from the end until the server wrote its last message. The four phases, queue,
        prefill, decode and delivery, follow each other without a gap.
      delivery_sum_s: each token's time until the transport accepted it, added up.
    """

    queue_s: float
    prefill_s: float
    time_to_first_token_s: float
    decode_s: float
    compile_s: float
    delivery_s: float
    delivery_sum_s: float


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Execution:
    """How the server ran a request; the fields are the proto's."""

    prefill_bucket_tokens: int
    prefill_chunks: int
    padding_fraction: float
    preemptions: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TopLogprob:
    """One of the most likely tokens at a position; the fields are as in `TokenLogprob`."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability by the model's own logits.

    Attributes:
      logprob: natural logarithm; finite.
      rank: its place among all tokens by probability; 1 is the most likely.
      token_bytes: what it stands for; not always whole characters.
      top: the most likely tokens there, most likely first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Start:
    """First of a stream, with the first token.

    Attributes:
      cached_prompt_tokens: of those, computed for earlier requests.
      prompt_logprobs: of the prompt's tokens from the second on; empty unless asked for.
    """

    request_id: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ToolCallDelta:
    """More of one tool call: first its id and name, then its arguments in pieces.

    Attributes:
      index: which call of this choice, from 0.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Delta:
    """More of the output. Text comes in whole characters, so it may lag behind `token_ids`.

    Attributes:
      index: which choice.
      logprobs: of the new tokens; empty unless asked for.
      reasoning, tool_calls: more of those, which are not in `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Finish:
    """The end of a choice; that of the last one ends the stream.

    Attributes:
      matched_stop: with STOP, the string or token id that ended it.
      usage, timings: of the whole request; None but on the last choice's.
      execution: likewise, where it was asked for.
      index: which choice.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage | None
    timings: Timings | None
    execution: Execution | None
    index: int = 0


Event = Start | Delta | Finish


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ToolCall:
    """A whole tool call.

    Attributes:
      arguments_json: a JSON object, as the model wrote it.
    """

    id: str
    name: str
    arguments_json: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Choice:
    """One whole output; the fields are as in `Delta` and `Finish`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Generation:
    """A whole answer. Its own `text`, `token_ids` and so on are the first choice's.

    Attributes:
      choices: by index, at least one.
      prompt_logprobs: as in `Start`.
    """

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    execution: Execution | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        return self.choices[0].matched_stop

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Score:
    """How likely one continuation is.

    Attributes:
      sum_logprob: of its tokens' natural log-probabilities.
      is_greedy: each of its tokens is the most likely one.
      token_logprobs: its tokens, where they were asked for.
    """

    sum_logprob: float
    num_tokens: int
    is_greedy: bool
    token_logprobs: tuple[TokenLogprob, ...]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Scores:
    """The scores of a call's items, in order; context and continuation are prompt tokens."""

    request_id: str
    model: str
    results: tuple[Score, ...]
    usage: Usage


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Tokens:
    """A text or a conversation as token ids.

    Attributes:
      offsets: of each token, [start, end) in the text's characters; empty unless asked for.
      max_model_tokens: most that prompt and output may have together.
    """

    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    max_model_tokens: int


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Model:
    """A served model.

    Attributes:
      default_sampling: its defaults here, by field name.
      tool_parser, reasoning_parser: how those are read from its output; empty where they are not.
    """

    name: str
    architectures: tuple[str, ...]
    max_model_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    weight_dtype: str
    quantization: str
    default_sampling: Mapping[str, object]
    has_chat_template: bool
    tool_parser: str
    reasoning_parser: str


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Health:
    """Whether the process works, and whether it takes requests."""

    is_alive: bool
    is_ready: bool
