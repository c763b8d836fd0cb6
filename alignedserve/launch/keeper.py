"""The keeper of a deployment decides what becomes of each part: when it starts, pauses, is retired or ended.

    start ──▶ its process is there ──▶ it runs ──▶ it ends ──▶ next life; after quick deaths in a row it pauses first
                                          └─ retired ──▶ it ends, and is forgotten

This is plain Python. A host (host.py) starts and ends the parts, deployment.py brings events and the clock, and
orders.py has what users order meanwhile.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Protocol

from alignedserve.config.config import Config, dump, parse, reloaded
from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.errors import AlignedServeError
from alignedserve.launch.host import Host, NoAnswer, PartBegan, PartEnded, PartEvent, PartTask
from alignedserve.launch.starts import Starts
from alignedserve.protocol.messages import Attempt, Died, Life, Retire, Started, rank_suffix, worker_of
from alignedserve.shell.control import HeardOrder
from alignedserve.signs import ExitCode, Sign, Stage

if TYPE_CHECKING:
    from alignedserve.shell.part import PartSpec

GRACE_S = 5.0  # between asking a process to stop and killing it
QUICK_DEATH_S = 5.0  # a part that ends before it runs, or sooner after that, has died quickly
MOST_QUICK_DEATHS = 3  # in a row: then a part pauses before it starts again, or ends a deployment that never served
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0  # each pause is twice the pause before


class Change(Enum):
    """What becomes of a part."""

    RUNS = 1
    IS_OVER = 2  # a life of the part has ended; of a worker, with all its ranks
    LEFT_OUT = 3  # it was not planned and cannot run: it is not started again


class Outside(Protocol):
    """What a keeper tells the rest of the launcher, and asks of it."""

    def say(self, line: str) -> None:
        """Tell the user."""

    def tell_router(self, message: Started | Died | Retire) -> None:
        """Tell the router: the lives that have started again and again, all else once."""

    def work_of(self, spec: PartSpec) -> tuple[Attempt, ...]:
        """Return what a part that has ended was working on."""

    def remember(self) -> None:
        """Write down what the next launcher needs to go on with the parts."""


@dataclass
class KeptPart:
    spec: PartSpec  # of its newest life
    is_alive: bool = False
    began_at: float = math.inf
    ran_at: float = math.inf  # when it first ran, all loaded


@dataclass
class KeptUnit:
    """A worker with all its ranks, or another part alone: what starts and ends together."""

    parts: list[KeptPart] = field(default_factory=list)
    num_starts: int = 0
    quick_deaths: int = 0  # in a row
    is_paused: bool = False  # it has ended, and is started again after a pause
    is_untried: bool = False  # it was not planned and never ran: if it cannot, it is left out
    is_retiring: bool = False
    asked: HeardOrder | None = None  # to answer when it has retired

    @property
    def spec(self) -> PartSpec:
        return self.parts[0].spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def role(self) -> Role:
        return self.spec.role

    @property
    def is_there(self) -> bool:
        """Return whether it has a process: it neither waits for a place nor pauses."""
        return not self.is_paused and self.parts[0].began_at < math.inf


class Keeper:
    def __init__(
        self,
        config: Config,
        specs: Iterable[PartSpec],
        host: Host,
        outside: Outside,
        clock: Callable[[], float],
        before: Mapping[str, Life] | None = None,
    ) -> None:
        """`before` has the newest life of each part where another launcher has started them."""
        self.config, self.units = config, dict[str, KeptUnit]()
        for spec in specs:
            self.units.setdefault(spec.worker, KeptUnit(num_starts=int(before is not None))).parts.append(
                KeptPart(spec)
            )
        self.newest = dict(before or {})  # life of each part, also of those that have gone
        self.starts = Starts(config.launch.quiet_s, clock(), config.launch.still_s)
        self.kept = frozenset(Role)  # roles whose parts are started again when they end
        self.drains = False  # whether it stops by request, with requests that go on
        self.on_change: Callable[[Change, str, str], None] = lambda *_: None
        self._host, self._outside, self._clock = host, outside, clock

    @property
    def serves(self) -> bool:
        return bool(self.kept) and not self.drains

    def parts(self) -> Iterator[KeptPart]:
        return (part for unit in [*self.units.values()] for part in unit.parts)

    def alive(self) -> set[str]:
        """Return the names of the parts that have not ended. Any thread may call this."""
        return {part.spec.name for part in self.parts() if part.is_alive}

    def part(self, name: str) -> KeptPart | None:
        unit = self.units.get(worker_of(name))
        return next((part for part in unit.parts if part.spec.name == name), None) if unit is not None else None

    # --- Lives

    def begin(self, going_on: Collection[str] = ()) -> None:
        """Start all parts; those that go on have a process already."""
        for name, unit in self.units.items():
            if (lost := self.newest.get(name)) is not None and name not in going_on:
                self._outside.tell_router(Died(name, lost.incarnation))
            self._start(unit, goes_on=name in going_on)

    def _start(self, unit: KeptUnit, quick_deaths: int = 0, goes_on: bool = False) -> None:
        """Start all ranks, with the same incarnation. The router hears of the life first."""
        before = self.newest.get(unit.name)
        num_lives = before.incarnation if before is not None else 0
        life = Life(unit.name, unit.spec.acts_as, num_lives if goes_on else num_lives + 1)
        self.newest[unit.name] = life
        unit.num_starts, unit.quick_deaths, unit.is_paused = unit.num_starts + 1, quick_deaths, False
        lives = tuple(self.newest.values())
        self._outside.tell_router(Started(lives))
        # Parts that start with the router may be heard before we are: it is told the first lives of all.
        first = (Life(name, other.spec.acts_as, 1) for name, other in self.units.items())
        told = (*first, *lives) if unit.role is Role.ROUTER else ()
        for part in unit.parts:
            part.spec = spec = replace(part.spec, incarnation=life.incarnation, lives=told)
            part.is_alive, part.began_at, part.ran_at = True, math.inf, math.inf
            self.starts.begin(spec.name, spec.incarnation, self._clock())
            self._try(spec, partial(self._host.start, spec))

    def _try(self, spec: PartSpec, act: Callable[[], None]) -> None:
        """Do this for a part. Where it fails, this life of the part ends: a full machine makes no process and no
        thread, and calls to Ray raise errors of many kinds."""
        try:
            act()
        except AlignedServeError:
            raise
        except Exception as error:
            self._host.events.ended(spec, error)

    def hear(self, event: PartEvent | Sign) -> int | None:
        """React to an event; return an exit code if the deployment ends with it."""
        part = self.part(event.part)
        if isinstance(event, Sign):
            self.starts.hear(event, self._clock())
        if part is None or part.spec.incarnation != event.incarnation:
            return None  # of an earlier life: a rank that was ended with its worker has a new life already
        match event:
            case Sign(stage=Stage.RUNS):
                part.ran_at = min(part.ran_at, self._clock())
                self.units[part.spec.worker].is_untried = False
                self.on_change(Change.RUNS, event.part, "")
            case PartBegan():
                part.began_at = self._clock()
                self.starts.hear(Sign(event.part, event.incarnation, Stage.LIBRARIES), part.began_at)
                self._outside.remember()
            case PartTask() if part.spec.role in self.kept:
                self._try(part.spec, event.act)
            case PartEnded():
                unit = self.units[part.spec.worker]
                code = self._is_over(part, event)
                if not (unit.is_retiring and part.spec.rank):  # a worker that retires has ended with rank 0
                    self.on_change(Change.IS_OVER, unit.name, "")
                return code
        return None

    def look(self) -> int | None:
        """End what stands still: everything where no request was served yet, or else the part, which starts again. A
        part that runs and is silent is ended too. Return an exit code if the deployment ends."""
        now = self._clock()
        if (silent := self.starts.silent(now)) is not None:
            part, silent_s = silent
            self._outside.say(
                f"{part} runs and has given no sign of life for {silent_s:.0f} s: it is ended, and starts again"
            )
            self._host.end(part)
        still = None if self.starts.is_over else self.starts.still(now)
        if still is None:
            return None
        if not self.starts.is_open or still.sign is None:
            self._outside.say(f"{still}: see the log above, or raise launch.quiet_s")
            return ExitCode.BROKEN
        self._outside.say(f"{still}: it is ended, and starts again")
        self.starts.end(still.sign.part)
        self._host.end(still.sign.part)
        return None

    def _is_over(self, part: KeptPart, ended: PartEnded) -> int | None:
        """React to the end of a part; return an exit code if the deployment ends with it."""
        part.is_alive = False
        self.starts.end(ended.part)
        unit = self.units[part.spec.worker]
        if unit.role not in self.kept or unit.is_paused:
            return None  # a rank of a paused worker ends because another one has
        if unit.is_retiring:
            if not part.spec.rank:  # the other ranks end because rank 0 has
                self._finish_retiring(unit)
            return None
        # A part that could not run has died quickly, however long it tried.
        is_quick = bool(ended.failure) or self._clock() - part.ran_at < QUICK_DEATH_S
        quick_deaths = unit.quick_deaths + 1 if is_quick else 0
        # A part that ran before may run again: other processes may free memory or space on a disk.
        cannot_run = unit.num_starts == 1 and bool(ended.failure)
        is_hopeless = cannot_run or quick_deaths >= MOST_QUICK_DEATHS
        may_come_yet = isinstance(ended.how, NoAnswer)
        if unit.is_untried and is_hopeless and not may_come_yet:
            self._leave_out(unit, ended.failure or "it does not stay up; see its log above")
            return None
        self._outside.say(ended.failure or f"{ended.part} {_ending(ended.how)}")
        # A deployment that has served waits for its part: what kills it may be a request, or a machine that is full.
        cannot_serve = cannot_run or (is_hopeless and not may_come_yet and not self._serves_without(unit))
        ends_all = not self.starts.is_open and cannot_serve
        if ended.failure and ends_all:
            return ExitCode.USER_ERROR  # what other parts say of the same fault is not printed
        if unit.role is not Role.ROUTER:
            self._end_all(unit)
            self._outside.tell_router(Died(unit.name, ended.incarnation, self._outside.work_of(part.spec)))
        if ends_all:
            self._outside.say(f"{ended.part} does not stay up; see its log above")
            return ExitCode.BROKEN
        if is_hopeless:
            self._start_after_pause(unit, quick_deaths)
        else:
            self._start(unit, quick_deaths)
        return None

    def _serves_without(self, unit: KeptUnit) -> bool:
        """Return whether requests are served while this part is away: chats need no job runner, and another part of its
        role may run."""
        for other in self.units.values():
            is_alike = other.role is unit.role and other.spec.of_embed == unit.spec.of_embed
            if is_alike and other is not unit and not other.is_retiring:
                stays = other.quick_deaths < MOST_QUICK_DEATHS
                for part in other.parts:
                    has_stayed = self._clock() - part.ran_at >= QUICK_DEATH_S
                    if part.is_alive and part.began_at < math.inf and (stays or has_stayed):
                        return True
        return unit.role is Role.JOBS

    def _start_after_pause(self, unit: KeptUnit, quick_deaths: int) -> None:
        pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, quick_deaths - MOST_QUICK_DEATHS))
        self._outside.say(f"{unit.name} does not stay up: it is started again in {pause_s:.0f} s")
        unit.is_paused = True

        def start() -> None:
            if unit.is_paused:
                self._start(unit, quick_deaths)

        self._host.events.after(pause_s, PartTask(unit.name, unit.spec.incarnation, start))

    def _end_all(self, unit: KeptUnit) -> None:
        """End all ranks of a worker: they cannot go on without each other."""
        for part in unit.parts:
            self.starts.end(part.spec.name)
            if part.is_alive:
                self._host.end(part.spec.name)
                part.is_alive = False

    # --- Parts that come and go while it serves

    def add(self, worker: str, replaces: str = "") -> None:
        """Start a worker, or another part, that was not planned; it may replace another of its role."""
        role = Role(worker.partition("-")[0])
        alike = (unit for unit in self.units.values() if unit.role is role and not unit.spec.of_embed)
        like = self.units[replaces] if replaces else next(alike)
        self.units[worker] = unit = KeptUnit(is_untried=True)
        for spec in [part.spec for part in like.parts]:
            named = replace(spec, name=f"{worker}{rank_suffix(spec.rank)}", replaces=replaces)
            unit.parts.append(KeptPart(replace(named, device=self._free_device(role))))
        self._start(unit)

    def _free_device(self, role: Role) -> int:
        """Return a device that no part has; 0 for a part that needs none, or where Ray gives it one."""
        if role not in WORKERS or not self._host.numbers_devices:
            return 0
        taken = {part.spec.device for part in self.parts() if part.spec.role in WORKERS}
        return next(number for number in itertools.count() if number not in taken)

    def retire(self, worker: str, asked: HeardOrder | None = None) -> None:
        """Let a part end that is not to come back, as soon as nothing is left there; `asked` is answered then."""
        unit = self.units[worker]
        unit.is_retiring, unit.asked = True, asked
        self._outside.remember()
        if not unit.is_there:
            self._end_retiring(unit)
        elif unit.role in WORKERS:
            self._outside.tell_router(Retire(worker, unit.spec.incarnation))
            self._end_after(self.config.server.drain_s, unit)
        else:
            self.end_softly(unit)

    def end_softly(self, unit: KeptUnit) -> None:
        """Have a part stop by itself; end it if it does not."""
        self._host.ask_to_stop({unit.name})
        self._end_after(GRACE_S + (self.config.server.drain_s if unit.role in OWNERS else 0.0), unit)

    def _end_after(self, seconds: float, unit: KeptUnit) -> None:
        task = PartTask(unit.name, unit.spec.incarnation, partial(self._host.end, unit.name))
        self._host.events.after(seconds, task)

    def _end_retiring(self, unit: KeptUnit) -> None:
        """End a part that is not to come back. During a pause it has ended already."""
        if unit.is_paused:
            unit.is_paused = False
            self._host.events.ended(unit.spec, "a pause")
        else:
            self._host.end(unit.name)

    def _finish_retiring(self, unit: KeptUnit) -> None:
        asked = unit.asked
        self._forget(unit, asked)
        if asked is not None:
            asked.answer(f"{unit.name} has ended")
            if all(other.asked is not asked for other in self.units.values()):
                asked.done()

    def _leave_out(self, unit: KeptUnit, why: str) -> None:
        """Go on without an added worker that cannot run."""
        self._outside.say(f"{unit.name} is left out: {why}")
        self.on_change(Change.LEFT_OUT, unit.name, why)
        self._forget(unit)

    def _forget(self, unit: KeptUnit, asked: HeardOrder | None = None) -> None:
        """Drop a part that has ended for good, and retire what is of no use without it."""
        others = self._host.goes_with(unit.name)
        self._end_all(unit)
        del self.units[unit.name]
        for part in (part for part in self.parts() if part.spec.replaces == unit.name):
            part.spec = replace(part.spec, replaces="")
        self._outside.tell_router(Died(unit.name, unit.spec.incarnation))
        for part in unit.parts:
            self._host.forget(part.spec.name)
        self._outside.remember()
        for other in others:
            self.units[other].is_retiring, self.units[other].asked = True, asked
            self._end_retiring(self.units[other])

    # --- Settings

    def take(self, new: Config) -> list[str]:
        """Take new settings and hand them on; return an error for each part that does not get them."""
        self.config = reloaded(self.config, new)
        errors = list[str]()
        for part in self.parts():
            part.spec = replace(part.spec, config=dump(reloaded(parse(part.spec.config), new)))
            try:
                if part.is_alive:
                    self._host.hand_on(part.spec)
            except Exception as error:  # as on a full machine
                errors.append(f"error: {part.spec.name} keeps the old settings until it starts again: {error}")
        self._outside.remember()
        return errors


def _ending(how: object) -> str:
    """Say how a process ended: by a signal, or with a status; or why it was not started."""
    if isinstance(how, Exception):
        return f"cannot be started: {type(how).__name__}: {how}"
    names = {-number: number.name for number in signal.Signals}
    return f"was ended by {names[how]}" if isinstance(how, int) and how in names else f"ended with {how}"
