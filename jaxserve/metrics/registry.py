"""Counters, gauges and histograms of one engine, in a registry of its own (prometheus-client).

Tests and reports read values through `Metrics.value`; nothing here is global. The phases of a
request, on the engine's monotonic clock:

- queue: arrival (submit is called) until its first tokens are scheduled;
- prefill: from there until its first token is on the host, preemptions included;
- decode: first until last token on the host, likewise;
- delivery, of each token: on the host until accepted by whoever carries it on: gRPC's write has
  returned (for a unary call: the response is handed over), or, within the process, the reader has
  taken it.

Every label has a bounded set of values: an enumeration, or the shapes compiled at start-up.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from jaxserve import errors
from jaxserve.metrics.labels import (
    AUTH_FAILURES,
    HOST_TIER_DROPS,
    SPAN_DROPS,
    error_label,
    finish_labels,
    refusal_labels,
)
from jaxserve.metrics.many_histogram import ManyHistogram
from jaxserve.metrics.tenants import TenantLabels
from jaxserve.plan import HOST_PHASES

PREFIX: Final = "jaxserve_"
LATENCY_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000
)  # fmt: skip
ERROR_BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
# What `Metrics.value` can be asked of each type, after the family's name.
_SUFFIXES: Final = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "info": ("_info",),
}
_Family = Counter | Gauge | Histogram | Info


class Metrics:
    """What the engine counts. Every counter only rises.

    Attributes:
      model_name: the served model's; None until it is known.
      tenants: what tenants are called in labels.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name: str | None = None
        self.tenants = TenantLabels()
        self._by_sample: dict[str, _Family] = {}
        self._make_requests()
        self._make_tenants()
        self._make_steps()
        self._make_costs()
        self._make_mechanisms()
        self._make_levels()
        self._make_times()
        self.build = self._info("build", "Versions, and the machine's kind of device.")
        self.config = self._info("config", "What is served, and how it was set up.")

    def _make_requests(self) -> None:
        self.requests_submitted = self._counter("requests_submitted", "Accepted by submit.")
        self.requests_refused = self._counter(
            "requests_refused", "Refused before they were accepted.", "reason"
        )
        self.requests_finished = self._counter(
            "requests_finished", "Accepted ones that ended.", "reason"
        )
        self.rpcs = self._counter("rpcs", "gRPC calls that ended.", "method", "code")
        self.http_requests = self._counter(
            "http_requests", "HTTP requests that ended.", "route", "status"
        )
        self.open_calls = self._gauge("open_calls", "Calls open now, over gRPC and HTTP.")
        self.trace_spans_exported = self._counter(
            "trace_spans_exported", "Spans of requests that the collector took."
        )
        self.trace_spans_dropped = self._counter(
            "trace_spans_dropped", "Spans of requests that never reached it.", "reason"
        )
        for reason in SPAN_DROPS:
            self.trace_spans_dropped.labels(reason)
        for reason in refusal_labels():
            self.requests_refused.labels(reason)
        for reason in finish_labels():
            self.requests_finished.labels(reason)
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests, counted at the first output token."
        )
        self.output_tokens = self._counter("output_tokens", "Tokens put into streams.")
        self.surplus_tokens = self._counter(
            "surplus_tokens", "Tokens sampled after the end was decided; never delivered."
        )
        self.given_up_streams = self._counter(
            "given_up_streams",
            "Streams of ended requests whose unread output was given up for want of room.",
        )
        self.put_off_streams = self._counter(
            "put_off_streams",
            "Streams that have begun, and whose turn to be given output a step left to the next.",
        )

    def _make_tenants(self) -> None:
        self.auth_failures = self._counter(
            "auth_failures", "Calls that came without a valid key.", "reason"
        )
        self.credential_reloads = self._counter(
            "credential_reloads", "Keys, tenants and certificates read again.", "outcome"
        )
        self.certificate_expiry = self._gauge(
            "certificate_expiry_timestamp_seconds",
            "When the certificate in force ends, since 1970; 0 without TLS.",
        )
        self.tenant_requests_submitted = self._counter(
            "tenant_requests_submitted", "Accepted by submit, by tenant.", "tenant"
        )
        self.tenant_quota_refusals = self._counter(
            "tenant_quota_refusals", "Refused because a quota was used up.", "tenant", "quota"
        )
        self.tenant_prompt_tokens = self._counter(
            "tenant_prompt_tokens", "Prompt tokens of ended requests, by tenant.", "tenant"
        )
        self.tenant_output_tokens = self._counter(
            "tenant_output_tokens", "Output tokens of ended requests, by tenant.", "tenant"
        )
        self.tenant_requests_live = self._gauge(
            "tenant_requests_live", "Requests in the engine, waiting or running.", "tenant"
        )
        for reason in AUTH_FAILURES:
            self.auth_failures.labels(reason)
        for outcome in ("ok", "failed"):
            self.credential_reloads.labels(outcome)

    def _make_steps(self) -> None:
        self.steps = self._counter("steps", "Steps launched.", "bucket")
        self.real_tokens = self._counter("step_real_tokens", "Tokens computed.", "bucket")
        self.padded_tokens = self._counter(
            "step_padded_tokens", "Bucket padding computed.", "bucket"
        )
        self.bucket_fallbacks = self._counter(
            "bucket_fallbacks",
            "Steps in a larger bucket than their rows and chunks alone ask for: the two sizes "
            "together were not compiled.",
            "bucket",
        )
        self.captured_steps = self._counter(
            "captured_steps", "Steps whose forward and output are one CUDA graph each.", "bucket"
        )
        self.output_programs = self._counter(
            "output_programs", "Output programs run.", "bucket", "variant"
        )
        self.side_programs = self._counter(
            "side_programs", "Programs that steps ran beside forward and output.", "kind"
        )
        self.compiles = self._counter(
            "compiles", "Programs compiled before serving.", "kind", "bucket"
        )
        self.compile_seconds = self._counter(
            "compile_seconds", "Seconds spent compiling or reading the cache.", "kind", "bucket"
        )
        self.cache_hits = self._counter(
            "compile_cache_hits", "Programs read from the persistent cache.", "kind", "bucket"
        )
        self.recompiles = self._counter(
            "recompiles",
            "Programs compiled after warm-up, by the step that did it; empty where none: a fault.",
            "bucket",
        )
        self.recompiles.labels(bucket="")
        self.sampler_fallbacks = self._counter(
            "sampler_fallbacks", "Steps whose filters needed more than the candidate cap."
        )
        self.masked_tokens = self._counter("masked_tokens", "Tokens sampled under a mask.")
        self.batched_masks = self._counter(
            "batched_masks", "Masks of grammars that were worked out with others' in one call."
        )
        self.scored_tokens = self._counter(
            "scored_tokens", "Prompt tokens whose log-probabilities were worked out."
        )
        self.useful_rows = self._counter(
            "useful_rows", "Row-steps that paid a live sequence's tokens."
        )
        self.offered_rows = self._counter("offered_rows", "Row-steps that the steps' batch held.")

    def _make_costs(self) -> None:
        """Where the engine thread's and the device's time went; 0 with measure.phases off."""
        self.step_host_seconds = self._counter(
            "step_host_seconds", "The engine thread's time, by what it did.", "phase"
        )
        self.step_device_seconds = self._counter(
            "step_device_seconds", "Device busy with steps, by the forward's bucket.", "bucket"
        )
        self.step_gap_seconds = self._counter(
            "step_gap_seconds", "Device without work while there were requests: the host gap."
        )
        self.step_communication_seconds = self._counter(
            "step_communication_seconds", "Of the device's, in collectives: none on one device."
        )
        self.reader_detokenize_seconds = self._counter(
            "reader_detokenize_seconds",
            "Tokens turned into text by the streams' readers, beside the engine thread.",
        )
        for phase in HOST_PHASES:
            self.step_host_seconds.labels(phase=phase)

    def _make_mechanisms(self) -> None:
        """Each proves that its mechanism ran."""
        self.preemptions = self._counter("preemptions", "Sequences that gave pages and row back.")
        self.recomputed_tokens = self._counter("recomputed_tokens", "Tokens computed again for it.")
        self.chunked_prompts = self._counter("chunked_prompts", "Prompts split over several steps.")
        self.limited_chunk_steps = self._counter(
            "limited_chunk_steps", "Steps whose prompt tokens the target between tokens limited."
        )
        self.mixed_steps = self._counter("mixed_steps", "Steps with chunks and one-token rows.")
        self.decode_table_tokens = self._counter(
            "decode_table_tokens", "Tokens that decode and were planned all at once, by column."
        )
        self.reordered_starts = self._counter(
            "reordered_starts", "Sequences that started before their turn for their cached prefix."
        )
        self.joined_running = self._counter(
            "joined_running", "Sequences admitted while others were running."
        )
        self.pages_allocated = self._counter("kv_pages_allocated", "Pages handed out.")
        self.grown_pages = self._counter(
            "kv_grown_pages", "Pages taken by a running sequence as it grew."
        )
        self.reserved_pages = self._counter("kv_reserved_pages", "Pages taken ahead of need.")
        self.forked_choices = self._counter(
            "forked_choices", "Choices that began from their request's computed prompt."
        )
        self.page_copies = self._counter("kv_page_copies", "Pages copied.")
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Requests that were started and could read it.", "namespace"
        )
        self.prefix_cache_query_tokens = self._counter(
            "prefix_cache_query_tokens", "Prompt tokens of those.", "namespace"
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Requests that found some of their prompt.", "namespace"
        )
        self.prefix_cache_hit_tokens = self._counter(
            "prefix_cache_hit_tokens", "Prompt tokens that they found.", "namespace"
        )
        self.prefix_cache_reused_tokens = self._counter(
            "prefix_cache_reused_tokens",
            "Tokens that were not computed, after preemptions too.",
            "namespace",
        )
        self.prefix_cache_copied_tokens = self._counter(
            "prefix_cache_copied_tokens", "Of those, in copies of a page's beginning.", "namespace"
        )
        self.prefix_cache_waits = self._counter(
            "prefix_cache_waits",
            "Requests that waited for another's prompt instead of computing the same.",
            "namespace",
        )
        self.prefix_cache_evictions = self._counter(
            "prefix_cache_evictions", "Pages dropped to make room.", "namespace"
        )
        self.prefix_cache_refusals = self._counter(
            "prefix_cache_refusals",
            "Requests that found nothing, though a page of the same tokens was there, by the part "
            "of the identity that was another's.",
            "namespace",
            "reason",
        )
        self._make_host_tier()
        self.overlapped_steps = self._counter(
            "overlapped_steps", "Steps launched before an earlier result was read."
        )
        self.overlap_waits = self._counter(
            "overlap_waits", "Steps that had to retire first.", "reason"
        )
        self.batch_invariant_steps = self._counter(
            "batch_invariant_steps", "Steps run in the one shape of runner.batch_invariant."
        )
        self.quantized_kv_tokens = self._counter(
            "quantized_kv_tokens", "Tokens whose K and V were written in one byte a number."
        )
        self.bucketed_steps = self._counter(
            "bucketed_steps", "Steps run in a bucket smaller than the largest of its kind."
        )

    def _make_host_tier(self) -> None:
        self.host_tier_pages_out = self._counter(
            "host_tier_pages_out", "Pages copied to host memory."
        )
        self.host_tier_bytes_out = self._counter("host_tier_bytes_out", "Bytes of those.")
        self.host_tier_pages_in = self._counter(
            "host_tier_pages_in", "Pages copied back from host memory."
        )
        self.host_tier_bytes_in = self._counter("host_tier_bytes_in", "Bytes of those.")
        self.host_tier_hit_tokens = self._counter(
            "host_tier_hit_tokens",
            "Tokens that came back from host memory and were not computed.",
            "namespace",
        )
        self.host_tier_declined_tokens = self._counter(
            "host_tier_declined_tokens",
            "Tokens that were there, but are computed sooner than copied.",
            "namespace",
        )
        self.host_tier_dropped_pages = self._counter(
            "host_tier_dropped_pages", "Pages that host memory lost or had no room for.", "reason"
        )
        for reason in HOST_TIER_DROPS:
            self.host_tier_dropped_pages.labels(reason)

    def _make_levels(self) -> None:
        self.program_graphs = self._gauge(
            "program_graphs", "CUDA graphs that a program is replayed as.", "kind", "bucket"
        )
        self.program_operations = self._gauge(
            "program_operations",
            "Kernels, copies and library calls in a program of a GPU.",
            "kind",
            "bucket",
        )
        self.uncaptured_operations = self._gauge(
            "uncaptured_operations",
            "Of those, in no graph: launched one by one by the host.",
            "kind",
            "bucket",
        )
        self.host_tier_used_bytes = self._gauge(
            "host_tier_used_bytes", "Bytes of pages in host memory."
        )
        self.host_tier_break_even_tokens = self._gauge(
            "host_tier_break_even_tokens",
            "From how many tokens on a copy back takes less time than to compute them.",
        )
        self.requests_running = self._gauge("requests_running", "Requests holding a state row.")
        self.requests_waiting = self._gauge("requests_waiting", "Requests in the queue.")
        self.waiting_tokens = self._gauge("waiting_tokens", "Prompt tokens in the queue.")
        self.kv_usage = self._gauge("kv_usage_ratio", "Share of the pool's pages not free, 0 to 1.")
        self.kv_capacity_tokens = self._gauge("kv_capacity_tokens", "Tokens the pool can hold.")
        self.kv_reserved_bytes = self._gauge(
            "kv_reserved_bytes", "Bytes of pages held by sequences."
        )
        self.kv_used_bytes = self._gauge(
            "kv_used_bytes", "Bytes of page rows holding a computed token."
        )
        self.kv_stranded_bytes = self._gauge("kv_stranded_bytes", "Reserved less used.")
        self.host_gap_ratio = self._gauge(
            "host_gap_ratio", "Host gap by gap and busy device together, since the start, 0 to 1."
        )

    def _make_times(self) -> None:
        seconds = LATENCY_BUCKETS_S
        self.queue_seconds = self._histogram(
            "queue_seconds", "Arrival to first scheduled.", seconds
        )
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "First scheduled to first token.", seconds
        )
        self.decode_seconds = self._histogram(
            "decode_seconds", "First to last token of an ended request.", seconds
        )
        self.inference_seconds = self._histogram(
            "inference_seconds", "First scheduled to last token of an ended request.", seconds
        )
        self.delivery_seconds = self._histogram(
            "delivery_seconds", "Each token: on the host to accepted by its carrier.", seconds
        )
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", seconds
        )
        self.itl_seconds = self._histogram(
            "inter_token_seconds", "Between tokens of a sequence.", seconds
        )
        self.tpot_seconds = self._histogram(
            "time_per_output_token_seconds",
            "Decode time by tokens after the first, of ended requests with at least two.",
            seconds,
        )
        self.e2e_seconds = self._histogram("request_seconds", "Arrival to end.", seconds)
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of an ended request.", TOKEN_BUCKETS
        )
        self.request_output_tokens = self._histogram(
            "request_output_tokens", "Output tokens of an ended request.", TOKEN_BUCKETS
        )
        self.step_time_error = self._histogram(
            "step_time_error_ratio",
            "Error of each step's predicted time, by the measured one.",
            ERROR_BUCKETS,
        )
        self.step_tokens = self._histogram("step_tokens", "Tokens of a step.", TOKEN_BUCKETS)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return self._add(Counter(f"{PREFIX}{name}", help_text, labels, registry=self.registry))

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return self._add(Gauge(f"{PREFIX}{name}", help_text, labels, registry=self.registry))

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> ManyHistogram:
        return self._add(
            ManyHistogram(f"{PREFIX}{name}", help_text, buckets=buckets, registry=self.registry)
        )

    def _info(self, name: str, help_text: str) -> Info:
        return self._add(Info(f"{PREFIX}{name}", help_text, registry=self.registry))

    def _add[F: _Family](self, family: F) -> F:
        (described,) = family.describe()
        for suffix in _SUFFIXES[described.type]:
            self._by_sample[f"{described.name}{suffix}"] = family
        return family

    def count_refusal(self, error: errors.JaxserveError) -> None:
        """Counts a request that is not accepted."""
        self.requests_refused.labels(error_label(error)).inc()

    def clear_levels(self) -> None:
        """Nothing runs or waits any more, and no page is anybody's."""
        for level in (
            self.requests_running, self.requests_waiting, self.waiting_tokens, self.kv_usage,
            self.kv_reserved_bytes, self.kv_used_bytes, self.kv_stranded_bytes,
        ):  # fmt: skip
            level.set(0)

    def value(self, name: str, **labels: str) -> float:
        """Returns a sample, such as ``value("preemptions_total")``, summed over the labels that are
        not given; 0.0 if it was never touched.

        Raises:
          KeyError: there is no such sample.
        """
        wanted = f"{PREFIX}{name}"
        return sum(
            sample.value
            for family in self._by_sample[wanted].collect()
            for sample in family.samples
            if sample.name == wanted and labels.items() <= sample.labels.items()
        )

    def total(self, name: str) -> float:
        """Returns a sample summed over its labels, such as ``total("steps_total")``."""
        return self.value(name)
