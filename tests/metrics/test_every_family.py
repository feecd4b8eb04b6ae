"""Every family has a row here: its exact value after runs that are known step by step."""

import asyncio
import dataclasses
import datetime
import gc
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import httpx
import jax
import pytest
from jax import numpy as jnp
from prometheus_client import Metric

import jaxserve
from jaxserve.client import AsyncClient, BadRequestError, OverloadedError, UnauthenticatedError
from jaxserve.config import ServerSection, TenantLimits, TenantsSection, load_config
from jaxserve.engine.start import load_engine
from jaxserve.errors import ConfigError
from jaxserve.host_pages import SwapCosts
from jaxserve.metrics import Metrics
from jaxserve.metrics.registry import ERROR_BUCKETS, LATENCY_BUCKETS_S, PREFIX, TOKEN_BUCKETS
from jaxserve.request import GenerationRequest, SamplingParams
from jaxserve.runner import programs
from jaxserve.runner.runner import Runner
from jaxserve.runner.spec import bytes_of_page
from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.differential.small import Play
from tests.differential.small import ask as ask_small
from tests.differential.stage import MODEL, tiny_params
from tests.differential.test_host_tier import PROMPTS, TIER
from tests.engines import ask, build_engine, gather, gather_choices, serve
from tests.metrics.script import LEVELS, Run, run_script
from tests.server.credentials import Files, sections, write_keys
from tests.server.harness import connect, run_server

Source = Literal["script", "reserving", "sharing", "tier", "device", "server", "tenants"]
Samples = Mapping[str, float]  # label values, joined by commas, to a value; 0 where not named

DEVICE_CONFIG: Final = load_config(
    flags={
        "model.dtype": "float32",
        "runner.attention": "xla",
        "runner.matmul": "xla",
        "model.max_model_tokens": 64,
        "kv.page_size": 4,
        "kv.num_pages": 33,
        "scheduler.max_seqs": 4,
        "buckets.decode_seqs": (4,),
        "buckets.chunk_tokens": (8, 16),
        "buckets.chunk_decode_seqs": (4,),
        "buckets.chunk_tile": 4,
        "runner.compile_threads": 1,
    }
)
PROGRAMS: Final = (
    "forward,4x1+0", "forward,4x1+8", "forward,4x1+16", "output,4 greedy", "output,4 plain",
    "output,4 full", "score,", "page_copy,", "init,", "row_load,", "counts,",
)  # fmt: skip
TIER_PAGE_BYTES: Final = bytes_of_page(MODEL, page_size=4, kv_dtype="float32")
EXPIRY: Final = datetime.datetime(2040, 1, 2, 3, tzinfo=datetime.UTC)
SHORT_AT: Final = (5.5, 7, 11.5, 13, 14.5, 16, 19, 19.5)  # when its tokens were on the host
GONE_AT: Final = (13, 14.5, 16, 17.5, 22)

