"""The names of a span's attributes, and of nothing else.

OpenTelemetry's are those of its conventions for generative AI, which are still in development and
so are written down here and not imported:
https://github.com/open-telemetry/semantic-conventions-genai/blob/002c8a6ea1c8/docs/gen-ai/gen-ai-spans.md
(read in November 2026; it builds on the general conventions 1.41.1, whose `error.type` is stable).
vLLM's are those of its `vllm/tracing`, for dashboards that read them.
"""

from typing import Final

# OpenTelemetry, generative AI
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

# OpenTelemetry, general
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"

# vLLM
REQUEST_ID: Final = "gen_ai.request.id"
REQUEST_N: Final = "gen_ai.request.n"
LATENCY_TIME_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"
LATENCY_TIME_TO_FIRST_TOKEN: Final = "gen_ai.latency.time_to_first_token"
LATENCY_E2E: Final = "gen_ai.latency.e2e"
LATENCY_TIME_IN_MODEL_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
LATENCY_TIME_IN_MODEL_DECODE: Final = "gen_ai.latency.time_in_model_decode"
LATENCY_TIME_IN_MODEL_INFERENCE: Final = "gen_ai.latency.time_in_model_inference"

# ours: what neither has a word for
TENANT: Final = "jaxserve.tenant"
PREEMPTIONS: Final = "jaxserve.preemptions"

PROVIDER: Final = "jaxserve"
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
SCORE: Final = "score"  # the conventions have no word for it
