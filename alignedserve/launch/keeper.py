"""Keeps the parts of a deployment: starts them, starts again whichever ends, adds some, lets some go, stops them all.

What to do when a part ends is the same for all launchers; how a part is started and ended each of them says.
"""

from __future__ import annotations

import math
import queue
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from alignedserve.config.config import Config
from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.errors import AlignedServeError
from alignedserve.launch.ready import announce_when_ready
from alignedserve.launch.scaling import change, check
from alignedserve.protocol.messages import ROUTER, Died, Retire, rank_suffix
from alignedserve.shell.control import Asked, Door
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.links import tell
from alignedserve.shell.part import PartSpec

GRACE_S = 5.0  # between asking a process to stop and killing it
QUICK_DEATH_S = 5.0  # a part that ends so soon after its start ...
MOST_QUICK_DEATHS = 3  # ... so often in a row is not started again


@dataclass(frozen=True)
class _Ended:
    part: str
    incarnation: int
    how: object  # for the log
    failure: str  # what keeps the part from running, in words for the user; empty where it just ended


@dataclass(frozen=True)
class _Overdue:
    """A part was to have ended by itself by now."""

    part: str
    incarnation: int


@dataclass(frozen=True)
class _Due:
    """What the keeper is to do, in its own thread, as long as this life of a part goes on."""

    part: str
    incarnation: int
    act: Callable[[], None]


@dataclass
class _Life:
    """Of a part, from one start to its end."""

    spec: PartSpec
    is_first: bool
    quick_deaths: int  # of the lives before it, in a row
    began_at: float = math.inf


@dataclass(frozen=True)
class Room:
    """For a worker that was not planned."""

    pools: Sequence[str] = ()  # that are to be started with it
    lacks: str = ""  # why it waits for a place, if it does


_Happened: TypeAlias = _Ended | _Overdue | _Due | Asked


