"""The table of mechanisms: complete, enforced, and true of what runs."""

import itertools
import typing
from pathlib import Path

import jax
import pytest

from jaxserve.config import Config, load_config
from jaxserve.engine import Delta, Engine, ServedModel
from jaxserve.errors import ConfigError
from jaxserve.host_pages import SwapCosts
from jaxserve.mechanisms import (
    MECHANISMS,
    PAIRS,
    Mechanism,
    Pair,
    active_mechanisms,
    check_mechanisms,
)
from jaxserve.metrics import Metrics
from jaxserve.plan import Runner, StepLimits
from jaxserve.request import GenerationRequest, SamplingParams
from jaxserve.runner import programs
from jaxserve.runner.capture import Capture
from jaxserve.runner.runner import Runner as DeviceRunner
from tests.fakes import FakeRunner, build_byte_tokenizer
from tests.runner.driver import CONFIG, MODEL, tiny_params

CONFIGS = Path(__file__).parent.parent / "configs"
MAX_MODEL_TOKENS = 40
# Keys with a choice that make nothing faster: a precision, an implementation, a way to fail, what
# is offered and to whom.
NOT_MECHANISMS = {
    "model.dtype", "runner.attention", "runner.matmul", "runner.sampling",
    "runner.forbid_recompile",
    "metrics.prefix", "measure.phases", "measure.record_content", "log.format", "scheduler.policy",
    "model.tool_parser", "model.reasoning_parser", "server.page", "server.reflection",
    "server.vllm_engine", "auth.allow_open",
}  # fmt: skip
OFF_BY_DEFAULT = ("prefix_order", "host_tier", "batch_invariant", "kv_quantization")
# Those that a runner without a device does not have, or that need a workload of their own.
ELSEWHERE = (
    "buckets", "host_tier", "prefix_order", "command_buffers", "batch_invariant", "kv_quantization"
)  # fmt: skip
SPARE = Mechanism(
    name="spare",
    purpose="A mechanism that exists only here.",
    key="runner.forbid_recompile",
    on=False,
    off=True,
    counters=("steps_total",),
)


def switches() -> set[str]:
    """Configuration keys whose values are true and false, or a few words."""
    return {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key, choice in typing.cast("type[Config]", field.annotation).model_fields.items()
        if choice.annotation is bool or typing.get_origin(choice.annotation) is typing.Literal
    }


def test_every_switch_of_the_configuration_is_in_the_table() -> None:
    assert {mechanism.key for mechanism in MECHANISMS} == switches() - NOT_MECHANISMS


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_a_switch_has_its_two_values(mechanism: Mechanism) -> None:
    for value, is_on in ((mechanism.on, True), (mechanism.off, False)):
        config = load_config(flags={mechanism.key: value})
        assert mechanism.is_on(config) is is_on
        assert (mechanism in active_mechanisms(config)) is is_on


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_the_counters_exist(mechanism: Mechanism) -> None:
    names = {
        sample.name for family in Metrics().registry.collect() for sample in family.samples
    } | {f"{family.name}_total" for family in Metrics().registry.collect()}
    assert {f"jaxserve_{counter}" for counter in mechanism.counters} <= names
    assert mechanism.counters


def test_every_pair_of_the_table_is_known_and_nothing_else_is() -> None:
    names = [mechanism.name for mechanism in MECHANISMS]
    assert set(PAIRS) == {frozenset(pair) for pair in itertools.combinations(names, 2)}


def test_the_defaults_and_the_shipped_files_pass_the_check() -> None:
    assert check_mechanisms(Config()) == tuple(
        row for row in MECHANISMS if row.name not in OFF_BY_DEFAULT
    )
    for path in CONFIGS.glob("*.toml"):
        check_mechanisms(load_config(path))


def test_the_baseline_turns_off_every_optional_row() -> None:
    active = active_mechanisms(load_config(CONFIGS / "baseline.toml"))
    assert set(active) == {mechanism for mechanism in MECHANISMS if mechanism.in_baseline}


def test_all_of_them_work_together() -> None:
    flags = {
        "host_tier.enabled": True, "scheduler.prefix_order": True, "runner.batch_invariant": True,
        "kv.dtype": "int8",
    }  # fmt: skip
    assert check_mechanisms(load_config(flags=flags)) == MECHANISMS


def test_one_without_what_it_needs_is_refused_with_the_two_ways_out() -> None:
    config = load_config(flags={"host_tier.enabled": True, "prefix_cache.enabled": False})
    with pytest.raises(ConfigError, match="host_tier does nothing without prefix_cache") as caught:
        check_mechanisms(config)
    ways_out = "set prefix_cache.enabled = true or host_tier.enabled = false"
    assert str(caught.value).endswith(ways_out)


