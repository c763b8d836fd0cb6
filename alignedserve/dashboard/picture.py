"""A picture of the deployment at a moment, as the page is given it, live or recorded; and what a gateway hears for it.

Every instant is in seconds by the clock of the deployment's parts: of 1970, or of the simulated run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any

import msgspec

from alignedserve.core import Role, Slo, Usage
from alignedserve.metrics.recent import NUM_SLOTS, SLOT_S, SLOTS_S, RecentRequests
from alignedserve.protocol.figures import (
    DecodeLengths,
    MachineFigures,
    PagesFor,
    ProcessFigures,
    Stages,
    machine_of_each_node,
)
from alignedserve.protocol.messages import Figures, Member

FORGOTTEN_S = 900.0  # after which a part that has gone is no longer shown
_CPU_S = 2.0  # over which processor use is measured, at least


@dataclass(frozen=True, slots=True)
class PartPicture:
    name: str
    role: Role
    node: str
    life: int  # the number of its process's life, from 1
    is_here: bool
    since: float  # when it started, or was first seen in this life, or was seen to be gone
    is_again: bool = False  # it was seen in an earlier life, or gone
    is_retiring: bool = False  # of a worker: it takes nothing new, and ends when it is idle
    slowdown: float = 0.0  # of a worker: how many times as long its steps take as in its profile
    cores: float = 0.0  # processor time in a second
    resident_bytes: int = 0
    back_at: float | None = None  # of a part that has gone: when its next life is expected, as the last one came back


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """Open requests by class and by where they are, as the router told it."""

    rt: Stages
    be: Stages


@dataclass(frozen=True, slots=True)
class WorkerPicture:
    name: str
    lengths: DecodeLengths
    used: float = 0.0  # share of its device's KV memory
    grouped: float = 0.0  # share of its decode steps that documents of other lengths sat out


@dataclass(frozen=True, slots=True)
class PoolPicture:
    name: str
    usage: Usage
    holders: tuple[PagesFor, ...]


@dataclass(frozen=True, slots=True)
class MachinePicture:
    node: str
    use: MachineFigures


@dataclass(frozen=True, slots=True)
class JobPicture:
    id: str
    owner: str  # the key's name
    status: str
    done: int  # lines with a result
    failed: int  # of them, lines whose result is an error
    total: int
    created_at: float
    deadline: float
    finish_at: float | None = None  # as the job runner predicts it; None: not known yet
    is_late: bool = False  # whether that is after its deadline
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class JobsPicture:
    open: tuple[JobPicture, ...] = ()  # the most urgent first
    more: int = 0  # open jobs that are left out
    ended: tuple[JobPicture, ...] = ()  # the last to end first
    trouble: str = ""  # why nothing is known of them now


@dataclass(frozen=True, slots=True)
class LoadPicture:
    """The load at the beginning of a slot of time, whose number counts as those of `RecentRequests`.

    A slot that is longer than 10 s has the highest of each that was seen in it."""

    number: int
    rt_queued: int  # requests without a place on a decode worker
    be_queued: int
    cores: float  # processor time of all parts in a second
    resident_bytes: int
    used: float  # KV memory of the fullest worker, as a share
    host: float | None = None  # processors of all machines in use, whoever uses them, as a share
    gpu: float | None = None  # share of the time in which a kernel ran, on average over GPUs that tell it

    def highest(self, other: LoadPicture) -> LoadPicture:
        pairs = zip(astuple(self), astuple(other), strict=True)
        highest: list[Any] = [max((each for each in pair if each is not None), default=None) for pair in pairs]
        return LoadPicture(*highest)


@dataclass(frozen=True, slots=True)
class Picture:
    at: float
    state: str  # ready, not ready or draining
    models: tuple[str, ...]
    parts: tuple[PartPicture, ...]
    router_at: float | None  # when the router last said how many requests are where; None: never yet
    queues: QueuePicture | None
    workers: tuple[WorkerPicture, ...]
    pools: tuple[PoolPicture, ...]
    requests: RecentRequests
    jobs: JobsPicture | None = None  # None where the deployment takes none
    load: tuple[LoadPicture, ...] = ()  # the oldest first
    promise: Slo | None = None  # of requests that ask for no other; None: not known
    machines: tuple[MachinePicture, ...] = ()  # by node
    slot_s: float = SLOT_S  # the length of the slots of requests and load

    def to_json(self) -> bytes:
        """Return it as JSON in one line."""
        return msgspec.json.encode(self)


@dataclass(frozen=True, slots=True)
class _SeenPart:
    member: Member
    is_here: bool
    since: float
    is_again: bool = False  # it was seen in an earlier life, or gone


class DeploymentView:
    """Remembers what parts of the deployment told last. Times are handed in; `hear` may be called by another thread."""

    def __init__(self) -> None:
        self._parts: dict[str, _SeenPart] = {}
        self._told: dict[str, Figures] = {}  # part -> its newest figures
        self._told_at: dict[str, float] = {}
        self._cpu: dict[str, tuple[float, float, float]] = {}  # part -> when it was read, processor time then, cores
        self._starts_s: dict[Role, float] = {}  # how long the last start of a part took
        self._first_look: float | None = None
        self._load: dict[float, deque[LoadPicture]] = {slot_s: deque(maxlen=NUM_SLOTS) for slot_s in SLOTS_S}
        self.queues: QueuePicture | None = None
        self.router_at: float | None = None  # when the router last said how many requests are where

    def hear(self, figures: Figures, now: float) -> None:
        """Take figures that a part reports."""
        if figures.rt is not None and figures.be is not None:
            self.queues, self.router_at = QueuePicture(figures.rt, figures.be), now
        self._told_at[figures.member], self._told[figures.member] = now, figures
        if figures.process is not None:
            self._hear_process(figures.member, figures.process, now)

    def _hear_process(self, part: str, process: ProcessFigures, now: float) -> None:
        read_at, cpu_s, _ = self._cpu.get(part, (now, process.cpu_s, 0.0))
        if process.cpu_s < cpu_s:  # another life
            read_at, cpu_s = now, process.cpu_s
        if now - read_at >= _CPU_S:
            self._cpu[part] = now, process.cpu_s, (process.cpu_s - cpu_s) / (now - read_at)
        elif now == read_at:
            self._cpu[part] = now, process.cpu_s, 0.0
        seen = self._parts.get(part)
        if seen is not None and seen.is_here and self._first_look is not None and self._first_look < seen.since:
            self._starts_s.setdefault(seen.member.role, max(0.0, seen.since - process.started_at))

    def look(self, members: Iterable[Member], now: float) -> None:
        """Note who is there now, and who has gone since the last look. A worker that was to go is forgotten at once."""
        here = {member.name: member for member in members}
        self._first_look = now if self._first_look is None else self._first_look
        for name, member in here.items():
            seen = self._parts.get(name)
            if seen is None or not seen.is_here or seen.member != member:
                if seen is not None and not seen.is_here:
                    self._starts_s[member.role] = now - seen.since
                # Its figures may be here before it is seen.
                self._parts[name] = _SeenPart(member, True, now, is_again=seen is not None)
        for name, seen in [*self._parts.items()]:
            if name in here:
                continue
            if seen.is_here:
                self._cpu.pop(name, None)
                if _is_retiring(self._told.pop(name, Figures())):
                    del self._parts[name]
                else:
                    self._parts[name] = replace(seen, is_here=False, since=now)
            elif now - seen.since > FORGOTTEN_S:
                del self._parts[name]
        if not (kept := self._load[SLOT_S]) or kept[-1].number < now // SLOT_S:
            load = self._load_now(int(now // SLOT_S))
            for slot_s, kept in self._load.items():
                load = replace(load, number=int(now // slot_s))
                if kept and kept[-1].number == load.number:
                    kept[-1] = kept[-1].highest(load)
                else:
                    kept.append(load)

    def _load_now(self, number: int) -> LoadPicture:
        stages = (None, None) if self.queues is None else (self.queues.rt, self.queues.be)
        rt, be = (0 if told is None else told.unplaced + told.prefill + told.pool for told in stages)
        parts, used = self.parts, max((worker.used for worker in self.workers), default=0.0)
        cores, resident = sum(part.cores for part in parts), sum(part.resident_bytes for part in parts)
        machines = [machine.use for machine in self.machines if machine.use.busy_cores is not None]
        busy, all_cores = (sum(use.busy_cores or 0.0 for use in machines), sum(use.cores for use in machines))
        gpus = [gpu.busy for machine in self.machines for gpu in machine.use.gpus if gpu.busy is not None]
        host, gpu = busy / all_cores if all_cores else None, sum(gpus) / len(gpus) if gpus else None
        return LoadPicture(number, rt, be, cores, resident, used, host, gpu)

    def picture(
        self,
        at: float,
        state: str,
        models: tuple[str, ...],
        requests: RecentRequests,
        jobs: JobsPicture | None = None,
        promise: Slo | None = None,
        slot_s: float = SLOT_S,
    ) -> Picture:
        """Return the picture of this moment."""
        told, load = (self.parts, self.router_at, self.queues, self.workers, self.pools), tuple(self._load[slot_s])
        return Picture(at, state, models, *told, requests, jobs, load, promise, self.machines, slot_s)

    @property
    def parts(self) -> tuple[PartPicture, ...]:
        """Return the parts by role, and by name; those of the last minutes that have gone are among them."""
        order = list(Role)
        seen = sorted(self._parts.values(), key=lambda part: (order.index(part.member.kind), part.member.name))
        return tuple(map(self._part, seen))

    @property
    def machines(self) -> tuple[MachinePicture, ...]:
        """Return what each node does, by name."""
        here = {name: part.member.node for name, part in self._parts.items() if part.is_here and name in self._told}
        told = ((here[name], self._told[name].process) for name in sorted(here, key=self._told_at.__getitem__))
        use = machine_of_each_node((node, process.machine) for node, process in told if process and process.machine)
        return tuple(MachinePicture(node, use[node]) for node in sorted(use))

    @property
    def workers(self) -> tuple[WorkerPicture, ...]:
        """Return the decode workers that are there; those that never had a request have told nothing."""
        here = (part.member for part in self._parts.values() if part.is_here and part.member.role is Role.DECODE)
        told = [(name, self._told.get(name, Figures())) for name in sorted(member.name for member in here)]
        return tuple(
            WorkerPicture(
                name,
                figures.lengths or DecodeLengths(),
                figures.worker.used if figures.worker else 0.0,
                figures.steps.grouped / max(1, sum(figures.steps.by_batches)) if figures.steps else 0.0,
            )
            for name, figures in told
        )

    @property
    def pools(self) -> tuple[PoolPicture, ...]:
        told = sorted([*self._told.items()], key=lambda item: item[0])
        return tuple(
            PoolPicture(name, figures.usage, figures.holders) for name, figures in told if figures.usage is not None
        )

    def _part(self, seen: _SeenPart) -> PartPicture:
        member, told = seen.member, self._told.get(seen.member.name, Figures())
        since = seen.since
        if told.process is not None and not seen.is_again:  # else it may be told by an earlier life
            since = min(since, told.process.started_at)
        state = member.name, member.kind, member.node, member.incarnation, seen.is_here, since
        if not seen.is_here:
            start_s = self._starts_s.get(member.role)
            return PartPicture(*state, seen.is_again, back_at=None if start_s is None else since + start_s)
        process, cores = told.process, self._cpu[member.name][2] if member.name in self._cpu else 0.0
        resident = 0 if process is None else process.resident_bytes
        return PartPicture(*state, seen.is_again, _is_retiring(told), told.slowdown, cores, resident)


def _is_retiring(told: Figures) -> bool:
    return told.worker is not None and told.worker.is_retiring
