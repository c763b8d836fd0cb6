"""The decisions that a core notes about its requests, and the ring that keeps the last of them.

A core tells its ring the time of each event that it handles; what it notes then has that time. The ring is bounded by
number, so by memory: about 2 MB where it is full. A core that is asked about a request looks through its ring, which
takes a few milliseconds; nothing is indexed, since hardly any request is ever asked about.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from alignedserve.core import Request, ServiceClass, StepPlan

MOST_DECISIONS = 8_192  # of a part: the last minutes, where a request has a dozen
MOST_STEPS = 4_096  # of a worker
HIDDEN = -1  # in place of a number that a caller may not see


class Kind(str, Enum):
    """A core decides one of these; each says what `other` and the numbers of the decision mean."""

    # Noted by the router
    ARRIVED = "arrived"  # tokens: of the prompt; seconds: since arrival; expected_s: of prompts before; why: promise
    DECLARED = "declared"  # the owner told a router that had just started of the request
    REFUSED = "refused"  # other: the reason; why: in words; expected_s: until a next try
    PREDICTED = "predicted"  # tokens: of the output; number: nine of ten outputs are not longer
    # other: the worker that is to run the prompt; of a chat in line, number: prompts before it; expected_s: until its
    # first token
    PLACED = "placed"
    MOVED = "moved"  # other: the member that has the request, as the router heard
    CANCELLED = "cancelled"  # the client has gone
    REPLACED = "replaced"  # the owner sent a later attempt
    # Noted by workers
    QUEUED = "queued"  # number: prompts that wait before; tokens: to be computed
    BEHIND = "behind"  # number: other prompts that ran in part meanwhile; tokens: of these; why: by class
    BESIDE = "beside"  # number: other requests that decoded meanwhile; seconds: of that; why: by class
    SEATED = "seated"  # the request has memory; tokens: found in the cache
    CHUNK = "chunk"  # number: of the step; tokens; seconds: that the step took; expected_s: as was predicted
    OFFERED = "offered"  # the prompt is done; other: the decode worker that may pull the KV
    WRITES = "writes"  # the prompt is done, and the KV goes to the pool once there are pages
    COMMITTED = "committed"  # the KV is in the pool, and the request waits there for a decode worker
    CANDIDATE = "candidate"  # a decode worker has taken over; number: requests before; other: the sender; why: how;
    # seconds: since arrival, where the pool had the request
    JOINING = "joining"  # there is memory, and the KV is copied; other: from where
    JOINED = "joined"  # the request decodes; number: requests that decode there; tokens: of the output so far
    DISPLACED = "displaced"  # memory was taken away; other: the request that gets the memory; why: how
    DROPPED = "dropped"  # cancelled, or running elsewhere
    # Noted by both
    ENDED = "ended"  # tokens: of the output, where known; why: the finish
    LOST = "lost"  # the attempt is lost: the owner starts the next; why


_WAITS = (Kind.QUEUED, Kind.CANDIDATE, Kind.DISPLACED)  # a request that waits on a worker was noted so last
_DURING_WAITS = (Kind.BEHIND, Kind.BESIDE)  # found in the ring when somebody asks
_LEAVES = (Kind.ENDED, Kind.LOST, Kind.DISPLACED, Kind.DROPPED)  # a request that decoded does so no more


@dataclass(slots=True)  # a frozen one takes three times as long to make
class Decision:
    kind: Kind
    at: float
    request: str
    attempt: int
    service: ServiceClass
    salt: str  # names the request's caller; no answer shows the salt
    other: str = ""  # a member or a request; at the end, how the joules are known
    tokens: int = 0
    number: int = 0
    seconds: float = 0.0
    expected_s: float = 0.0
    why: str = ""
    joules: float = 0.0


@dataclass(slots=True)
class Step:
    """A step of a worker while it had the request."""

    number: int
    began_at: float
    seconds: float
    predicted_s: float
    prompt_tokens: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The notes that a ring holds about one request."""

    decisions: tuple[Decision, ...] = ()  # about the request, and about those displaced for its memory
    steps: tuple[Step, ...] = ()
    since: float = 0.0  # some of what was noted before is forgotten


@dataclass(frozen=True, slots=True)
class _Wait:
    """A time in which a request had to wait."""

    of: Decision
    began_at: float
    until: float

    @property
    def seconds(self) -> float:
        return self.until - self.began_at


