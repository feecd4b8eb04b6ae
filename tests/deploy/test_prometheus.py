"""The dashboard and the rules speak of series that there are, by labels that those have."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxserve.config import Config
from tests.deploy import promql

DASHBOARD = list(promql.dashboard_expressions())
RULES = [rule["expr"] for rule in promql.load_rules()]
ALL = [*DASHBOARD, *RULES]
SERVED = promql.served_labels()
PROMETHEUS = promql.DEPLOY / "prometheus"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def promtool(*arguments: str, cwd: Path = PROMETHEUS) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", ALL)
def test_an_expression_names_what_is_served(expression: str) -> None:
    found = promql.find_series(expression)
    assert found
    labels = {label for series in found for label in SERVED.get(series.name, ())}
    for series in found:
        assert series.name in SERVED, series.name
        own = SERVED[series.name]
        assert {label for label, _, _ in series.matchers} <= own, series.name
    assert promql.find_grouping(expression) <= labels
    if "histogram_quantile" in expression:
        assert all(series.name.endswith("_bucket") for series in found)
        assert "le" in promql.find_grouping(expression)


@pytest.mark.parametrize("expression", ALL)
def test_a_value_that_is_asked_for_exists(expression: str) -> None:
    for series in promql.find_series(expression):
        for label, operator, wanted in series.matchers:
            values = promql.known_values(series.name, label)
            if not values or label in promql.ADDED:
                continue
            is_found = [
                value == wanted if operator in ("=", "!=") else bool(re.fullmatch(wanted, value))
                for value in values
            ]
            assert any(is_found), f"{series.name}: no {label} is {wanted}"


def test_the_check_sees_a_name_that_is_not_there() -> None:
    (series,) = promql.find_series('rate(jaxserve_request_finished_total{reason="x"}[5m])')
    assert series.name not in SERVED
    assert series.matchers == (("reason", "=", "x"),)
    assert promql.find_grouping("sum by (job, le) (x)") == {"job", "le"}
    assert promql.known_values("jaxserve_requests_refused_total", "reason") > {"queue_full"}


def test_counters_are_read_as_rates() -> None:
    """But where what counts is whether there were any since the start."""
    raw = [
        expression
        for expression in ALL
        for series in promql.find_series(expression)
        if series.name.endswith(("_total", "_bucket"))
        and not re.search(rf"(rate|increase)\({series.name}\b", expression)
    ]
    assert raw == ['sum(jaxserve_recompiles_total{job=~"$job", instance=~"$instance"})']


def test_each_panel_can_be_read() -> None:
    panels = promql.load_dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    for panel in panels:
        assert panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert [target["refId"] for target in panel["targets"]] == sorted(
                {target["refId"] for target in panel["targets"]}
            )


def test_each_alert_says_what_is_wrong_and_how_much_it_matters() -> None:
    alerts = [rule for rule in promql.load_rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_each_alert_is_tried_out() -> None:
    tests = yaml.safe_load((PROMETHEUS / "jaxserve.rules_test.yml").read_text())["tests"]
    tried = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ())}
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert tried == fired == {rule["alert"] for rule in promql.load_rules() if "alert" in rule}
    for test in tests:  # and with series that there are
        for series in test["input_series"]:
            (found,) = promql.find_series(series["series"])
            assert {label for label, _, _ in found.matchers} <= SERVED[found.name]


def test_each_alert_is_in_the_page_for_operators() -> None:
    page = (promql.DEPLOY.parent / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(Jaxserve\w+)`", page))
    assert named == {rule["alert"] for rule in promql.load_rules() if "alert" in rule}


def test_the_example_scrapes_where_the_metrics_are() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "jaxserve"  # what the alerts ask for
    assert config["rule_files"] == [promql.RULES.name]
    ((target,),) = [static["targets"] for static in job["static_configs"]]
    assert target == f"{Config().metrics.host}:9100"  # the port that the docs take


@needs_promtool
def test_promtool_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", promql.RULES.name)
    promtool("test", "rules", "jaxserve.rules_test.yml")


@needs_promtool
def test_promtool_takes_each_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:{place}", "expr": promql.as_prometheus_reads(expression)}
        for place, expression in enumerate(DASHBOARD)
    ]
    groups = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump(groups))
    promtool("check", "rules", "dashboard.yml", cwd=tmp_path)
