"""Compiled programs: their keys, what they donate, the persistent cache, the guard."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import jax
import jaxlib.version
import numpy as np
import pytest
from jax import numpy as jnp

from jaxserve.config import Config
from jaxserve.errors import CapacityError, RecompileError
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.dot import MatmulImpl
from jaxserve.metrics import Metrics
from jaxserve.model.config import ModelConfig
from jaxserve.model.params import Params
from jaxserve.plan import Bucket
from jaxserve.runner.batch import SCORE_WIDTH
from jaxserve.runner.buckets import OutputBucket, Reach
from jaxserve.runner.compile_cache import persistent_cache, versioned_folder
from jaxserve.runner.kernel_choice import choose_attention, choose_sampling
from jaxserve.runner.lowering import ProgramKey, lower
from jaxserve.runner.programs import Programs, compiler_options, program_keys
from jaxserve.runner.results import num_logprob_columns
from jaxserve.runner.runner import Runner
from jaxserve.runner.sizing import RunnerSizes, size_runner
from tests.fakes import build_mask
from tests.runner.driver import CONFIG, MODEL, Driver, oracle_tokens, prompt_of, tiny_sizes

# A value of each configuration field that programs depend on, other than CONFIG's.
CHANGES_PROGRAMS: dict[str, object] = {
    "model.dtype": "bfloat16",
    "model.max_model_tokens": 32,
    "kv.page_size": 8,
    "kv.dtype": "bfloat16",
    "kv.num_pages": 64,
    "scheduler.chunked_prefill": False,
    "scheduler.max_seqs": 5,
    "scheduler.max_chunks": 2,
    "buckets.decode_seqs": [2, 6],
    "buckets.chunk_tokens": [8, 16],
    "buckets.chunk_decode_seqs": [4],
    "buckets.chunk_tile": 8,
    "buckets.capture": False,
    "runner.attention": "reference",
    "runner.sampling": "passes",
    "runner.batch_invariant": True,
    "limits.max_logit_bias": 6,
    "limits.max_stop_token_ids": 3,
    "limits.max_logprobs": 5,
    "host_tier.enabled": True,
}
# And of the fields that they do not.
CHANGES_NOTHING: dict[str, object] = {
    "kv.reserve": "max_length",
    "host_tier.max_bytes": 1 << 20,
    "scheduler.batching": "static",
    "scheduler.max_step_tokens": 100,
    "scheduler.policy": "fcfs",
    "scheduler.ageing_s": 1.0,
    "scheduler.max_preemptions": 2,
    "scheduler.target_itl_s": 0.1,
    "scheduler.fair_credit_tokens": 5,
    "scheduler.prefix_order": True,
    "scheduler.prefix_max_overtakes": 3,
    "model.chat_template": "elsewhere",
    "model.tool_parser": "none",
    "model.reasoning_parser": "none",
    "runner.overlap": False,
    "runner.command_buffers": "off",  # of a GPU alone
    "runner.compile_threads": 3,
    "runner.cache_dir": "elsewhere",
    "runner.forbid_recompile": True,
    "limits.stream_buffer_bytes": 1000,
    "limits.total_buffer_bytes": 1000,
    "server.port": 1,
}

REACH = Reach(prompt_len=5, max_tokens=4, variant="greedy")


def _with(field: str, value: object) -> Config:
    section, name = field.split(".")
    values = CONFIG.model_dump()
    values[section][name] = value
    return Config.model_validate(values)


def _sizes(
    config: Config, *, matmul: MatmulImpl = "xla", model: ModelConfig = MODEL
) -> RunnerSizes:
    def compile_nothing(keys: tuple[ProgramKey, ...]) -> None:
        raise AssertionError(f"sizing must not compile {keys} on CPU")

    model_dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = "float32" if config.kv.dtype == "auto" else config.kv.dtype
    return size_runner(
        model,
        config,
        dtypes=(model_dtype, kv_dtype),
        kernels=Kernels(
            attention=choose_attention(config, has_native=False, platform="cpu"),
            matmul=matmul,
            sampling=choose_sampling(config, platform="cpu"),
        ),
        programs=Programs(Metrics()),
        compile_keys=compile_nothing,
    )


def _keys(config: Config, *, matmul: MatmulImpl = "xla") -> set[ProgramKey]:
    sizes = _sizes(config, matmul=matmul)
    has_host_tier = sizes.num_host_pages > 0
    return set(program_keys(sizes.spec, sizes.scheme, has_host_tier=has_host_tier))


@pytest.mark.parametrize("field", CHANGES_PROGRAMS)
def test_a_field_that_changes_a_program_changes_its_key(field: str) -> None:
    assert _keys(_with(field, CHANGES_PROGRAMS[field])) != _keys(CONFIG)


def test_the_kernel_of_the_products_is_in_the_key() -> None:
    assert _keys(CONFIG, matmul="native").isdisjoint(_keys(CONFIG, matmul="xla"))


def test_one_row_is_a_bucket_where_no_product_is_xlas() -> None:
    config = _with("buckets.decode_seqs", (1, 4))
    assert _sizes(config, matmul="native").scheme.forwards[0].decode_seqs == 1
    assert _sizes(config, matmul="xla").scheme.forwards[0].decode_seqs == 2
    layers = (MODEL.layers[0], dataclasses.replace(MODEL.layers[1], mlp="experts"))
    sizes = _sizes(config, matmul="native", model=dataclasses.replace(MODEL, layers=layers))
    assert sizes.scheme.forwards[0].decode_seqs == 2


@pytest.mark.parametrize("field", CHANGES_NOTHING)
def test_a_field_that_changes_no_program_changes_no_key(field: str) -> None:
    assert _keys(_with(field, CHANGES_NOTHING[field])) == _keys(CONFIG)


def test_every_field_that_a_program_can_see_is_in_one_table() -> None:
    sections = ("model", "kv", "host_tier", "scheduler", "buckets", "runner")
    fields = {
        f"{section}.{name}"
        for section in sections
        for name in type(getattr(CONFIG, section)).model_fields
    }
    known = CHANGES_PROGRAMS.keys() | CHANGES_NOTHING.keys()
    # The pool's bytes only choose the number of pages, which CONFIG gives; the products' kernel is
    # chosen of bfloat16 weights alone.
    assert fields - known == {"kv.pool_bytes", "runner.matmul"}
    assert not CHANGES_PROGRAMS.keys() & CHANGES_NOTHING.keys()


@pytest.mark.parametrize(
    ("named", "platform", "chosen"),
    [
        ("auto", "cpu", "xla"),
        ("auto", "gpu", "xla"),
        ("triton", "cpu", "triton_interpret"),
        ("triton", "gpu", "triton"),
        ("mosaic", "cpu", "mosaic_interpret"),
        ("mosaic", "gpu", "mosaic"),
        ("reference", "gpu", "reference"),
    ],
)
def test_an_attention_that_needs_a_gpu_is_interpreted_elsewhere(
    named: str, platform: str, chosen: str
) -> None:
    config = _with("runner.attention", named)
    assert choose_attention(config, has_native=False, platform=platform) == chosen


def test_the_pool_of_so_many_bytes_is_in_the_key() -> None:
    def spec_of(pool_bytes: int) -> int:
        values = CONFIG.model_dump()
        values["kv"] |= {"num_pages": None, "pool_bytes": pool_bytes}
        return _sizes(Config.model_validate(values)).spec.num_pages

    page_bytes = 2 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, rows, head size, float32
    assert spec_of(20 * page_bytes) == 20
    assert spec_of(21 * page_bytes - 1) == 20


def test_what_one_request_reaches_is_part_of_what_serving_compiles() -> None:
    sizes = _sizes(CONFIG)
    reach = Reach(prompt_len=9, max_tokens=5, variant="plain")
    reached = program_keys(sizes.spec, sizes.scheme.reachable(reach, max_step_tokens=None), reach)
    assert set(reached) < set(program_keys(sizes.spec, sizes.scheme))
    assert len(reached) == 6  # two forwards, one output, init, row_load, counts


@pytest.mark.parametrize(
    ("reach", "kinds"),
    [
        (REACH, set()),
        (dataclasses.replace(REACH, num_choices=2), {"page_copy"}),
        (dataclasses.replace(REACH, has_scoring=True), {"score"}),
        (dataclasses.replace(REACH, num_choices=9, has_scoring=True), {"page_copy", "score"}),
    ],
)
def test_only_choices_and_scoring_reach_their_programs(reach: Reach, kinds: set[str]) -> None:
    sizes = _sizes(CONFIG)
    scheme = sizes.scheme.reachable(reach, max_step_tokens=None)
    reached = program_keys(sizes.spec, scheme, reach)
    usual = {"forward", "output", "init", "row_load", "counts"}
    assert {key.kind for key in reached} == usual | kinds
    assert set(reached) < set(program_keys(sizes.spec, sizes.scheme))


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    memory = compiled.memory_analysis()
    assert memory is not None
    names = ("alias", "temp", "output")
    return {name: getattr(memory, f"{name}_size_in_bytes") for name in names}


def test_a_forward_updates_the_pool_in_place(runner: Runner) -> None:
    pool_bytes = sum(pool.nbytes for pool in runner._kv)
    replaced = pool_bytes + runner._hidden_TD.nbytes + runner._state.page_table_BP.nbytes
    for bucket in runner._scheme.forwards:
        assert _memory(runner._run["forward", bucket])["alias"] == replaced


def test_a_forward_needs_no_more_memory_for_a_larger_pool(runner: Runner) -> None:
    bucket = runner._scheme.forwards[0]
    large = dataclasses.replace(runner.spec, num_pages=50 * runner.num_pages)
    compiled = lower(ProgramKey(kind="forward", spec=large, bucket=bucket)).compile()
    want = _memory(runner._run["forward", bucket])["temp"]
    assert _memory(compiled)["temp"] == want


def test_an_output_copies_neither_head_nor_hidden_states(runner: Runner) -> None:
    held = runner._state
    for bucket in runner._scheme.outputs:
        memory = _memory(runner._run["output", bucket])
        replaced, num_columns = held.last_token_B.nbytes, 3
        if bucket.variant == "full":
            replaced += sum(leaf.nbytes for leaf in jax.tree.leaves(held.sampling))
            num_columns += num_logprob_columns(runner.spec)
        assert memory["alias"] == replaced
        pointers = 8 * (2 + len(jax.tree.leaves(held.sampling)))
        assert memory["output"] - replaced <= 4 * num_columns * bucket.rows + pointers
        if bucket.rows == 2:
            assert memory["temp"] < runner._params["embedding_VD"].nbytes


def test_scoring_copies_neither_head_nor_hidden_states(runner: Runner) -> None:
    memory = _memory(runner._run["score", None])
    assert memory["alias"] == 0
    assert memory["output"] <= 4 * SCORE_WIDTH * (1 + num_logprob_columns(runner.spec)) + 8
    logits_bytes = 4 * SCORE_WIDTH * MODEL.padded_vocab_size
    assert memory["temp"] < 4 * logits_bytes


def _small_config(**runner: object) -> Config:
    values = CONFIG.model_dump()
    values["scheduler"]["max_seqs"] = 2
    values["buckets"] |= {"chunk_tokens": [8], "capture": False}
    values["runner"] |= runner
    return Config.model_validate(values)


def _start(params: Params, metrics: Metrics, cache_dir: Path | None, **runner: object) -> Runner:
    return Runner(
        params,
        MODEL,
        _small_config(**runner),
        metrics=metrics,
        cache_dir=cache_dir,
        reach=REACH,
    )


@pytest.fixture(scope="module")
def cache_dir(params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one start has filled."""
    folder = tmp_path_factory.mktemp("cache")
    metrics = Metrics()
    jax.clear_caches()  # as in a new process; else the process itself remembers
    _start(params, metrics, folder)
    assert metrics.total("compiles_total") == 6
    assert metrics.value("compile_cache_hits_total") == 0
    return folder


