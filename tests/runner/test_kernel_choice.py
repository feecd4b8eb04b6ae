"""Which kernels a runner gets, and what it says where it does not get what was asked for."""

import dataclasses
import logging
from pathlib import Path

import pytest

from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.kernels.choice import Kernels
from jaxserve.kernels.paged_attention.launch import Cut, Cuts
from jaxserve.model.config import ModelConfig
from jaxserve.runner import kernel_choice
from jaxserve.runner.device import Device
from jaxserve.runner.kernel_choice import choose_kernels
from jaxserve.runner.launch_table import AttentionCall, Entry, LaunchTable, TunedImpl
from jaxserve.runner.native_build import NativeUnavailableError
from jaxserve.runner.spec import DtypeName, KvDtypeName
from tests.runner.driver import MODEL as ODD_MODEL

MODEL = dataclasses.replace(
    ODD_MODEL, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=96
)
NATIVE = Kernels(attention="native", matmul="native")
CPU = Device(platform="cpu")
H200 = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine with a compiler; returns the libraries it was asked to load."""
    loads: list[list[str]] = []

    def load(cache_dir: Path, names: list[str]) -> None:
        loads.append(names)

    monkeypatch.setattr(kernel_choice, "load_native", load)
    return loads


def choose(
    model: ModelConfig = MODEL,
    *,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "bfloat16",
    device: Device = CPU,
    attention: str = "auto",
    matmul: str = "auto",
    sampling: str = "auto",
    batch_invariant: bool = False,
) -> Kernels:
    flags = {"attention": attention, "matmul": matmul, "sampling": sampling}
    flags["batch_invariant"] = str(batch_invariant).lower()
    config = load_config(flags={f"runner.{key}": value for key, value in flags.items()})
    return choose_kernels(model, config, dtypes=(dtype, kv_dtype), device=device, cache_dir=None)


def test_auto_is_native_where_all_is_there(
    loads: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose() == NATIVE
    assert loads == [["attention_bfloat16", "products"]]
    assert "kernels attention=native matmul=native sampling=candidates" in caplog.text
    assert "reason" not in caplog.text


def test_what_is_asked_for_is_taken(loads: list[list[str]]) -> None:
    assert choose(attention="xla", matmul="xla") == Kernels()
    assert choose(attention="reference", matmul="xla") == Kernels(attention="reference")
    assert loads == []  # and nothing is compiled that nobody wants
    assert choose(attention="native", matmul="native") == NATIVE
    loads.clear()
    assert choose(attention="xla", matmul="native") == Kernels(matmul="native")
    assert choose(attention="native", matmul="xla") == Kernels(attention="native")
    assert loads == [["products"], ["attention_bfloat16"]]


def test_filters_are_found_in_passes_on_a_gpu_and_as_the_configuration_says() -> None:
    assert choose().sampling == "candidates"
    assert choose(device=H200).sampling == "passes"
    assert choose(sampling="passes").sampling == "passes"
    assert choose(device=H200, sampling="candidates").sampling == "candidates"


ODD_MLP = dataclasses.replace(MODEL, mlp_size=100)
ODD_HIDDEN = dataclasses.replace(MODEL, hidden_size=48)
MATMUL_PROBLEMS: list[tuple[ModelConfig, DtypeName, str]] = [
    (MODEL, "float32", "the weights are float32, and the native product is of bfloat16"),
    (ODD_MLP, "bfloat16", "layers/0/.*: a weight is 64 by 100, not a multiple of 2 by 32"),
    (ODD_HIDDEN, "bfloat16", "layers/0/o_NHD: a weight is 64 by 48, not a multiple of 2 by 32"),
]


@pytest.mark.parametrize(
    ("model", "dtype", "reason"), MATMUL_PROBLEMS, ids=["f32", "mlp", "hidden"]
)
def test_products_that_cannot_be_native_are_xla_and_say_why(
    model: ModelConfig, dtype: DtypeName, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(model, dtype=dtype) == Kernels(attention="native", matmul="xla")
    assert "kernels matmul is xla reason=" in caplog.text
    with pytest.raises(ConfigError, match=f"runner.matmul is native, but .*{reason}.*auto or xla"):
        choose(model, dtype=dtype, matmul="native")


@pytest.mark.parametrize("head_dim", [8, 24, 528])
def test_attention_of_an_odd_head_is_xla_and_says_why(
    head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = dataclasses.replace(MODEL, head_dim=head_dim)
    assert choose(model).attention == "xla"
    reason = f"head_dim is {head_dim}, not a multiple of 16 up to 512"
    assert f"kernels attention is xla reason={reason}" in caplog.text
    with pytest.raises(ConfigError, match=f"runner.attention is native, but {reason}"):
        choose(model, attention="native")


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_attention_of_a_pool_of_one_byte_is_native_too(
    kv_dtype: KvDtypeName, loads: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for attention in ("auto", "native"):
        assert choose(kv_dtype=kv_dtype, attention=attention) == NATIVE
        assert loads.pop() == [f"attention_{kv_dtype}", "products"]
    assert "reason" not in caplog.text
    assert choose(kv_dtype=kv_dtype, device=H200, attention="triton").attention == "triton"


def test_on_a_gpu_nothing_native_is_built_nor_asked_for_in_silence(
    loads: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(device=H200) == Kernels(sampling="passes")
    assert "reason" not in caplog.text  # nobody expects it there
    for key in ("attention", "matmul"):
        with pytest.raises(ConfigError, match=f"runner.{key} is native, but .*and this is gpu"):
            choose(device=H200, **{key: "native"})  # type: ignore[arg-type]  # by name
    assert loads == []


def test_without_a_compiler_auto_is_xla_and_native_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(cache_dir: Path, names: list[str]) -> None:
        raise NativeUnavailableError("there is no C++ compiler: install one")

    monkeypatch.setattr(kernel_choice, "load_native", fail)
    caplog.set_level(logging.INFO)
    assert choose() == Kernels()
    for key in ("attention", "matmul"):
        assert f"kernels {key} is xla reason=there is no C++ compiler" in caplog.text
        with pytest.raises(ConfigError, match=f"runner.{key} is native, but there is no C"):
            choose(**{key: "native"})  # type: ignore[arg-type]  # by name


def test_mosaic_is_taken_where_its_kernel_is_written_for_the_model() -> None:
    model = dataclasses.replace(MODEL, head_dim=64)
    taken: list[KvDtypeName] = ["bfloat16", "int8", "float8_e4m3fn"]
    for kv_dtype in taken:
        chosen = choose(model, kv_dtype=kv_dtype, device=H200, attention="mosaic")
        assert chosen.attention == "mosaic"
    refused: list[tuple[int, DtypeName, KvDtypeName, str]] = [
        (16, "bfloat16", "bfloat16", "head_dim is 16, and it is written for 64, 96, 128, 256"),
        (64, "float32", "float32", "the KV pool is float32"),
        (256, "float32", "int8", "queries are float32 and head_dim is 256"),
        (256, "float32", "bfloat16", "queries are float32 and head_dim is 256"),
    ]
    for head_dim, dtype, kv_dtype, reason in refused:
        model = dataclasses.replace(MODEL, head_dim=head_dim)
        with pytest.raises(ConfigError, match=f"runner.attention is mosaic, but {reason}"):
            choose(model, dtype=dtype, kv_dtype=kv_dtype, device=H200, attention="mosaic")


@pytest.mark.parametrize(
    ("kind", "capability"), [("NVIDIA A100", "8.0"), ("NVIDIA B200", "10.0"), ("GPU", None)]
)
def test_mosaic_is_refused_on_a_gpu_that_is_no_hopper(kind: str, capability: str | None) -> None:
    model = dataclasses.replace(MODEL, head_dim=64)
    device = Device(platform="gpu", kind=kind, compute_capability=capability)
    told = rf"\(compute capability 9.x\), and this {kind} has {capability or 'none'}"
    with pytest.raises(ConfigError, match=f"runner.attention is mosaic, but .*{told}; set it to"):
        choose(model, device=device, attention="mosaic")
    assert choose(model, device=device, attention="triton").attention == "triton"


def test_a_cpu_simulates_mosaic_without_any_capability() -> None:
    model = dataclasses.replace(MODEL, head_dim=64)
    chosen = choose(model, attention="mosaic", matmul="xla")
    assert chosen == Kernels(attention="mosaic_interpret")


def tune(monkeypatch: pytest.MonkeyPatch, model: ModelConfig, *, impl: TunedImpl) -> Cut:
    """Has the launch table hold a cut of this model's decode rows on an H200, and returns it."""
    cut = Cut(rows=64, block_tokens=32, num_warps=4, num_stages=3)
    call = AttentionCall.of(model, load_config(), attention=impl, dtypes=("bfloat16", "bfloat16"))
    facts = {"device": H200.kind, "kind": "decode", "time_ratio": 0.9, "jax": "0"}
    entry = Entry.model_validate(call.model_dump() | facts | dataclasses.asdict(cut))
    monkeypatch.setattr(kernel_choice, "read_launch_table", lambda: LaunchTable(entries=(entry,)))
    return cut


@pytest.mark.parametrize("impl", ["triton", "mosaic"])
def test_a_gpu_kernel_is_cut_as_the_launch_table_has_it(
    impl: TunedImpl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = dataclasses.replace(MODEL, head_dim=64)
    cut = tune(monkeypatch, model, impl=impl)
    assert choose(model, device=H200, attention=impl).cuts == Cuts(decode=cut)
    assert "kernels attention of decode is cut by Cut(rows=64, block_tokens=32" in caplog.text
    assert "kernels attention of chunk is cut by formula" in caplog.text
    h100 = dataclasses.replace(H200, kind="NVIDIA H100")
    assert choose(model, device=h100, attention=impl).cuts == Cuts()
    assert choose(model, attention=impl, matmul="xla").cuts == Cuts()  # a CPU interprets it


def test_what_must_depend_on_no_measurement_is_cut_by_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune(monkeypatch, MODEL, impl="triton")
    assert choose(device=H200, attention="triton").cuts != Cuts()
    assert choose(device=H200, attention="triton", batch_invariant=True).cuts == Cuts()