class Keeper(ABC):
    """Starts every part, starts again whichever ends, and stops them all; a launcher says how each is done."""

    def __init__(self, config: Config, specs: Sequence[PartSpec]) -> None:
        self._config, self._specs = config, list(specs)
        self._lives: dict[str, _Life] = {}
        self._alive: set[str] = set()
        self._retiring: dict[str, Asked | None] = {}  # workers and pools that are to end, and who hears of that
        self._added: set[str] = set()  # those that were not planned: where they cannot be, all else goes on
        self._happened: queue.SimpleQueue[_Happened | None] = queue.SimpleQueue()  # None: stop
        self._code = ExitCode.STOPPED  # of our exit, where we are told to stop
        self._asked_to_stop: Asked | None = None

    @abstractmethod
    def start(self, spec: PartSpec) -> None:
        """Start the part; say `began` when its process is there, and `ended` once, when it is over."""

    @abstractmethod
    def ask_to_stop(self, part: str) -> None: ...

    @abstractmethod
    def end(self, part: str) -> None:
        """Now, whatever it is doing; nothing where it has ended already."""

    def forget(self, part: str) -> None:  # noqa: B027  (most have nothing to forget)
        """It has ended for good."""

    def another(self, spec: PartSpec) -> PartSpec:
        """One that was not planned, with what is to be its own here."""
        return spec

    def make_place(self, worker: str) -> Room:
        """For one that is to be started beside those that were planned."""
        return Room()

    def goes_with(self, worker: str) -> Sequence[str]:
        """Workers and pools that are of no use without this one, which goes."""
        return ()

    def began(self, part: str) -> None:
        if part in self._lives:
            self._lives[part].began_at = time.monotonic()

    def ended(self, spec: PartSpec, how: object, failure: str = "") -> None:
        """From any thread."""
        self._happened.put(_Ended(spec.name, spec.incarnation or 0, how, failure))

    def hear_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._happened.put(None))

    def run(self) -> int:
        """Until a signal says stop, or nothing can be served; the exit code."""
        self.hear_signals()
        try:
            for spec in self._specs:
                if not spec.rank:
                    self._start(spec.worker, quick_deaths=0)
            announce_when_ready(self._config, self._give_up)
            door = Door(self._config.server.port, self._happened.put)
            try:
                return self._watch()
            finally:
                door.close()
        finally:
            self._stop_all()

    def _watch(self) -> int:
        while (happened := self._happened.get()) is not None:
            code = self._hear(happened)
            if code is not None:
                return code
        return self._code

    def _hear(self, happened: _Happened) -> int | None:
        """An exit code, where that is the end of all."""
        match happened:
            case Asked() if happened.wanted.stop:
                happened.answer("it stops: open requests are finished, nothing new is taken")
                self._asked_to_stop = happened  # its connection ends with us
                return ExitCode.STOPPED
            case Asked():
                self._scale(happened)
            case _ if not self._is_news(happened):
                pass
            case _Due():
                happened.act()
            case _Overdue():
                self.end(happened.part)
            case _Ended():
                return self._is_over(happened)
        return None

    def _is_over(self, ended: _Ended) -> int | None:
        """A part has ended: an exit code, where that is the end of all."""
        self._alive.discard(ended.part)
        life = self._lives[ended.part]
        if life.spec.worker in self._retiring:
            if not life.spec.rank:  # the others end because the first has
                self._retired(ended)
            return None
        quick_deaths = self._quick_deaths(life, ended)
        # Where it ran before, what keeps it from running may pass: memory that others have just now, a disk.
        is_hopeless = quick_deaths >= MOST_QUICK_DEATHS or (life.is_first and bool(ended.failure))
        if life.spec.worker in self._added and is_hopeless:
            self._left_out(life, ended)
            return None
        print(f"alignedserve: {ended.failure or f'{ended.part} ended with {ended.how}'}", file=sys.stderr, flush=True)
        if ended.failure and is_hopeless:
            return ExitCode.USER_ERROR  # what others say of the same fault is not heard
        if ended.part != ROUTER:
            self._end_worker(life.spec.worker)
            tell(life.spec.router, Died(life.spec.worker, ended.incarnation), life.spec.keys)
        if is_hopeless:
            print(f"alignedserve: {ended.part} does not stay up; see its log above", file=sys.stderr, flush=True)
            return ExitCode.BROKEN
        self._start(life.spec.worker, quick_deaths)
        return None

    @staticmethod
    def _quick_deaths(life: _Life, ended: _Ended) -> int:
        """In a row, of a part that has just ended; one that could not run has died quickly, however long it tried."""
        is_quick = bool(ended.failure) or time.monotonic() - life.began_at < QUICK_DEATH_S
        return life.quick_deaths + 1 if is_quick else 0

    def _left_out(self, life: _Life, ended: _Ended) -> None:
        """It was asked for, and cannot be."""
        why, worker = ended.failure or "it does not stay up; see its log above", life.spec.worker
        print(f"alignedserve: {worker} is left out: {why}", file=sys.stderr, flush=True)
        others = self.goes_with(worker)
        self._forget(worker, ended.incarnation)
        for other in others:
            self._retiring[other] = None
            self.end(other)

    def _scale(self, asked: Asked) -> None:
        workers = [(spec.role, spec.name) for spec in self._specs if spec.role in WORKERS and not spec.rank]
        try:
            check(self._config, asked.wanted)
            wanted = change(workers, self._retiring, asked.wanted)
        except AlignedServeError as error:
            asked.answer(f"error: {error}")
            return asked.done()
        if asked.wanted.why:
            print(f"alignedserve: scales by itself: {asked.wanted.why}", file=sys.stderr, flush=True)
        for name in wanted.new:
            room = self.make_place(name)
            for one in (*room.pools, name):
                self._add(one)
                asked.answer(room.lacks or f"{one} starts")
        for name in wanted.retiring:
            spec = self._lives[name].spec
            self._retiring[name] = asked
            if self._lives[name].began_at == math.inf:  # it waits for a place
                self.end(name)
                continue
            asked.answer(f"{name} takes nothing new, and ends when nothing is left there")
            tell(spec.router, Retire(name, spec.incarnation or 0), spec.keys)
            overdue = _Overdue(name, spec.incarnation or 0)
            timer = threading.Timer(self._config.server.drain_s, self._happened.put, [overdue])
            timer.daemon = True
            timer.start()
        return asked.done() if not wanted.retiring else None

    def _add(self, worker: str) -> None:
        """Or a pool."""
        role = Role(worker.partition("-")[0])
        like = next(spec.worker for spec in self._specs if spec.role is role)
        ranks = [replace(spec, name=f"{worker}{rank_suffix(spec.rank)}") for spec in self._ranks(like)]
        self._specs += map(self.another, ranks)
        self._added.add(worker)
        self._start(worker, quick_deaths=0)

    def _retired(self, ended: _Ended) -> None:
        asked, others = self._retiring.pop(ended.part), self.goes_with(ended.part)
        self._forget(ended.part, ended.incarnation)
        for other in others:
            self._retiring[other] = asked
            self.end(other)
        if asked is not None:
            asked.answer(f"{ended.part} has ended")
            if asked not in self._retiring.values():
                asked.done()

    def _forget(self, worker: str, incarnation: int) -> None:
        """For good."""
        self._end_worker(worker)
        first, ranks = self._lives[worker].spec, self._ranks(worker)
        self._specs = [spec for spec in self._specs if spec.worker != worker]
        self._added.discard(worker)
        tell(first.router, Died(worker, incarnation), first.keys)
        for rank in ranks:
            del self._lives[rank.name]
            self.forget(rank.name)

    def later(self, spec: PartSpec, act: Callable[[], None]) -> None:
        """In our own thread, unless the part has ended by then; from any thread."""
        self._happened.put(_Due(spec.name, spec.incarnation or 0, act))

    def _is_news(self, ended: _Ended | _Overdue | _Due) -> bool:
        """A rank that was ended with its worker is not: there is another already."""
        life = self._lives.get(ended.part)
        return life is not None and life.spec.incarnation == ended.incarnation

    def _ranks(self, worker: str) -> list[PartSpec]:
        """All its parts; of what is no worker, itself."""
        return [spec for spec in self._specs if spec.worker == worker]

    def _end_worker(self, worker: str) -> None:
        """Ranks cannot go on without each other."""
        for spec in self._ranks(worker):
            if spec.name in self._alive:
                self.end(spec.name)
                self._alive.discard(spec.name)

    def _give_up(self) -> None:
        self._code = ExitCode.BROKEN
        self._happened.put(None)

    def _start(self, part: str, quick_deaths: int) -> None:
        """All ranks of a worker are of one life."""
        incarnation = time.time_ns()
        for rank in self._ranks(part):
            spec = replace(rank, incarnation=incarnation)
            self._lives[spec.name] = _Life(spec, spec.name not in self._lives, quick_deaths)
            self.start(spec)
            self._alive.add(spec.name)

    def _stop_all(self) -> None:
        """Owners of requests first: a gateway drains, and the others are needed for that. Other ranks after rank 0."""
        specs = {part: self._lives[part].spec for part in self._alive}
        owners = {part for part, spec in specs.items() if spec.role in OWNERS}
        ranks = {part for part, spec in specs.items() if spec.rank}
        self._stop(owners, self._config.server.drain_s + GRACE_S)
        self._stop(self._alive - owners - ranks, GRACE_S)
        self._stop(self._alive & ranks, GRACE_S)

    def _stop(self, parts: set[str], patience_s: float) -> None:
        """A second signal ends the patience."""
        for part in parts:
            self.ask_to_stop(part)
        deadline = time.monotonic() + patience_s
        while self._alive & parts:
            try:
                ended = self._happened.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if ended is None:
                break
            if isinstance(ended, _Ended) and self._is_news(ended):
                self._alive.discard(ended.part)
        for part in parts:
            self.end(part)
