"""The sections of the configuration: every key with its meaning, its default and what is allowed.

The defaults equal `configs/cpu.toml`, where each number says where it was measured. Nothing here is
changed after start-up.
"""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic

GIB = 1 << 30
MIB = 1 << 20
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
RESERVED_TENANTS = ("anonymous", "other")


class Section(pydantic.BaseModel):
    """A table of the file: frozen, finite, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object, info: pydantic.ValidationInfo) -> object:
        """pydantic reads true as 1, and so would `port = true`."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("true and false are no value of this key")
        return value


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


class KVSection(Section):
    """The paged KV pool."""

    page_size: int = pydantic.Field(16, ge=1, le=1024, description="Tokens of a page.")
    dtype: Literal["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"] = pydantic.Field(
        "auto",
        description="auto: the model's dtype. int8, float8_e4m3fn: a byte for each number, and a "
        "float32 scale for each token's K, and V, in each KV head.",
    )
    pool_bytes: int | None = pydantic.Field(
        None, ge=1, description="Bytes of the pool. Unset: 1 GiB on CPU, what is free elsewhere."
    )
    num_pages: int | None = pydantic.Field(
        None, ge=2, description="Pages of the pool, page 0 (padding) among them; over pool_bytes."
    )
    reserve: Literal["on_demand", "max_length"] = pydantic.Field(
        "on_demand",
        description="When a sequence takes its pages: as it grows, or all at admission (ablation).",
    )