# Read script.py's drawing beside it. A histogram's row lists what was observed.
FAMILIES: Final[Mapping[str, tuple[Source, Samples | Sequence[float]]]] = {
    "requests_submitted": ("script", {"": 5}),
    "requests_refused": ("script", {"invalid_field": 1}),
    "requests_finished": (
        "script",
        {"eos": 1, "max_tokens": 1, "cancelled": 1, "error_numerics": 1, "error_deadline": 1},
    ),
    "rpcs": (
        "server",
        {
            "Generate,OK": 1,
            "Generate,INVALID_ARGUMENT": 1,
            "StreamGenerate,OK": 2,
            "ListModels,OK": 1,
        },
    ),
    "http_requests": (
        "server",
        {"/v1/completions,200": 1, "/v1/completions,400": 1, "/health,200": 1, "other,404": 1},
    ),
    "open_calls": ("server", {}),  # tests/server/test_metrics.py sees them open
    "trace_spans_exported": ("tenants", {}),  # tests/server/tracing has what they count
    "trace_spans_dropped": ("tenants", {}),
    "prompt_tokens": ("script", {"": 9 + 3 + 2 + 1}),  # not LATE's
    "output_tokens": ("script", {"": 4 + 8 + 1 + 5}),
    "surplus_tokens": ("script", {"": 3}),  # of LONG in step 6, BAD in 10, GONE in 15
    "given_up_streams": ("script", {}),  # all are read
    "put_off_streams": ("script", {}),  # no task waits: tests/engine/test_delivery.py
    "auth_failures": ("tenants", {"missing": 1, "unknown": 2}),
    "credential_reloads": ("tenants", {"ok": 1, "failed": 2}),
    "certificate_expiry_timestamp_seconds": ("tenants", {"": EXPIRY.timestamp()}),
    "tenant_requests_submitted": ("tenants", {"acme": 1, "other": 2}),
    "tenant_quota_refusals": ("tenants", {"acme,requests_per_minute": 3}),
    "tenant_prompt_tokens": ("tenants", {"acme": 3, "other": 3 + 5}),
    "tenant_output_tokens": ("tenants", {"acme": 2, "other": 4 + 4}),
    "tenant_requests_live": ("script", {"": 3 + 1}),
    "steps": ("device", {"4x1+16": 1, "4x1+8": 2, "4x1+0": 3}),
    "step_real_tokens": ("device", {"4x1+16": 16, "4x1+8": 4 + 3, "4x1+0": 2 + 2}),
    "step_padded_tokens": ("device", {"4x1+16": 4, "4x1+8": 8 + 9, "4x1+0": 2 * 3 + 2}),
    "bucket_fallbacks": ("device", {}),  # all its buckets have the same rows
    "captured_steps": ("device", {}),  # of a GPU: tests/test_mechanisms.py
    "output_programs": ("device", {"4 greedy,greedy": 3, "4 full,full": 2}),
    "side_programs": ("device", {"row_load": 2, "score": 1, "page_copy": 1}),
    "compiles": ("device", dict.fromkeys(PROGRAMS, 1)),
    "compile_seconds": ("device", dict.fromkeys(PROGRAMS, 2)),  # of two starts
    "compile_cache_hits": ("device", dict.fromkeys(PROGRAMS, 1)),
    "recompiles": ("device", {"": 1}),
    "sampler_fallbacks": ("device", {"": 2}),
    "masked_tokens": ("device", {}),
    "batched_masks": ("device", {}),
    "scored_tokens": ("device", {"": 2}),
    "useful_rows": ("script", {"": 21}),  # offered less the surplus
    "offered_rows": ("script", {"": 24}),
    # the fake runner builds nothing; a launch takes 1 and a result 0.5
    "step_host_seconds": ("script", {"dispatch": 15 * 1, "wait": 15 * 0.5}),
    "step_device_seconds": (
        "script",  # from the end of a launch, or the result before it, to the result; 19.5 in all
        {
            "0x1+6": 1.5 * 4,  # 1, 2, 7, 14
            "2x1+0": 1.5 * 2,  # 3, 4
            "1x1+0": 1.5 * 3 + 0.5 * 3,  # 5, 11, 12; 6, 13, 15: launched long before
            "2x1+2": 1.5,  # 8
            "3x1+0": 1.5 * 2,  # 9, 10
        },
    ),
    "step_gap_seconds": ("script", {"": 1 + 1 + 1}),  # before the launches 1, 7, 14
    "step_communication_seconds": ("script", {}),  # one device
    "reader_detokenize_seconds": ("script", {}),  # the clock stands still meanwhile
    "preemptions": ("script", {"": 2}),
    "recomputed_tokens": ("script", {"": 4 + 4}),
    "chunked_prompts": ("script", {"": 2}),  # LONG's and SHORT's
    "limited_chunk_steps": ("script", {}),  # there is no target
    "mixed_steps": ("script", {"": 1}),  # 8
    "decode_table_tokens": ("script", {}),  # few pages: tests/scheduler/test_random_operations.py
    "reordered_starts": ("script", {}),  # the order is the policy's
    "joined_running": ("script", {"": 3}),  # SHORT, BAD, GONE; those that resume join nobody
    "kv_pages_allocated": ("script", {"": 2 + 1 + 2 + 1 + 1 + 2 + 3}),
    "kv_grown_pages": ("script", {"": 3}),  # LONG's in 2 and 6, SHORT's in 12
    "kv_reserved_pages": ("reserving", {"": 1}),
    "forked_choices": ("device", {"": 1}),
    "kv_page_copies": ("device", {"": 1}),  # of the prompt's page: one choice goes on in it
    "prefix_cache_queries": ("sharing", {"anonymous": 4, "other": 1}),
    "prefix_cache_query_tokens": ("sharing", {"anonymous": 9 + 9 + 8 + 37, "other": 9}),
    "prefix_cache_hits": ("sharing", {"anonymous": 2}),
    "prefix_cache_hit_tokens": ("sharing", {"anonymous": 8 + 6}),
    "prefix_cache_reused_tokens": ("sharing", {"anonymous": 8 + 6}),
    "prefix_cache_copied_tokens": ("sharing", {"anonymous": 2}),
    "prefix_cache_waits": ("sharing", {}),  # one after the other
    "prefix_cache_evictions": ("sharing", {"anonymous": 1, "other": 2}),
    "prefix_cache_refusals": ("sharing", {"other,owner": 1}),
    "host_tier_pages_out": ("tier", {"": 14}),
    "host_tier_bytes_out": ("tier", {"": 14 * TIER_PAGE_BYTES}),
    "host_tier_pages_in": ("tier", {"": 3}),
    "host_tier_bytes_in": ("tier", {"": 3 * TIER_PAGE_BYTES}),
    "host_tier_hit_tokens": ("tier", {"anonymous": 12}),
    "host_tier_declined_tokens": ("tier", {"anonymous": 12}),
    "host_tier_dropped_pages": ("tier", {"damaged": 1}),
    "overlapped_steps": ("script", {"": 15 - 3}),
    "overlap_waits": ("script", {"pages": 2}),  # before launches 7 and 14
    "batch_invariant_steps": ("device", {}),  # off; tests/test_mechanisms.py
    "quantized_kv_tokens": ("device", {}),  # off; tests/test_mechanisms.py
    "bucketed_steps": ("device", {"": 2}),
    "program_graphs": ("device", {}),  # of a GPU: tests/runner/test_capture.py
    "program_operations": ("device", {}),
    "uncaptured_operations": ("device", {}),
    "host_tier_used_bytes": ("tier", {"": 11 * TIER_PAGE_BYTES}),
    "host_tier_break_even_tokens": ("script", {}),  # measured: tests/runner/test_swaps.py
    "requests_running": ("script", {"": 3}),
    "requests_waiting": ("script", {"": 1}),
    "waiting_tokens": ("script", {"": 2}),
    "kv_usage_ratio": ("script", {"": 1.0}),
    "kv_capacity_tokens": ("script", {"": 16}),
    "kv_reserved_bytes": ("script", {"": 4 * 400}),
    "kv_used_bytes": ("script", {"": (6 + 1 + 2) * 100}),
    "kv_stranded_bytes": ("script", {"": 700}),
    "host_gap_ratio": ("script", {"": 3 / 22.5}),
    "queue_seconds": ("script", [0, 1, 7.5, 1]),
    "prefill_seconds": ("script", [4, 4.5, 3, 3]),
    "decode_seconds": ("script", [4.5, 14, 0, 9]),
    "inference_seconds": ("script", [8.5, 18.5, 3, 12]),
    "delivery_seconds": (
        "script",  # LONG's at 9, all others' at 22.5
        [
            *(9 - ready for ready in (4, 5.5, 7, 8.5)),
            *(22.5 - ready for ready in (*SHORT_AT, 13, *GONE_AT)),
        ],
    ),
    "time_to_first_token_seconds": ("script", [4, 5.5, 10.5, 4]),
    "inter_token_seconds": (
        "script",
        [
            *(1.5, 1.5, 1.5),
            *(later - earlier for earlier, later in itertools.pairwise(SHORT_AT)),
            *(later - earlier for earlier, later in itertools.pairwise(GONE_AT)),
        ],
    ),
    "time_per_output_token_seconds": ("script", [4.5 / 3, 14 / 7, 9 / 4]),
    "request_seconds": ("script", [8.5, 19.5, 12, 13, 1.5]),
    "request_prompt_tokens": ("script", [9, 3, 2, 1, 2]),
    "request_output_tokens": ("script", [4, 8, 1, 5, 0]),
    "step_time_error_ratio": (
        "script",  # of launches 2 to 15; each is predicted by the median of its bucket so far, or
        # by the buckets next to it in size; measured from the result before or its own planning
        [1 / 1.5, 0.5 / 1.5, 0, 0, 2, 0.2, 0.5 / 1.5, 0, 0, 0.5 / 1.5, 0, 2, 0, 2],
    ),
    "step_tokens": ("script", [6, 5, 2, 2, 1, 1, 5, 4, 3, 3, 1, 1, 1, 5, 1]),
    "build": ("device", {}),  # its labels have a test of their own
    "config": ("device", {}),
}


