"""Write a run as a Chrome trace, to look at in Perfetto (ui.perfetto.dev).

    process "requests"   a track for each request, from arrival to end, and a mark at the first token
    process decode-0     steps │prefill│  decode  │ mixed │ ...
                         copies   │to device│     │from device│, and those beside steps on a track of their own

Times are microseconds since the run began. An event that begins after the limit is left out. A step or a copy that ends
after the limit is shown whole; a request is cut at the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, isfinite

from alignedserve.explain.trace_file import TraceEvent, dump, micros, process_name, span, thread_name
from alignedserve.lab.loads.records.records import CopyRecord, RequestOutcome, RequestRecord, RunRecord, StepRecord
from alignedserve.lab.reports.step_figures import spread

_REQUESTS = 1  # pid of the requests; workers have the following pids
_STEPS, _COPIES, _ASIDE = 1, 2, 3  # tids of a worker's tracks


def timeline(record: RunRecord, limit_s: float = inf) -> str:
    return dump(_events(_View(record, limit_s)))


class _View:
    """The part of a run that is shown, and the mapping of its times to the trace's axis."""

    def __init__(self, record: RunRecord, limit_s: float) -> None:
        self.record = record
        self._until = record.began_at + limit_s
        self.pids: Mapping[str, int] = {name: pid for pid, name in enumerate(record.workers, _REQUESTS + 1)}

    def shows(self, at: float) -> bool:
        return at < self._until

    def ts(self, at: float) -> float:
        return micros(at - self.record.began_at)

    def span(self, began_at: float, seconds: float) -> TraceEvent:
        zero = self.record.began_at
        return span(began_at - zero, began_at + seconds - zero)

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
    yield process_name("requests", _REQUESTS)
    for worker, pid in view.pids.items():
        yield process_name(worker, pid)
        yield thread_name("steps", pid, _STEPS)
        yield thread_name("copies", pid, _COPIES)
        yield thread_name("copies beside steps", pid, _ASIDE)


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
