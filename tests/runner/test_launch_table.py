"""The launch table: what it finds, and what it says of a table that is wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention.launch import Cut, Cuts
from jaxserve.runner.launch_table import (
    AttentionCall,
    Entry,
    LaunchTable,
    read_launch_table,
    write_launch_table,
)

CALL: dict[str, object] = {
    "impl": "triton", "head_dim": 128, "num_shared": 4, "page_size": 16,
    "q_dtype": "bfloat16", "kv_dtype": "bfloat16",
}  # fmt: skip
ENTRY: dict[str, object] = {
    **CALL, "device": "NVIDIA H200", "kind": "decode", "rows": 16, "block_tokens": 128,
    "num_warps": 8, "num_stages": 3, "wanted_programs": 528, "time_ratio": 0.8, "jax": "0.11.2",
}  # fmt: skip
CUT = Cut(rows=16, block_tokens=128, num_warps=8, num_stages=3, wanted_programs=528)


def table_of(*entries: dict[str, object]) -> dict[str, object]:
    return {"version": 1, "entries": list(entries)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "launches.json"


def read(path: Path, table: object) -> LaunchTable:
    path.write_text(json.dumps(table))
    return read_launch_table(path)


def find(
    table: LaunchTable,
    *,
    device: str = "NVIDIA H200",
    changes: Mapping[str, object] = MappingProxyType({}),
) -> Cuts:
    return table.find_cuts(AttentionCall.model_validate({**CALL, **changes}), device=device)


def test_the_packages_own_table_is_right() -> None:
    assert read_launch_table().version == 1


def test_a_cut_is_found_by_all_of_its_call(path: Path) -> None:
    chunk = ENTRY | {"kind": "chunk", "rows": 64}
    assert find(read(path, table_of(ENTRY))) == Cuts(decode=CUT)
    both = read(path, table_of(ENTRY, chunk))
    assert find(both).decode == CUT
    assert find(both).chunk is not None
    others: list[dict[str, object]] = [
        {"impl": "mosaic"}, {"head_dim": 64}, {"num_shared": 1}, {"page_size": 32},
        {"q_dtype": "float32"}, {"kv_dtype": "float32"},
    ]  # fmt: skip
    for other in others:
        assert find(both, changes=other) == Cuts()
    assert find(both, device="NVIDIA H100") == Cuts()


def test_what_is_written_is_read_again_in_one_order(path: Path) -> None:
    entries = [Entry.model_validate(ENTRY | {"head_dim": size}) for size in (64, 128)]
    write_launch_table(LaunchTable(entries=tuple(entries)), path)
    written = path.read_text()
    assert read_launch_table(path).entries[0].cut == CUT
    write_launch_table(LaunchTable(entries=tuple(entries[::-1])), path)
    assert path.read_text() == written


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (table_of(ENTRY | {"rows": 24}), "entries.0.rows: .*24 is no power of two"),
        (table_of(ENTRY | {"rows": 8}), "entries.0.rows: .*greater than or equal to 16"),
        (table_of(ENTRY | {"rows": "16"}), "entries.0.rows: .*valid integer"),
        (table_of(ENTRY | {"block_tokens": 1024}), "entries.0.block_tokens: .*equal to 512"),
        (table_of(ENTRY | {"num_warps": 0}), "entries.0.num_warps: "),
        (table_of(ENTRY | {"wanted_programs": -1}), "entries.0.wanted_programs: "),
        (table_of(ENTRY | {"time_ratio": 1.5}), "entries.0.time_ratio: .*less than 1"),
        (table_of(ENTRY | {"kv_dtype": "int3"}), "entries.0.kv_dtype: "),
        (table_of(ENTRY | {"kind": "verify"}), "entries.0.kind: "),
        (table_of(ENTRY | {"row": 16}), "entries.0.row: Extra inputs"),
        (table_of(ENTRY, ENTRY | {"rows": 32}), "two entries of NVIDIA H200, decode, triton, 128"),
        (table_of(ENTRY | {"impl": "mosaic"}), "mosaic has 64 rows and 4 warps, not 16 and 8"),
        ({"version": 2, "entries": []}, "version: "),
        ({"launches": []}, "launches: Extra inputs"),
        ([], "Input should be an object"),
    ],
)
def test_a_wrong_table_is_refused_by_place(path: Path, table: object, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"launches\.json is wrong: .*{told}"):
        read(path, table)


def test_a_table_that_is_none_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launches\.json cannot be read: No such file"):
        read_launch_table(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"launches\.json is wrong: Invalid JSON"):
        read_launch_table(path)