def check_tenant_name(name: str) -> None:
    """Raises ValueError for a name that no key and no table may have."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(
            f"the tenant {name!r} must be 1 to 64 ASCII letters, digits, dots, dashes and "
            "underscores, beginning with a letter or digit"
        )
    if name in RESERVED_TENANTS:
        raise ValueError(f"{name} is a word of the metrics; call the tenant something else")


def _check_shared_namespaces(shared: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    listed = [tenant for tenants in shared.values() for tenant in tenants]
    for name in (*shared, *listed):
        check_tenant_name(name)
    twice = sorted({tenant for tenant in listed if listed.count(tenant) > 1})
    if twice:
        raise ValueError(f"the tenant {twice[0]} is listed twice; a tenant has one namespace")
    return shared


class PrefixCacheSection(Section):
    """What is kept of computed prompts for later requests (docs/prefix-cache.md)."""

    enabled: bool = pydantic.Field(
        True, description="Keep full KV pages while there is room, and reuse them."
    )
    shared_namespaces: Annotated[
        dict[str, tuple[str, ...]], pydantic.AfterValidator(_check_shared_namespaces)
    ] = pydantic.Field(
        {},
        description="Tenants that share what is kept, by a name for it. They can tell by the time "
        "to the first token what the others ask. All other tenants share nothing.",
    )


class HostTierSection(Section):
    """KV pages in host memory: what the prefix cache drops from the pool, as long as there is room
    (docs/prefix-cache.md)."""

    enabled: bool = pydantic.Field(
        False,
        description="Copy pages that the prefix cache would drop to host memory, and back where "
        "that takes less time than to compute them. Needs prefix_cache.enabled.",
    )
    max_bytes: int = pydantic.Field(
        1 * GIB, ge=1, description="Bytes of those pages; what is worth least goes first."
    )


class SchedulerSection(Section):
    """Which requests run, and how many tokens a step computes."""

    batching: Literal["continuous", "static"] = pydantic.Field(
        "continuous", description="static: a new batch only when the last one is done (ablation)."
    )
    chunked_prefill: bool = pydantic.Field(
        True, description="Split prompts over steps, beside decoding rows."
    )
    max_seqs: int = pydantic.Field(32, ge=1, le=4096, description="Sequences running at once.")
    max_chunks: int = pydantic.Field(
        4, ge=1, le=64, description="Sequences that compute more than one token in one step."
    )
    max_step_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="Token budget of a step. Unset: max_seqs + the largest chunk bucket.",
    )
    target_itl_s: float | None = pydantic.Field(
        None,
        gt=0,
        description="Time between a sequence's tokens to keep to: a step takes as many prompt "
        "tokens beside decoding rows as the step times allow. Needs chunked_prefill. Unset: all "
        "that fit.",
    )
    policy: Literal["priority", "fcfs", "edf", "fair"] = pydantic.Field(
        "priority",
        description="Who comes first: priority: the higher class, then who came first; fcfs: who "
        "came first, and classes are refused; edf: in a class, whose deadline is first, and what "
        "cannot meet its own is refused at once; fair: the tenant that has had least, by weight.",
    )
    fair_credit_tokens: int | None = pydantic.Field(
        None,
        ge=0,
        le=1 << 40,
        description="With policy fair, tokens that a tenant may have ahead of others after it used "
        "less than its share, and that others are given until it no longer counts as present. 0: "
        "nothing is saved up, and nothing is kept ready for who is present. Unset: 64 steps.",
    )
    ageing_s: float | None = pydantic.Field(
        60.0,
        gt=0,
        description="With policy priority, seconds of waiting that count as one class. Unset: a "
        "lower class waits for ever while there is a higher.",
    )
    prefix_order: bool = pydantic.Field(
        False,
        description="Among those of one class and tenant that wait, who has most of its prompt in "
        "the prefix cache starts first. Needs prefix_cache.enabled; not with policy edf.",
    )
    prefix_max_overtakes: int = pydantic.Field(
        8,
        ge=1,
        le=1_000_000,
        description="With prefix_order, times that one which waits is overtaken at most.",
    )
    max_preemptions: int = pydantic.Field(
        3,
        ge=1,
        description="Times a sequence gives its pages up; then others do, while there are any.",
    )

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.prefix_order and self.policy == "edf":
            raise ValueError(
                'prefix_order does not go with policy = "edf", which tells who can meet its '
                "deadline by the order of deadlines; set prefix_order = false or another policy"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target_itl_s is not None and not self.chunked_prefill:
            raise ValueError(
                "target_itl_s needs chunked_prefill = true: it cuts prompts; or leave it unset"
            )
        return self


def _expand_geometric(sizes: object) -> object:
    """`{first = 2, last = 32, ratio = 2}` stands for [2, 4, 8, 16, 32]."""
    match sizes:
        case {"first": int(first), "last": int(last), "ratio": int(ratio), **rest}:
            if rest or first < 1 or ratio < 2 or last < first:
                raise ValueError("a geometric list needs 1 ≤ first ≤ last, ratio ≥ 2, no more")
            steps = range(last.bit_length())  # ratio is at least 2
            return [first * ratio**n for n in steps if first * ratio**n <= last]
        case dict():
            raise ValueError("a geometric list has the integers first, last and ratio")
    return sizes


def _check_rising(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not sizes or any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError("must be a rising list of sizes ≥ 1, such as [2, 8, 32]")
    return sizes


# A list of sizes; in a file, a variable or a flag also `{first = 2, last = 32, ratio = 2}`.
Sizes = Annotated[
    tuple[int, ...],
    pydantic.BeforeValidator(_expand_geometric),
    pydantic.AfterValidator(_check_rising),
    pydantic.WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
                {
                    "type": "object",
                    "description": "Geometric: first, first * ratio, … up to last.",
                    "properties": {
                        "first": {"type": "integer", "minimum": 1},
                        "last": {"type": "integer", "minimum": 1},
                        "ratio": {"type": "integer", "minimum": 2},
                    },
                    "required": ["first", "last", "ratio"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class BucketsSection(Section):
    """The padded shapes that are compiled at start-up."""

    decode_seqs: Sizes = pydantic.Field(
        (1, 2, 4, 8, 16, 32),
        description="One-token rows; max_seqs is always added, and 1 is 2 where one row is slower.",
    )
    chunk_tokens: Sizes = pydantic.Field(
        (16, 32, 64, 128, 256),
        description="Prompt tokens of a step; the largest is the chunk size.",
    )
    chunk_decode_seqs: Sizes = pydantic.Field(
        (8,), description="Decode sizes that chunks are combined with; max_seqs is always added."
    )
    chunk_tile: int = pydantic.Field(
        16, ge=1, le=256, description="Chunks are laid out in tiles of this many tokens."
    )
    capture: bool = pydantic.Field(
        True, description="Off: one maximal bucket of each kind (ablation)."
    )


class RunnerSection(Section):
    """How steps reach the device."""

    overlap: bool = pydantic.Field(
        True, description="Launch step n+1 before step n's result is read."
    )
    attention: Literal["auto", "reference", "xla", "native", "triton", "mosaic"] = pydantic.Field(
        "auto",
        description="Attention implementation; auto is native on a CPU with a C++ compiler, else "
        "xla. triton and mosaic are for a GPU; on a CPU their kernels are interpreted, slowly.",
    )
    matmul: Literal["auto", "xla", "native"] = pydantic.Field(
        "auto",
        description="Products with bfloat16 weights; auto as for attention.",
    )
    sampling: Literal["auto", "candidates", "passes"] = pydantic.Field(
        "auto",
        description="How filters and the most likely ids are found: among a few candidates where "
        "they do (auto on a CPU), or in passes over all ids (auto on a GPU). Tokens are the same.",
    )
    command_buffers: Literal["auto", "off"] = pydantic.Field(
        "auto",
        description="auto: on a GPU, programs are replayed as CUDA graphs (XLA's command buffers); "
        "a CPU has none. off: the host launches each kernel (ablation).",
    )
    batch_invariant: bool = pydantic.Field(
        False,
        description="Every step in one shape, every token by the same operations: outputs are the "
        "same bit for bit whatever runs beside them (docs/performance.md has the cost).",
    )
    compile_threads: int = pydantic.Field(2, ge=1, le=64, description="Threads that compile.")
    cache_dir: Path | None = pydantic.Field(
        None, description="Compilation cache. Unset: jaxserve/ in the user's cache folder."
    )
    forbid_recompile: bool = pydantic.Field(
        False, description="Raise where a program is compiled after warm-up (tests); else counted."
    )


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


class ServerSection(Section):
    """Where the front ends listen."""

    host: str = pydantic.Field("127.0.0.1", min_length=1, description="Address to bind.")
    port: int = pydantic.Field(50051, ge=0, le=65535, description="0 picks a free one.")
    drain_timeout_s: float = pydantic.Field(
        30.0, ge=0, description="After SIGTERM, how long running requests may finish."
    )
    health_host: str = pydantic.Field(
        "127.0.0.1", min_length=1, description="Address to bind for health_port."
    )
    health_port: int | None = pydantic.Field(
        None,
        ge=0,
        le=65535,
        description="Port with health alone, in plaintext, for probes that have no TLS "
        "(docs/operations.md); 0 picks a free one. Unset: none.",
    )
    reflection: bool = pydantic.Field(
        True, description="Tell gRPC clients what can be called; with keys, those that have one."
    )
    vllm_engine: bool = pydantic.Field(
        False,
        description="Serve vllm.grpc.engine.VllmEngine on the same port, for the gateway smg "
        "(docs/smg.md). Extra: smg.",
    )
    http_host: str = pydantic.Field(
        "127.0.0.1", min_length=1, description="Address to bind for HTTP (docs/http.md)."
    )
    http_port: int | None = pydantic.Field(
        None, ge=0, le=65535, description="Port for HTTP; 0 picks a free one. Unset: no HTTP."
    )
    page: bool = pydantic.Field(
        True,
        description="Serve a page at / of the HTTP port: a chat, and the server's load "
        "(docs/page.md).",
    )
    http_allowed_hosts: tuple[str, ...] = pydantic.Field(
        (),
        description="Names by which requests may reach an open loopback http_host, besides "
        "localhost and its addresses; for a proxy that passes its own name on.",
    )
    http_cors_origins: tuple[str, ...] = pydantic.Field(
        (),
        description="Origins whose pages may call from a browser, such as http://localhost:3000; "
        '["*"] is any.',
    )
    http_read_timeout_s: float = pydantic.Field(
        30.0, gt=0, description="For an HTTP request's headers, and then its body, to arrive."
    )
    http_write_timeout_s: float = pydantic.Field(
        60.0, gt=0, description="An HTTP client that takes nothing for so long is cut off."
    )


class TlsSection(Section):
    """Certificates of the front ends (docs/security.md). Unset: plaintext."""

    cert_file: Path | None = pydantic.Field(
        None, description="PEM: the server's certificate, then those between it and its root."
    )
    key_file: Path | None = pydantic.Field(None, description="PEM: the certificate's private key.")
    client_ca_file: Path | None = pydantic.Field(
        None, description="PEM: roots; only clients with a certificate from one of them connect."
    )

    @pydantic.model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together; set both or neither")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs cert_file and key_file")
        return self


class AuthSection(Section):
    """Who may call (docs/security.md)."""

    keys_file: Path | None = pydantic.Field(
        None,
        description="Keys and their tenants, from `jaxserve keys`. Unset: anyone who can connect.",
    )
    allow_open: bool = pydantic.Field(
        False,
        description="Listen beyond this machine though neither keys nor client certificates are "
        "asked for.",
    )
    reload_interval_s: float = pydantic.Field(
        30.0,
        ge=0,
        description="Between looks at whether the files of keys and certificates changed; 0 is "
        "never: SIGHUP and ReloadCredentials remain.",
    )


class TenantLimits(Section):
    """What a tenant may use; unset is no limit of its own."""

    requests_per_minute: int | None = pydantic.Field(
        None, ge=1, description="Requests; as many may come at once after a quiet minute."
    )
    tokens_per_minute: int | None = pydantic.Field(
        None,
        ge=1,
        description="Prompt tokens, charged at submit, and output tokens, charged at the end.",
    )
    max_concurrent_requests: int | None = pydantic.Field(
        None, ge=1, description="Requests in the engine at once, waiting or running."
    )
    queue_share: float = pydantic.Field(
        1.0, gt=0, le=1, description="Share of the queue that its waiting requests may fill."
    )
    max_context_tokens: int | None = pydantic.Field(
        None, ge=2, description="Longest prompt + output, where the model allows more."
    )
    max_priority: int | None = pydantic.Field(
        None, ge=-(1 << 31), le=(1 << 31) - 1, description="Highest priority it may ask for."
    )
    weight: float = pydantic.Field(
        1.0,
        gt=0,
        le=1e6,
        description="With scheduler.policy fair, its share of the machine, by that of others.",
    )


def _check_tenant_names(named: dict[str, TenantLimits]) -> dict[str, TenantLimits]:
    for name in named:
        check_tenant_name(name)
    return named


class TenantsSection(Section):
    """Limits of the tenants that keys belong to (docs/security.md); read again with the keys."""

    default: TenantLimits = pydantic.Field(
        TenantLimits(), description="Of every tenant without a table of its own."
    )
    named: Annotated[dict[str, TenantLimits], pydantic.AfterValidator(_check_tenant_names)] = (
        pydantic.Field(
            {}, description="Of one tenant, by its name; nothing is taken over from default."
        )
    )

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.named.get(tenant, self.default)


class AdminSection(Section):
    """Where AdminService listens (docs/security.md)."""

    address: str | None = pydantic.Field(
        None,
        description="unix:/path/of/a/socket, which only this user can open, or a loopback "
        "address with its port, which every user of the machine can. Unset: nowhere.",
    )

    @pydantic.field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is None or address.removeprefix("unix:") not in (address, ""):
            return address
        host, _, port = address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
        if not (is_port and is_loopback(host.removeprefix("[").removesuffix("]"))):
            raise ValueError(
                "it must be unix:/path/of/a/socket or a loopback address with its port, such as "
                "127.0.0.1:50052"
            )
        return address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on `host`; False where that is not certain."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class MetricsSection(Section):
    """Where and under which names the metrics are read (docs/metrics.md)."""

    port: int | None = pydantic.Field(
        None,
        ge=0,
        le=65535,
        description="HTTP port of the metrics; 0 picks a free one. Unset: none.",
    )
    host: str = pydantic.Field("127.0.0.1", min_length=1, description="Address to bind.")
    prefix: Literal["jaxserve", "vllm"] = pydantic.Field(
        "jaxserve",
        description="vllm: what vLLM has too goes by its names, for tools that read those.",
    )


class MeasureSection(Section):
    """What the engine times of itself (docs/metrics.md) and records (docs/measuring.md)."""

    phases: bool = pydantic.Field(
        True, description="Time each step's phases on the host and the device."
    )
    trace_steps: int = pydantic.Field(
        0,
        ge=0,
        le=100_000,
        description="Last steps and requests that are kept for a trace; 0 is off. Needs phases.",
    )

    record_path: Path | None = pydantic.Field(
        None,
        description="File that serve records its requests in, as a workload. Unset: none.",
    )
    record_content: bool = pydantic.Field(
        False, description="Record the prompts' token ids too, not only what they share."
    )
    record_max_entries: int = pydantic.Field(
        100_000, ge=1, le=10_000_000, description="Requests of a recording; the rest is counted."
    )
    record_max_bytes: int = pydantic.Field(
        256 * MIB, ge=1, description="Bytes of a recording; what does not fit is counted."
    )

    @pydantic.model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.trace_steps and not self.phases:
            raise ValueError("trace_steps needs phases = true; or set trace_steps = 0")
        return self


class TracingSection(Section):
    """Spans of requests, sent to an OpenTelemetry collector (docs/operations.md). Extra: otel."""

    endpoint: str | None = pydantic.Field(
        None,
        description="Collector that takes OTLP over gRPC, such as http://localhost:4317; https has "
        "TLS. Unset: nothing is traced.",
    )
    sample_ratio: float = pydantic.Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests that come without a traceparent; others say themselves.",
    )
    service_name: str = pydantic.Field(
        "jaxserve", min_length=1, description="What this server is called in traces."
    )
    max_queue_spans: int = pydantic.Field(
        4096, ge=1, description="Spans that wait to be sent; what finds no room is counted."
    )
    export_interval_s: float = pydantic.Field(
        1.0, gt=0, le=60, description="Between sendings, while there are few spans."
    )
    export_timeout_s: float = pydantic.Field(
        10.0, gt=0, le=600, description="For one sending, repetitions and all."
    )

    @pydantic.field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        scheme, separator, rest = endpoint.partition("://")
        host, _, port = rest.rstrip("/").rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if scheme not in ("http", "https") or not separator or not is_port or not host:
            raise ValueError("it must be http://HOST:PORT or https://HOST:PORT of a collector")
        if "/" in host or "@" in host:
            raise ValueError("it is a host and a port alone, without a path or a user")
        return endpoint


class LogSection(Section):
    """The log on stderr; its level is a flag of each command."""

    format: Literal["text", "json"] = pydantic.Field(
        "text", description="text: a line of key=value; json: an object a line."
    )
    interval_s: float = pydantic.Field(
        10.0, ge=0, description="Between lines of throughput while requests run; 0 is off."
    )


class Config(Section):
    """All of it."""

    model: ModelSection = ModelSection()
    sampling: SamplingSection = SamplingSection()
    kv: KVSection = KVSection()
    prefix_cache: PrefixCacheSection = PrefixCacheSection()
    host_tier: HostTierSection = HostTierSection()
    scheduler: SchedulerSection = SchedulerSection()
    buckets: BucketsSection = BucketsSection()
    runner: RunnerSection = RunnerSection()
    limits: LimitsSection = LimitsSection()
    server: ServerSection = ServerSection()
    tls: TlsSection = TlsSection()
    auth: AuthSection = AuthSection()
    tenants: TenantsSection = TenantsSection()
    admin: AdminSection = AdminSection()
    metrics: MetricsSection = MetricsSection()
    measure: MeasureSection = MeasureSection()
    tracing: TracingSection = TracingSection()
    log: LogSection = LogSection()
