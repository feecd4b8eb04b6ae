"""A request, its sequences, and what the scheduler knows of them. Host only."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Literal

from jaxserve.errors import JaxserveError
from jaxserve.identity import CacheIdentity


class FinishReason(enum.Enum):
    """Why a sequence ended without an error. TOOL_CALLS is the doors' word alone, for an EOS after
    a tool call: the engine does not know what a text means."""

    EOS = "eos"
    STOP = "stop"  # a stop string or a stop token id
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # passed while decoding: the output so far stands
    TOOL_CALLS = "tool_calls"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Checked by `engine/limits.py`, never here.

    Attributes:
      temperature: ≥ 0; ≤ 1e-5 is greedy.
      top_k: keep the k most likely; 0 is off.
      top_p: keep the smallest set with this probability, in (0, 1]; 1 is off.
      min_p: drop below this share of the most likely, in [0, 1]; 0 is off.
      presence_penalty: [-2, 2], once for each id in the output.
      frequency_penalty: [-2, 2], for each occurrence in the output.
      repetition_penalty: > 0, ids of prompt and output: positive logits divided, others multiplied.
      seed: uint64; None draws one from the operating system.
      logit_bias: id to a finite number added to its logit.
      max_tokens: ≥ 1, or 0 where only the prompt is scored; None is the rest of the context.
      min_tokens: EOS, stop ids and stop strings are held off until this many tokens.
      stop_strings: earliest match in the output text ends it.
      stop_token_ids: end the output like EOS.
      ignore_eos: EOS is an ordinary token.
      include_stop_text: leave the matched stop in the text.
      skip_special_tokens: leave special tokens out of the text.
      kept_special_ids: special tokens that are left in it all the same, each with a mark before it:
        they frame tool calls and reasoning, and who reads the text takes them and the marks out.
      num_choices: outputs to write, each with noise of its own; ≥ 1.
      logprobs: alternatives to report with each output token; 0 is the token's own alone, None is
        nothing.
      prompt_logprobs: likewise for the prompt's tokens; with it `max_tokens` may be 0.
      bad_words: texts that are never written as the tokens they consist of.
      allowed_token_ids: nothing but these, and what ends the output, is drawn; None is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: frozenset[int] = frozenset()
    num_choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 1e-5

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class StructuredOutput:
    """A form that the output must have.

    Attributes:
      kind: what `text` is; json_object and choice have none.
      text: a JSON Schema, a regular expression for the whole output, or a grammar in Lark's
        notation.
      choices: of choice: the output is one of these.
      field: what refusals name, where the form was made of another field of the request.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str = ""
    choices: tuple[str, ...] = ()
    field: str = ""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
      tool_calls: of an earlier assistant turn, in OpenAI's shape; JSON values only.
      tool_call_id: which call this turn answers; empty for none.
      reasoning: what the assistant thought, for templates that use it.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[Mapping[str, object], ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template.

    Attributes:
      template_kwargs: extra template variables; JSON values only.
      tools: that the model may call, in OpenAI's shape; JSON values only.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    tools: tuple[Mapping[str, object], ...] = ()


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class GenerationRequest:
    """What a caller asks of `Engine.submit`.

    Attributes:
      prompt: text, token ids, or a conversation.
      id: made by the engine when empty.
      priority: higher runs first.
      deadline_s: absolute, on the engine's monotonic clock; None is no deadline.
      queue_timeout_s: longest wait for admission; None takes the server's limit.
      structured_output: the form of the output; None is free.
      tenant: whose it is, as the server knows it from the credentials; "" where there are none.
        Ids of requests are the tenant's own.
      cache_salt: its K/V is shared only with requests of the same salt; "" is none.
      on_end: told once of the end of a request that was accepted, on the engine's thread, after its
        stream was: it must return at once and raise nothing. None costs nothing.
    """

    prompt: str | tuple[int, ...] | ChatPrompt
    sampling: SamplingParams = SamplingParams()
    structured_output: StructuredOutput | None = None
    tenant: str = ""
    id: str = ""
    priority: int = 0
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str = ""
    on_end: "Callable[[RequestEnd], None] | None" = dataclasses.field(
        default=None, compare=False, repr=False
    )


class SequenceState(enum.Enum):
    """RUNNING has a state row, and its pages; all others have neither.

    UNFORKED: another choice of a request whose first has not computed the prompt yet; it begins
    from there. While the first runs, a row is kept free for it.
    """

    UNFORKED = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of a request: the unit of plan ids, state rows, pages and preemption.

    The scheduler alone changes it.

    Attributes:
      id: unique in the engine's life.
      output: committed token ids.
      output_s: when each of them was on the host; monotonic seconds.
      num_computed: leading tokens whose K/V is written by steps already launched.
      num_in_flight: tokens sampled by launched steps whose results are not committed yet
        (placeholders: their values exist only on the device).
      pages: pool pages held, in position order.
      row: the state row owned while RUNNING.
      last_step: step_id of the last plan it was in; 0 before the first.
      num_lost: leading tokens that were computed before a preemption took their pages.
      num_overtaken: how often another started before it for what the prefix cache has of that.
    """

    id: int
    request: "Request"
    choice: int = 0
    state: SequenceState = SequenceState.WAITING
    output: list[int] = dataclasses.field(default_factory=list)
    output_s: list[float] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    row: int | None = None
    num_preemptions: int = 0
    last_step: int = 0
    num_lost: int = 0
    num_overtaken: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to compute: prompt, committed output and placeholders. Where the prompt is only
        scored its last token is none of them, unless it is alone: nothing is asked of it."""
        request = self.request
        if not request.max_tokens:
            return max(len(request.prompt) - 1, 1)
        return len(request.prompt) + len(self.output) + self.num_in_flight

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the tokens at [start, end) of prompt and committed output."""
        prompt, output = self.request.prompt, self.output
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        if start >= num_prompt:
            return tuple(output[start - num_prompt : end - num_prompt])
        return (*prompt[start:], *output[: end - num_prompt])

    @property
    def num_owed(self) -> int:
        """Tokens still to compute: one while decoding, more while prefilling or recomputing."""
        return self.num_tokens - self.num_computed


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One admitted request: the unit of admission, limits, abort and finish.

    Everything in it is resolved: `seed` drawn, `max_tokens` set, EOS and stop ids united.

    Attributes:
      prompt: token ids, at least one.
      ends_by_context: max_tokens was cut by the context, so the reason is CONTEXT_LENGTH.
      stop_ids: id to the reason it ends with (EOS or STOP).
      deadline_s: monotonic seconds; None is none.
      queue_deadline_s: latest admission, and with policy edf the latest first token that is
        foreseen, monotonic seconds; None is none.
      max_tokens: 0 where only the prompt is scored.
      is_masked: its tokens are drawn under a mask (a grammar, bad words, allowed ids).
      is_followed: of its tokens but the first and the last there may be no `Update`: who wants
        them reads its only sequence's `output`. No log-probabilities are asked for.
      tenant: as in `GenerationRequest`.
      num_scored: leading prompt tokens after which the next one was scored, and that is committed.
      cache_identity: what its K/V may be shared under; None neither reads nor fills the cache.
      num_cached: leading prompt tokens that the cache spared when it was first scheduled.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    ends_by_context: bool
    stop_ids: Mapping[int, FinishReason]
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    queue_deadline_s: float | None = None
    is_masked: bool = False
    is_followed: bool = False
    tenant: str = ""
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    num_scored: int = 0
    cache_identity: CacheIdentity | None = None
    num_cached: int = 0


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class RequestEnd:
    """What became of an accepted request, for who asked to be told. Times are in seconds.

    Attributes:
      outcome: how it ended.
      reasons: of each choice; empty after an error.
      completion_tokens: delivered, of all choices.
      time_to_first_token_s: from its arrival; None where there was no token.
      prefill_s: first scheduled to first token; None where there was none.
      decode_s: first to last token; likewise.
      queue_s: arrival to first scheduled, or to the end where it never was.
      e2e_s: arrival to end.
      preemptions: times its pages were taken back.
    """

    request: Request
    outcome: FinishReason | JaxserveError
    reasons: tuple[FinishReason, ...]
    completion_tokens: int
    queue_s: float
    time_to_first_token_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float
    preemptions: int
