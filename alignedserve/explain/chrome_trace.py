"""Events of the Chrome trace format, which Perfetto shows (ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

TraceEvent = dict[str, Any]


def micros(seconds: float) -> float:
    """Return the time on a trace's axis, rounded to the nanosecond: neighbours never overlap by rounding."""
    return round(seconds * 1e6, 3)


def span(began_s: float, ended_s: float) -> TraceEvent:
    """Return the fields of an event that has a duration."""
    start = micros(began_s)
    return {"ph": "X", "ts": start, "dur": round(micros(ended_s) - start, 3)}


def process_name(name: str, pid: int) -> TraceEvent:
    return _name("process_name", name, pid, 0)


def thread_name(name: str, pid: int, tid: int) -> TraceEvent:
    return _name("thread_name", name, pid, tid)


def _name(event: str, name: str, pid: int, tid: int) -> TraceEvent:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": {"name": name}}


def dump(events: Iterable[TraceEvent]) -> str:
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}, allow_nan=False)
