"""The core of a load test: it says which request is asked next, and records what came of each.

    begin ──▶ Wake ──▶ AskServer ──▶ end ──▶ the record of the request, and what follows it

Times are seconds since the test began. Each method returns orders; the workload's own core (loads/workload/load.py)
says which requests follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from alignedserve.core import Request, ServiceClass
from alignedserve.lab.bench.answer import AskFailure, Counted, StreamedAnswer
from alignedserve.lab.bench.wording import AnyWording, visit_of
from alignedserve.lab.loads.figures.request_figures import keeps_all, ttft_s
from alignedserve.lab.loads.records.distribution import percentile, ratio
from alignedserve.lab.loads.records.records import RequestOutcome, RequestRecord, RunRecord
from alignedserve.lab.loads.workload import Arrival, Load

_LATE_S = 0.05  # by which a request may be asked too late without a note
_LAST = 100  # latest requests; the line of progress shows their median


# --- What it orders


@dataclass(frozen=True, slots=True)
class Wake:
    at: float
    then: Callable[[float], list[Command]]  # what is to be asked at that time


@dataclass(frozen=True, slots=True)
class AskServer:
    request: str
    path: str  # of the API
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HangUp:
    request: str


Command: TypeAlias = Wake | AskServer | HangUp


# --- The server


@dataclass(frozen=True)
class Dialect:
    """The fields of a body that this server understands."""

    model: str
    refused: frozenset[str] = frozenset()  # fields beside OpenAI's that it refuses

    def body(self, arrival: Arrival, prompt: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self.model,
            "max_tokens": max(1, min(arrival.length, arrival.request.max_tokens)),
            "temperature": 0,
            "stream": True,
        }
        body |= {"stream_options": {"include_usage": True}, **_more(arrival.request), **prompt}
        return {name: value for name, value in body.items() if name not in self.refused}

    def without(self, complaint: str) -> Dialect:
        """Return the dialect without the fields that the complaint names; without all of them if it names none."""
        known = (*FIELDS,)
        named = {name for name in known if re.search(rf"\b{name}\b", complaint) and name not in self.refused}
        return replace(self, refused=self.refused | (named or frozenset(known)))

    @property
    def notes(self) -> Iterator[str]:
        for name, effect in FIELDS.items():
            if name in self.refused:
                yield f"the server refuses {name}: {effect}"


FIELDS = {  # beside those of OpenAI's that every server has -> what follows where one is refused
    "ignore_eos": "outputs may be shorter than the workload says",
    "return_token_ids": "tokens are counted by the usage it tells",
    "slo": "it was not told what is promised",
    "service_tier": "best-effort requests were asked like the others",
    "stream_options": "it tells no usage",
}


def _more(request: Request) -> dict[str, Any]:
    slo, is_best_effort = request.slo, request.service is ServiceClass.BE
    more: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    if is_best_effort:
        more["service_tier"] = "flex"
    if slo.is_asked:
        times = {"jct_ms": slo.jct_s} if is_best_effort else {"ttft_ms": slo.ttft_s, "tbt_ms": slo.tbt_s}
        more["slo"] = {name: 1e3 * seconds for name, seconds in times.items()}
    return more


# --- The test


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    arrival: Arrival
    record: RequestRecord
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The figures that a line of progress shows."""

    ended: int
    expected: int | None
    open: int
    failed: int
    attained: float  # share of the requests that ended and kept every promise; NaN before the first
    ttft_s: float  # median of the last requests


