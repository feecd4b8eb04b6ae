"""A server's metrics by our names, whoever serves them."""

import asyncio

import httpx
import pytest
from prometheus_client import generate_latest

from jaxserve.measure.server_metrics import Snapshot, describe_server, has_restarted
from jaxserve.measure.targets.base import Levels
from jaxserve.measure.targets.scrape import Scraper, levels_of
from jaxserve.metrics import Metrics

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 4096.0
"""


def test_the_registry_and_its_text_read_the_same() -> None:
    metrics = Metrics()
    metrics.steps.labels("4x1+0").inc(3)
    metrics.queue_seconds.observe(0.2)
    metrics.build.info({"jax": "0.12"})
    one = Snapshot.of_registry(metrics.registry)
    other = Snapshot.of_text(generate_latest(metrics.registry).decode())
    assert one.as_json() == other.as_json()
    assert one.value("steps_total", bucket="4x1+0") == 3
    assert one.value("queue_seconds_count") == 1
    assert one.value("nonsense") is None
    assert one.info("build") == {"jax": "0.12"}
    assert one.values_by("steps_total", "bucket") == {"4x1+0": 3}


def test_vllms_names_are_read_as_ours() -> None:
    snapshot = Snapshot.of_text(VLLM)
    assert levels_of(snapshot) == Levels(running=3.0, kv_usage=0.25, memory_bytes=4096.0)
    assert snapshot.value("output_tokens_total") == 100


def test_two_moments_say_what_happened_in_between() -> None:
    metrics = Metrics()
    metrics.steps.labels("4x1+0").inc(3)
    before = Snapshot.of_registry(metrics.registry)
    metrics.steps.labels("4x1+64").inc(2)
    metrics.real_tokens.labels("4x1+64").inc(30)
    metrics.padded_tokens.labels("4x1+64").inc(10)
    metrics.recompiles.labels(bucket="4x1+64").inc()
    metrics.recompiles.labels(bucket="").inc()
    metrics.bucket_fallbacks.labels(bucket="4x1+64").inc()
    metrics.captured_steps.labels(bucket="4x1+64").inc()
    metrics.output_programs.labels(bucket="4 greedy", variant="greedy").inc(2)
    metrics.side_programs.labels(kind="row_load").inc(1)
    after = Snapshot.of_registry(metrics.registry)
    found = describe_server(before, after, peak_kv_usage=0.5, peak_memory_bytes=None)
    assert found is not None
    assert found["buckets"] == [
        {
            "bucket": "4x1+64", "steps": 2, "real_tokens": 30, "padded_tokens": 10,
            "captured_steps": 1, "fallbacks": 1, "recompiles": 1,
        }
    ]  # fmt: skip
    assert found["captured_share"] == 0.5
    assert found["programs_per_step"] == 2.5
    assert found["padding_share"] == 0.25
    assert found["compiles"] == {"before_serving": None, "while_serving": 2.0}
    assert (found["kv_usage_peak"], found["peak_memory_bytes"]) == (0.5, None)


def test_what_did_not_happen_has_no_share() -> None:
    snapshot = Snapshot.of_registry(Metrics().registry)
    found = describe_server(snapshot, snapshot, peak_kv_usage=None, peak_memory_bytes=None)
    assert found is not None
    for share in (
        "padding_share", "row_occupancy", "host_gap_share", "captured_share", "programs_per_step"
    ):  # fmt: skip
        assert found[share] is None


@pytest.mark.parametrize(
    ("before", "after", "is_other"),
    [
        ("process_start_time_seconds 5.5\nx_total 9", "process_start_time_seconds 5.5\n", False),
        ("process_start_time_seconds 5.5\n", "process_start_time_seconds 9.5\n", True),
        ("jaxserve_output_tokens_total 9\n", "jaxserve_output_tokens_total 4\n", True),
        ("jaxserve_output_tokens_total 9\n", "jaxserve_output_tokens_total 9\n", False),
        ("jaxserve_output_tokens_total 9\n", "other 1\n", True),
    ],
)
def test_two_processes_have_no_difference(before: str, after: str, is_other: bool) -> None:
    first, last = Snapshot.of_text(before), Snapshot.of_text(after)
    assert has_restarted(first, last) is is_other
    found = describe_server(first, last, peak_kv_usage=None, peak_memory_bytes=None)
    assert (found is None) is is_other


def test_metrics_that_cannot_be_read_are_none_and_not_zero() -> None:
    snapshot = Snapshot.of_text(VLLM)
    peaks = {"peak_kv_usage": None, "peak_memory_bytes": None}
    assert describe_server(None, snapshot, **peaks) is None
    assert describe_server(snapshot, None, **peaks) is None
    assert levels_of(None) == Levels()


@pytest.mark.parametrize(
    ("status", "text", "is_read"),
    [(200, VLLM, True), (404, "no", False), (200, "<html>{{{", False)],
)
def test_a_scrape_is_metrics_or_nothing(status: int, text: str, is_read: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=text)

    async def read() -> Snapshot | None:
        scraper = Scraper("http://x/metrics", transport=httpx.MockTransport(answer))
        try:
            return await scraper.read()
        finally:
            await scraper.close()

    assert (asyncio.run(read()) is not None) is is_read


def test_a_server_that_is_gone_has_no_metrics() -> None:
    async def read() -> Snapshot | None:
        scraper = Scraper("http://127.0.0.1:1/metrics")
        try:
            return await scraper.read()
        finally:
            await scraper.close()

    assert asyncio.run(read()) is None
