"""Merge what all parts noted of a request into one story: stage after stage.

    router   ─ arrived ── placed ┐
    worker                       └ queued ── chunk ── joined ────────── displaced ── joined ── ended
    stages   │ routing  │ queue           │ prompt │ decode            │ displaced │ decode   │

Each part notes by its own clock. Clocks of one machine agree; another machine's clock is moved by as little as it takes
for its answer to come after the question and before it was heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from types import MappingProxyType
from typing import Any

from alignedserve.core import ServiceClass
from alignedserve.explain.decisions import HIDDEN, Decision, Findings, Kind, Step

_ID_PREFIXES = ("chatcmpl-", "cmpl-")  # of answers; the request has the same id with another prefix
_PREFIX = "req-"
_ROUTER = "router"  # takes part in every request


class StoryStage(str, Enum):
    ROUTING = "routing"  # at the router, until a worker is to run the prompt
    QUEUE = "queue"  # on a worker, until the prompt begins to run
    PROMPT = "prompt"
    HAND_ON = "hand on"  # the prompt is done, and the KV is on its way
    POOL = "pool"  # in the pool, until a decode worker takes it
    CANDIDATE = "candidate"  # on a decode worker, until there is memory
    COPY = "copy"  # the KV is copied to the decode worker
    DECODE = "decode"
    DISPLACED = "displaced"  # memory was given up, and the request waits


_BEGINS: Mapping[Kind, StoryStage] = MappingProxyType(
    {
        Kind.ARRIVED: StoryStage.ROUTING,
        Kind.PLACED: StoryStage.QUEUE,
        Kind.QUEUED: StoryStage.QUEUE,
        Kind.CHUNK: StoryStage.PROMPT,
        Kind.OFFERED: StoryStage.HAND_ON,
        Kind.WRITES: StoryStage.HAND_ON,
        Kind.COMMITTED: StoryStage.POOL,
        Kind.CANDIDATE: StoryStage.CANDIDATE,
        Kind.JOINING: StoryStage.COPY,
        Kind.JOINED: StoryStage.DECODE,
        Kind.DISPLACED: StoryStage.DISPLACED,
    }
)
NEXT_ATTEMPT_S = 5.0  # a lost attempt without a successor until then was the last: the owner gave the request up
# What decisions tell of other requests. What is predicted of a step follows from all that runs in it, and a predicted
# output from all outputs of prompts alike. The place in line is in the stream itself.
_OF_OTHERS: Mapping[Kind, Mapping[str, Any]] = MappingProxyType(
    {
        Kind.ARRIVED: {"expected_s": 0.0},
        Kind.PREDICTED: {"tokens": HIDDEN},
        Kind.QUEUED: {"number": HIDDEN},
        Kind.BEHIND: {"number": HIDDEN, "tokens": HIDDEN, "why": ""},
        Kind.BESIDE: {"number": HIDDEN, "why": ""},
        Kind.CHUNK: {"expected_s": inf},
        Kind.CANDIDATE: {"number": HIDDEN},
        Kind.JOINED: {"number": HIDDEN},
        Kind.DISPLACED: {"other": "another request"},
    }
)
ENDS = (Kind.REFUSED, Kind.ENDED, Kind.LOST, Kind.CANCELLED, Kind.REPLACED)


def request_named(name: str) -> str:
    """Return the id of the request that a client names by the answer's id, or by the request's."""
    prefix = next((prefix for prefix in _ID_PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else _PREFIX + name.removeprefix(prefix)


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """The answer of a part, and by how much its clock is behind ours."""

    part: str
    findings: Findings
    behind_s: float = 0.0

    def __post_init__(self) -> None:
        if self.behind_s:
            object.__setattr__(self, "findings", _moved(self.findings, self.behind_s))


def _moved(findings: Findings, by_s: float) -> Findings:
    decisions = tuple(replace(noted, at=noted.at + by_s) for noted in findings.decisions)
    steps = tuple(replace(step, began_at=step.began_at + by_s) for step in findings.steps)
    return Findings(decisions, steps, findings.since + by_s if findings.since else 0.0)


def clock_lag_s(now: float, asked_at: float, heard_at: float) -> float:
    """Return by how much the clock of a part is behind ours: it said `now` between these two of our instants."""
    return min(max(now, asked_at), heard_at) - now


@dataclass(frozen=True, slots=True)
class Moment:
    """A decision, and the part that noted it."""

    part: str
    decision: Decision


@dataclass(slots=True)
class Stay:
    """A stage of the request on one part, with what was noted meanwhile."""

    stage: StoryStage
    part: str
    began_at: float
    ended_at: float
    moments: list[Moment] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # of the part, while the request was in this stage
    next: Decision | None = None  # with which the next stage began

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    def noted(self, *kinds: Kind) -> list[Decision]:
        return [moment.decision for moment in self.moments if moment.decision.kind in kinds]


@dataclass(frozen=True, slots=True)
class Story:
    request: str
    asked_at: float
    moments: tuple[Moment, ...]  # of the request, in the order of time
    displaced: tuple[Moment, ...]  # other requests that gave up memory for this one
    stays: tuple[Stay, ...]
    steps: Mapping[str, Sequence[Step]]  # by part
    silent: tuple[str, ...]  # parts that did not answer
    forgotten_before: Mapping[str, float]  # by part, where its ring may have lost the beginning

    @property
    def service(self) -> ServiceClass:
        return self.moments[0].decision.service

    @property
    def began_at(self) -> float:
        return self.moments[0].decision.at

    @property
    def end(self) -> Decision | None:
        """Return how the request ended, or None while it is open."""
        last = max(self.moments, key=lambda moment: moment.decision.attempt).decision.attempt
        ends = [noted for _, noted in self._pairs if noted.attempt == last and noted.kind in ENDS]
        is_over = (Kind.REFUSED, Kind.ENDED, Kind.CANCELLED)
        over = next((noted for noted in ends if noted.kind in is_over), None)
        return over or next((noted for noted in ends if self.asked_at - noted.at > NEXT_ATTEMPT_S), None)

    @property
    def ended_at(self) -> float:
        return self.asked_at if self.end is None else self.end.at

    @property
    def _pairs(self) -> Iterator[tuple[str, Decision]]:
        return ((moment.part, moment.decision) for moment in self.moments)

    def is_of(self, salt: str) -> bool:
        """Return whether a caller with this salt sent the request."""
        return bool(self.moments) and all(noted.salt.startswith(salt) for _, noted in self._pairs)


def without_others(story: Story) -> Story:
    """Return the story as a caller may read it who may not see what others do: without any number of theirs."""

    def own(moment: Moment) -> Moment:
        hidden = _OF_OTHERS.get(moment.decision.kind)
        return moment if hidden is None else replace(moment, decision=replace(moment.decision, **hidden))

    def bare(steps: Sequence[Step]) -> list[Step]:
        return [replace(step, predicted_s=inf, prompt_tokens=HIDDEN, decodes=HIDDEN) for step in steps]

    stays = [replace(it, moments=[*map(own, it.moments)], steps=bare(it.steps)) for it in story.stays]
    steps = {part: bare(its) for part, its in story.steps.items()}
    return replace(story, moments=tuple(map(own, story.moments)), displaced=(), stays=tuple(stays), steps=steps)


def tell(request: str, answers: Iterable[PartAnswer], silent: Iterable[str], asked_at: float) -> Story:
    """Merge the answers of all parts."""
    answers = [answer for answer in answers if answer.findings.decisions or answer.part == _ROUTER]
    all_moments = [Moment(answer.part, noted) for answer in answers for noted in answer.findings.decisions]
    all_moments.sort(key=lambda moment: moment.decision.at)
    own = tuple(moment for moment in all_moments if moment.decision.request == request)
    displaced = tuple(moment for moment in all_moments if moment.decision.request != request)
    steps = {answer.part: answer.findings.steps for answer in answers if answer.findings.steps}
    stays = tuple(_stays(own, steps, asked_at))
    first_at = own[0].decision.at if own else asked_at
    forgotten = {answer.part: answer.findings.since for answer in answers if answer.findings.since > first_at}
    return Story(request, asked_at, own, displaced, stays, steps, tuple(sorted(silent)), forgotten)


def _stays(moments: Sequence[Moment], steps: Mapping[str, Sequence[Step]], asked_at: float) -> list[Stay]:
    stays: list[Stay] = []
    stay: Stay | None = None  # that goes on
    is_over = False  # the attempt has ended; what a part notes later, which had not heard of it, is no stage
    for moment in moments:
        noted = moment.decision
        is_over &= noted.kind is not Kind.ARRIVED
        begun = None if is_over else _begun_with(moment)
        if begun is not None and not (stay is not None and (stay.stage, stay.part) == (begun.stage, begun.part)):
            if stay is not None:  # it ends where the next one begins, which begins no earlier than it
                begun.began_at = max(begun.began_at, stay.began_at)
                stay.ended_at, stay.next = begun.began_at, noted
            stays.append(begun)
            stay = begun
        if stay is not None:
            stay.moments.append(moment)
            stay.ended_at = noted.at
        if noted.kind in ENDS:
            stay, is_over = None, True
    if stay is not None:
        stay.ended_at = max(asked_at, stay.ended_at)
    for stay in stays:
        # A step belongs to the stay that its middle lies in: the clocks of two parts may be a little apart.
        middles = [(step.began_at + step.seconds / 2, step) for step in steps.get(stay.part, ())]
        stay.steps = [step for middle, step in middles if stay.began_at <= middle < stay.ended_at]
    return stays


def _begun_with(moment: Moment) -> Stay | None:
    """Return the stage that begins with this decision, if any does."""
    noted = moment.decision
    if noted.kind not in _BEGINS:
        return None
    part = noted.other if noted.kind is Kind.PLACED else moment.part
    began_at = noted.at - noted.seconds if noted.kind is Kind.CHUNK else noted.at
    return Stay(_BEGINS[noted.kind], part, began_at, noted.at)