def test_an_unknown_pair_is_refused_with_the_two_ways_out() -> None:
    with pytest.raises(ConfigError, match="never tested") as caught:
        check_mechanisms(load_config(CONFIGS / "baseline.toml"), mechanisms=(MECHANISMS[0], SPARE))
    assert "continuous_batching and spare do not go together" in str(caught.value)
    assert 'set scheduler.batching = "static" or runner.forbid_recompile = true' in str(
        caught.value
    )


def test_a_refused_pair_is_refused_with_its_reason() -> None:
    pairs = {frozenset((MECHANISMS[0].name, "spare")): Pair(verdict="refused", note="they clash")}
    with pytest.raises(ConfigError, match="do not go together: they clash; set"):
        check_mechanisms(Config(), mechanisms=(MECHANISMS[0], SPARE), pairs=pairs)


def test_a_pair_that_is_not_on_together_is_not_looked_at() -> None:
    config = load_config(flags={"runner.forbid_recompile": True})
    assert check_mechanisms(config, mechanisms=(MECHANISMS[0], SPARE)) == MECHANISMS[:1]


def run_workload(config: Config, runner: Runner, metrics: Metrics, *, num_rounds: int = 1) -> None:
    """Runs requests that can use every mechanism, so many times."""
    engine = Engine(
        runner=runner,
        tokenizer=build_byte_tokenizer(),
        config=config,
        model=ServedModel(
            name="tiny", max_model_tokens=MAX_MODEL_TOKENS, vocab_size=128, eos_ids=frozenset()
        ),
        metrics=metrics,
    )
    engine.start()
    streams = [
        engine.submit(
            GenerationRequest(
                prompt=f"request number {number}",
                sampling=SamplingParams(temperature=0.0, max_tokens=6 + number),
            )
        )
        for number in list(range(4)) * num_rounds
    ]
    if isinstance(runner, FakeRunner):
        runner.gate.set()  # all are there before the first step ends
    for number, stream in enumerate(streams):
        token_ids = [id for event in stream if isinstance(event, Delta) for id in event.token_ids]
        assert len(token_ids) == 6 + number % 4
    engine.stop()


def run_on_fake(config: Config) -> Metrics:
    """Runs the workload on a runner without a device."""
    limits = StepLimits(
        max_rows=2,
        max_chunk_tokens=8 if config.scheduler.chunked_prefill else MAX_MODEL_TOKENS,
        chunk_tile=2,
        max_chunks=2,
        max_seqs=2,
    )
    runner = FakeRunner(limits=limits, num_pages=32, page_size=config.kv.page_size)
    runner.gate.clear()
    metrics = Metrics()
    run_workload(config, runner, metrics)
    return metrics


def run_on_device(*, capture: bool = True, **runner: object) -> Metrics:
    """Runs the workload on the real runner; its programs are those of tests/runner."""
    config = CONFIG.model_copy(
        update={
            "runner": CONFIG.runner.model_copy(update=runner),
            "buckets": CONFIG.buckets.model_copy(update={"capture": capture}),
        }
    )
    metrics = Metrics()
    run_workload(config, DeviceRunner(tiny_params(), MODEL, config, metrics=metrics), metrics)
    return metrics


@pytest.mark.parametrize(
    "mechanism",
    [row for row in MECHANISMS if row.name not in ELSEWHERE],
    ids=lambda row: row.name,
)
def test_a_mechanism_counts_while_on_and_not_while_off(mechanism: Mechanism) -> None:
    small = {"kv.page_size": 4, "scheduler.max_seqs": 2}
    metrics = {
        value: run_on_fake(load_config(flags={mechanism.key: value, **small}))
        for value in (mechanism.on, mechanism.off)
    }
    for counter in mechanism.counters:
        assert metrics[mechanism.on].total(counter) > 0
        assert metrics[mechanism.off].total(counter) == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_who_has_more_in_the_cache_starts_first_while_that_is_on(is_on: bool) -> None:
    flags = {"scheduler.prefix_order": is_on, "kv.page_size": 4, "scheduler.max_seqs": 1}
    limits = StepLimits(max_rows=1, max_chunk_tokens=8, chunk_tile=2, max_chunks=1, max_seqs=1)
    runner = FakeRunner(limits=limits, num_pages=32, page_size=4)
    runner.gate.clear()
    metrics = Metrics()
    engine = Engine(
        runner=runner,
        tokenizer=build_byte_tokenizer(),
        config=load_config(flags=flags),
        model=ServedModel(
            name="tiny", max_model_tokens=MAX_MODEL_TOKENS, vocab_size=128, eos_ids=frozenset()
        ),
        metrics=metrics,
    )
    engine.start()
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    prompts = ("the same beginning", "another prompt", "the same beginning, and more")
    streams = [engine.submit(GenerationRequest(prompt=p, sampling=sampling)) for p in prompts]
    runner.gate.set()  # all are there before the first step ends
    for stream in streams:
        for _ in stream:
            pass
    engine.stop()
    assert (metrics.total("reordered_starts_total") > 0) is is_on


