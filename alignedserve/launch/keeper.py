"""The keeper of a deployment: it starts the parts, starts a part again that has ended, adds and retires workers, and
stops all parts in the end. orders.py has what users order meanwhile.

All launchers do the same when a part ends; each launcher says how a part is started and ended.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from alignedserve.cli.terminal.interrupt import RemembersCtrlC
from alignedserve.config.choices import LogFormat
from alignedserve.config.config import Config
from alignedserve.core import OWNERS, WORKERS, Role
from alignedserve.errors import AlignedServeError
from alignedserve.launch.bounded_calls import NoAnswer
from alignedserve.launch.keeper_events import KeeperEvent, KeeperEvents, PartEnded, PartTask, Ready, TimeToLook
from alignedserve.launch.plan import LaunchMachine
from alignedserve.launch.ready import announce_when_ready
from alignedserve.launch.reloading import Reloading, hears_hangup
from alignedserve.launch.restarting import PartChange
from alignedserve.launch.start_screen import StartScreen
from alignedserve.launch.starts import Starts
from alignedserve.launch.succession import Left
from alignedserve.protocol.messages import LAUNCHER, ROUTER, Died, Life, Retire, Started, rank_suffix
from alignedserve.shell.control import Door, HeardOrder, LauncherOrder
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.inboxes import inbox
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.links import Pulse
from alignedserve.shell.logs import set_up
from alignedserve.shell.part import PartSpec
from alignedserve.shell.signs import SignInbox
from alignedserve.shell.work_note import note_of, read
from alignedserve.signs import Sign, Stage

STOPS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 5.0  # between asking a process to stop and killing it
QUICK_DEATH_S = 5.0  # a part that ends before it runs, or sooner after that, has died quickly
MOST_QUICK_DEATHS = 3  # in a row: then a part pauses before it starts again, or ends a deployment that never served
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0  # each pause is twice the pause before
LOOK_S, LOOK_AGAIN_S = 0.5, 2.0  # between two looks at parts, while one is starting and when all run


@dataclass
class _PartLife:
    """One life of a part, from a start to its end."""

    spec: PartSpec
    is_first: bool
    quick_deaths: int  # in a row, of the lives before it
    began_at: float = math.inf
    ran_at: float = math.inf  # when it first ran, all loaded


@dataclass(frozen=True)
class NewPlace:
    """The place of a worker that was not planned."""

    pools: Sequence[str] = ()  # pools to start with the worker
    lacks: str = ""  # why the worker waits for a place, if it does


class Keeper(ABC):
    """Starts every part, starts a part again that has ended, and stops them all."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[PartSpec],
        reloading: Reloading,
        machine: LaunchMachine | None = None,
        left: Left | None = None,
    ) -> None:
        """`machine` gives each rank of a worker a device; on the nodes of a cluster Ray does. Of the parts that
        another launcher has `left`, those that run go on, with their keys."""
        self._config, self._specs, self._reloading, self._machine = config, list(specs), reloading, machine
        self._lives: dict[str, _PartLife] = {}
        self._keys = left.record.keys if left else DeploymentKeys.new()
        router, interval_s = self._specs[0].router, config.wire.heartbeat_s
        self._to_router = Pulse(LAUNCHER, 0, Started(()), router, interval_s, self._keys.launcher)
        self._newest: dict[str, Life] = {}  # name -> the newest life of each part, also of those that have gone
        self._left: set[str] = set()  # parts with a newest life from another launcher, which goes on
        self._replaces_left = left is not None and left.is_other_version
        if left is not None:
            self._newest |= left.record.lives
            self._left |= left.processes.keys()
            self._lives |= {spec.name: _PartLife(spec, is_first=False, quick_deaths=0) for spec in specs}
        self._alive: set[str] = set()
        self._retiring: dict[str, HeardOrder | None] = {}  # workers and pools that are to end -> the order to answer
        self._added: set[str] = set()  # workers that were not planned and never ran: if one cannot, it is left out
        self._paused: set[str] = set()  # workers and other parts that are started again after a pause
        self._events = KeeperEvents()
        first = self._specs[0]
        address = inbox(first.deployment, LAUNCHER) if first.is_private else f"tcp://{first.host}:*"
        self._signs = SignInbox(address, self._keys.parts, self._events.put)
        self._starts = Starts(config.launch.quiet_s, time.monotonic(), config.launch.still_s)
        if left is not None and left.record.has_served:
            self._starts.is_open = True
        self._screen = StartScreen(sys.stderr, config.log.format is LogFormat.TEXT)
        self._orders_to_stop: list[HeardOrder] = []  # their connections end with this process
        self._drains = False  # whether it stops by request, with requests that go on
        self._kept = frozenset(Role)  # roles whose parts are started again when they end
        self._is_hurried = False  # by a second signal

    @abstractmethod
    def start(self, spec: PartSpec) -> None:
        """Start the part; call `began` when its process is there, and `ended` once, when it has ended."""

    @abstractmethod
    def ask_to_stop(self, parts: Collection[str]) -> None:
        """Have the parts stop by themselves."""

    @abstractmethod
    def hand_on(self, spec: PartSpec) -> None:
        """Give a part that is alive its new settings, without waiting for it."""

    @abstractmethod
    def end(self, part: str) -> None:
        """End the part now, whatever it is doing; do nothing if it has ended already."""

    @abstractmethod
    def _obey(self, asked: HeardOrder) -> None:
        """Do what a user has ordered while it serves."""

    def _changed(self, change: PartChange, part: str, why: str = "") -> None:  # noqa: B027  (not all obey orders)
        """Hear that a part runs, has ended or is left out."""

    def forget(self, part: str) -> None:
        """Free what was kept for a part that has ended for good."""
        if self._machine is not None:
            self._machine.leave(part)

    def remember(self) -> None:  # noqa: B027  (not all launchers can be followed)
        """Write down what another launcher needs to go on with the parts."""

    def make_place(self, worker: str) -> NewPlace:
        """Make a place for a worker that was not planned."""
        return NewPlace()

    def goes_with(self, worker: str) -> Sequence[str]:
        """Return the workers and pools that are of no use after this worker has gone."""
        return ()

    def began(self, part: str) -> None:
        """Note that the process of the part is there."""
        if (life := self._lives.get(part)) is not None:
            life.began_at = time.monotonic()
            self._events.put(Sign(part, life.spec.incarnation, Stage.LIBRARIES))
            self.remember()

    def ended(self, spec: PartSpec, how: object, failure: str = "") -> None:
        """Report that a part has ended. Any thread may call this."""
        self._events.put(PartEnded(spec.name, spec.incarnation, how, failure))

    def hear_signals(self) -> None:
        """Stop at SIGINT and SIGTERM, also at one that came before and was lost; reload at SIGHUP."""
        if hears_hangup():
            signal.signal(signal.SIGHUP, lambda *_: self._events.put(HeardOrder(LauncherOrder(reload=True))))
        for number in STOPS:
            before = signal.signal(number, lambda *_: self._events.put(None))
            if isinstance(before, RemembersCtrlC) and before.has_come:
                self._events.put(None)

    def run(self) -> int:
        """Run until a signal says stop, or nothing can be served; return the exit code."""
        self.hear_signals()
        set_up(self._config.log, LAUNCHER, "alignedserve.launch")  # for lines on a long start
        try:
            for spec in self._specs:
                if not spec.rank:
                    if (lost := self._newest.get(spec.name)) is not None and spec.name not in self._left:
                        self._to_router.say(Died(spec.name, lost.incarnation))
                    self._start(spec.worker, quick_deaths=0)
            announce_when_ready(self._config, lambda greeting: self._events.put(Ready(greeting)))
            door = Door(self._config.server.port, self._events.put)
            try:
                return self._watch()
            finally:
                door.close()
        finally:
            self._screen.clear()
            self._stop_all()
            self._to_router.stop()
            self._signs.close()

    def _watch(self) -> int:
        while (event := self._next()) is not None:
            code = self._hear(event)
            if code is None and self._events.is_empty():  # or a sign that has come already would be overlooked
                code = self._look()
            if code is not None:
                return code
        self._drains = True
        within = f"within {self._config.server.drain_s:g} s"
        say(f"it stops: open requests are finished {within}, nothing new is taken; a second signal ends it at once")
        return ExitCode.STOPPED

    def _next(self, within_s: float = math.inf) -> KeeperEvent | None:
        """Return the next event. One comes in time to look at the parts."""
        return self._events.next(min(within_s, LOOK_AGAIN_S if self._starts.is_over else LOOK_S))

    def _look(self) -> int | None:
        """Show how far the start is, and end what stands still: everything where no request was served yet, or else the
        part, which starts again. A part that runs and is silent is ended too."""
        if (silent := self._starts.silent(time.monotonic())) is not None:
            self._screen.clear()
            part, silent_s = silent
            say(f"{part} runs and has given no sign of life for {silent_s:.0f} s: it is ended, and starts again")
            self.end(part)
        if self._starts.is_over:
            self._screen.clear()
            return None
        still = self._starts.still(time.monotonic())
        if still is None:
            self._screen.show(self._starts.slowest)
            return None
        self._screen.clear()
        if not self._starts.is_open or still.sign is None:
            say(f"{still}: see the log above, or raise launch.quiet_s")
            return ExitCode.BROKEN
        say(f"{still}: it is ended, and starts again")
        self._starts.end(still.sign.part)
        self.end(still.sign.part)
        return None

    def _hear(self, event: KeeperEvent) -> int | None:
        """React to an event; return an exit code if the deployment ends."""
        match event:
            case HeardOrder() if event.order.stop:
                event.answer("it stops: open requests are finished, nothing new is taken")
                self._orders_to_stop.append(event)
                self._drains = True
                return ExitCode.STOPPED
            case HeardOrder() if self._drains or not self._kept:
                event.answer("error: it stops")
                event.done()
            case HeardOrder():
                self._obey(event)
            case Ready(greeting) if self._kept and not self._drains:
                self._starts.is_open = True
                self.remember()
                self._screen.clear()
                print(greeting, flush=True)
                for replaced in [spec.replaces for spec in self._specs if spec.replaces in self._lives]:
                    self._retire(replaced)  # a launcher before this one was killed while it restarted parts
                if self._replaces_left:
                    say("the parts that it goes on with are of a version with other settings: they are replaced")
                    self._events.put(HeardOrder(LauncherOrder(restart=True)))
            case Sign():
                now, life = time.monotonic(), self._lives.get(event.part)
                self._starts.hear(event, now)
                if event.stage is Stage.RUNS and life is not None and life.spec.incarnation == event.incarnation:
                    life.ran_at = min(life.ran_at, now)
                    self._added.discard(life.spec.worker)
                    self._changed(PartChange.RUNS, life.spec.name)
            case TimeToLook() | Ready():
                pass
            case _ if not self._is_news(event):
                pass
            case PartTask():
                self._act(event)
            case PartEnded():
                code = self._is_over(event)
                self._changed(PartChange.IS_OVER, event.part)
                return code
        return None

    def _act(self, task: PartTask) -> None:
        """Do the task. Where it fails, this life of the part ends: a full machine makes no process and no thread, and
        calls to Ray raise errors of many kinds."""
        try:
            task.act()
        except AlignedServeError:
            raise
        except Exception as error:
            self.ended(self._lives[task.part].spec, error)

    def _is_over(self, ended: PartEnded) -> int | None:
        """React to the end of a part; return an exit code if the deployment ends with it."""
        self._alive.discard(ended.part)
        self._starts.end(ended.part)
        life = self._lives[ended.part]
        if life.spec.role not in self._kept or life.spec.worker in self._paused:
            return None  # a rank of a paused worker ends because another one has
        if life.spec.worker in self._retiring:
            if not life.spec.rank:  # the other ranks end because rank 0 has
                self._finish_retiring(ended)
            return None
        # A part that could not run has died quickly, however long it tried.
        is_quick = bool(ended.failure) or time.monotonic() - life.ran_at < QUICK_DEATH_S
        quick_deaths = life.quick_deaths + 1 if is_quick else 0  # in a row
        # A part that ran before may run again: other processes may free memory or space on a disk.
        cannot_run = life.is_first and bool(ended.failure)
        is_hopeless = cannot_run or quick_deaths >= MOST_QUICK_DEATHS
        may_come_yet = isinstance(ended.how, NoAnswer)  # Ray is away: nothing is known of the part
        if life.spec.worker in self._added and is_hopeless and not may_come_yet:
            self._leave_out(life, ended)
            return None
        say(ended.failure or f"{ended.part} {_ending(ended.how)}")
        # A deployment that has served waits for its part: what kills it may be a request, or a machine that is full.
        cannot_serve = cannot_run or (is_hopeless and not may_come_yet and not self._serves_without(life.spec))
        ends_all = not self._starts.is_open and cannot_serve
        if ended.failure and ends_all:
            return ExitCode.USER_ERROR  # what other parts say of the same fault is not printed
        if ended.part != ROUTER:
            self._end_worker(life.spec.worker)
            note = note_of(Path(self._config.kvpool.directory), life.spec.deployment, ended.part)
            self._to_router.say(Died(life.spec.worker, ended.incarnation, read(note)))
        if ends_all:
            say(f"{ended.part} does not stay up; see its log above")
            return ExitCode.BROKEN
        if is_hopeless:
            self._start_after_pause(life.spec, quick_deaths)
        else:
            self._start(life.spec.worker, quick_deaths)
        return None

    def _serves_without(self, part: PartSpec) -> bool:
        """Return whether requests are served while this part is away: chats need no job runner, and another part of its
        role may run."""
        for spec in self._specs:
            if spec.role is part.role and spec.worker != part.worker and spec.name in self._alive:
                life = self._lives[spec.name]
                stays = life.quick_deaths < MOST_QUICK_DEATHS or time.monotonic() - life.ran_at >= QUICK_DEATH_S
                if stays and spec.worker not in self._retiring and life.began_at < math.inf:
                    return True
        return part.role is Role.JOBS

    def _start_after_pause(self, part: PartSpec, quick_deaths: int) -> None:
        pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, quick_deaths - MOST_QUICK_DEATHS))
        say(f"{part.worker} does not stay up: it is started again in {pause_s:.0f} s")
        self._paused.add(part.worker)

        def start() -> None:
            if part.worker in self._paused and part.role in self._kept:
                self._start(part.worker, quick_deaths)

        self.after(pause_s, PartTask(part.name, part.incarnation, start))

    def _leave_out(self, life: _PartLife, ended: PartEnded) -> None:
        """Go on without an added worker that cannot run."""
        why, worker = ended.failure or "it does not stay up; see its log above", life.spec.worker
        say(f"{worker} is left out: {why}")
        self._changed(PartChange.LEFT_OUT, worker, why)
        others = self.goes_with(worker)
        self._forget(worker, ended.incarnation)
        for other in others:
            self._retiring[other] = None
            self._end_retiring(other)

    def _retire(self, part: str, asked: HeardOrder | None = None) -> None:
        """Let a part end that is not to come back, as soon as nothing is left there; `asked` is answered then."""
        spec = self._lives[part].spec
        self._retiring[part] = asked
        self.remember()
        if part in self._paused or self._lives[part].began_at == math.inf:  # it still waits for a place
            self._end_retiring(part)
        elif spec.role in WORKERS:
            self._to_router.say(Retire(part, spec.incarnation))
            self._end_after(spec, self._config.server.drain_s)
        else:
            self._end_softly(spec)

    def _end_softly(self, spec: PartSpec) -> None:
        """Have the part stop by itself; end it if it does not."""
        self.ask_to_stop({spec.name})
        self._end_after(spec, GRACE_S + (self._config.server.drain_s if spec.role in OWNERS else 0.0))

    def _end_after(self, spec: PartSpec, seconds: float) -> None:
        self.after(seconds, PartTask(spec.name, spec.incarnation, partial(self.end, spec.name)))

    def _end_retiring(self, part: str) -> None:
        """End a part that is not to come back. During a pause it has ended already."""
        if part in self._paused:
            self._paused.discard(part)
            self.ended(self._lives[part].spec, "a pause")
        else:
            self.end(part)

    def _add(self, worker: str, replaces: str = "") -> None:
        """Start a worker, or another part, that was not planned; it may replace another of its role."""
        role = Role(worker.partition("-")[0])
        like = replaces or next(spec.worker for spec in self._specs if spec.role is role)
        named = partial(replace, replaces=replaces)
        ranks = [named(spec, name=f"{worker}{rank_suffix(spec.rank)}") for spec in self._ranks(like)]
        self._specs += ranks if self._machine is None else map(self._machine.place, ranks)
        self._added.add(worker)
        self._start(worker, quick_deaths=0)

    def _finish_retiring(self, ended: PartEnded) -> None:
        asked, others = self._retiring.pop(ended.part), self.goes_with(ended.part)
        self._forget(ended.part, ended.incarnation)
        for other in others:
            self._retiring[other] = asked
            self._end_retiring(other)
        if asked is not None:
            asked.answer(f"{ended.part} has ended")
            if asked not in self._retiring.values():
                asked.done()

    def _forget(self, worker: str, incarnation: int) -> None:
        """Drop a worker that has ended for good."""
        self._end_worker(worker)
        ranks = self._ranks(worker)
        others = [spec for spec in self._specs if spec.worker != worker]
        self._specs = [replace(spec, replaces="") if spec.replaces == worker else spec for spec in others]
        self._added.discard(worker)
        self._to_router.say(Died(worker, incarnation))
        for rank in ranks:
            del self._lives[rank.name]
            self.forget(rank.name)
        self.remember()

    def after(self, seconds: float, event: KeeperEvent) -> None:
        """Hear the event after this many seconds. Only the keeper's own thread may call this."""
        self._events.after(seconds, event)

    def later(self, spec: PartSpec, act: Callable[[], None]) -> None:
        """Call `act` in the keeper's own thread, unless the part has ended by then. Any thread may call this."""
        self._events.put(PartTask(spec.name, spec.incarnation, act))

    def _is_news(self, event: PartEnded | PartTask) -> bool:
        """Return whether the event is about the present life of a part, and a task about one that is kept. A rank that
        was ended with its worker has a new life already."""
        life = self._lives.get(event.part)
        if life is None or life.spec.incarnation != event.incarnation:
            return False
        return isinstance(event, PartEnded) or life.spec.role in self._kept

    def _ranks(self, worker: str) -> list[PartSpec]:
        """Return the parts of a worker: its ranks. Any other part is the only one of its name."""
        return [spec for spec in self._specs if spec.worker == worker]

    def _end_worker(self, worker: str) -> None:
        """End all ranks of a worker: they cannot go on without each other."""
        for spec in self._ranks(worker):
            self._starts.end(spec.name)
            if spec.name in self._alive:
                self.end(spec.name)
                self._alive.discard(spec.name)

    def _start(self, part: str, quick_deaths: int) -> None:
        """Start a part; all ranks of a worker get the same incarnation. The router hears of the life first."""
        ranks, before = self._ranks(part), self._newest.get(part)
        num_lives = before.incarnation if before is not None else 0
        life = Life(part, ranks[0].acts_as, num_lives if part in self._left else num_lives + 1)
        self._left.discard(part)
        self._newest[part] = life
        self._paused.discard(part)
        lives = tuple(self._newest.values())
        self._to_router.change(Started(lives))
        # Parts that start with the router may be heard before we are: it is told the first lives of all.
        first = (Life(spec.worker, spec.acts_as, 1) for spec in self._specs if not spec.rank)
        told = (*first, *lives) if part == ROUTER else ()
        for rank in ranks:
            keys, signs_at = self._keys.parts, self._signs.address
            spec = replace(rank, incarnation=life.incarnation, keys=keys, lives=told, signs_at=signs_at)
            self._starts.begin(spec.name, spec.incarnation, time.monotonic())
            self._lives[spec.name] = _PartLife(spec, spec.name not in self._lives, quick_deaths)
            self._alive.add(spec.name)
            self._act(PartTask(spec.name, spec.incarnation, partial(self.start, spec)))

    def _stop_all(self) -> None:
        """Stop the owners of requests first: a gateway drains, and needs the other parts for that, which are kept until
        then. Then stop all other parts, rank 0 of a worker before its other ranks."""
        self._kept = self._kept - {*OWNERS} if self._drains and self._starts.is_open else frozenset()
        owners = {part for part in self._alive if self._lives[part].spec.role in OWNERS}
        self._stop(owners, self._config.server.drain_s + GRACE_S)
        self._kept = frozenset()
        ranks = {part for part in self._alive if self._lives[part].spec.rank}
        self._stop(self._alive - owners - ranks, GRACE_S)
        self._stop(self._alive & ranks, GRACE_S)

    def _stop(self, parts: set[str], patience_s: float) -> None:
        """Stop these parts, and end after so long those that have not."""
        if not self._is_hurried:
            self.ask_to_stop(parts)
        self._wait_until_ended(parts, patience_s)
        for part in parts:
            self.end(part)

    def _wait_until_ended(self, parts: set[str], patience_s: float) -> None:
        """Wait at most `patience_s` until these parts have ended, and keep the others meanwhile. A second signal ends
        this wait and those to come."""
        deadline = time.monotonic() + patience_s
        while self._alive & parts and not self._is_hurried and (left_s := deadline - time.monotonic()) > 0:
            event = self._next(left_s)
            if event is None:
                self._is_hurried = True
                return
            try:
                self._hear(event)
                if self._kept and self._events.is_empty():
                    self._look()
            except AlignedServeError as error:  # nothing can be started any more
                say(str(error))
                self._kept = frozenset()


def _ending(how: object) -> str:
    """Say how a process ended: by a signal, or with a status; or why it was not started."""
    if isinstance(how, Exception):
        return f"cannot be started: {type(how).__name__}: {how}"
    names = {-number: number.name for number in signal.Signals}
    return f"was ended by {names[how]}" if isinstance(how, int) and how in names else f"ended with {how}"


def say(line: str) -> None:
    print(f"alignedserve: {line}", file=sys.stderr, flush=True)
