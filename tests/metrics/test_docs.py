"""docs/metrics.md has a row of each family, and each row is true."""

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from jaxserve.metrics import Metrics, finish_labels, refusal_labels
from jaxserve.metrics.view import TWINS

TEXT = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()
ROWS = {
    row[0].strip("`"): row[1:]
    for line in TEXT.splitlines()
    if line.startswith("| `jaxserve_")
    for row in [[cell.strip() for cell in line.strip("|").split("|")]]
}
FAMILIES = {family.name: family for family in Metrics().registry.collect()}
UNITS = {
    "requests", "calls", "tokens", "steps", "programs", "rows", "sequences", "prompts", "pages",
    "streams", "choices", "spans", "graphs", "operations", "seconds", "bytes", "0 to 1", "1",
}  # fmt: skip


def labels_of(name: str) -> list[str]:
    found = Metrics()._by_sample
    (family,) = {found[sample] for sample in found if sample in samples_of(FAMILIES[name])}
    assert isinstance(family, MetricWrapperBase)
    return list(family._labelnames)


def samples_of(family: Metric) -> list[str]:
    return [f"{family.name}{suffix}" for suffix in ("", "_total", "_bucket", "_info")]


def test_the_table_is_the_registry() -> None:
    assert list(ROWS) == list(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_says_what_the_code_says(name: str) -> None:
    kind, unit, labels, meaning, vllm = ROWS[name]
    family = FAMILIES[name]
    assert (kind, meaning) == (family.type, family.documentation)
    assert re.findall(r"`(\w+)`", labels) == labels_of(name)
    assert unit in UNITS
    assert ("seconds" in name) == (unit == "seconds")
    assert ("bytes" in name) == (unit == "bytes")
    twin = TWINS.get(name)
    assert vllm == (f"`{twin.name}`" if twin else "")


def test_every_reason_is_named() -> None:
    for reason in finish_labels():
        assert f"`{reason.removeprefix('error_')}`" in TEXT, reason
    assert "in lower case" in TEXT
    assert refusal_labels()