class DecisionRing:
    def __init__(self, most_decisions: int = MOST_DECISIONS, most_steps: int = MOST_STEPS) -> None:
        self.now = 0.0  # the core sets it at each event
        self._decisions: deque[Decision] = deque(maxlen=most_decisions)
        self._steps: deque[tuple[int, float, float, float, int, int]] = deque(maxlen=most_steps)  # fields of Step

    def note(
        self,
        kind: Kind,
        request: Request,
        other: str = "",
        tokens: int = 0,
        number: int = 0,
        seconds: float = 0.0,
        expected_s: float = 0.0,
        why: str = "",
        joules: float = 0.0,
    ) -> None:
        whose = request.id, request.attempt, request.service, request.salt
        facts = other, tokens, number, seconds, expected_s, why, joules
        self._decisions.append(Decision(kind, self.now, *whose, *facts))

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Note a step that has ended now."""
        chunks = plan.chunks
        prompt_tokens = sum([len(chunk.tokens) for chunk in chunks]) if chunks else 0
        began_at = self.now - seconds
        self._steps.append((plan.number, began_at, seconds, plan.predicted_s, prompt_tokens, len(plan.decodes)))

    def about(self, request: str) -> Findings:
        """Return what the ring holds about a request."""
        decisions = [
            noted
            for noted in self._decisions
            if noted.request == request or (noted.kind is Kind.DISPLACED and noted.other == request)
        ]
        own = [noted for noted in decisions if noted.request == request]
        decisions += [ran for wait in self._waits(own) for ran in self._ran_during(wait)]
        decisions.sort(key=lambda noted: (noted.at, noted.kind not in _DURING_WAITS))
        decided = self._decisions[0].at if len(self._decisions) == self._decisions.maxlen else 0.0
        stepped = self._steps[0][1] if len(self._steps) == self._steps.maxlen else 0.0
        return Findings(tuple(decisions), tuple(self._steps_during(own)), max(decided, stepped))

    def _steps_during(self, own: list[Decision]) -> Iterable[Step]:
        """Return the steps from the first of these decisions until the last, or until now where it has not ended."""
        if not own:
            return ()
        has_left = own[-1].kind in (Kind.ENDED, Kind.LOST, Kind.COMMITTED, Kind.OFFERED, Kind.DROPPED)
        first, last = own[0].at, own[-1].at if has_left else self.now
        return (Step(*step) for step in self._steps if first < step[1] + step[2] and step[1] < last)

    def _waits(self, own: list[Decision]) -> Iterator[_Wait]:
        """Yield the waits of the request on this worker, and in the pool for this worker."""
        told = [noted for noted in own if noted.kind is not Kind.SEATED]  # it still waits for a step
        for before, noted, following in zip([None, *told], told, [*told[1:], None], strict=False):
            if noted.seconds and noted.kind is Kind.CANDIDATE:
                yield _Wait(noted, max(noted.at - noted.seconds, before.at if before else 0.0), noted.at)
            if noted.kind in _WAITS:
                yield _Wait(noted, noted.at, self.now if following is None else _begins_at(following))

    def _ran_during(self, wait: _Wait) -> Iterator[Decision]:
        """Yield what ran of other requests during a wait: of prompts, and of outputs."""
        own = wait.of.request, wait.of.attempt, wait.of.service, wait.of.salt
        if wait.seconds <= 0:
            return
        others = self._others((Kind.CHUNK,), own[0])
        if chunks := [chunk for chunk in others if wait.began_at < chunk.at and _begins_at(chunk) < wait.until]:
            prompts = {chunk.request: chunk.service for chunk in chunks}
            tokens = sum(chunk.tokens for chunk in chunks)
            yield Decision(Kind.BEHIND, wait.until, *own, tokens=tokens, number=len(prompts), why=_by_class(prompts))
        decoded: dict[str, ServiceClass] = {}
        for noted in self._others((Kind.JOINED, *_LEAVES), own[0]):
            if noted.kind is Kind.JOINED and noted.at < wait.until:
                decoded[noted.request] = noted.service
            elif noted.kind is not Kind.JOINED and noted.at <= wait.began_at:
                decoded.pop(noted.request, None)
        if decoded:
            number, by_class = len(decoded), _by_class(decoded)
            yield Decision(Kind.BESIDE, wait.until, *own, number=number, seconds=wait.seconds, why=by_class)

    def _others(self, kinds: Container[Kind], request: str) -> Iterator[Decision]:
        return (noted for noted in self._decisions if noted.kind in kinds and noted.request != request)


def _begins_at(noted: Decision) -> float:
    """Return when a step began, or when anything else was noted."""
    return noted.at - noted.seconds if noted.kind is Kind.CHUNK else noted.at


def _by_class(requests: Mapping[str, ServiceClass]) -> str:
    return ", ".join(f"{count} {service.value}" for service, count in Counter(requests.values()).items())
