"""What scripts/gpu_check reads of a compiler's dump, and what it calls a fault."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.dump import (
    Assembled,
    Compiled,
    Coverage,
    Resources,
    count_copies,
    count_sorts,
    read_assembly,
    read_coverage,
    read_launch,
)
from scripts.gpu_check.faults import Kind, Limits, find_faults, find_kernel_faults

ROOT = Path(__file__).parent.parent
LAUNCH = "grid: [16, 1, 1] threads: [128, 1, 1]  shared_memory: 512 bytes"
CAPTURED = f"""\
000: kCommandBuffer [source | sink] 
    001: kCustomKernel [source       | next=002 (1)] gemm_fusion {LAUNCH}
    002: kCopy         [prev=001 (1) | next=003 (1)] kCopy
    003: kWhile        [prev=002 (1) | next=007 (1)]       
condition:
        004: kCustomKernel [source | sink] wrapped_compare {LAUNCH}
      body:
        005: kConditional  [source       | sink        ]
          false_branch:
            006: kCustomKernel [source | sink] gemm_fusion {LAUNCH}
    007: kCustomKernel [prev=003 (1) | sink        ] loop_add_fusion {LAUNCH}
"""  # noqa: W291  # as XLA writes it
LONE = f"001: kCustomKernel [source | sink] loop_gather_fusion {LAUNCH}\n"
LOOP_OUTSIDE = f"""\
000: kCommandBuffer [source       | next=002 (1)]
    001: kCustomKernel [source | sink] gemm_fusion {LAUNCH}
002: kWhile        [prev=000 (1) | next=005 (1)]
condition:
    003: kCustomKernel [source | sink] wrapped_compare {LAUNCH}
  body:
    004: kCustomKernel [source | sink] loop_add_fusion {LAUNCH}
005: kCommandBuffer [prev=002 (1) | sink        ]
    006: kCustomKernel [source | sink] gemm_fusion {LAUNCH}
"""
LAYER = (4097, 2, 3, 16, 64)
COPY = "  %copy.7 = bf16[4097,2,3,16,64]{4,3,2,1,0} copy(bf16[4097,2,3,16,64]{4,3,2,1,0} %p)"
SORT = "  %sort.3 = (u32[32,768]{1,0}, s32[32,768]{1,0}) sort(%a, %b), dimensions={1}, to_apply=%c"
SPILLING = Assembled(num_registers=255, spill_bytes=8)
LIMITS = Limits(temp_bytes=100, kernels=3, launches=4, loops=1, conditions=1, pool_shapes=(LAYER,))
FINE = Compiled(
    thunk_sequence=CAPTURED,
    mosaic_launches={},
    kernels={
        name: Assembled(num_registers=32, spill_bytes=0)
        for name in ("gemm_fusion", "wrapped_compare", "loop_add_fusion")
    },
    hlo="  %add.1 = bf16[4097,2,3,16,64]{4,3,2,1,0} add(%a, %b)",
    lower_s=0.1,
    compile_s=4.0,
    temp_bytes=100,
    alias_bytes=7,
    donated_bytes=7,
)


def kinds(compiled: Compiled, limits: Limits = LIMITS) -> list[Kind]:
    coverage = read_coverage(compiled.thunk_sequence)
    return [fault.kind for fault in find_faults(compiled, coverage, limits)]


def test_a_planted_regression_takes_no_choice_of_what_is_checked() -> None:
    # In a process of its own: what it imports sets jax up.
    code = """
import sys
from scripts.gpu_check.__main__ import read_options
for beside in ("--all", "--part step", "--model 1b", "--attention xla"):
    sys.argv = ["check", "--plant", "scan", *beside.split()]
    try:
        print("taken", read_options())
    except SystemExit as refused:
        print("refused", refused.code)
sys.argv = ["check", "--plant", "scan"]
print(read_options().plant)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == ["refused 2"] * 4 + ["scan"]
    for option in ("--all", "--part", "--model", "--attention"):
        assert f"leave {option} out" in done.stderr


def test_coverage_counts_what_a_graph_holds_at_any_depth() -> None:
    assert read_coverage(CAPTURED) == Coverage(
        top_level=("kCommandBuffer",),
        kernels={"gemm_fusion": 2, "wrapped_compare": 1, "loop_add_fusion": 1},
        loops=1,
        conditions=1,
    )


def test_coverage_tells_what_stands_outside_the_graphs() -> None:
    coverage = read_coverage(LOOP_OUTSIDE)
    assert (coverage.num_graphs, coverage.outside) == (2, ("kWhile",))
    assert coverage.num_launches == 4


def test_a_dump_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="did its form change"):
        read_coverage("command_buffer { custom_kernel }")


def test_a_program_within_its_limits_has_no_fault() -> None:
    assert kinds(FINE) == []


