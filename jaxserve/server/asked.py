"""What a GenerateRequest asks: the engine's part of it, and how the answer is told."""

import dataclasses
from typing import Final

from jaxserve.engine import Engine, Stream
from jaxserve.gen import generation_pb2
from jaxserve.request import GenerationRequest
from jaxserve.server import convert
from jaxserve.server.chat_plan import ChatPlan, plan_chat
from jaxserve.server.choice_reply import MAX_DELTA_TOKENS, ReplyRules
from jaxserve.server.conversation import read_conversation
from jaxserve.server.fields import refuse_unsupported
from jaxserve.server.replies import Replies

MAX_PIECE_BYTES: Final = 1 << 20  # of one message's lists: more would hold other calls up


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    """One call's wishes, all fields read.

    Attributes:
      chat: how the answer to a conversation is read; None for other prompts.
    """

    request: GenerationRequest
    rules: ReplyRules
    chat: ChatPlan | None

    def open_replies(self, engine: Engine, stream: Stream) -> Replies:
        """Returns what makes messages of the stream's events."""
        return Replies(
            self.rules,
            engine.model,
            complete=stream.complete,
            chat=self.chat.open(stream.prompt, engine) if self.chat else None,
        )


def read_asked(
    message: generation_pb2.GenerateRequest,
    engine: Engine,
    *,
    request_id: str,
    tenant: str,
    deadline_s: float | None,
    interval: int,
) -> Asked:
    """Returns what a message asks.

    Args:
      interval: tokens to gather before a delta is sent.

    Raises:
      InvalidRequestError, UnsupportedError, ModelNotFoundError: name the field.
    """
    refuse_unsupported(message)
    convert.check_model(message.model, engine.model)
    limits = engine.config.limits
    conversation = read_conversation(message.chat, limits) if message.HasField("chat") else None
    request = convert.read_generate(
        message,
        conversation,
        request_id=request_id,
        tenant=tenant,
        deadline_s=deadline_s,
        model=engine.model,
    )
    chat = None
    if conversation is not None:
        chat = plan_chat(
            request,
            conversation.prompt,
            conversation.tool_choice,
            output="raw" if message.output.raw_text else "parsed",
            engine=engine,
        )
        request = chat.request
    rules = ReplyRules(
        options=message.output,
        interval=min(interval, MAX_DELTA_TOKENS),
        max_bytes=min(MAX_PIECE_BYTES, limits.max_message_bytes // 2),
        token_bytes=engine.tokenizer.token_bytes,
        echo=_read_echo(message, request, engine),
    )
    return Asked(request=request, rules=rules, chat=chat)


def _read_echo(
    message: generation_pb2.GenerateRequest, request: GenerationRequest, engine: Engine
) -> str:
    if not message.output.echo:
        return ""
    match request.prompt:
        case str() as text:
            return text
        case tuple() as token_ids:
            is_skipped = request.sampling.skip_special_tokens
            return engine.tokenizer.decode(token_ids, skip_special_tokens=is_skipped)
        case _:
            raise AssertionError("convert.py refuses an echo of a conversation")
