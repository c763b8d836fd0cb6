"""The keeper that a user commands while its deployment serves: `alignedserve reload`, `scale`, `restart`, and `stop
--launcher`, which ends the keeper alone."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from dataclasses import replace

from alignedserve.config.config import dump, parse, reloaded
from alignedserve.core import WORKERS
from alignedserve.errors import AlignedServeError
from alignedserve.launch.keeper import Keeper, NewPlace, say
from alignedserve.launch.restarting import Act, PartChange, Restart, Step
from alignedserve.launch.scaling import change, check
from alignedserve.launch.succession import OUTLIVE_S
from alignedserve.protocol.messages import LAUNCHER, rank_suffix
from alignedserve.shell.control import RESTARTED, HeardOrder
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.logs import set_up

ROOM_S, ROOM_LOOK_S = 5.0, 0.5  # for the place of a spare, and between two looks


class CommandedKeeper(Keeper):
    """A keeper that takes orders."""

    _restart: Restart | None = None  # while one goes on
    _asked_to_restart: HeardOrder

    @property
    def may_be_followed(self) -> bool:
        """Return whether parts go on when this launcher ends, for the next one."""
        return False

    def _obey(self, asked: HeardOrder) -> None:
        order = asked.order
        if order.leave:
            self._leave(asked)
        elif order.reload:
            self._reload(asked)
        elif self._restart is not None:
            asked.answer("error: a restart goes on: wait until it has ended, or interrupt it")
            asked.done()
        elif order.restart:
            self._begin_restart(asked)
        else:
            self._scale(asked)

    def _leave(self, asked: HeardOrder) -> None:
        """End this process alone, as one that is killed: its parts listen for the next launcher."""
        if not self.may_be_followed:
            asked.answer("error: parts of this deployment end with their launcher: it needs a --port, and no Ray")
            return asked.done()
        goes_on = "and `alignedserve serve` goes on with them"
        asked.answer(f"the launcher ends; its parts serve on for {OUTLIVE_S:g} s, {goes_on}")
        asked.done()
        self.remember()
        sys.stdout.flush()
        os._exit(ExitCode.LAUNCHER_GONE)  # a supervisor starts the next one

    # --- Settings

    def _reload(self, asked: HeardOrder) -> None:
        """Take new keys, certificates and settings, or none of them."""
        try:
            new, lines = self._reloading.read()
        except AlignedServeError as error:
            lines = [f"error: {error}"]
        else:
            self._config = reloaded(self._config, new)
            set_up(self._config.log, LAUNCHER, "alignedserve.launch")
            tree = dump(reloaded(parse(self._specs[0].config), new))
            self._specs = [replace(spec, config=tree) for spec in self._specs]
            for name, life in self._lives.items():
                life.spec = replace(life.spec, config=tree)
                try:
                    if name in self._alive:
                        self.hand_on(life.spec)
                except Exception as error:  # as on a full machine
                    lines += [f"error: {name} keeps the old settings until it starts again: {error}"]
            self.remember()
        for line in lines:
            say(f"reload: {line}")
            asked.answer(line)
        asked.done()

    # --- Workers

    def _scale(self, asked: HeardOrder) -> None:
        """Start and retire workers as an order says."""
        workers = [(spec.role, spec.name) for spec in self._specs if spec.role in WORKERS and not spec.rank]
        try:
            check(self._config, asked.order)
            changed = change(workers, self._retiring, asked.order)
            places = [(name, self.make_place(name)) for name in changed.new]
        except Exception as error:  # Ray raises errors of many kinds
            asked.answer(f"error: {error}")
            return asked.done()
        if asked.order.why:
            say(f"scales by itself: {asked.order.why}")
        for name, place in places:
            for part in (*place.pools, name):
                self._add(part)
                asked.answer(place.lacks or f"{part} starts")
        for name in changed.retiring:
            if name not in self._paused and self._lives[name].began_at < math.inf:  # or it ends at once
                asked.answer(f"{name} takes nothing new, and ends when nothing is left there")
            self._retire(name, asked)
        return asked.done() if not changed.retiring else None

    # --- All parts, one after another

    def _begin_restart(self, asked: HeardOrder) -> None:
        if not self._starts.is_open:
            asked.answer("error: it still starts: wait until it serves")
            return asked.done()
        parts = [(spec.role, spec.name) for spec in self._specs if not spec.rank and spec.name not in self._retiring]
        self._restart = Restart(parts, time.monotonic(), asked.order.in_place)
        self._asked_to_restart = asked
        return self._do(self._restart.next())

    def _changed(self, change: PartChange, part: str, why: str = "") -> None:
        if self._restart is not None and self._kept and not self._drains:
            step = self._restart.hear(change, part, why)
            if step is not None:
                self._do(step)

    def _do(self, step: Step) -> None:
        """Take a step of the restart. Where that fails, it ends there: what was replaced stays."""
        try:
            self._take(step)
        except Exception as error:  # Ray raises errors of many kinds
            self._end_restart(f"error: {step.part} is not replaced: {error}")

    def _take(self, step: Step) -> None:
        assert self._restart is not None
        part, tell = step.part, self._asked_to_restart.answer
        if step.act in (Act.START_SPARE, Act.END) and self._asked_to_restart.has_gone:
            self._end_restart(f"error: it was interrupted, and ends before {part}")
        elif step.act is Act.START_SPARE:
            role = self._lives[part].spec.role
            names = (f"{role.value}-{number}" for number in itertools.count())
            spare = next(name for name in names if name not in self._lives)
            for other in self._place_spare(spare, part).pools if role in WORKERS else ():
                self._add(other)
            self._restart.spare = spare
            tell(f"{spare} starts, in place of {part}")
            self._add(spare, part)
        elif step.act is Act.RETIRE:
            tell(f"{part} takes nothing new, and ends when nothing is left there")
            self._retire(part)
        elif step.act is Act.END:
            tell(f"{part} ends, and starts again")
            if part in self._paused:
                self._restart.hear(PartChange.IS_OVER, part)
            else:
                self._end_softly(self._lives[part].spec)
        elif step.act is Act.FINISH:
            self._end_restart(f"{RESTARTED} after {self._restart.took_s(time.monotonic()):.0f} s")
        else:
            raise AlignedServeError(f"{step.why}; --in-place ends a worker before the next one starts")

    def _place_spare(self, spare: str, part: str) -> NewPlace:
        """Make a place for the spare of a worker; raise where there is none.

        Ray shows only after a moment that the room of the worker before is free, so this looks again for ROOM_S. The
        keeper hears nothing else meanwhile: on a cluster that has no room, parts that end start again that much later.
        """
        until = time.monotonic() + ROOM_S
        while (place := self.make_place(spare)).lacks:
            for other in (*place.pools, *(f"{spare}{rank_suffix(rank.rank)}" for rank in self._ranks(part))):
                self.forget(other)
            if time.monotonic() > until:
                raise AlignedServeError(f"{place.lacks}; --in-place ends a worker before the next one starts")
            time.sleep(ROOM_LOOK_S)
        return place

    def _end_restart(self, line: str) -> None:
        say(f"restart: {line}")
        self._restart = None
        self._asked_to_restart.answer(line)
        self._asked_to_restart.done()
