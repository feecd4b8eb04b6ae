"""What fits: dtypes, pool, context."""

import dataclasses
import functools
import re

import jax
import pytest

from jaxserve.config import GIB, Config
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.pool import empty_pool
from jaxserve.metrics import Metrics
from jaxserve.model.params import num_param_bytes
from jaxserve.runner import memory, sizing
from jaxserve.runner.lowering import ProgramKey
from jaxserve.runner.programs import Programs
from jaxserve.runner.spec import KvDtypeName, bytes_of_page
from tests.runner.driver import CONFIG, MODEL


def _config(**sections: dict[str, object]) -> Config:
    return Config.model_validate(sections)


def _no_device() -> int:
    raise AssertionError("the device must not be asked")


@pytest.mark.parametrize(
    ("platform", "flags", "want"),
    [
        ("cpu", {"avx2"}, ("float32", "float32")),
        ("cpu", {"avx512_bf16"}, ("bfloat16", "bfloat16")),
        ("cpu", {"amx_bf16"}, ("bfloat16", "bfloat16")),
        ("gpu", set(), ("bfloat16", "bfloat16")),
    ],
)
def test_auto_takes_bfloat16_where_the_machine_is_fast_at_it(
    platform: str, flags: set[str], want: tuple[str, str]
) -> None:
    got = memory.choose_dtypes(_config(), platform=platform, cpu_flags=frozenset(flags))
    assert got == want


def test_a_given_dtype_holds_everywhere() -> None:
    config = _config(model={"dtype": "float32"}, kv={"dtype": "bfloat16"})
    for platform in ("cpu", "gpu"):
        got = memory.choose_dtypes(config, platform=platform, cpu_flags=frozenset())
        assert got == ("float32", "bfloat16")


def test_a_quantized_pool_is_the_configurations_alone() -> None:
    for kv_dtype in ("int8", "float8_e4m3fn"):
        config = _config(model={"dtype": "bfloat16"}, kv={"dtype": kv_dtype})
        got = memory.choose_dtypes(config, platform="gpu", cpu_flags=frozenset())
        assert got == ("bfloat16", kv_dtype)


def test_a_page_of_one_byte_counts_its_scales_and_is_about_half_as_large() -> None:
    model = dataclasses.replace(MODEL, head_dim=64)

    def bytes_of(kv_dtype: KvDtypeName) -> int:
        return bytes_of_page(model, page_size=16, kv_dtype=kv_dtype)

    num_heads = 2 * 2 * 2 * 16  # layers, K and V, heads, rows
    assert bytes_of("bfloat16") == num_heads * 64 * 2
    assert bytes_of("int8") == bytes_of("float8_e4m3fn") == num_heads * (64 + 4)
    dtypes: tuple[KvDtypeName, ...] = ("float32", "bfloat16", "int8", "float8_e4m3fn")
    for kv_dtype in dtypes:
        arrays = jax.eval_shape(functools.partial(empty_pool, (7, 2, 2, 16, 64), kv_dtype))
        total = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(arrays))
        assert bytes_of(kv_dtype) == total * 2 // 7


def test_pages_win_over_bytes_and_bytes_over_the_device() -> None:
    both = _config(kv={"num_pages": 7, "pool_bytes": 1000})
    assert memory.choose_num_pages(both, page_bytes=100, free_bytes=_no_device) == 7
    only_bytes = _config(kv={"pool_bytes": 1000})
    assert memory.choose_num_pages(only_bytes, page_bytes=99, free_bytes=_no_device) == 10
    assert memory.choose_num_pages(_config(), page_bytes=99, free_bytes=lambda: 500) == 5


def test_a_pool_of_less_than_two_pages_is_refused() -> None:
    config = _config(kv={"pool_bytes": 199})
    with pytest.raises(CapacityError, match=r"has 199 bytes.*need 200.*raise kv\.pool_bytes"):
        memory.choose_num_pages(config, page_bytes=100, free_bytes=_no_device)


def test_a_pool_beyond_the_memory_is_refused_before_anything_is_compiled() -> None:
    memory.check_pool_bytes(1000, memory_bytes=1000)
    with pytest.raises(CapacityError, match=r"take 1001 bytes.*are 1000 in all; lower kv\.num_pag"):
        memory.check_pool_bytes(1001, memory_bytes=1000)

    def compile_nothing(keys: tuple[ProgramKey, ...]) -> None:
        raise AssertionError("nothing may be compiled")

    for section in ({"num_pages": 10**10}, {"num_pages": None, "pool_bytes": 10**24}):
        config = CONFIG.model_copy(update={"kv": CONFIG.kv.model_copy(update=section)})
        with pytest.raises(CapacityError, match=r"lower kv\.num_pages or kv\.pool_bytes"):
            sizing.size_runner(
                MODEL,
                config,
                dtypes=("float32", "float32"),
                kernels=Kernels(),
                programs=Programs(Metrics()),
                compile_keys=compile_nothing,
            )


def size_of(num_pages: int, *, attention: Impl, kv_dtype: KvDtypeName) -> int:
    kv = CONFIG.kv.model_copy(update={"num_pages": num_pages, "dtype": kv_dtype})
    sizes = sizing.size_runner(
        MODEL,
        CONFIG.model_copy(update={"kv": kv}),
        dtypes=("float32", kv_dtype),
        kernels=Kernels(attention=attention),
        programs=Programs(Metrics()),
        compile_keys=lambda keys: None,
    )
    return sizes.spec.num_pages