@pytest.fixture(scope="module")
def script() -> Run:
    return run_script()


@pytest.fixture(scope="module")
def reserving() -> Metrics:
    """A request of 3 + 6 tokens takes both its pages at once, one of them ahead of need."""
    engine, runner = build_engine(reserve="max_length")
    with serve(engine, runner):
        gather(engine.submit(ask((1, 2, 3), max_tokens=6, ignore_eos=True)))
    return engine.metrics


@pytest.fixture(scope="module")
def sharing() -> Metrics:
    """Of twelve pages of four: a prompt of 9 tokens twice, which leaves its two full pages; one of
    8 that has 6 of them, and leaves a page of its own; the first one for another tenant, who gets
    nothing and leaves two more; and one of 37, for whose ten pages three of these five must go.
    """
    engine, runner = build_engine()
    first = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    with serve(engine, runner):
        for asked in (
            ask(first, max_tokens=1),
            ask(first, max_tokens=1),
            ask((*first[:6], 40, 41), max_tokens=1),
            dataclasses.replace(ask(first, max_tokens=1), tenant="acme"),
            ask(tuple(range(50, 87)), max_tokens=1),
        ):
            gather(engine.submit(asked))
    return engine.metrics


@pytest.fixture(scope="module")
def tier() -> Metrics:
    """Of twelve pages of four: a prompt of 30 tokens leaves its seven full ones, and another, for
    whose eight three of these must go, has all seven copied, as they ride along. The first finds
    four in the pool and three in host memory, and pushes the other's out likewise; that one finds
    as much, but computes what is in host memory, which is sooner now. The first again: a page that
    returns is damaged, and is lost with the two behind it.
    """
    runner = Runner(tiny_params(), MODEL, TIER, metrics=Metrics())
    store = runner.host_pages
    assert store is not None
    store.costs = SwapCosts(run_pages=16, run_s=1e-9, token_s=1.0)
    play = Play(runner, config=TIER)
    cache = play.engine._pool.cache
    assert cache is not None
    assert cache.host is not None

    def run(prompt: tuple[int, ...]) -> None:
        play.submit(ask_small(prompt, max_tokens=1))
        play.run()

    for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0]):
        run(prompt)
    before, store.costs = store.costs, dataclasses.replace(store.costs, run_s=12.0)
    run(PROMPTS[1])
    store.costs = before
    (fifth,) = (node for node in cache.host if node.depth == 5 and not node.is_live)
    assert fifth.host_page is not None
    store._bytes[fifth.host_page, 0, 0] ^= 1
    run(PROMPTS[0])
    return runner._metrics


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """Two starts, the second from the cache; then one request after the other, and a fault.

    The first is 20 prompt tokens in chunks of 16 and 4, and 3 outputs; the second 3, which are
    scored, and two choices of 2, with a filter that needs more candidates than the cap. A program
    takes a second to compile.
    """
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_hf(folder, T1, make_weights(T1))
    cache_dir = tmp_path_factory.mktemp("cache")
    runner_section = DEVICE_CONFIG.runner.model_copy(update={"cache_dir": cache_dir})
    config = DEVICE_CONFIG.model_copy(update={"runner": runner_section})
    metrics = Metrics()
    with pytest.MonkeyPatch.context() as patch:
        ticks = itertools.count()
        patch.setattr(programs, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
        for _ in range(2):
            jax.clear_caches()  # as in a new process
            engine = load_engine(str(folder), config, metrics=metrics)
            gc.collect()  # the first engine's ear for compiles closes with it
    engine.start()
    wide = SamplingParams(
        temperature=100.0,
        top_p=0.99,
        max_tokens=2,
        ignore_eos=True,
        num_choices=2,
        prompt_logprobs=0,
    )
    gather(engine.submit(ask(tuple(range(20)), max_tokens=3, ignore_eos=True)))
    gather_choices(engine.submit(GenerationRequest(prompt=(1, 2, 3), sampling=wide)))
    engine.stop()
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    return metrics


@pytest.fixture(scope="module")
def server() -> Metrics:
    return asyncio.run(call_each())


async def call_each() -> Metrics:
    listening = {"server": ServerSection(port=0, http_port=0)}
    async with run_server(sections=listening) as running, connect(running) as client:
        assert running.server.http is not None
        async with httpx.AsyncClient(base_url=f"http://{running.server.http.address}") as http:
            for prompt in ("one", 1):
                await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            await http.get("/health")
            await http.get("/nowhere")
        await client.generate("one", max_tokens=2)
        with pytest.raises(BadRequestError):
            await client.generate("one", temperature=-1.0)
        for _ in range(2):
            async for _event in client.stream("two", max_tokens=2):
                pass
        await client.models()
    return running.engine.metrics


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return asyncio.run(call_as_tenants(tmp_path_factory.mktemp("secrets")))


async def call_as_tenants(folder: Path) -> Metrics:
    """Of acme, which is configured, and of two that are not; then with wrong keys; then reloads."""
    files = Files(folder=folder)
    files.write(files.root.issue_cert("localhost", not_after=EXPIRY))
    path, (acme, bolt, coil) = write_keys(folder, "acme", "bolt", "coil")
    limits = TenantsSection(named={"acme": TenantLimits(requests_per_minute=1)})
    chosen = {**sections(path, files.section()), "tenants": limits}
    async with run_server(sections=chosen) as running:

        async def call(key: str, prompt: str, max_tokens: int) -> None:
            async with AsyncClient(running.target, key=key, tls=files.trust()) as client:
                await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)

        await call(acme, "one", 2)
        await call(bolt, "two", 4)
        await call(coil, "three", 4)
        for _ in range(3):
            with pytest.raises(OverloadedError):
                await call(acme, "one", 2)
        for key in ("", "jsk_wrong", acme[:-1]):
            with pytest.raises(UnauthenticatedError):
                await call(key, "one", 2)
        credentials = running.server.door.credentials
        credentials.reload()
        (folder / "key.pem").unlink()
        for _ in range(2):
            with pytest.raises(ConfigError):
                credentials.reload()
    return running.engine.metrics


