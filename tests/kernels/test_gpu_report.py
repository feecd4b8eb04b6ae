"""The report's own check of attention: what is right is timed; what is wrong or refused is told,
and takes nothing else with it."""

import dataclasses
import json
import sys
from typing import Any

import jax
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import Impl
from jaxserve.kernels.paged_attention.launch import BY_FORMULA, Cuts, Launch
from jaxserve.kernels.pool import Pool
from scripts import gpu_attention, gpu_report
from scripts.gpu_attention import Call, Shape

SHAPE = Shape(heads=(4, 2), head_dim=16)
MAX_ERROR = 1.2e-2


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "MAX_LAYERS", 2)


def report(impls: list[Impl], shape: Shape = SHAPE) -> list[dict[str, object]]:
    lines = gpu_attention.report(
        impls, shape, rows=[2], kv_lens=[40], splits=[], copy_bytes_per_s=1e9, max_error=MAX_ERROR
    )
    return list(lines)


def test_what_is_right_is_timed() -> None:
    checked, timed = report(["xla"])
    assert checked["impl"] == timed["impl"] == "xla"
    assert timed["kv_mib"] == 2 * 2 * 40 * 2 * 16 * 2 / 2**20  # rows, K and V, heads, bfloat16


@pytest.mark.parametrize(
    "kv_dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.nightly)]
)
def test_a_pool_of_one_byte_is_read_with_its_scales(kv_dtype: str) -> None:
    _, timed = report(["xla"], dataclasses.replace(SHAPE, kv_dtype=kv_dtype))
    assert timed["kv_mib"] == 2 * 2 * 40 * 2 * (16 + 4) / 2**20


@pytest.fixture
def one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Call.attend

    def shift(
        call: Call,
        kv_C2KRH: Pool,
        impl: Impl,
        launch: Launch | None = None,
        cuts: Cuts = BY_FORMULA,
    ) -> jax.Array:
        if impl == "xla":  # every row sees one key less
            call = dataclasses.replace(call, q_starts_X=call.q_starts_X - 1)
        return attend(call, kv_C2KRH, impl, launch, cuts)

    monkeypatch.setattr(Call, "attend", shift)


@pytest.mark.usefixtures("one_is_wrong")
def test_what_is_wrong_is_told_and_the_others_are_timed() -> None:
    wrong, checked, timed = report(["xla", "reference"])
    assert wrong["impl"] == "xla"
    assert str(wrong["failed"]).startswith("wrong by ")
    assert "failed" not in checked
    assert (timed["impl"], timed["rows"]) == ("reference", 2)


def test_what_is_refused_is_told_and_the_others_are_timed() -> None:
    refused, checked, timed = report(["mosaic", "xla"])
    assert refused["impl"] == "mosaic"
    assert "head_dim is 16" in str(refused["failed"])
    assert checked["impl"] == timed["impl"] == "xla"


def run_main(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    """Returns the command's exit status, and the JSON of its last line."""
    monkeypatch.setattr(gpu_report, "measure_copy_bytes_per_s", lambda: 1e9)
    tried = "--model tiny --attention-rows 2 --attention-kv-len 40"
    monkeypatch.setattr(sys, "argv", ["gpu_report", *tried.split(), *arguments.split()])
    status = gpu_report.main()
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_report_without_a_failure_exits_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, facts = run_main("--part attention --attention xla", monkeypatch, capsys)
    assert (status, facts["num_failed"]) == (0, 0)


@pytest.mark.usefixtures("one_is_wrong")
def test_a_report_with_a_failure_keeps_the_rest_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def report_steps_of(name: str, *, attention: str, **options: object) -> dict[str, object]:
        if attention == "native":
            raise ConfigError("runner.attention is native, but there is no compiler")
        return {"model": name, "attention": attention}

    monkeypatch.setattr(gpu_report, "report", report_steps_of)
    status, facts = run_main(
        "--part attention steps --attention reference xla mosaic", monkeypatch, capsys
    )
    assert (status, facts["num_failed"]) == (1, 2)
    alone = [(line["impl"], "failed" in line) for line in facts["attention"]]
    assert alone == [("reference", False), ("xla", True), ("mosaic", True), ("reference", False)]
    assert facts["models"] == [{"model": "tiny", "attention": "reference"}]  # what was right
    status, facts = run_main("--part steps --attention native xla", monkeypatch, capsys)
    assert status == 1
    native, xla = facts["models"]
    assert native["failed"] == "runner.attention is native, but there is no compiler"
    assert xla == {"model": "tiny", "attention": "xla"}
