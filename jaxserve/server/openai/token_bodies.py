"""The bodies of `/tokenize` and `/detokenize`, in vLLM's shapes."""

from collections.abc import Mapping
from typing import Final

import pydantic

from jaxserve.engine import Engine, Tokenizer, limits
from jaxserve.engine.fields import check_text
from jaxserve.errors import InvalidRequestError
from jaxserve.request import ChatPrompt
from jaxserve.server.openai.fields import keep_known
from jaxserve.server.openai.findings import kind_of, refuse
from jaxserve.server.openai.messages import read_messages, tidy_messages
from jaxserve.server.openai.parts import Message, Tool
from jaxserve.server.openai.requests import check_model

REFUSED_IN_TOKENIZE: Final[Mapping[str, tuple[object, ...]]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": (),
}


class _TokenBody(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None


class TokenizeBody(_TokenBody):
    """A text, or a conversation as the model would see it: one of the two."""

    prompt: str | None = None
    messages: list[Message] | None = pydantic.Field(None, min_length=1)
    add_special_tokens: bool | None = pydantic.Field(
        None, description="Of a text; true unless set. A conversation has them from its template."
    )
    return_token_strs: bool = pydantic.Field(False, description="Adds each token's text.")
    tools: list[Tool] = []
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None


class DetokenizeBody(_TokenBody):
    """Token ids, special ones among them."""

    tokens: list[int] = pydantic.Field(
        json_schema_extra={"items": {"type": "integer", "minimum": 0}}
    )


def tokenize(document: object, engine: Engine) -> dict[str, object]:
    """Returns the reply to a body of `/tokenize`.

    Raises:
      RequestError: names the field.
    """
    body = _read(TokenizeBody, document)
    check_model(body.model, engine.model)
    token_ids = _tokenize(body, engine)
    tokenizer = engine.tokenizer
    return {
        "count": len(token_ids),
        "max_model_len": engine.model.max_model_tokens,
        "tokens": list(token_ids),
        "token_strs": _spell(token_ids, tokenizer) if body.return_token_strs else None,
    }


def detokenize(document: object, engine: Engine) -> dict[str, object]:
    """Returns the reply to a body of `/detokenize`.

    Raises:
      RequestError: names the field.
    """
    body = _read(DetokenizeBody, document)
    check_model(body.model, engine.model)
    for token_id in body.tokens:
        if not 0 <= token_id < engine.model.vocab_size:
            raise InvalidRequestError(
                f"tokens holds {str(token_id)[:24]}, but this model's ids are 0 to "
                f"{engine.model.vocab_size - 1}; use ids of its tokenizer",
                field="tokens",
            )
    return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _read[B: _TokenBody](kind: type[B], document: object) -> B:
    if not isinstance(document, Mapping):
        raise InvalidRequestError(f"the body is {kind_of(document)}, but must be a JSON object")
    known = keep_known(document, supported=kind.model_fields, refused=REFUSED_IN_TOKENIZE)
    if "messages" in known:
        known["messages"] = tidy_messages(known["messages"])
    try:
        return kind.model_validate(known)
    except pydantic.ValidationError as error:
        refuse(error)


def _tokenize(body: TokenizeBody, engine: Engine) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError(
            "prompt and messages are both set or both missing; send one of them", field="prompt"
        )
    if body.messages is None:
        assert body.prompt is not None
        check_text(body.prompt, "prompt", engine.config.limits.max_prompt_bytes)
        adds = body.add_special_tokens is not False
        return tuple(engine.tokenizer.encode(body.prompt, add_special_tokens=adds))
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for a text; leave it out with messages",
            field="add_special_tokens",
        )
    prompt = ChatPrompt(
        messages=read_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs or {},
        tools=tuple(tool.model_dump(exclude_unset=True) for tool in body.tools),
    )
    return limits.tokenize(
        prompt, model=engine.model, tokenizer=engine.tokenizer, limits=engine.config.limits
    )


def _spell(token_ids: tuple[int, ...], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
