"""How every benchmark says a figure: one JSON line, with what it is held against."""

from __future__ import annotations

import json


def report(
    name: str,
    value: float,
    unit: str,
    *,
    baseline: float | None = None,
    goal: float | None = None,
    at_least: bool = False,
) -> bool:
    """A goal is met by a value that is no larger, or no smaller; without a goal there is nothing to meet."""
    ratio = value / baseline if baseline else None
    met = None if goal is None else value >= goal if at_least else value <= goal
    figures = {"value": value, "baseline": baseline, "ratio": ratio, "goal": goal}
    rounded = {key: None if one is None else float(f"{one:.4g}") for key, one in figures.items()}
    line = {"name": name, "value": rounded["value"], "unit": unit, **rounded, "met": met}
    print(json.dumps(line), flush=True)
    return met is not False
