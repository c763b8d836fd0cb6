"""The Grafana board and the alert rules of deploy/ ask for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics.deployment import exposed

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "board.json").read_text())
PREFIX = "${prefix}"  # of the metrics: the board asks which, since --metrics-prefix may be another
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"up": {"job", "instance"}}
METRIC = re.compile(r"\b(?:alignedserve|process)[:_]\w+|\bup\b")


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Return the labels of each series' name."""
    found: dict[str, set[str]] = {name: set(known) for name, known in OF_PROMETHEUS.items()}
    for family in text_string_to_metric_families(exposed()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def board_queries() -> Iterator[tuple[str, str]]:
    """Yield each query of the board with the name of its lines."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace(PREFIX, "alignedserve"), target["legendFormat"]


def rule_queries() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


def test_the_board_shows_what_each_key_used() -> None:
    queries = [query for query, shown in board_queries() if shown == "{{key}}"]
    assert [METRIC.findall(query) for query in queries] == [
        ["alignedserve:request_device_seconds_total"],
        ["alignedserve:request_energy_joules_total"],
    ]


def test_queries_name_metrics_and_labels_that_exist(labels: dict[str, set[str]]) -> None:
    for query, shown in (*board_queries(), *rule_queries()):
        names = METRIC.findall(query)
        assert names, query
        assert [name for name in names if name not in labels] == [], query
        known = set.union(*(labels[name] for name in names))
        inside = re.findall(r"\{([^}]*)\}", query)
        matched = {label for each in inside for label in re.findall(r"(\w+)\s*[=!]", each)}
        grouped = {label for each in re.findall(r"\bby \(([^)]*)\)", query) for label in each.split(", ")}
        assert matched | grouped <= known, query
        named = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", shown))
        assert named <= (grouped or known), f"a sum keeps only the labels by which it is taken: {query}"
        assert query.count("(") == query.count(")"), query


def test_panels_do_not_overlap() -> None:
    taken = [
        (x, y)
        for panel in BOARD["panels"]
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert {rule["labels"]["severity"] for rule in RULES} <= {"critical", "warning"}
    assert all(rule["annotations"]["summary"] for rule in RULES)


def test_compose_gives_prometheus_and_grafana_what_they_read() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    rules = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["rule_files"]
    mounted = {
        name: dict(volume.split(":")[:2] for volume in services[name]["volumes"]) for name in ("prometheus", "grafana")
    }
    assert rules == ["alerts.yaml"], "beside prometheus.yml"
    (scraped,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped["authorization"] == {"credentials_file": f"/run/secrets/{services['prometheus']['secrets'][0]}"}
    assert mounted["prometheus"]["./deploy/alerts.yaml"] == "/etc/prometheus/alerts.yaml"
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "boards.yaml").read_text())["providers"]
    assert mounted["grafana"]["./deploy/grafana/board.json"].startswith(provider["options"]["path"])
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "source.yaml").read_text())["datasources"]
    used = {panel["datasource"]["uid"] for panel in BOARD["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