@pytest.mark.parametrize(("count", "faults"), [(1, []), (4, []), (5, [Kind.NOT_ONE_GRAPH])])
def test_a_few_kernels_need_no_graph(count: int, faults: list[Kind]) -> None:
    kernels = {"loop_gather_fusion": Assembled(num_registers=16, spill_bytes=0)}
    lone = dataclasses.replace(FINE, thunk_sequence=LONE * count, kernels=kernels)
    limits = dataclasses.replace(LIMITS, launches=None, loops=0, conditions=0)
    assert kinds(lone, limits) == faults


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"temp_bytes": 101}, Kind.TEMPORARIES),
        ({"alias_bytes": 6}, Kind.NOT_IN_PLACE),
        ({"hlo": COPY}, Kind.POOL_COPY),
        ({"hlo": SORT}, Kind.SORTS),
        ({"kernels": FINE.kernels | {"sort": SPILLING}}, Kind.SPILLS),
        ({"kernels": {}}, Kind.SPILLS),
    ],
)
def test_each_fault_of_a_program_is_found(change: dict[str, object], kind: Kind) -> None:
    assert kinds(dataclasses.replace(FINE, **change)) == [kind]  # type: ignore[arg-type]  # a field each


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"kernels": 2}, Kind.MANY_KERNELS),
        ({"launches": 3}, Kind.MANY_LAUNCHES),
        ({"loops": 0}, Kind.LOOPS),
        ({"conditions": 0}, Kind.LOOPS),
        ({"loops": 2}, Kind.LOOPS),  # one was unrolled, or is gone
        ({"conditions": 2}, Kind.LOOPS),
    ],
)
def test_each_limit_of_a_program_holds(change: dict[str, int], kind: Kind) -> None:
    assert kinds(FINE, dataclasses.replace(LIMITS, **change)) == [kind]  # type: ignore[arg-type]  # a field each


def test_a_loop_outside_the_graph_is_found() -> None:
    outside = dataclasses.replace(FINE, thunk_sequence=LOOP_OUTSIDE)
    assert kinds(outside, dataclasses.replace(LIMITS, conditions=0)) == [Kind.NOT_ONE_GRAPH]


def test_copies_are_counted_by_shape() -> None:
    assert count_copies(f"{COPY}\n{COPY}", LAYER) == 2
    assert count_copies(COPY, LAYER[1:]) == 0


def test_sorts_are_counted_by_themselves_and_in_libraries() -> None:
    in_library = '  %c = (f32[8]{0}) custom-call(%a), custom_call_target="__cub$DeviceRadixSort", x'
    top_k = '  %t = (f32[8]{0}, s32[8]{0}) custom-call(%a), custom_call_target="__gpu$TopK"'
    assert count_sorts(f"{SORT}\n{in_library}\n{top_k}") == 3
    assert (
        count_sorts('  %sorted.1 = f32[8]{0} add(%sort.1, %b), metadata={op_name="sort(x)"}') == 0
    )


def test_what_ptxas_tells_is_read_by_kernel() -> None:
    told = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'gemm_fusion' for 'sm_90a'\n"
        "ptxas info    : Function properties for gemm_fusion\n"
        "    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
        "ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'\n"
        "ptxas info    : Function properties for loop_add_fusion\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 16 registers, used 0 barriers\n"
    )
    assert read_assembly(told) == {
        "gemm_fusion": Assembled(num_registers=255, spill_bytes=24),
        "loop_add_fusion": Assembled(num_registers=16, spill_bytes=0),
    }


def test_a_kernels_launch_is_found_by_its_whole_name() -> None:
    longer = CAPTURED.replace("gemm_fusion grid", "gemm_fusion_2 grid").replace("[128", "[64")
    compiled = dataclasses.replace(FINE, thunk_sequence=longer + LONE + CAPTURED)
    assert read_launch(compiled, "gemm_fusion") == (128, 512)
    with pytest.raises(ValueError, match="no launch of add_fusion"):
        read_launch(FINE, "add_fusion")


def test_a_mosaic_kernels_launch_is_its_own() -> None:
    text = (
        "gpu.launch blocks(%a) threads(%b) in (%x = %c128, %y = %c1) "
        "dynamic_shared_memory_size %c51200_i32"
    )
    launches = {
        "attend_0.after_layout_inference.txt": text,
        "other_0.after_layout_inference.txt": "",
    }
    compiled = dataclasses.replace(FINE, mosaic_launches=launches)
    assert read_launch(compiled, "attend") == (128, 51200)
    with pytest.raises(ValueError, match="no launch of other_"):
        read_launch(compiled, "other_")


@pytest.mark.parametrize(
    ("num_registers", "shared_bytes", "num_resident"),
    [
        (96, 39 << 10, 5),  # 5 by either
        (97, 0, 4),  # rounded up to 104 a thread
        (16, 0, 16),  # 2,048 threads
        (32, 113 << 10, 2),  # 1 KiB of each is the system's
    ],
)
def test_occupancy_follows_cudas_rules(
    num_registers: int, shared_bytes: int, num_resident: int
) -> None:
    resources = Resources(
        num_threads=128, num_registers=num_registers, spill_bytes=0, shared_bytes=shared_bytes
    )
    assert resources.num_resident == num_resident
    assert list(find_kernel_faults(resources, planned_resident=num_resident)) == []
    (fault,) = find_kernel_faults(resources, planned_resident=num_resident + 1)
    assert fault.kind is Kind.OCCUPANCY


def test_a_kernel_that_spills_is_a_fault() -> None:
    resources = Resources(num_threads=128, num_registers=255, spill_bytes=4, shared_bytes=0)
    (fault,) = find_kernel_faults(resources, planned_resident=1)
    assert fault.kind is Kind.SPILLS
