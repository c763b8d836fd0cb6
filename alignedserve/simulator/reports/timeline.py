"""Write a run as a Chrome trace, to look at in Perfetto (ui.perfetto.dev).

    process "requests"   a track for each request, from its arrival to its end, and a mark at its first token
    process decode-0     steps │prefill│  decode  │ mixed │ ...
                         copies   │to device│     │from device│, and those beside steps on a track of their own

Times are microseconds since the run began. An event that begins after the limit is left out. A step or a copy that ends
after the limit is shown whole; a request is cut at the limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import Any

from alignedserve.simulator.records.records import CopyRecord, RequestOutcome, RequestRecord, RunRecord, StepRecord
from alignedserve.simulator.reports.step_figures import spread

_REQUESTS = 1  # pid of the requests; workers have the following pids
_STEPS, _COPIES, _ASIDE = 1, 2, 3  # tids of a worker's tracks

TraceEvent = dict[str, Any]


def timeline(record: RunRecord, limit_s: float = inf) -> str:
    events = list(_events(_View(record, limit_s)))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


class _View:
    """The part of a run that is shown, and the mapping of its times to the trace's axis."""

    def __init__(self, record: RunRecord, limit_s: float) -> None:
        self.record = record
        self._until = record.began_at + limit_s
        self.pids: Mapping[str, int] = {name: pid for pid, name in enumerate(record.workers, _REQUESTS + 1)}

    def shows(self, at: float) -> bool:
        return at < self._until

    def ts(self, at: float) -> float:
        """Return the time on the trace's axis, rounded to the nanosecond: neighbours never overlap by rounding."""
        return round((at - self.record.began_at) * 1e6, 3)

    def span(self, began_at: float, seconds: float) -> TraceEvent:
        start = self.ts(began_at)
        return {"ph": "X", "ts": start, "dur": round(self.ts(began_at + seconds) - start, 3)}

    def ended_at(self, request: RequestRecord) -> float:
        """Return the end of the request, or the end of the run if the request is still open."""
        ended_at = self.record.ended_at if request.outcome is RequestOutcome.OPEN else request.ended_at
        return min(ended_at, self._until)


def _events(view: _View) -> Iterator[TraceEvent]:
    record = view.record
    yield from _names(view)
    for step in record.steps:
        if view.shows(step.began_at):
            yield _step(view, step)
    for copy in record.copies:
        if view.shows(copy.began_at):
            yield _copy(view, copy)
    for request in record.requests:
        if view.shows(request.arrival_at):
            yield from _request(view, request)


def _names(view: _View) -> Iterator[TraceEvent]:
    yield _name("process_name", "requests", _REQUESTS)
    for worker, pid in view.pids.items():
        yield _name("process_name", worker, pid)
        yield _name("thread_name", "steps", pid, _STEPS)
        yield _name("thread_name", "copies", pid, _COPIES)
        yield _name("thread_name", "copies beside steps", pid, _ASIDE)


def _name(event: str, name: str, pid: int, tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": {"name": name}}


def _step(view: _View, step: StepRecord) -> TraceEvent:
    shape = step.shape
    args: dict[str, float] = {"tokens": shape.tokens, "chunks": shape.chunks, "decodes": shape.decodes}
    if shape.decodes:
        args |= {"shortest prefix": step.shortest, "longest prefix": shape.longest, "spread": spread(step)}
    if isfinite(step.predicted_s):
        args |= {"predicted ms": round(step.predicted_s * 1e3, 3)}
    place = {"name": shape.kind.value, "cat": "step", "pid": view.pids[step.worker], "tid": _STEPS}
    return place | view.span(step.began_at, step.seconds) | {"args": args}


def _copy(view: _View, copy: CopyRecord) -> TraceEvent:
    name = "to device" if copy.to_device else "from device"
    place = {"name": name, "cat": "copy", "pid": view.pids[copy.worker], "tid": _ASIDE if copy.aside else _COPIES}
    return place | view.span(copy.began_at, copy.seconds) | {"args": {"tokens": copy.num_tokens}}


def _request(view: _View, request: RequestRecord) -> Iterator[TraceEvent]:
    name = f"{request.service.value} {request.id}"
    place = {"name": name, "cat": "request", "id": request.id, "pid": _REQUESTS, "tid": 0}
    about = {"prompt": request.num_prompt, "output": len(request.token_at), "outcome": request.outcome.value}
    yield place | {"ph": "b", "ts": view.ts(request.arrival_at), "args": about}
    if request.token_at and view.shows(request.token_at[0]):
        yield place | {"ph": "n", "name": "first token", "ts": view.ts(request.token_at[0])}
    yield place | {"ph": "e", "ts": view.ts(view.ended_at(request))}