def test_a_second_start_compiles_nothing(params: Params, cache_dir: Path) -> None:
    jax.clear_caches()
    metrics = Metrics()
    runner = _start(params, metrics, cache_dir)
    assert metrics.total("compiles_total") == 0
    assert metrics.value("compile_cache_hits_total") == 6
    assert metrics.total("compile_seconds_total") > 0
    assert jax.config.jax_compilation_cache_dir is None  # nobody else's programs land there
    driver = Driver(runner)
    driver.generate(row := driver.row(0, prompt_of(5)), num_tokens=2)
    assert row.output == oracle_tokens(params, row.prompt, 2)


def test_damaged_cache_entries_are_compiled_again_said_once_and_replaced(
    params: Params, cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(cache_dir, damaged)
    for path in versioned_folder(damaged).glob("jit_forward_step-*-cache"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    for num_compiles, num_warnings in ((2, 1), (0, 0)):
        jax.clear_caches()
        caplog.clear()
        metrics = Metrics()
        _start(params, metrics, damaged)
        assert metrics.value("compiles_total", kind="forward") == num_compiles
        assert metrics.total("compiles_total") == num_compiles
        assert caplog.text.count("compilation cache entry unusable") == num_warnings


def test_an_unusable_cache_folder_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    with persistent_cache(occupied), persistent_cache(tmp_path / "\0"):
        assert jax.config.jax_compilation_cache_dir is None
    assert caplog.text.count("compilation cache unusable") == 2


def test_the_cache_folder_names_versions_and_device(tmp_path: Path) -> None:
    name = versioned_folder(tmp_path).name
    assert name.startswith(f"jaxlib-{jaxlib.version.__version__}-{jax.default_backend()}-")


def test_progress_is_told_after_each_program(params: Params) -> None:
    told: list[tuple[int, int, str, float]] = []
    Runner(
        params,
        MODEL,
        _small_config(),
        metrics=Metrics(),
        reach=REACH,
        progress=lambda *facts: told.append(facts),
    )
    assert [(done, total) for done, total, _, _ in told] == [(n, 6) for n in range(1, 7)]
    assert {"forward 2x1+8", "output 2 greedy", "row_load"} < {name for _, _, name, _ in told}
    assert all(seconds > 0 for _, _, _, seconds in told)


def test_parameters_may_be_loaded_while_programs_compile(params: Params) -> None:
    asked: list[str] = []

    def load(dtype: str) -> Params:
        asked.append(dtype)
        return params

    runner = Runner(load, MODEL, _small_config(), metrics=Metrics(), reach=REACH)
    assert asked == ["float32"]
    assert runner.max_model_tokens == MODEL.max_position


def test_a_compile_after_warm_up_raises_where_it_is_forbidden(params: Params) -> None:
    metrics = Metrics()
    runner = _start(params, metrics, None, forbid_recompile=True)
    driver = Driver(runner)
    driver.generate(driver.row(0, prompt_of(5)), num_tokens=3)
    assert metrics.value("recompiles_total") == 0
    jax.jit(lambda x: x * 3 + 1).lower(jnp.zeros(3)).compile()
    assert metrics.value("recompiles_total") >= 1
    with pytest.raises(RecompileError, match="compiled after warm-up"):
        driver.generate(driver.row(0, prompt_of(5)), num_tokens=1)


def test_a_compile_in_a_step_is_counted_by_its_bucket(
    params: Params, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    runner = _start(params, metrics, None)
    forward = runner._run_forward

    def compile_too(bucket: Bucket, packed_I: np.ndarray) -> jax.Array:
        jax.jit(lambda x: x * 11 + 1).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
        return forward(bucket, packed_I)

    monkeypatch.setattr(runner, "_run_forward", compile_too)
    driver = Driver(runner)
    driver.step((driver.row(0, prompt_of(5)), 5))
    assert metrics.value("recompiles_total", bucket="2x1+8") >= 1
    assert metrics.value("recompiles_total", bucket="") == 0
    assert "compiled after warm-up function=" in caplog.text
    assert "bucket=2x1+8" in caplog.text
    jax.jit(lambda x: x * 13 + 1).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
    assert metrics.value("recompiles_total", bucket="") >= 1


def test_a_compile_in_a_masked_output_is_counted_by_its_steps_bucket(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    reach = dataclasses.replace(REACH, variant="full")
    runner = Runner(params, MODEL, _small_config(), metrics=metrics, reach=reach)
    run_output = runner._run_output

    def compile_too(
        output: OutputBucket, rows_4R: np.ndarray, *, mask_RW: jax.Array | None
    ) -> jax.Array:
        jax.jit(lambda x: x * 17 + 1).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
        return run_output(output, rows_4R, mask_RW=mask_RW)

    monkeypatch.setattr(runner, "_run_output", compile_too)
    driver = Driver(runner)
    row = driver.row(0, prompt_of(5))
    row.mask = lambda output: build_mask(range(MODEL.vocab_size), MODEL.vocab_size)
    driver.step((row, 5))
    assert metrics.value("recompiles_total", bucket="2x1+8") >= 1
    assert metrics.value("recompiles_total", bucket="") == 0


def test_a_compile_after_warm_up_is_counted_where_it_is_not(params: Params) -> None:
    metrics = Metrics()
    runner = _start(params, metrics, None)
    jax.jit(lambda x: x * 5 + 1).lower(jnp.zeros(3)).compile()
    assert metrics.value("recompiles_total") >= 1
    driver = Driver(runner)
    driver.generate(row := driver.row(0, prompt_of(5)), num_tokens=1)
    assert row.output[0] is not None


def test_command_buffers_are_in_a_gpus_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    off = _keys(_with("runner.command_buffers", "off"))
    assert off.isdisjoint(_keys(CONFIG))


@pytest.mark.parametrize("is_invariant", [True, False])
def test_the_options_for_a_gpu_are_known_to_this_jaxlib(is_invariant: bool) -> None:
    spec = dataclasses.replace(
        tiny_sizes().spec, command_buffers=True, batch_invariant=is_invariant
    )
    options = compiler_options(spec, "gpu")
    assert "WHILE" in str(options["xla_gpu_enable_command_buffer"])
    assert (options.get("xla_gpu_autotune_level") == 0) is is_invariant
    compiled = jax.jit(lambda x: x * 7 + 1).lower(jnp.zeros(3)).compile(options)
    assert compiled(jnp.zeros(3)).tolist() == [1, 1, 1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum"):
        jax.jit(lambda x: x).lower(jnp.zeros(3)).compile(
            {"xla_gpu_enable_command_buffer": "FUSION,NO_SUCH_KIND"}
        )


def test_another_runner_that_starts_is_no_recompile(params: Params) -> None:
    metrics = Metrics()
    runner = _start(params, metrics, None)
    before = metrics.value("recompiles_total")
    _start(params, Metrics(), None)
    assert metrics.value("recompiles_total") == before
    assert runner.limits.max_seqs == 1


def test_no_step_moves_bytes_that_it_does_not_name(runner: Runner) -> None:
    lens = itertools.product((1, 2, 5), (1, 3))
    driver = Driver(runner)
    with jax.transfer_guard("disallow"):
        for first, second in lens:
            rows = [driver.row(n, prompt_of(length)) for n, length in enumerate((first, second))]
            driver.generate(*rows, num_tokens=2)
            assert all(len(row.output) == 2 for row in rows)
        with pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"):
            jnp.sin(np.float32(1.0))


def test_a_start_without_room_for_one_sequence_is_refused(params: Params) -> None:
    config = _with("kv.num_pages", 16)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"max_model_tokens": 64})}
    )
    with pytest.raises(CapacityError, match="does not fit the KV pool, which holds 60 tokens"):
        Runner(params, MODEL, config, metrics=Metrics())
