"""The requests that join a decode worker as soon as there is room: its candidate requests, then its candidate batch.

    Offer (the KV is on a prefill worker) ─▶ candidate ── room: Pull, ReceiveKv ─▶ receiving ── intact ──▶ resident
    Batch (the KV is in the pool) ─────────▶ candidate ── room: CopyIn ─▶ joining      └── not ──▶ Decline, or CopyIn
                                                                                         where the pool has it too

The order in which candidates join (AlignedServe §3.4, and our pinning):

    1. pinned requests, by slack: these are taken whatever room there is
    2. other candidate requests, in the order of service: each is about as long as the running requests, and belongs
       to the running batch, or has run here and had to leave
    3. the candidate batch, as the pool has it: the first member that joins begins a batch switch

Real-time members of the candidate batch overtake best-effort candidate requests. A batch that has waited for half of
the time that its most urgent member had overtakes all candidates that are not pinned: otherwise a running batch that is
always filled up would never end. The worker alone decides which requests are resident: it has the lists, and pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from alignedserve.core import Entry
from alignedserve.protocol.messages import Attempt, Expect, Member
from alignedserve.scheduling.dues import Promise
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

LEAST_WIDTH = 256  # tokens: a spread that costs a step next to nothing
_WEIGHT = 0.1  # of the newest join in the mean
_GROWN = 64  # tokens by which members may have grown since the pool heard of the band


@dataclass(eq=False)
class JoinCandidate:
    entry: Entry  # with the pages, where the KV is in the pool
    source: Member | None  # the prefill worker that has the KV; None where the pool has it
    is_pinned: bool
    promise: Promise
    due_at: float  # the next token
    since: float
    batch: int = 0  # the tag of the candidate batch; 0 of a candidate request
    found_for: int = 0  # the running batch, of about this length, that the pool found the candidate for
    partner: Member | None = None  # the worker that is to hold the KV for this worker; once it does, also the source
    is_refused: bool = False  # the partner had no room for the KV
    awaits_syntax: bool = False  # the syntax is being compiled: a step with the request would wait
    evicted: WorkerRequest | None = None  # the request when it had to leave; the source alone has the KV

    @property
    def is_rt(self) -> bool:
        return self.promise.is_rt

    @property
    def is_copied(self) -> bool:
        """Return whether the partner's KV is, or is to be, a copy of what the pool has."""
        return self.partner is not None and self.evicted is None

    @property
    def key(self) -> Attempt:
        return self.entry.request.id, self.entry.request.attempt

    def as_running(self, policy: Policy, page_size: int) -> WorkerRequest:
        """Return the request as it will join, without blocks."""
        if self.evicted is not None:
            return self.evicted
        entry = self.entry
        running = running_of(policy, entry.request, entry.output, entry.due, kv=entry.kv)
        running.resume(entry, page_size)
        running.becomes(State.CANDIDATE)
        return running


