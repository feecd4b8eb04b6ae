"""What is read of a GPU program's text, and what the metrics say of it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from jaxserve.metrics import Metrics
from jaxserve.runner import programs
from jaxserve.runner.capture import COMMAND_KINDS, Capture, read_capture
from jaxserve.runner.lowering import ProgramKey
from jaxserve.runner.programs import Programs, compiler_options
from tests.runner.driver import tiny_sizes

KERNEL = "fusion(%a), kind=kLoop, calls=%fused"
TRITON = 'custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"'
CUBLAS = 'custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"'
CALLBACK = 'custom-call(%a), custom_call_target="xla_ffi_python_gpu_callback"'
WHILE = "while(%a), condition=%test, body=%body"
COND = "conditional(%a, %a, %a), branch_computations={%body, %test}"
IF = "conditional(%a, %a, %a), true_computation=%body, false_computation=%test"
CALL = "call(%a), to_apply=%body"
SORT = "sort(%a), to_apply=%test"
NOTHING = [
    "parameter(0)", "constant(7)", "tuple(%a, %a)", "get-tuple-element(%a), index=0", "bitcast(%a)"
]  # fmt: skip


def lines(operations: list[str]) -> str:
    types = ("f32[8,4]{1,0}", "(f32[2]{0:T(128)}, /*index=1*/s32[]{:S(5)})")
    return "".join(
        f"  {'ROOT ' if number == len(operations) - 1 else ''}%op.{number} = "
        f'{types[number % 2]} {operation}, metadata={{op_name="jit(f)/while(x)"}}\n'
        for number, operation in enumerate(operations)
    )


def module(entry: list[str], *, body: Sequence[str] = (), test: Sequence[str] = ()) -> str:
    """Returns a module's text as XLA writes it."""
    return (
        'HloModule jit_step, is_scheduled=true\n\nFileNames\n1 "steps.py"\n\n'
        "%fused (p: f32[8,4]) -> f32[8,4] {\n  ROOT %p = f32[8,4]{1,0} parameter(0)\n}\n\n"
        f"%body (p: f32[8,4]) -> f32[8,4] {{\n{lines([*NOTHING, *body])}}}\n\n"
        f"%test (p: f32[8,4]) -> pred[] {{\n{lines([*NOTHING, *test])}}}\n\n"
        f"ENTRY %main (a: f32[8,4]) -> f32[8,4] {{\n{lines([*NOTHING, *entry])}}}\n"
    )


def capture(num_graphs: int, num_operations: int, num_outside: int) -> Capture:
    return Capture(num_graphs=num_graphs, num_operations=num_operations, num_outside=num_outside)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (module([]), capture(0, 0, 0)),
        (module([KERNEL] * 5), capture(1, 5, 0)),
        (module([KERNEL] * 4), capture(0, 4, 4)),  # too few for a graph
        ("", capture(0, 1, 1)),  # of another form: nothing is claimed of it
        (module([KERNEL] * 5 + ["call(%a), to_apply=%gone"]), capture(1, 6, 1)),
        (module([KERNEL, TRITON, CUBLAS, "copy(%a)", SORT]), capture(1, 5, 0)),
        (module([KERNEL] * 5 + [CALLBACK] + [KERNEL] * 6), capture(2, 12, 1)),
        (module([KERNEL] * 5 + [CALLBACK] + [KERNEL] * 3), capture(1, 9, 4)),
        (module([WHILE], body=[KERNEL] * 3, test=[KERNEL]), capture(1, 5, 0)),
        (module([KERNEL] * 5 + [WHILE], body=[KERNEL, CALLBACK]), capture(1, 8, 3)),
        (module([COND, *[KERNEL] * 3], body=[KERNEL]), capture(1, 5, 0)),
        (module([IF, *[KERNEL] * 5], body=[CALLBACK], test=[KERNEL]), capture(1, 8, 3)),
        (module([CALL, KERNEL], body=[KERNEL] * 4), capture(1, 5, 0)),
        (module([KERNEL] * 5 + ["infeed(%a)"]), capture(1, 6, 1)),  # not known: not captured
    ],
)  # fmt: skip
def test_a_graph_is_a_run_of_operations_that_xla_may_take(text: str, wanted: Capture) -> None:
    assert read_capture(text) == wanted


def test_a_kind_that_is_not_enabled_ends_a_graph() -> None:
    text = module([KERNEL] * 5 + [WHILE] + [KERNEL] * 5 + [CUBLAS], body=[KERNEL])
    assert read_capture(text) == capture(1, 13, 0)
    assert read_capture(text, kinds=("FUSION", "CUBLASLT")) == capture(2, 13, 2)
    assert read_capture(text, kinds=("FUSION", "WHILE")) == capture(1, 13, 1)
    assert read_capture(text, kinds=()) == capture(0, 13, 13)


@pytest.mark.parametrize(
    ("told", "is_whole"),
    [
        (capture(1, 90, 0), True),
        (capture(0, 1, 1), True),  # one kernel needs no graph
        (capture(0, 0, 0), True),
        (capture(1, 90, 1), False),
        (capture(2, 90, 0), False),
        (capture(0, 4, 4), False),
    ],
)
def test_a_program_is_whole_where_the_host_launches_one_thing(
    told: Capture, is_whole: bool
) -> None:
    assert told.is_whole is is_whole


def test_the_switch_is_an_option_of_the_compiler_on_a_gpu_alone() -> None:
    off = tiny_sizes().spec
    on = dataclasses.replace(off, command_buffers=True)
    name = "xla_gpu_enable_command_buffer"
    assert compiler_options(on, "gpu") == {name: ",".join(COMMAND_KINDS)}
    assert compiler_options(off, "gpu") == {name: ""}
    assert compiler_options(on, "cpu") == compiler_options(off, "cpu") == {}


def test_a_program_tells_its_graphs_compiled_and_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def read(text: str) -> Capture:
        texts.append(text)
        return capture(2, 30, 4)

    monkeypatch.setattr(programs, "read_capture", read)
    spec = dataclasses.replace(tiny_sizes().spec, command_buffers=True)
    key = ProgramKey(kind="counts", spec=spec)
    for num_compiles in (1, 0):
        jax.clear_caches()  # as in a new process
        metrics = Metrics()
        compiled = Programs(metrics)
        compiled.compile_all([key], num_threads=1, cache_dir=tmp_path)
        assert metrics.total("compiles_total") == num_compiles
        assert not compiled.is_captured(key)
        for name, wanted in (
            ("program_graphs", 2), ("program_operations", 30), ("uncaptured_operations", 4)
        ):  # fmt: skip
            assert metrics.value(name, kind="counts", bucket="") == wanted
    assert len(texts) == 2
    assert all(text.startswith("HloModule jit_add_counts") for text in texts)


def test_without_graphs_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "read_capture", lambda text: pytest.fail("it was read"))
    metrics = Metrics()
    key = ProgramKey(kind="counts", spec=tiny_sizes().spec)
    compiled = Programs(metrics)
    compiled.compile_all([key], num_threads=1, cache_dir=None)
    assert not compiled.is_captured(key)
    assert metrics.total("program_operations") == 0
