"""A deployment as its launcher runs it: its keeper hears what happens, users give orders, and all stops in the end."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from alignedserve.config.choices import LogFormat
from alignedserve.config.config import Config
from alignedserve.core import OWNERS, Role
from alignedserve.errors import AlignedServeError
from alignedserve.interrupt import RemembersCtrlC
from alignedserve.launch.bounded import STOPS, BoundedEnd
from alignedserve.launch.host import Host, KeeperEvent, Ready, TimeToLook, say
from alignedserve.launch.keeper import GRACE_S, Keeper
from alignedserve.launch.orders import Orders, Reloading
from alignedserve.launch.plan import other_weights
from alignedserve.launch.screen import StartScreen, announce_when_ready
from alignedserve.launch.succession import OUTLIVE_S, LauncherRecord, LeftParts, LivingProcess, RecordFile
from alignedserve.protocol.messages import LAUNCHER, Attempt, Died, Retire, Started
from alignedserve.shell.control import Door, HeardOrder, LauncherOrder
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.links import Pulse, inbox
from alignedserve.shell.logs import set_up
from alignedserve.shell.part import PartSpec
from alignedserve.shell.signs import SignInbox
from alignedserve.shell.work_note import note_of, read
from alignedserve.signs import ExitCode

LOOK_S, LOOK_AGAIN_S = 0.5, 2.0  # between two looks at parts, while one is starting and when all run
ENDED_S = 2.0  # for killed parts to have ended, at the end


class RunningDeployment:
    """Runs a keeper and its host."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[PartSpec],
        reloading: Reloading,
        host: Host,
        *,
        record: RecordFile | None = None,
        left: LeftParts | None = None,
        ending: BoundedEnd | None = None,
    ) -> None:
        """Go on with the parts that another launcher has `left` running, and with their keys. `record` is for the next
        launcher. `ending` bounds the end where the host may hang."""
        self._reloading, self._host, self._ending = reloading, host, ending
        self._record, self._left = record or RecordFile(0), left
        first = specs[0]
        self._keys = left.record.keys if left else DeploymentKeys.new()
        beats = config.wire.heartbeat_s, self._keys.launcher
        routers = dict.fromkeys(spec.router for spec in specs)
        self._to_routers = [Pulse(LAUNCHER, 0, Started(()), router, *beats) for router in routers]
        address = inbox(first.deployment, LAUNCHER) if first.is_private else f"tcp://{first.host}:*"
        self._signs = SignInbox(address, self._keys.parts, host.events.put)
        told = [replace(spec, keys=self._keys.parts, signs_at=self._signs.address) for spec in specs]
        self.keeper = Keeper(config, told, host, self, time.monotonic, left.record.lives if left else None)
        self.keeper.starts.is_open = left is not None and left.record.has_served
        self._orders = Orders(self.keeper, host, reloading, other_weights)
        self._screen = StartScreen(sys.stderr, config.log.format is LogFormat.TEXT)
        self._orders_to_stop: list[HeardOrder] = []  # their connections end with this process
        if ending is not None:
            ending.left = self.keeper.alive

    # --- What the keeper says

    def say(self, line: str) -> None:
        self._screen.clear()
        say(line)

    def tell_router(self, message: Started | Died | Retire) -> None:
        """Tell all routers: one drops what is said of members that it does not have."""
        for router in self._to_routers:
            (router.change if isinstance(message, Started) else router.say)(message)

    def work_of(self, spec: PartSpec) -> tuple[Attempt, ...]:
        return read(note_of(Path(self.keeper.config.kvpool.directory), spec.deployment, spec.name))

    def remember(self) -> None:
        me = LivingProcess.of(os.getpid())
        if not self._record.is_kept or me is None:
            return
        # What a retiring worker has goes on elsewhere; a gateway's streams do not.
        stay = (unit for unit in self.keeper.units.values() if unit.role is Role.GATEWAY or not unit.is_retiring)
        specs = tuple(part.spec for unit in stay for part in unit.parts)
        found = {name: LivingProcess.of(pid) for name, pid in self._host.pids().items()}
        processes = {name: process for name, process in found.items() if process is not None}
        asked, has_served = self._reloading.asked, self.keeper.starts.is_open
        self._record.write(
            LauncherRecord(me, asked, self._keys, self.keeper.newest, specs, processes, has_served=has_served)
        )

    # --- Serving

    def hear_signals(self) -> None:
        """Stop at SIGINT and SIGTERM, also at one that came before and was lost; reload at SIGHUP."""
        events = self._host.events
        if hears_hangup():
            signal.signal(signal.SIGHUP, lambda *_: events.put(HeardOrder(LauncherOrder(reload=True))))
        for number in STOPS:
            before = signal.signal(number, lambda *_: events.put(None))
            if isinstance(before, RemembersCtrlC) and before.has_come:
                events.put(None)
        if self._ending is not None:
            self._ending.hear_signals()

    def run(self) -> int:
        """Run until a signal says stop, or nothing can be served; return the exit code."""
        config = self.keeper.config
        self.hear_signals()
        set_up(config.log, LAUNCHER, "alignedserve.launch")  # for lines on a long start
        try:
            self.keeper.begin(going_on={*self._left.processes} if self._left else ())
            announce_when_ready(config, lambda greeting: self._host.events.put(Ready(greeting)))
            door = Door(config.server.port, self._host.events.put)
            try:
                return self._watch()
            finally:
                door.close()
        finally:
            self._screen.clear()
            self._stop_all()
            for router in self._to_routers:
                router.stop()
            self._signs.close()

    def _watch(self) -> int:
        while (event := self._next()) is not None:
            code = self._hear(event)
            if code is None and self._host.events.is_empty():  # or a sign that has come already would be overlooked
                code = self._look()
            if code is not None:
                return code
        self.keeper.drains = True
        within = f"within {self.keeper.config.server.drain_s:g} s"
        say(f"it stops: open requests are finished {within}, nothing new is taken; a second signal ends it at once")
        return ExitCode.STOPPED

    def _next(self, within_s: float = math.inf) -> KeeperEvent | None:
        """Return the next event. One comes in time to look at the parts."""
        return self._host.events.next(min(within_s, LOOK_AGAIN_S if self.keeper.starts.is_over else LOOK_S))

    def _look(self) -> int | None:
        code, starts = self.keeper.look(), self.keeper.starts
        self._screen.show(None if starts.is_over else starts.slowest)
        return code

    def _hear(self, event: KeeperEvent) -> int | None:
        """React to an event; return an exit code if the deployment ends."""
        match event:
            case HeardOrder() if event.order.stop:
                event.answer("it stops: open requests are finished, nothing new is taken")
                self._orders_to_stop.append(event)
                self.keeper.drains = True
                return ExitCode.STOPPED
            case HeardOrder() if not self.keeper.serves:
                event.answer("error: it stops")
                event.done()
            case HeardOrder() if event.order.leave:
                self._leave(event)
            case HeardOrder():
                self._orders.obey(event)
                if event.order.reload:
                    self._take_settings()
            case Ready(greeting) if self.keeper.serves:
                self._open(greeting)
            case TimeToLook() | Ready():
                pass
            case _:
                return self.keeper.hear(event)
        return None

    def _open(self, greeting: str) -> None:
        """Greet as the deployment takes requests, and finish what a launcher that was killed has begun."""
        self.keeper.starts.is_open = True
        self.remember()
        self._screen.clear()
        print(greeting, flush=True)
        spares = [unit.spec.replaces for unit in self.keeper.units.values()]
        for replaced in [name for name in spares if name in self.keeper.units]:
            self.keeper.retire(replaced)  # it was killed while it restarted parts
        if self._left is not None and self._left.is_other_version:
            say("the parts that it goes on with are of a version with other settings: they are replaced")
            self._host.events.put(HeardOrder(LauncherOrder(restart=True)))

    def _leave(self, asked: HeardOrder) -> None:
        """End this process alone, as one that is killed: its parts listen for the next launcher."""
        if not self._record.is_kept:
            asked.answer("error: parts of this deployment end with their launcher: it needs a --port, and no Ray")
            return asked.done()
        goes_on = "and `alignedserve serve` goes on with them"
        asked.answer(f"the launcher ends; its parts serve on for {OUTLIVE_S:g} s, {goes_on}")
        asked.done()
        self.remember()
        sys.stdout.flush()
        os._exit(ExitCode.LAUNCHER_GONE)  # a supervisor starts the next one

    def _take_settings(self) -> None:
        set_up(self.keeper.config.log, LAUNCHER, "alignedserve.launch")
        if self._ending is not None:
            self._ending.drains_for(self.keeper.config.server.drain_s)

    # --- The end

    def _stop_all(self) -> None:
        """Stop the owners of requests first: a gateway drains, and needs the other parts for that, which are kept until
        then. Then stop all other parts, rank 0 of a worker before its other ranks."""
        keeper = self.keeper
        if self._ending is not None:
            self._ending.begin(is_wanted=bool(self._orders_to_stop))
        self._keep(keeper.kept - {*OWNERS} if keeper.drains and keeper.starts.is_open else frozenset())
        owners = {part.spec.name for part in keeper.parts() if part.is_alive and part.spec.role in OWNERS}
        self._stop(owners, keeper.config.server.drain_s + GRACE_S)
        self._keep(frozenset())
        ranks = {part.spec.name for part in keeper.parts() if part.spec.rank}
        self._stop(keeper.alive() - owners - ranks, GRACE_S)
        self._stop(keeper.alive() & ranks, GRACE_S)
        self._wait_until_ended(keeper.alive(), ENDED_S)
        if (left := keeper.alive()) and not self._host.is_hurried:
            say(f"{', '.join(sorted(left))} may still run: {self._host.WHY_LEFT}")

    def _keep(self, roles: frozenset[Role]) -> None:
        self.keeper.kept, self._host.is_ending = roles, not roles

    def _stop(self, parts: set[str], patience_s: float) -> None:
        """Stop these parts, and end after so long those that have not."""
        if not self._host.is_hurried:
            self._host.ask_to_stop(parts)
        self._wait_until_ended(parts, patience_s)
        for part in parts:
            self._host.end(part)

    def _wait_until_ended(self, parts: set[str], patience_s: float) -> None:
        """Wait at most `patience_s` until these parts have ended, and keep the others meanwhile. A second signal ends
        this wait and those to come."""
        deadline = time.monotonic() + patience_s
        while self.keeper.alive() & parts and not self._host.is_hurried:
            if (left_s := deadline - time.monotonic()) <= 0:
                return
            event = self._next(left_s)
            if event is None:
                self._host.is_hurried = True
                return
            try:
                self._hear(event)
                if self.keeper.kept and self._host.events.is_empty():
                    self._look()
            except AlignedServeError as error:  # nothing can be started any more
                say(str(error))
                self._keep(frozenset())


def hears_hangup() -> bool:
    """Return whether SIGHUP is a command here: neither a terminal that hangs up sends it, nor is it ignored (nohup)."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return False
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
