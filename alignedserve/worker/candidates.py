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

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from alignedserve.protocol.messages import Attempt, Member
from alignedserve.worker.step.request import JoinCandidate, WorkerRequest
from alignedserve.worker.step.states import State

LEAST_WIDTH = 256  # tokens: a spread that costs a step next to nothing
_WEIGHT = 0.1  # of the newest join in the mean
_GROWN = 64  # tokens by which members may have grown since the pool heard of the band
_MOST_RECEIVED = 1000  # attempts that are remembered, for a sender that believes that KV never arrived


class AllRequests(Protocol):
    """What is needed of all requests on a worker, which have these candidates (requests.py)."""

    @property
    def coming(self) -> list[JoinCandidate]: ...

    def among(self, state: State) -> Collection[WorkerRequest]: ...

    def find_attempt(self, attempt: Attempt, *states: State) -> WorkerRequest | None: ...

    def move(self, running: WorkerRequest, state: State) -> None: ...

    def put_last(self, running: WorkerRequest) -> None: ...


class Candidates:
    """The requests in State.CANDIDATE, there in the order of joining: candidate requests, then the batch."""

    def __init__(self, here: AllRequests) -> None:
        self._here, self._all = here, here.among(State.CANDIDATE)
        self.peers: dict[str, Member] = {}  # name -> worker that KV goes to and from directly
        self._arranged_in: int | None = None  # the step in which the candidate requests were last put in order
        self.unwanted: list[tuple[str, Attempt]] = []  # (partner, attempt): KV that the partner need not hold any more
        self._received: dict[Attempt, None] = {}  # the newest attempts that were received at any time
        self._numbers: Counter[str] = Counter()  # holder of a source -> number of the newest transfer

    def __len__(self) -> int:
        return len(self._all)

    @property
    def waiting(self) -> list[JoinCandidate]:
        return [of.candidate for of in self._all if of.candidate is not None]

    @property
    def requests(self) -> list[JoinCandidate]:
        return [candidate for candidate in self.waiting if not candidate.batch]

    @property
    def batch(self) -> list[JoinCandidate]:
        """Return the members of the candidate batch that have not joined."""
        return [candidate for candidate in self.waiting if candidate.batch]

    def first(self, now: float) -> JoinCandidate | None:
        """Return the candidate that joins next: others overtake candidates that wait for a compiled syntax."""
        if not self._all:  # mostly
            return None
        ready = [candidate for candidate in self.waiting if not candidate.awaits_syntax]
        request = next((candidate for candidate in ready if not candidate.batch), None)
        member = next((candidate for candidate in ready if candidate.batch), None)
        if request is None or member is None:
            return request or member
        overtakes = (member.is_rt and not request.is_rt) or self.is_starving(now)
        return member if overtakes and not request.is_pinned else request

    def is_starving(self, now: float) -> bool:
        """Return whether the candidate batch has waited for half of the time that its most urgent member had."""
        first = min(self.batch, key=lambda member: member.due_at, default=None)
        return first is not None and now - first.since > (first.due_at - first.since) / 2

    def find(self, attempt: Attempt, *states: State) -> JoinCandidate | None:
        """Return the candidate of this attempt, which is in one of these states."""
        running = self._here.find_attempt(attempt, *states)
        return None if running is None else running.candidate

    def add(self, candidate: JoinCandidate) -> None:
        candidate.running.comes_as(candidate)
        self._here.move(candidate.running, State.CANDIDATE)
        self._arranged_in = None
        if candidate.batch:  # the last already
            return
        self._put(sorted(self.waiting, key=lambda of: (of.batch > 0, not of.is_pinned, of.is_pinned and of.due_at)))

    def arrange(self, step: int, as_they_join: Callable[[list[JoinCandidate]], Iterable[JoinCandidate]]) -> None:
        """Put the candidate requests that are not pinned in this order, once a step."""
        if self._arranged_in != step and len(self._all) > 1 and len(requests := self.requests) > 1:
            pinned = sum(request.is_pinned for request in requests)
            self._put([*requests[:pinned], *as_they_join(requests[pinned:]), *self.batch])
        self._arranged_in = step

    def _put(self, in_order: Iterable[JoinCandidate]) -> None:
        for candidate in in_order:
            self._here.put_last(candidate.running)

    def forget_copy(self, candidate: JoinCandidate) -> None:
        """Note that the partner need not hold the KV any more."""
        if candidate.partner is not None:
            self.unwanted.append((candidate.partner.name, candidate.key))

    # --- KV on the way here from another worker

    def begin_transfer(self, candidate: JoinCandidate, source: Member) -> int:
        """Return the number of a transfer of the candidate's KV; the caller orders to receive it, and pulls it."""
        self._numbers[source.holder] += 1
        candidate.transfer = source.holder, self._numbers[source.holder]
        return self._numbers[source.holder]

    def coming_from(self, source: str, number: int) -> JoinCandidate:
        """Return the request with KV that comes from this holder under this number."""
        return next(candidate for candidate in self._here.coming if candidate.transfer == (source, number))

    def end_transfer(self, source: str, number: int, intact: bool) -> JoinCandidate:
        candidate = self.coming_from(source, number)
        candidate.transfer = None
        if intact:
            self._received[candidate.key] = None
            if len(self._received) > _MOST_RECEIVED:
                del self._received[next(iter(self._received))]
        return candidate

    def has_come(self, attempt: Attempt) -> bool:
        """Return whether this attempt was received at any time."""
        return attempt in self._received


class RunningBatch:
    """The batch that runs, and the band of lengths that its members have (AlignedServe §3.4).

        shortest of its members ──────── width, as the pool put it together ───────▶
                     └─▶ a token a step, as all of them grow

    The band never gets wider than the batch was. Other requests join too: pinned chats, prompts that are handed on,
    requests that came while there was room for all. These guests run beside the batch, and are members only if they are
    in the band. If the band covered all that runs, the first guest could make the band so wide that every request in
    the pool fits.

    A request that the pool found in the band stays a member, even if the members have grown when the request gets a
    seat. Otherwise the shortest of such requests would become guests, the band would move up and away from the requests
    that wait, and no member would be left long before the guests end.
    """

    def __init__(self) -> None:
        self.number = 0  # the batch's tag: that of the newest batch with a member that has joined
        self.num_batches = 0  # that have come
        self.mean_join_s = 0.0  # from the arrival of a batch until a member joins
        self._widths: dict[int, int] = {}  # the batch that runs, or has come and does not run yet -> width

    def comes(self, prefixes: Sequence[int]) -> None:
        """Note a candidate batch, with its members' prefixes."""
        self.num_batches += 1
        self._widths[self.num_batches] = max(prefixes) - min(prefixes)

    def begins(self, number: int) -> None:
        """Let this batch take the place of the batch that ran."""
        self.number = number
        self._widths = {batch: width for batch, width in self._widths.items() if batch >= number}

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

    @property
    def _width(self) -> int:
        return max(LEAST_WIDTH, self._widths.get(self.number, 0))

    def _prefixes(self, seated: Iterable[WorkerRequest]) -> list[int]:
        return [running.num_held for running in seated if running.batch == self.number] if self.number else []
