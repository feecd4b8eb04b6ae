"""Who may import whom. This table is the architecture; README.md draws it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxserve"
BASE = {"errors", "config", "host_pages", "identity", "request", "plan", "metrics", "mechanisms"}
MAY_IMPORT: dict[str, set[str]] = {
    "cli": {"server", "measure", "engine", "calibrate", "checkpoint", "client", "llm"},
    "server": {"engine", "gen", "text"},
    "client": {"gen"},
    "llm": {"engine"},
    "measure": {"engine", "scheduler", "client", "text"},
    "engine": {"text", "scheduler", "runner", "checkpoint", "speculate"},
    "calibrate": {"runner", "model", "quant", "checkpoint"},
    "checkpoint": {"model", "quant", "text"},
    "runner": {"model", "kernels", "quant", "shapes"},
    "model": {"kernels", "quant", "shapes"},
    "quant": {"kernels", "shapes"},
    "kernels": {"shapes"},
    "scheduler": set(),
    "text": set(),
    "speculate": set(),
    "gen": set(),
    "shapes": {"errors"},
}
# Base modules import each other and nothing of ours besides: never a layer above.
HOST_ONLY = (
    "cli", "client", "config", "engine", "gen", "identity", "llm", "mechanisms", "metrics", "plan",
    "request", "scheduler", "server", "speculate", "text",
)  # fmt: skip
THERE = [
    name
    for name in HOST_ONLY
    if (ROOT / name / "__init__.py").exists() or (ROOT / f"{name}.py").exists()
]


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(source: str) -> Iterator[str]:
    """Every module an import statement names, wherever it stands.

    `from jaxserve import config` names jaxserve.config.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer: write jaxserve.…"
            if node.module == "jaxserve":
                yield from (f"jaxserve.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def not_allowed(layer: str, source: str) -> list[str]:
    """The imports of `source`, standing in `layer`, that the table forbids."""
    if layer == "__init__":
        # The package's front door may name the Python API, lazily.
        allowed = {"llm"} | BASE
    else:
        allowed = MAY_IMPORT.get(layer, set()) | BASE | {layer}
    targets = {
        module: module.split(".")[1]
        for module in imported_modules(source)
        if module.startswith("jaxserve.")
    }
    return sorted(
        module
        for module, target in targets.items()
        if target not in allowed and not target.startswith("__")
    )


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    layer = layer_of(path)
    assert not_allowed(layer, path.read_text()) == [], f"{layer} may not import these"


def test_every_folder_of_the_package_is_in_the_table() -> None:
    layers = {layer_of(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert layers - BASE - MAY_IMPORT.keys() == set()


@pytest.mark.parametrize(
    ("layer", "source", "bad"),
    [
        ("scheduler", "import jaxserve.runner.batch", ["jaxserve.runner.batch"]),
        ("scheduler", "from jaxserve import engine", ["jaxserve.engine"]),
        (
            "runner",
            "def f():\n    from jaxserve.scheduler import Scheduler",
            ["jaxserve.scheduler"],
        ),
        ("config", "from jaxserve.text import stops", ["jaxserve.text"]),
        ("engine", "import jaxserve.plan, numpy", []),
    ],
)
def test_the_check_sees_an_import_that_goes_up(layer: str, source: str, bad: list[str]) -> None:
    assert not_allowed(layer, source) == bad


@pytest.mark.parametrize("name", THERE)
def test_host_layers_do_not_pull_in_jax(name: str) -> None:
    code = f"import sys, jaxserve.{name}; sys.exit(1 if 'jax' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or f"importing jaxserve.{name} pulled in jax"