class CandidateLists:
    def __init__(self) -> None:
        self.peers: dict[str, Member] = {}  # name -> worker that KV goes to and from directly
        # Both in the order of joining; only this class changes them:
        self.requests: list[JoinCandidate] = []  # candidate requests
        self.batch: list[JoinCandidate] = []  # members of the candidate batch that have not joined
        self.arranged_in = -1  # the step in which the candidate requests were last put in order
        self.unwanted: list[tuple[str, Attempt]] = []  # (partner, attempt): KV that the partner need not hold any more

    def __len__(self) -> int:
        return len(self.requests) + len(self.batch)

    def first(self, now: float) -> JoinCandidate | None:
        """Return the candidate that joins next: others overtake candidates that wait for a compiled syntax."""
        request, member = _first_ready(self.requests), _first_ready(self.batch)
        if request is None or member is None:
            return request or member
        overtakes = (member.is_rt and not request.is_rt) or self.is_starving(now)
        return member if overtakes and not request.is_pinned else request

    def is_starving(self, now: float) -> bool:
        """Return whether the candidate batch has waited for half of the time that its most urgent member had."""
        first = min(self.batch, key=lambda member: member.due_at, default=None)
        return first is not None and now - first.since > (first.due_at - first.since) / 2

    @property
    def waiting(self) -> Iterable[JoinCandidate]:
        return (*self.requests, *self.batch)

    def find(self, attempt: Attempt) -> JoinCandidate | None:
        return next((candidate for candidate in self.waiting if candidate.key == attempt), None)

    def add(self, candidate: JoinCandidate) -> None:
        self.arranged_in = -1
        if candidate.batch:
            self.batch.append(candidate)
            return
        self.requests.append(candidate)
        self.requests.sort(key=lambda request: (not request.is_pinned, request.due_at if request.is_pinned else 0.0))

    def arrange(self, step: int, as_they_join: Callable[[list[JoinCandidate]], Iterable[JoinCandidate]]) -> None:
        """Put the candidate requests that are not pinned in this order, once a step."""
        if self.arranged_in != step and len(self.requests) > 1:
            pinned = sum(request.is_pinned for request in self.requests)
            self.requests[pinned:] = as_they_join(self.requests[pinned:])
        self.arranged_in = step

    def take(self, candidate: JoinCandidate) -> None:
        """Remove a candidate that joins."""
        self._note_unwanted([candidate] if candidate.source is None else [])
        (self.batch if candidate.batch else self.requests).remove(candidate)

    def expect(self, told: Expect, policy: Policy, now: float) -> None:
        """Note the predicted length of a candidate."""
        if (candidate := self.find((told.request, told.attempt))) is not None:
            entry = candidate.entry
            candidate.entry = replace(entry, request=replace(entry.request, estimate=told.estimate))
            if candidate.evicted is None:
                candidate.promise.expect(candidate.entry.request, policy, now)
            else:
                candidate.evicted.expect(told.estimate, policy, now)

    def has_pages(self, attempt: Attempt, entry: Entry) -> None:
        """Note the pool's pages of this attempt if a candidate here has no more KV than these pages hold."""
        if (candidate := self.find(attempt)) is not None and candidate.evicted is None:
            sampling = candidate.entry.request.sampling  # with the syntax that is compiled already
            candidate.entry = replace(entry, request=replace(entry.request, sampling=sampling))
            candidate.source = None if candidate.partner is None else candidate.source

    def drop(self, request: str, attempt: int) -> list[Attempt]:
        """Remove the request up to this attempt; return the attempts that were here."""
        return self._remove(lambda candidate: candidate.key[0] == request and candidate.key[1] <= attempt)

    def peer_lost(self, peer: Member) -> list[Attempt]:
        """Forget this worker, and return the candidates that lose their KV with the worker.

        Requests that had to leave are recomputed, and not returned. A transfer from this worker ends by a separate
        event."""
        self.peers.pop(peer.name, None)
        return self._remove(lambda candidate: candidate.source == peer and candidate.evicted is None)

    def pool_lost(self) -> list[Attempt]:
        """Return the candidates that lost their KV with the pool."""
        for candidate in self.waiting:
            candidate.entry = replace(candidate.entry, pages=())
        return self._remove(lambda candidate: candidate.source is None)

    def _remove(self, leaves: Callable[[JoinCandidate], bool]) -> list[Attempt]:
        leaving = [candidate for candidate in self.waiting if leaves(candidate)]
        if leaving:
            self._note_unwanted(leaving)
            self.requests = [candidate for candidate in self.requests if not leaves(candidate)]
            self.batch = [candidate for candidate in self.batch if not leaves(candidate)]
        return [candidate.key for candidate in leaving]

    def _note_unwanted(self, candidates: Iterable[JoinCandidate]) -> None:
        self.unwanted += [
            (candidate.partner.name, candidate.key) for candidate in candidates if candidate.partner is not None
        ]


def _first_ready(candidates: Iterable[JoinCandidate]) -> JoinCandidate | None:
    return next((candidate for candidate in candidates if not candidate.awaits_syntax), None)


class RunningBatch:
    """The batch that runs, and the band of lengths that its members have (AlignedServe §3.4).

        shortest of its members ──────── width, as the pool put it together ───────▶
                     └─▶ a token a step, as all of them grow

    The band is never wider than its batch was, whichever requests join: pinned chats, prompts that are handed on,
    requests that came while there was room for all. These guests run beside the batch, and are members only if they are
    in the band. A band as wide as all that runs would become so wide with the first guest that every request in the
    pool fits.

    A request that the pool finds in the band stays a member, though the members grow while the request waits for a
    seat. Otherwise the shortest of these requests would all be guests, the band would move up and away from the waiting
    requests, and no member would be left long before the guests end.
    """

    def __init__(self) -> None:
        self.number = 0  # the batch's tag: that of the newest batch with a member that has joined
        self.num_batches = 0  # that have come
        self.mean_join_s = 0.0  # from the arrival of a batch until a member joins
        self._width = 0
        self._widths: dict[int, int] = {}  # batch that has come and does not run yet -> width

    def comes(self, prefixes: Sequence[int]) -> None:
        """Note a candidate batch, with its members' prefixes."""
        self.num_batches += 1
        self._widths[self.num_batches] = max(prefixes) - min(prefixes)

    def begins(self, number: int) -> None:
        """Let this batch take the place of the batch that ran."""
        self.number = number
        self._width = max(LEAST_WIDTH, self._widths.get(number, 0))
        self._widths = {batch: width for batch, width in self._widths.items() if batch > number}

    def joined(self, waited_s: float) -> None:
        """Note how long a member waited before it joined."""
        self.mean_join_s += _WEIGHT * (waited_s - self.mean_join_s)

    def band(self, seated: Iterable[WorkerRequest]) -> tuple[int, int] | None:
        """Return the shortest and the longest prefix of the band, or None when no member is left."""
        prefixes = self._prefixes(seated)
        return (min(prefixes), min(prefixes) + self._width) if prefixes else None

    def tag(self, prefix: int, seated: Iterable[WorkerRequest]) -> int:
        """Return the tag of a candidate with this prefix: the batch's number for a member, else 0."""
        prefixes = self._prefixes(seated)
        if not prefixes:
            return 0
        shortest, longest = min(prefixes), max(prefixes)
        spread = max(longest, prefix) - min(shortest, prefix)
        return self.number if spread <= max(longest - shortest, self._width + _GROWN) else 0

    def _prefixes(self, seated: Iterable[WorkerRequest]) -> list[int]:
        return [running.num_held for running in seated if running.batch == self.number] if self.number else []