@pytest.fixture(scope="module")
def read(request: pytest.FixtureRequest, script: Run) -> Callable[[Source], dict[str, Metric]]:
    """The families after a run."""

    def read(source: Source) -> dict[str, Metric]:
        found = request.getfixturevalue(source)
        return families(found.metrics if isinstance(found, Run) else found)

    return read


def test_no_family_is_without_a_row() -> None:
    assert list(FAMILIES) == list(families(Metrics()))


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if name not in LEVELS])
def test_the_value_after_the_run_is_exact(
    name: str, read: Callable[[Source], dict[str, Metric]]
) -> None:
    source, wanted = FAMILIES[name]
    family = read(source)[name]
    if isinstance(wanted, Sequence):
        assert family.type == "histogram"
        assert histogram(family) == pytest.approx(buckets_of(wanted, name), abs=1e-9)
        return
    assert {labels: value for labels, value in samples(family).items() if value} == dict(wanted)


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_exact_in_the_middle_and_nothing_is_left_at_the_end(
    name: str, script: Run
) -> None:
    _, wanted = FAMILIES[name]
    assert isinstance(wanted, Mapping)
    assert script.levels[name] == wanted[""]
    at_end = wanted[""] if name == "kv_capacity_tokens" else 0
    assert script.metrics.value(name) == at_end


