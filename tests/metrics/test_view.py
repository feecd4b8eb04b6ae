"""What is served: our names, or vLLM's for what vLLM has too."""

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics import Metrics, MetricsView, finish_labels, refusal_labels
from jaxserve.metrics.labels import AUTH_FAILURES, HOST_TIER_DROPS, SPAN_DROPS
from jaxserve.metrics.view import TWINS
from tests.metrics.script import run_script

# Of vLLM 0.32, as tools read them; those of features that are not here are left out.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
}


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    metrics = run_script().metrics
    metrics.model_name = "tiny"
    return metrics


def served(metrics: Metrics, *, prefix: str) -> dict[str, Metric]:
    """The families after a way through the text format."""
    assert prefix in ("jaxserve", "vllm")
    registry = CollectorRegistry()
    registry.register(MetricsView(metrics, prefix))  # type: ignore[arg-type]  # one of the two
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def flat(family: Metric) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in family.samples}


def test_our_names_are_served_as_they_are_counted(metrics: Metrics) -> None:
    families = served(metrics, prefix="jaxserve")
    for family in metrics.registry.collect():
        if family.type == "info":
            continue  # a gauge in the text format
        family.samples = [s for s in family.samples if not s.name.endswith("_created")]
        assert flat(families[family.name]) == flat(family)
        assert families[family.name].documentation == family.documentation
    assert not any("created" in name for name in families)


def test_vllms_names_and_types_are_these(metrics: Metrics) -> None:
    families = served(metrics, prefix="vllm")
    vllm = {name: family.type for name, family in families.items() if name.startswith("vllm:")}
    assert vllm == VLLM


def test_what_vllm_has_is_served_once_and_the_rest_as_ours(metrics: Metrics) -> None:
    ours, theirs = served(metrics, prefix="jaxserve"), served(metrics, prefix="vllm")
    kept = ours.keys() - TWINS.keys()
    assert theirs.keys() == kept | VLLM.keys()
    for name in kept:
        assert flat(theirs[name]) == flat(ours[name])


def test_a_twin_has_our_values_and_vllms_labels(metrics: Metrics) -> None:
    theirs = served(metrics, prefix="vllm")
    (running,) = theirs["vllm:num_requests_running"].samples
    assert (running.value, running.labels) == (0, {"model_name": "tiny", "engine": "0"})
    for ours, name in (
        ("time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("step_tokens", "vllm:iteration_tokens_total"),
    ):
        samples = {
            s.name.removeprefix(name): s for s in theirs[name].samples if "le" not in s.labels
        }
        assert samples["_count"].value == metrics.value(f"{ours}_count")
        assert samples["_sum"].value == metrics.value(f"{ours}_sum")
        buckets = {s.labels["le"]: s.value for s in theirs[name].samples if "le" in s.labels}
        assert all(metrics.value(f"{ours}_bucket", le=le) == buckets[le] for le in buckets)
        assert len(buckets) > 10


def test_ends_are_added_up_by_vllms_reasons() -> None:
    metrics = Metrics()
    metrics.model_name = "tiny"
    for number, reason in enumerate(finish_labels()):
        metrics.requests_finished.labels(reason).inc(10**number)
    family = served(metrics, prefix="vllm")["vllm:request_success"]
    values = {s.labels["finished_reason"]: int(s.value) for s in family.samples}
    assert finish_labels()[:6] == (
        "eos", "stop", "max_tokens", "context_length", "cancelled", "deadline",
    )  # fmt: skip
    errors = sum(10**number for number in range(6, len(finish_labels())))
    assert values == {"stop": 11, "length": 1100, "abort": 110000, "error": errors}


def test_before_the_model_is_known_its_families_have_no_samples() -> None:
    families = served(Metrics(), prefix="vllm")
    assert families["vllm:num_requests_running"].samples == []
    assert families["jaxserve_requests_submitted"].samples[0].value == 0


@pytest.mark.parametrize(
    "name", ['a"} 7\nvllm:prompt_tokens_total{x="', "back\\slash\\n", "é\x1b["]
)
def test_a_models_name_cannot_make_samples(metrics: Metrics, name: str) -> None:
    """K4: a folder may be called anything."""
    hostile = Metrics()
    hostile.model_name = name
    hostile.config.info({"model": name})
    families = served(hostile, prefix="vllm")
    assert {s.labels["model_name"] for s in families["vllm:prompt_tokens"].samples} == {name}
    assert families.keys() == served(metrics, prefix="vllm").keys()
    (config,) = families["jaxserve_config_info"].samples
    assert config.labels == {"model": name}


def test_labels_have_few_values() -> None:
    """K4: nothing that a client sends becomes a label."""
    assert len(refusal_labels()) == len(set(refusal_labels())) < 20
    assert len(finish_labels()) == len(set(finish_labels())) < 20
    words = {
        *refusal_labels(),
        *finish_labels(),
        *AUTH_FAILURES,
        *SPAN_DROPS,
        *HOST_TIER_DROPS,
    }
    assert all(word.replace("_", "").isalpha() and word.islower() for word in words)
    for family in Metrics().registry.collect():
        reasons = {s.labels["reason"] for s in family.samples if "reason" in s.labels}
        assert reasons <= words


def test_a_sample_that_does_not_exist_is_not_zero() -> None:
    metrics = Metrics()
    assert metrics.value("steps_total", bucket="8x1+0") == 0
    for name in ("step_total", "steps", "queue_seconds"):
        with pytest.raises(KeyError):
            metrics.value(name)


def test_labels_that_are_left_out_are_added_up() -> None:
    metrics = Metrics()
    for kind, bucket, count in (("forward", "a", 1), ("forward", "b", 2), ("output", "a", 4)):
        metrics.compiles.labels(kind=kind, bucket=bucket).inc(count)
    assert metrics.value("compiles_total") == metrics.total("compiles_total") == 7
    assert metrics.value("compiles_total", kind="forward") == 3
    assert metrics.value("compiles_total", kind="forward", bucket="b") == 2
