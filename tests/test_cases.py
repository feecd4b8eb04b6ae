"""The table of fault cases names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "cases.md").read_text()
CASES = (
    7,
    8,
    11,
    12,
    13,
    14,
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
    42,
    48,
    50,
    51,
    53,
    54,
    55,
    56,
    57,
    58,
    63,
    65,
)


def test_every_case_has_a_row_and_every_named_test_exists() -> None:
    rows = re.findall(r"^\| C(\d\d) \|.*\|(.*)\|$", TABLE, flags=re.MULTILINE)
    assert tuple(int(case) for case, _ in rows) == CASES
    for case, cell in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, f"C{case} has no test"
        for path, name in named:
            tree = ast.parse((TESTS / path).read_text())
            functions = {
                node.name
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, f"C{case}: {path} has no {name}"