def test_what_runs_is_told_in_labels(device: Metrics) -> None:
    (config,) = families(device)["config"].samples
    assert config.value == 1
    assert config.labels == {
        "model": "tiny", "architecture": "llama", "quantization": config.labels["quantization"],
        "dtype": "float32", "kv_dtype": "float32", "attention": "xla", "matmul": "xla",
        "sampling": "candidates",
        "page_size": "4", "max_seqs": "4", "max_model_tokens": "64",
        "mechanisms": "continuous_batching,on_demand_pages,chunked_prefill,overlap,buckets,"
        "prefix_cache",
    }  # fmt: skip
    (build,) = families(device)["build"].samples
    assert build.labels["version"] == jaxserve.__version__
    assert build.labels["jax"] == jax.__version__
    assert build.labels["platform"] == jax.default_backend()
    assert device.model_name == "tiny"


def test_a_shape_that_never_ran_shows_as_zero(device: Metrics) -> None:
    (family,) = (f for f in device.registry.collect() if f.name == f"{PREFIX}output_programs")
    assert samples(family)["4 plain,plain"] == 0


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name.removeprefix(PREFIX): family for family in metrics.registry.collect()}


def samples(family: Metric) -> dict[str, float]:
    """Label values, in the order of the labels, to the value."""
    return {
        ",".join(sample.labels.values()): sample.value
        for sample in family.samples
        if not sample.name.endswith(("_created", "_info"))
    }


def histogram(family: Metric) -> dict[str, float]:
    """Upper bounds, "sum" and "count" to the value."""
    return {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def buckets_of(observed: Sequence[float], name: str) -> dict[str, float]:
    """What a histogram shows of these values."""
    if name.endswith("_ratio"):
        bounds: Sequence[float] = ERROR_BUCKETS
    else:
        bounds = LATENCY_BUCKETS_S if name.endswith("_seconds") else TOKEN_BUCKETS
    cumulative = {str(float(bound)): sum(value <= bound for value in observed) for bound in bounds}
    return {**cumulative, "+Inf": len(observed), "count": len(observed), "sum": sum(observed)}
