"""Counters, gauges and histograms of one engine, in a registry of its own (prometheus-client).

Tests and reports read values through `Metrics.value`; nothing here is global.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0
)  # fmt: skip


class Metrics:
    """What the engine counts. Every counter only rises."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"jaxserve_{name}", help_text, labels, registry=self.registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"jaxserve_{name}", help_text, registry=self.registry)

        def histogram(name: str, help_text: str) -> Histogram:
            return Histogram(
                f"jaxserve_{name}", help_text, buckets=LATENCY_BUCKETS_S, registry=self.registry
            )

        # requests: submitted = the sum of finished over reasons, once idle
        self.requests_submitted = counter("requests_submitted", "Requests accepted by submit.")
        self.requests_refused = counter("requests_refused", "Refused at submit.", "reason")
        self.requests_finished = counter("requests_finished", "Requests ended.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.output_tokens = counter("output_tokens", "Tokens delivered.")
        self.surplus_tokens = counter(
            "surplus_tokens", "Tokens sampled after the end was decided; never delivered."
        )

        # steps
        self.steps = counter("steps", "Steps launched.", "bucket")
        self.real_tokens = counter("step_real_tokens", "Tokens computed.", "bucket")
        self.padded_tokens = counter("step_padded_tokens", "Bucket padding computed.", "bucket")
        self.output_programs = counter("output_programs", "Output programs run.", "variant")
        self.compiles = counter("compiles", "Programs compiled before serving.", "kind")
        self.compile_seconds = counter("compile_seconds", "Seconds spent compiling.", "kind")
        self.cache_hits = counter("compile_cache_hits", "Programs read from the persistent cache.")
        self.recompiles = counter("recompiles", "Programs compiled after warm-up: a fault.")
        self.sampler_fallbacks = counter(
            "sampler_fallbacks", "Steps whose filters needed more than the candidate cap."
        )

        # mechanisms: each proves that it ran
        self.preemptions = counter("preemptions", "Sequences that gave pages and row back.")
        self.recomputed_tokens = counter("recomputed_tokens", "Tokens computed again after it.")
        self.chunked_prompts = counter("chunked_prompts", "Prompts split over several steps.")
        self.mixed_steps = counter("mixed_steps", "Steps with both chunks and one-token rows.")
        self.joined_running = counter(
            "joined_running", "Sequences admitted while others were running."
        )
        self.pages_allocated = counter("kv_pages_allocated", "Pages handed out.")
        self.grown_pages = counter(
            "kv_grown_pages", "Pages taken by a running sequence as it grew."
        )
        self.reserved_pages = counter("kv_reserved_pages", "Pages taken ahead of need.")
        self.overlapped_steps = counter(
            "overlapped_steps", "Steps launched before an earlier result was read."
        )
        self.overlap_waits = counter("overlap_waits", "Steps that had to retire first.", "reason")
        self.bucketed_steps = counter(
            "bucketed_steps", "Steps run in a bucket smaller than the largest of its kind."
        )
        self.page_copies = counter("kv_page_copies", "Pages copied.")

        # levels
        self.requests_running = gauge("requests_running", "Requests holding a state row.")
        self.requests_waiting = gauge("requests_waiting", "Requests in the queue.")
        self.waiting_tokens = gauge("waiting_tokens", "Prompt tokens in the queue.")
        self.kv_capacity_tokens = gauge("kv_capacity_tokens", "Tokens the pool can hold.")
        self.kv_reserved_bytes = gauge("kv_reserved_bytes", "Bytes of pages held by sequences.")
        self.kv_used_bytes = gauge("kv_used_bytes", "Bytes of page rows holding a computed token.")
        self.kv_stranded_bytes = gauge("kv_stranded_bytes", "Reserved less used.")
        self.useful_rows = counter("useful_rows", "Row-steps that paid a live sequence's tokens.")
        self.offered_rows = counter("offered_rows", "Row-steps that the steps' batch held.")

        # times
        self.queue_seconds = histogram("queue_seconds", "Arrival to first scheduled.")
        self.ttft_seconds = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.itl_seconds = histogram("inter_token_seconds", "Between tokens of a sequence.")
        self.e2e_seconds = histogram("request_seconds", "Arrival to end.")

    def value(self, name: str, **labels: str) -> float:
        """Returns one sample, such as ``value("preemptions_total")``; 0.0 if never touched."""
        return self.registry.get_sample_value(f"jaxserve_{name}", labels) or 0.0

    def total(self, name: str) -> float:
        """Returns a sample summed over its labels, such as ``total("steps_total")``."""
        wanted = f"jaxserve_{name}"
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == wanted
        )
