"""Check that a simulated run wastes nothing: no attempt starts without cause, and nothing is kept without an owner.

At every command:

- cause: an owner starts the next attempt only after it heard that the current attempt is lost, or asked for tokens of
  it; in a run without faults no attempt is lost, unless the pool took a prefix back whose Commit may be on its way;
- transfers: in a run without faults a worker sends KV for every Pull, unless it has let that go, or was told that it is
  not wanted, or has given it to the pool.

From time to time:

- outputs: a worker keeps an output that has not ended only of an attempt that it has;
- pages: a decode worker keeps pages of the pool only for an attempt that it has, or while it writes the answer; pool
  and worker agree which attempts the worker has got out of the pool, but for what is on its way between them; a pool
  holds first pages of a prompt, or of what is decoded, only for an attempt that the worker has;
- late releases: in a run without faults no worker and no pool has a request that has ended.

What does not hold at one look may hold at the next, since messages are on their way: it fails the check after a while
in which neither member was in a fault. That is less than the time after which parts repeat what may have been lost.
Where a frame between the two was lost, add that time: the loss may matter only when a request leaves, much later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.kvpool.state import REFRESH_S, PoolCore
from alignedserve.lab.fuzzing.scenario import Scenario
from alignedserve.lab.fuzzing.worker_views import holds_of
from alignedserve.lab.loads.records.records import RequestOutcome
from alignedserve.lab.simulator.clients import Client
from alignedserve.lab.simulator.machines.faults import Fault, Forge, LinkFault, MemberFault, Skew, lasts_s
from alignedserve.lab.simulator.machines.process import Process
from alignedserve.lab.simulator.machines.world import World
from alignedserve.protocol.commands import Send, SendKv
from alignedserve.protocol.form_messages import PrefetchDeclined
from alignedserve.protocol.messages import Attempt, AttemptLost, Cancel, Commit, Member, Prefix, Pull, Resend, Submit

LOOK_S = 0.25  # between two looks
GRACE_S, CALM_GRACE_S = 3.0, 1.0  # what is on its way may take so long; the second in a run without faults
Breaks = Callable[[str], None]


@dataclass(frozen=True)
class _Odd:
    """What is kept and should not be, where it does not go away by itself."""

    what: str
    members: frozenset[str]  # holders of the members between which it would be put right


class WasteWatch:
    """Watches one simulation; `breaks` is called with what is wasted."""

    def __init__(self, scenario: Scenario, world: World, clients: dict[str, Client], breaks: Breaks) -> None:
        self._world, self._clients, self._breaks = world, clients, breaks
        self._counts = [fault for fault in scenario.faults if not isinstance(fault, Skew | Forge)]
        self._is_calm = not scenario.faults
        copies_s = scenario.num_pages * scenario.costs.page_s  # of answers, which are copied after their ends
        self._grace_s = CALM_GRACE_S + copies_s if self._is_calm else GRACE_S
        self._may_start: set[Attempt] = set()  # attempts that are lost, as their owners have heard, or asked for
        self._charged: set[str] = set()  # requests that have had a worker that died
        self._has_prefix: set[Attempt] = set()  # attempts for which a pool holds the beginning of the prompt
        self._without_prefix: set[Attempt] = set()  # attempts whose beginning it has taken back
        self._pulled: dict[tuple[str, str, int], Attempt] = {}  # (holder that pulls, name that sends, number) ->
        self._need_not_come: set[tuple[str, Attempt]] = set()  # what members released, gave to the pool, or are to drop
        self._odd_since: dict[_Odd, float] = {}
        self._look_at = 0.0

    # --- Attempts

    def commanded(self, by: Member, command: Send) -> None:
        match command.message:
            case Pull(number, request, attempt):
                self._pulled[by.holder, command.to, number] = (request, attempt)
            case PrefetchDeclined(attempts):
                self._need_not_come.update((by.name, attempt) for attempt in attempts)
            case Commit(entry):
                self._need_not_come.add((by.name, (entry.request.id, entry.request.attempt)))
            case Cancel(request, attempt):
                self._need_not_come.add((command.to, (request, attempt)))
            case AttemptLost(request, attempt) | Resend(request, attempt):
                self._may_start.add((request, attempt + 1))
                if isinstance(command.message, AttemptLost) and command.message.died:
                    self._charged.add(request)
            case Prefix(request, attempt, pages):
                if pages:
                    self._has_prefix.add((request, attempt))
                elif (request, attempt) in self._has_prefix:
                    self._without_prefix.add((request, attempt))
            case Submit(request) if request.attempt:
                runs_alone = request.is_suspect and request.id in self._charged  # of a death that was known late
                has_cause = runs_alone or (request.id, request.attempt) in self._may_start
                if not has_cause or (self._is_calm and (request.id, request.attempt - 1) not in self._without_prefix):
                    self._breaks(f"{_said((request.id, request.attempt))} starts without cause")
                if request.is_suspect:  # its owner may acquit it at any token, and starts the next attempt then
                    self._may_start.add((request.id, request.attempt + 1))

    def sends(self, by: Member, command: SendKv) -> None:
        if command.blocks or not self._is_calm:
            return
        attempt = self._pulled[command.to, by.name, command.number]
        is_open = self._clients[attempt[0]].outcome is RequestOutcome.OPEN
        if is_open and (by.name, attempt) not in self._need_not_come:
            self._breaks(f"{by.name} sends nothing of {_said(attempt)}, which it has not let go")

    # --- What is kept

    def look(self) -> None:
        now = self._world.agenda.now
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        found = dict.fromkeys(self._odd())
        self._odd_since = {odd: self._odd_since.get(odd, now) for odd in found}
        for odd, since in self._odd_since.items():
            if now - since > self._grace_of(odd) and not self._in_fault(odd, since, now):
                self._breaks(f"{odd.what} for {now - since:.2f} s")

    def _odd(self) -> Iterator[_Odd]:
        for process in self._world.processes:
            match process.core:
                case DecodeCore() as core:
                    yield from self._odd_of_worker(process, core)
                case PoolCore() as core:
                    yield from self._odd_of_pool(process, core)

    def _odd_of_worker(self, process: Process, core: DecodeCore) -> Iterator[_Odd]:
        here, name = set(core.here.attempts()), process.member.name
        outputs = core.owners.attempts
        for attempt in {attempt for attempt, has_ended in outputs.items() if not has_ended} - here:
            yield _odd(f"{name} keeps an output of {_said(attempt)}, which it does not have", process)
        for attempt in holds_of(core) - here - core.router.settled:
            yield _odd(f"{name} keeps pages for {_said(attempt)}, which it does not have", process)
        if self._is_calm:
            for request in self._ended(request for request, _ in (*here, *outputs)):
                yield _odd(f"{name} has {request}, which has ended", process)

    def _odd_of_pool(self, process: Process, core: PoolCore) -> Iterator[_Odd]:
        for worker, out in core.out.items():
            reader = self._world.alive(worker)
            if reader is not None and isinstance(reader.core, DecodeCore):
                for attempt in out - holds_of(reader.core):
                    yield _odd(f"{process.member.name} keeps {_said(attempt)} out at {worker}", process, reader)
        for worker, held in core.held_for.items():
            reader = self._world.alive(worker)
            if reader is not None and isinstance(reader.core, DecodeCore):
                for attempt in held - {*reader.core.here.attempts()} - reader.core.router.settled:
                    yield _odd(f"{process.member.name} holds pages for {_said(attempt)} of {worker}", process, reader)
        if self._is_calm:
            for request in self._ended(core.kept):
                yield _odd(f"{process.member.name} has {request}, which has ended", process)

    def _ended(self, requests: Iterable[str]) -> Iterator[str]:
        return (request for request in requests if self._clients[request].outcome is not RequestOutcome.OPEN)

    def _grace_of(self, odd: _Odd) -> float:
        has_lost = any(_names(odd).issuperset(link) for link in self._world.trouble.lost_at)
        return self._grace_s + REFRESH_S if has_lost else self._grace_s

    def _in_fault(self, odd: _Odd, since: float, now: float) -> bool:
        """Return whether one of the members was in a fault meanwhile, a frame of one was lost, or its clock jumped."""
        names = _names(odd)
        was_in_fault = any(
            fault.at <= now and fault.at + lasts_s(fault) + GRACE_S >= since and _concerns(fault, names)
            for fault in self._counts
        )
        lost = self._world.trouble.lost_at.items()  # perhaps long after the fault began
        return was_in_fault or any(at + GRACE_S >= since and names & set(link) for link, at in lost)


def _odd(what: str, *processes: Process) -> _Odd:
    return _Odd(what, frozenset(process.member.holder for process in processes))


def _names(odd: _Odd) -> set[str]:
    return {holder.rpartition(".")[0] for holder in odd.members}


def _said(attempt: Attempt) -> str:
    return f"attempt {attempt[1]} of {attempt[0]}"


def _concerns(fault: Fault, names: set[str]) -> bool:
    match fault:
        case MemberFault(member=member):
            return member in names or member == "router"
        case LinkFault(sender=sender, to=to):
            return sender in names or to in names
    return True