def test_a_pool_that_triton_would_read_at_wrong_places_is_refused_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing, "read_memory_bytes", lambda stats: 1 << 40)
    page_bytes = 2 * 2 * 4 * 8  # K and V, heads, rows, head size: of one layer, without scales
    wrong = 2**31 // page_bytes
    for attention in ("triton", "triton_interpret"):
        with pytest.raises(CapacityError, match="reads those of 2 to 4 GiB at wrong") as caught:
            size_of(wrong, attention=attention, kv_dtype="int8")
        told = re.search(r"kv.pool_bytes to at most (\d+)", str(caught.value))
        assert told is not None
        most = int(told[1])
        for num_pages in (most // (2 * page_bytes * 12 // 8), 2**32 // page_bytes + 1):
            assert size_of(num_pages, attention=attention, kv_dtype="int8") == num_pages
        assert most // (2 * page_bytes * 12 // 8) == wrong - 1
    assert size_of(wrong, attention="xla", kv_dtype="int8") == wrong
    assert size_of(wrong, attention="triton", kv_dtype="bfloat16") == wrong


def test_the_memory_is_the_devices_or_else_the_machines() -> None:
    assert memory.read_memory_bytes({"bytes_limit": 7}) == 7
    assert memory.read_memory_bytes(None) > GIB // 4


def test_a_refused_allocation_is_a_lack_of_capacity() -> None:
    with pytest.raises(CapacityError, match=r"RESOURCE_EXHAUSTED: 1 byte; lower kv\.pool_bytes"):
        with memory.naming_lack_of_memory():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        with memory.naming_lack_of_memory():
            raise jax.errors.JaxRuntimeError("INTERNAL: ours")


def test_a_cpu_pool_is_one_gibibyte() -> None:
    assert memory.free_device_bytes(None, needed_bytes=0) == GIB


def test_a_device_pool_is_what_parameters_and_programs_leave() -> None:
    free = memory.free_device_bytes({"bytes_limit": 1_000_000}, needed_bytes=400_000)
    assert 0.9 * 600_000 <= free < 600_000


def test_parameters_that_fill_the_device_are_refused() -> None:
    with pytest.raises(CapacityError, match="need 1000000 bytes, but the device offers 999999"):
        memory.free_device_bytes({"bytes_limit": 999_999}, needed_bytes=1_000_000)


def _context(config: Config, *, model_limit: int = 2048, num_pages: int) -> int:
    return memory.choose_max_model_tokens(
        config, model_limit=model_limit, num_pages=num_pages, page_bytes=100
    )


def test_an_unset_context_is_the_lesser_of_model_and_pool() -> None:
    config = _config(kv={"page_size": 16})
    assert _context(config, num_pages=1000) == 2048
    assert _context(config, num_pages=11) == 160


def test_a_set_context_that_fits_is_kept() -> None:
    config = _config(kv={"page_size": 4}, model={"max_model_tokens": 40})
    assert _context(config, num_pages=11) == 40


@pytest.mark.parametrize("num_pages", [9, 10])
def test_a_context_one_page_short_is_refused(num_pages: int) -> None:
    config = _config(kv={"page_size": 4}, model={"max_model_tokens": 40})
    with pytest.raises(
        CapacityError, match=rf"max_model_tokens = 40 .* holds {(num_pages - 1) * 4} tokens .* 1100"
    ):
        _context(config, num_pages=num_pages)


def test_a_context_beyond_the_model_is_refused() -> None:
    config = _config(model={"max_model_tokens": 4096})
    with pytest.raises(ConfigError, match="is 4096, but this model has 2048 positions"):
        _context(config, num_pages=1000)


def test_the_capacity_is_logged_in_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        _context(_config(kv={"page_size": 16}), num_pages=11)
    assert "capacity_tokens=160 max_model_tokens=160" in caplog.text


def test_cpu_flags_are_read_where_the_system_has_them() -> None:
    assert all(flag == flag.strip() for flag in memory.read_cpu_flags())


def test_what_a_pool_must_leave_free_is_measured_on_the_largest_programs() -> None:
    values = CONFIG.model_dump()
    values["scheduler"]["max_seqs"] = 2
    values["buckets"] |= {"chunk_tokens": [8], "capture": False}
    config = Config.model_validate(values)
    programs = Programs(Metrics())
    compiled: list[ProgramKey] = []

    def compile_keys(keys: tuple[ProgramKey, ...]) -> None:
        compiled.extend(keys)
        programs.compile_all(keys, num_threads=2, cache_dir=None)

    needed = sizing._needed_bytes(
        MODEL,
        config,
        ("float32", "float32"),
        kernels=Kernels(),
        programs=programs,
        compile_keys=compile_keys,
    )
    assert [key.name for key in compiled] == ["forward 2x1+8", "output 2 full", "score"]
    temp_bytes = max(
        analysis.temp_size_in_bytes
        for key in compiled
        if (analysis := programs[key].memory_analysis()) is not None
    )
    state_bytes = 2 * MODEL.padded_vocab_size * 4  # the counts, most of it
    least = num_param_bytes(MODEL, "float32") + temp_bytes + state_bytes
    assert least < needed < 2 * least
