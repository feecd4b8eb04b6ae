"""The table of fault cases names tests that exist, and that run."""

import ast
import re
from pathlib import Path

from jaxserve.cli import exit_codes

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "cases.md").read_text()
CASES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    11,
    12,
    13,
    14,
    17,
    22,
    24,
    25,
    26,
    28,
    29,
    30,
    32,
    34,
    35,
    37,
    39,
    40,
    41,
    42,
    44,
    46,
    48,
    50,
    51,
    53,
    54,
    55,
    56,
    57,
    58,
    62,
    63,
    65,
)

FAULTS = (TESTS.parent / "docs" / "faults.md").read_text()


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(path: Path) -> dict[str, Function]:
    nodes = ast.parse(path.read_text()).body
    return {node.name: node for node in nodes if isinstance(node, Function)}


def is_skipped(function: Function) -> bool:
    return any(re.search("skip|xfail", ast.unparse(mark)) for mark in function.decorator_list)


def is_empty(function: Function) -> bool:
    """Whether it neither asserts nor calls anything."""
    nodes = (node for part in function.body for node in ast.walk(part))
    return not any(isinstance(node, ast.Assert | ast.Call) for node in nodes)


def test_the_table_of_faults_names_tests_that_exist_and_all_of_them() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(\w+)`", FAULTS))
    there = {
        (path.name, name)
        for path in (TESTS / "faults").glob("test_*.py")
        for name in functions_of(path)
        if name.startswith("test_")
    }
    assert named == there
    for path in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", FAULTS):
        assert (TESTS.parent / path).exists(), path


def test_every_exit_code_is_in_the_table_of_faults() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    rows = {
        int(code)
        for row in re.findall(r"^\| ([\d, ]+) \|", FAULTS, re.M)
        for code in row.split(",")
    }
    assert codes == rows - {137, 143}


def test_every_case_has_a_row_and_every_named_test_exists() -> None:
    rows = re.findall(r"^\| C(\d\d) \|.*\|(.*)\|$", TABLE, flags=re.MULTILINE)
    assert tuple(int(case) for case, _ in rows) == CASES
    check_named(rows)


def test_every_case_of_our_own_about_metrics_has_a_row_and_tests() -> None:
    rows = re.findall(r"^\| K(\d+) \|.*\|(.*)\|$", TABLE, flags=re.MULTILINE)
    assert [int(case) for case, _ in rows] == list(range(1, 12))
    check_named(rows)


def test_every_case_of_our_own_about_offline_batches_has_a_row_and_tests() -> None:
    rows = re.findall(r"^\| Q(\d+) \|.*\|(.*)\|$", TABLE, flags=re.MULTILINE)
    assert [int(case) for case, _ in rows] == list(range(1, 17))
    check_named(rows)


def check_named(rows: list[tuple[str, str]]) -> None:
    for case, cell in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, f"{case} has no test"
        for path, name in named:
            function = functions_of(TESTS / path).get(name)
            assert function is not None, f"{case}: {path} has no {name}"
            assert not is_skipped(function), f"{case}: {name} is skipped"
            assert not is_empty(function), f"{case}: {name} asserts nothing"
