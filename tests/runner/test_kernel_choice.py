"""Which kernels a runner gets, and what it says where it does not get what was asked for."""

import dataclasses
import logging

import pytest

from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.kernels.choice import Kernels
from jaxserve.model.config import ModelConfig
from jaxserve.runner import kernel_choice
from jaxserve.runner.kernel_choice import choose_kernels
from jaxserve.runner.native_build import NativeUnavailableError
from jaxserve.runner.spec import DtypeName, KvDtypeName
from tests.runner.driver import MODEL as ODD_MODEL

MODEL = dataclasses.replace(
    ODD_MODEL, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=96
)
NATIVE = Kernels(attention="native", matmul="native")


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A machine with a compiler; returns the cache folders it was asked to load from."""
    folders: list[object] = []
    monkeypatch.setattr(kernel_choice, "load_native", folders.append)
    return folders


def choose(
    model: ModelConfig = MODEL,
    *,
    dtype: DtypeName = "bfloat16",
    kv_dtype: KvDtypeName = "bfloat16",
    platform: str = "cpu",
    attention: str = "auto",
    matmul: str = "auto",
) -> Kernels:
    config = load_config(flags={"runner.attention": attention, "runner.matmul": matmul})
    return choose_kernels(
        model, config, dtypes=(dtype, kv_dtype), platform=platform, cache_dir=None
    )


def test_auto_is_native_where_all_is_there(
    loads: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose() == NATIVE
    assert len(loads) == 1
    assert "kernels attention=native matmul=native" in caplog.text
    assert "reason" not in caplog.text


def test_what_is_asked_for_is_taken(loads: list[object]) -> None:
    assert choose(attention="xla", matmul="xla") == Kernels()
    assert choose(attention="reference", matmul="xla") == Kernels(attention="reference")
    assert loads == []  # and nothing is compiled that nobody wants
    assert choose(attention="native", matmul="native") == NATIVE
    assert choose(attention="xla", matmul="native") == Kernels(matmul="native")


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
def test_attention_of_a_pool_of_one_byte_is_xla_and_says_why(
    kv_dtype: KvDtypeName, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(kv_dtype=kv_dtype) == Kernels(attention="xla", matmul="native")
    reason = f"the KV pool is {kv_dtype}, and it reads float32 and bfloat16"
    assert f"kernels attention is xla reason={reason}" in caplog.text
    with pytest.raises(ConfigError, match=f"runner.attention is native, but {reason}"):
        choose(kv_dtype=kv_dtype, attention="native")
    triton = choose(kv_dtype=kv_dtype, platform="gpu", attention="triton")
    assert triton == Kernels(attention="triton")


def test_on_a_gpu_nothing_native_is_built_nor_asked_for_in_silence(
    loads: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(platform="gpu") == Kernels()
    assert "reason" not in caplog.text  # nobody expects it there
    for key in ("attention", "matmul"):
        with pytest.raises(ConfigError, match=f"runner.{key} is native, but .*and this is gpu"):
            choose(platform="gpu", **{key: "native"})  # type: ignore[arg-type]  # by name
    assert loads == []


def test_without_a_compiler_auto_is_xla_and_native_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: object) -> None:
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
    assert choose(model, platform="gpu", attention="mosaic") == Kernels(attention="mosaic")
    refused: list[tuple[int, DtypeName, KvDtypeName, str]] = [
        (16, "bfloat16", "bfloat16", "head_dim is 16, and it is written for 64, 96, 128, 256"),
        (64, "float32", "float32", "the KV pool is float32"),
        (64, "bfloat16", "int8", "the KV pool is int8, and its products take bfloat16 alone"),
        (256, "float32", "bfloat16", "queries are float32 and head_dim is 256"),
    ]
    for head_dim, dtype, kv_dtype, reason in refused:
        model = dataclasses.replace(MODEL, head_dim=head_dim)
        with pytest.raises(ConfigError, match=f"runner.attention is mosaic, but {reason}"):
            choose(model, dtype=dtype, kv_dtype=kv_dtype, platform="gpu", attention="mosaic")