class LoadTest:
    """A load on one server."""

    def __init__(self, load: Load, wording: AnyWording, dialect: Dialect) -> None:
        self._load, self._wording, self._dialect = load, wording, dialect
        self.failures: dict[str, list[AskFailure]] = {}  # by kind
        self.num_cached = 0  # tokens of prompts that the server did not compute
        self._counted = Counter[Counted]()  # answers, by how their tokens were counted
        self._open: dict[str, _Open] = {}
        self._records = list[RequestRecord]()  # of requests that have ended
        self._num_kept = 0  # of them, those that kept every promise
        self._latest_s = 0.0  # the longest time by which a request was asked too late

    def begin(self, now: float) -> list[Command]:
        return self._expect(self._load.start(now))

    @property
    def is_over(self) -> bool:
        return not self._open

    def _expect(self, arrivals: Iterable[Arrival]) -> list[Command]:
        return [self._plan(arrival) for arrival in arrivals]

    def _plan(self, arrival: Arrival) -> Command:
        request = arrival.request
        record = RequestRecord(request.id, request.service, request.slo, request.arrival_at, len(request.prompt))
        self._open[request.id] = _Open(arrival, record)
        return Wake(request.arrival_at, partial(self._ask, self._open[request.id]))

    def _ask(self, asked: _Open, now: float) -> list[Command]:
        request, record = asked.arrival.request, asked.record
        self._latest_s = max(self._latest_s, now - record.arrival_at)
        record.arrival_at, asked.is_asked = now, True
        path, fields = self._wording.prompt(request)
        commands: list[Command] = [AskServer(request.id, path, self._dialect.body(asked.arrival, fields))]
        if asked.arrival.leaves_after_s is not None:
            commands.append(Wake(now + asked.arrival.leaves_after_s, partial(self._leave, request.id)))
        return commands + self._expect(self._load.arrived(request.id))

    def _leave(self, request: str, _now: float) -> list[Command]:
        """Hang up; what was answered until then is heard as the request's end."""
        if request not in self._open:
            return []
        self._open[request].record.outcome = RequestOutcome.LEFT
        return [HangUp(request)]

    def end(self, request: str, answer: StreamedAnswer, now: float) -> list[Command]:
        """Hear how a request was answered, well or not."""
        asked = self._open.pop(request)
        self._note(asked.record, answer)
        is_whole = asked.record.outcome is RequestOutcome.FINISHED
        tokens = self._wording.heard(asked.arrival.request, answer) if is_whole else None
        following = self._load.ended(request, now, tokens)
        visit = visit_of(request)
        if all(visit_of(arrival.request.id) != visit for arrival in following):
            self._wording.forget(visit)
        return self._expect(following)

    def _note(self, record: RequestRecord, answer: StreamedAnswer) -> None:
        record.token_at, record.ended_at = answer.token_at, answer.ended_at
        record.num_prompt = answer.num_prompt or record.num_prompt
        failure = answer.failure
        if record.outcome is RequestOutcome.OPEN:
            record.outcome = RequestOutcome.FINISHED if failure is None else failure.outcome
            if failure is not None:
                self.failures.setdefault(failure.kind, []).append(failure)
        self._counted[answer.counted] += bool(len(answer.token_at))
        self.num_cached += answer.num_cached
        self._num_kept += keeps_all(record)
        self._records.append(record)

    # --- What is known of it

    def progress(self) -> LoadProgress:
        last = [ttft_s(record) for record in self._records[-_LAST:] if record.token_at]
        num_failed = sum(map(len, self.failures.values()))
        num_asked = sum(asked.is_asked for asked in self._open.values())
        ended = len(self._records)
        attained, ttft = ratio(self._num_kept, ended), percentile(last, 50)
        return LoadProgress(ended, self._load.expected, num_asked, num_failed, attained, ttft)

    def record(self) -> RunRecord:
        """Return the record of all requests that have ended."""
        records = sorted(self._records, key=lambda record: record.arrival_at)
        began_at = records[0].arrival_at if records else 0.0
        ended_at = max((record.ended_at for record in records), default=began_at)
        return RunRecord(began_at, ended_at, ended_at - began_at, {}, records, notes=tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        yield from self._load.notes
        yield from self._dialect.notes
        if self._open:
            asked = sum(asked.is_asked for asked in self._open.values())
            yield f"interrupted: {asked} requests that were open are left out"
        if self._latest_s > _LATE_S:
            late = f"up to {1e3 * self._latest_s:.0f} ms later than the workload says"
            yield f"the client asked {late}: its processor was busy"
        for counted in (Counted.USAGE, Counted.PIECES):
            if number := self._counted[counted]:
                yield f"tokens of {number:,} answers were counted by {counted.value}"
