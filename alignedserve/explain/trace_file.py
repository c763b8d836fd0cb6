"""Write a story as a trace for Perfetto.

    process of the request   the stages
    process router           what it decided, each as an instant
    process decode-0         what it decided; the steps that ran while the worker had the request

Times are microseconds since the request came, or since the step began that ran then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from alignedserve.explain.decisions import HIDDEN, Step
from alignedserve.explain.sentences import said, said_of_stay
from alignedserve.explain.story import Moment, Stay, Story

TraceEvent = dict[str, Any]  # of the Chrome trace format, which Perfetto shows (ui.perfetto.dev)
_REQUEST = 1  # pid; parts have the following pids
_DECISIONS, _STEPS = 1, 2  # tids of a part


def trace_of(story: Story) -> str:
    zero = min([story.began_at, *(step.began_at for steps in story.steps.values() for step in steps)])
    return dump(_events(story, zero))


def _events(story: Story, zero: float) -> Iterator[TraceEvent]:
    moments = (*story.moments, *story.displaced)
    parts = dict.fromkeys((*(moment.part for moment in moments), *story.steps))
    pids = {part: pid for pid, part in enumerate(parts, _REQUEST + 1)}
    yield process_name(story.request, _REQUEST)
    yield thread_name("stages", _REQUEST, _DECISIONS)
    for part, pid in pids.items():
        yield process_name(part, pid)
        yield thread_name("decisions", pid, _DECISIONS)
        if part in story.steps:
            yield thread_name("steps", pid, _STEPS)
    yield from (_stay(stay, zero) for stay in story.stays)
    yield from (_moment(moment, pids[moment.part], zero) for moment in moments)
    yield from (_step(step, pids[part], zero) for part, steps in story.steps.items() for step in steps)


def _stay(stay: Stay, zero: float) -> TraceEvent:
    place = {"name": f"{stay.stage.value} ({stay.part})", "cat": "stage", "pid": _REQUEST, "tid": _DECISIONS}
    lasts = span(stay.began_at - zero, stay.ended_at - zero)
    return place | lasts | {"args": {"what": said_of_stay(stay)}}


def _moment(moment: Moment, pid: int, zero: float) -> TraceEvent:
    noted = moment.decision
    args = {"request": noted.request, "attempt": noted.attempt, "what": said(noted)}
    place = {"name": noted.kind.value, "cat": "decision", "pid": pid, "tid": _DECISIONS}
    return place | {"ph": "i", "s": "t", "ts": micros(noted.at - zero), "args": args}


def _step(step: Step, pid: int, zero: float) -> TraceEvent:
    kinds = [*(["prefill"] if step.prompt_tokens > 0 else []), *(["decode"] if step.decodes > 0 else [])]
    args: dict[str, float] = {"step": step.number}
    if step.decodes != HIDDEN:
        args |= {"prompt tokens": step.prompt_tokens, "decodes": step.decodes}
    if isfinite(step.predicted_s):
        args["predicted ms"] = round(step.predicted_s * 1e3, 3)
    place = {"name": " and ".join(kinds) or "step", "cat": "step", "pid": pid, "tid": _STEPS}
    began_s, ended_s = step.began_at - zero, step.began_at + step.seconds - zero
    return place | span(began_s, ended_s) | {"args": args}


# --- Events of the format


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
