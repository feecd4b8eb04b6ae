"""Tokenize and Detokenize: what generation would see, and what token ids say."""

from jaxserve.engine import Engine, limits
from jaxserve.engine.fields import check_text
from jaxserve.errors import InvalidRequestError
from jaxserve.gen import generation_pb2
from jaxserve.server import convert
from jaxserve.server.conversation import read_conversation
from jaxserve.server.fields import refuse_unsupported


def tokenize(
    message: generation_pb2.TokenizeRequest, engine: Engine
) -> generation_pb2.TokenizeResponse:
    """Returns the tokens of a text or a conversation.

    Raises:
      RequestError: it cannot be tokenized; names the field.
    """
    refuse_unsupported(message)
    convert.check_model(message.model, engine.model)
    response = generation_pb2.TokenizeResponse(max_model_tokens=engine.model.max_model_tokens)
    match message.WhichOneof("input"):
        case "text":
            check_text(message.text, "text", engine.config.limits.max_prompt_bytes)
            is_added = message.add_special_tokens or not message.HasField("add_special_tokens")
            token_ids, offsets = engine.tokenizer.encode_with_offsets(
                message.text, add_special_tokens=is_added
            )
            response.token_ids.extend(token_ids)
            if message.include_offsets:
                response.start_offsets.extend(start for start, _ in offsets)
                response.end_offsets.extend(end for _, end in offsets)
        case "chat":
            _refuse_text_options(message)
            with convert.naming_fields():
                response.token_ids.extend(
                    limits.tokenize(
                        read_conversation(message.chat, engine.config.limits).prompt,
                        model=engine.model,
                        tokenizer=engine.tokenizer,
                        limits=engine.config.limits,
                    )
                )
        case _:
            raise InvalidRequestError("input is missing; set text or chat", field="input")
    return response


def detokenize(
    message: generation_pb2.DetokenizeRequest, engine: Engine
) -> generation_pb2.DetokenizeResponse:
    """Returns the text of token ids; raises InvalidRequestError for one that the model has not."""
    refuse_unsupported(message)
    convert.check_model(message.model, engine.model)
    highest = max(message.token_ids, default=0)
    if highest >= engine.model.vocab_size:
        raise InvalidRequestError(
            f"token id {highest} is not in this model's vocabulary, whose ids are 0 to "
            f"{engine.model.vocab_size - 1}; use ids of its tokenizer",
            field="token_ids",
        )
    is_skipped = message.skip_special_tokens or not message.HasField("skip_special_tokens")
    text = engine.tokenizer.decode(message.token_ids, skip_special_tokens=is_skipped)
    return generation_pb2.DetokenizeResponse(text=text)


def _refuse_text_options(message: generation_pb2.TokenizeRequest) -> None:
    """Raises for an option that a conversation has no use for: its template says it all."""
    for field in ("add_special_tokens", "include_offsets"):
        if getattr(message, field):
            raise InvalidRequestError(
                f"{field} is for text; leave it out with a conversation", field=field
            )
