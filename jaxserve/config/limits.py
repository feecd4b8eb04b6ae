"""`[limits]`: what a request and all of them together may take."""

import pydantic

from jaxserve.config.section import MIB, Section


class LimitsSection(Section):
    """Every limit is finite and is enforced at submit."""

    max_waiting_requests: int = pydantic.Field(256, ge=1, description="Queue length.")
    max_waiting_tokens: int = pydantic.Field(
        1 << 20, ge=1, description="Prompt tokens in the queue."
    )
    queue_timeout_s: float = pydantic.Field(600.0, gt=0, description="Longest wait for admission.")
    max_prompt_bytes: int = pydantic.Field(4 * MIB, ge=1, description="UTF-8 bytes of a prompt.")
    max_stop_strings: int = pydantic.Field(16, ge=0, description="Stop strings of a request.")
    max_stop_string_bytes: int = pydantic.Field(1024, ge=1, description="UTF-8 bytes of one.")
    max_stop_token_ids: int = pydantic.Field(64, ge=0, description="Stop ids of a request.")
    max_logit_bias: int = pydantic.Field(300, ge=0, description="Biased ids of a request.")
    max_choices: int = pydantic.Field(8, ge=1, le=1024, description="Choices of a request (n).")
    max_logprobs: int = pydantic.Field(
        20, ge=0, le=64, description="Alternatives reported with a token's log-probability."
    )
    max_bad_words: int = pydantic.Field(64, ge=0, description="Bad words of a request.")
    max_allowed_token_ids: int = pydantic.Field(
        1 << 16, ge=1, description="Allowed token ids of a request."
    )
    max_grammar_bytes: int = pydantic.Field(
        64 << 10,
        ge=1,
        description="UTF-8 bytes of a schema, regular expression, choice or grammar.",
    )
    max_tools: int = pydantic.Field(128, ge=0, description="Tools of a conversation.")
    max_score_items: int = pydantic.Field(256, ge=1, description="Items of a Score call.")
    max_cache_salt_bytes: int = pydantic.Field(
        256, ge=1, description="UTF-8 bytes of a cache salt."
    )
    max_request_id_bytes: int = pydantic.Field(
        256, ge=1, description="UTF-8 bytes of a request id."
    )
    max_chat_messages: int = pydantic.Field(1024, ge=1, description="Turns of a conversation.")
    stream_buffer_bytes: int = pydantic.Field(
        1 * MIB, ge=1, description="Unread output of one stream before it is ended."
    )
    total_buffer_bytes: int = pydantic.Field(
        256 * MIB,
        ge=1,
        description="Unread output of all streams before the one with the most is ended.",
    )
    max_message_bytes: int = pydantic.Field(
        16 * MIB,
        ge=1,
        description="Largest gRPC message received or sent, and largest HTTP body received.",
    )
    max_header_bytes: int = pydantic.Field(
        32 << 10, ge=1024, description="Request line and headers of an HTTP request."
    )
    max_open_calls: int = pydantic.Field(
        1024, ge=1, description="Calls open at once over all connections, gRPC and HTTP together."
    )
    max_connections: int = pydantic.Field(
        4096, ge=1, description="Connections of clients to a front end at once; more are closed."
    )