def test_the_baseline_counts_nothing_but_what_it_keeps() -> None:
    plain = load_config(CONFIGS / "baseline.toml", flags={"kv.page_size": 4})
    metrics = run_on_fake(plain)
    for mechanism in MECHANISMS:
        for counter in mechanism.counters:
            assert (metrics.total(counter) > 0) is mechanism.in_baseline


def test_overlap_and_buckets_count_on_the_device_too() -> None:
    metrics = run_on_device(overlap=True, capture=True)
    assert metrics.total("quantized_kv_tokens_total") == 0  # off
    assert metrics.total("overlapped_steps_total") > 0
    assert metrics.total("bucketed_steps_total") > 0
    assert metrics.total("captured_steps_total") == 0  # a CPU has no graphs
    assert metrics.total("batch_invariant_steps_total") == 0  # off


def test_the_host_tier_counts_on_the_device_while_on_and_not_while_off() -> None:
    kv = CONFIG.kv.model_copy(update={"num_pages": 1 + 12})
    tier = CONFIG.host_tier.model_copy(update={"enabled": True, "max_bytes": 1 << 20})
    config = CONFIG.model_copy(update={"kv": kv, "host_tier": tier})
    metrics = Metrics()
    runner = DeviceRunner(tiny_params(), MODEL, config, metrics=metrics)
    assert runner.host_pages is not None
    runner.host_pages.costs = SwapCosts(run_pages=16, run_s=1e-9, token_s=1.0)
    off = config.model_copy(update={"host_tier": CONFIG.host_tier})
    (mechanism,) = (row for row in MECHANISMS if row.name == "host_tier")
    for chosen, is_on in ((off, False), (config, True)):
        run_workload(chosen, runner, metrics, num_rounds=2)
        for counter in mechanism.counters:
            assert (metrics.total(counter) > 0) is is_on


def test_batch_invariance_counts_on_the_device() -> None:
    metrics = run_on_device(batch_invariant=True)
    assert metrics.total("batch_invariant_steps_total") == metrics.total("steps_total") > 0
    assert metrics.total("bucketed_steps_total") == 0


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_tokens_count_on_the_device(dtype: str) -> None:
    kv = CONFIG.kv.model_copy(update={"dtype": dtype})
    config = CONFIG.model_copy(update={"kv": kv})
    assert "kv_quantization" in {row.name for row in active_mechanisms(config)}
    metrics = Metrics()
    run_workload(config, DeviceRunner(tiny_params(), MODEL, config, metrics=metrics), metrics)
    counted = metrics.total("quantized_kv_tokens_total")
    assert counted == metrics.total("step_real_tokens_total") > 0


@pytest.mark.parametrize(
    ("switch", "no_graph", "is_counted"),
    [
        ("auto", "none", True),
        ("auto", "jit_forward_step", False),
        ("auto", "output_step", False),
        ("off", "none", False),
    ],
)
def test_command_buffers_count_where_a_gpus_programs_are_graphs_and_not_while_off(
    switch: str, no_graph: str, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step counts where its forward and its output are a graph each."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def read(text: str) -> Capture:
        is_outside = no_graph in text.partition(",")[0]
        return Capture(num_graphs=1, num_operations=50, num_outside=int(is_outside))

    monkeypatch.setattr(programs, "read_capture", read)
    metrics = run_on_device(capture=False, command_buffers=switch, attention="xla", matmul="xla")
    assert metrics.total("steps_total") > 0
    counted = metrics.total("steps_total") if is_counted else 0
    assert metrics.total("captured_steps_total") == counted


def test_overlap_and_buckets_count_nothing_on_the_device_while_off() -> None:
    metrics = run_on_device(overlap=False, capture=False)
    assert metrics.total("steps_total") > 0
    assert metrics.total("overlapped_steps_total") == 0
    assert metrics.total("bucketed_steps_total") == 0
