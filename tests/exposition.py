"""Read one value of an exposition in Prometheus' text form."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families


def value(exposed: str, wanted: str) -> float:
    """Return the value of the only series with this name and at least these labels, as in name{label="value"}."""
    name, _, labels = wanted.partition("{")
    asked = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    lines = "".join(line for line in exposed.splitlines(keepends=True) if line.startswith(name))
    found = [
        sample.value
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
        if sample.name == name and asked.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{wanted} has {len(found)} series"
    return found[0]
