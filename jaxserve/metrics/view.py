"""The metrics as they are served: under our names, or what vLLM has too under vLLM's.

vLLM's names and labels are those of its `vllm/v1/metrics/loggers.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final, Literal

from prometheus_client import Metric
from prometheus_client.registry import Collector

from jaxserve.metrics.registry import PREFIX, Metrics
from jaxserve.request import FinishReason

Labels = dict[str, str]


def _same(labels: Labels) -> Labels:
    return labels


def _finished_reason(labels: Labels) -> Labels:
    return {"finished_reason": VLLM_REASONS.get(labels["reason"], "error")}


@dataclasses.dataclass(slots=True, frozen=True)
class Twin:
    """vLLM's family for one of ours.

    Attributes:
      name: without the `_total` of a counter.
      labels: ours to theirs; samples that become the same are added up.
    """

    name: str
    labels: Callable[[Labels], Labels] = _same


# vLLM's FinishReason; what is not here ended with an error.
VLLM_REASONS: Final = {
    FinishReason.EOS.value: "stop",
    FinishReason.STOP.value: "stop",
    FinishReason.MAX_TOKENS.value: "length",
    FinishReason.CONTEXT_LENGTH.value: "length",
    FinishReason.CANCELLED.value: "abort",
    FinishReason.DEADLINE.value: "abort",
}
TWINS: Final = {
    f"{PREFIX}{ours}": twin
    for ours, twin in {
        "requests_running": Twin("vllm:num_requests_running"),
        "requests_waiting": Twin("vllm:num_requests_waiting"),
        "kv_usage_ratio": Twin("vllm:kv_cache_usage_perc"),
        "prompt_tokens": Twin("vllm:prompt_tokens"),
        "output_tokens": Twin("vllm:generation_tokens"),
        "requests_finished": Twin("vllm:request_success", _finished_reason),
        "requests_refused": Twin("vllm:admission_rejections"),
        "preemptions": Twin("vllm:num_preemptions"),
        "time_to_first_token_seconds": Twin("vllm:time_to_first_token_seconds"),
        "inter_token_seconds": Twin("vllm:inter_token_latency_seconds"),
        "time_per_output_token_seconds": Twin("vllm:request_time_per_output_token_seconds"),
        "request_seconds": Twin("vllm:e2e_request_latency_seconds"),
        "queue_seconds": Twin("vllm:request_queue_time_seconds"),
        "prefill_seconds": Twin("vllm:request_prefill_time_seconds"),
        "decode_seconds": Twin("vllm:request_decode_time_seconds"),
        "inference_seconds": Twin("vllm:request_inference_time_seconds"),
        "request_prompt_tokens": Twin("vllm:request_prompt_tokens"),
        "request_output_tokens": Twin("vllm:request_generation_tokens"),
        "step_tokens": Twin("vllm:iteration_tokens_total"),
    }.items()
}


class MetricsView(Collector):
    """Reads the families anew at each scrape; the names stay the same from the first to the last.

    A family with a twin has no samples until the model's name, which is their label, is known.
    """

    def __init__(self, metrics: Metrics, prefix: Literal["jaxserve", "vllm"]) -> None:
        self._metrics = metrics
        self._twins = TWINS if prefix == "vllm" else {}

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.registry.collect():
            # the time each series was made says no more than the process's start, on as many lines
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            twin = self._twins.get(family.name)
            yield _translate(family, twin, self._metrics.model_name) if twin else family

    def describe(self) -> Iterator[Metric]:
        """Names the families for the registry, which serves `?name[]=` by them."""
        yield from self.collect()


def _translate(family: Metric, twin: Twin, model_name: str | None) -> Metric:
    translated = Metric(twin.name, family.documentation, family.type)
    if model_name is None:
        return translated
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        labels = {"model_name": model_name, "engine": "0", **twin.labels(dict(sample.labels))}
        key = (f"{twin.name}{suffix}", tuple(labels.items()))
        values[key] = values.get(key, 0.0) + sample.value
    for (name, items), value in values.items():
        translated.add_sample(name, dict(items), value)
    return translated
