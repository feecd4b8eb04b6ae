"""As much of PromQL as tells which series an expression names, and by which labels."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final

import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from jaxserve.metrics import Metrics

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
RULES: Final = DEPLOY / "prometheus" / "jaxserve.rules.yml"
DASHBOARD: Final = DEPLOY / "grafana" / "jaxserve.json"
ADDED: Final = frozenset({"job", "instance"})  # by Prometheus
SUFFIXES: Final = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "info": ("_info",),
}
_SERIES: Final = re.compile(
    r"(?<![\w:])(jaxserve_\w+|process_\w+|instance:\w+:\w+|up)\b(\{[^}]*\})?"
)
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING: Final = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")


@dataclasses.dataclass(slots=True, frozen=True)
class Series:
    """A selector: its name, and what it asks of labels."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def find_series(expression: str) -> list[Series]:
    return [
        Series(match[1], tuple(_MATCHER.findall(match[2] or "")))
        for match in _SERIES.finditer(expression)
    ]


def find_grouping(expression: str) -> set[str]:
    """Returns the labels that are kept or joined by."""
    return {
        label.strip() for match in _GROUPING.finditer(expression) for label in match[1].split(",")
    }


def load_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def load_dashboard() -> dict[str, Any]:
    loaded = json.loads(DASHBOARD.read_text())
    assert isinstance(loaded, dict)
    return loaded


def dashboard_expressions() -> Iterator[str]:
    dashboard = load_dashboard()
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            series, _, _ = variable["definition"].removeprefix("label_values(").rpartition(",")
            yield series
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def as_prometheus_reads(expression: str) -> str:
    """Returns an expression of the dashboard with Grafana's variables filled in."""
    filled = expression.replace("$__rate_interval", "5m").replace("$__interval", "1m")
    return filled.replace("$job", ".*").replace("$instance", ".*")


def served_labels() -> Mapping[str, Set[str]]:
    """Returns the labels of every sample that there is, recorded ones among them."""
    found: dict[str, Set[str]] = {"up": ADDED}
    metrics = Metrics()
    for family in metrics.registry.collect():
        for suffix in SUFFIXES[family.type]:
            name = f"{family.name}{suffix}"
            own = getattr(metrics._by_sample[name], "_labelnames")  # noqa: B009
            found[name] = ADDED | set(own) | ({"le"} if suffix == "_bucket" else set())
    processes = CollectorRegistry()
    ProcessCollector(registry=processes)
    for family in processes.collect():
        for sample in family.samples:
            found[sample.name] = ADDED
    for rule in load_rules():
        if "record" in rule:
            found[rule["record"]] = ADDED
    return found


def known_values(name: str, label: str) -> set[str]:
    """Returns the values that a label has from the start; empty where that is not known."""
    return {
        sample.labels[label]
        for family in Metrics().registry.collect()
        for sample in family.samples
        if sample.name == name and label in sample.labels
    }
