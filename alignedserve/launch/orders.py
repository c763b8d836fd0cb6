"""What users order while a deployment serves: `alignedserve scale`, `restart` and `reload`."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alignedserve.config.config import Config, dump, every_setting, plain
from alignedserve.config.setting import leaves
from alignedserve.core import WORKERS, Role
from alignedserve.errors import AlignedServeError, ConfigError
from alignedserve.gateway.access.exposure import check_exposure
from alignedserve.launch.host import Host, NewPlace, say
from alignedserve.launch.keeper import Change, Keeper
from alignedserve.protocol.messages import rank_suffix
from alignedserve.shell.control import RESTARTED, ControlError, HeardOrder, LauncherOrder

if TYPE_CHECKING:
    from alignedserve.shell.part import PartSpec

RESTART_ORDER = [Role.ROUTER, Role.POOL, *WORKERS, Role.GATEWAY, Role.JOBS]
ROOM_S, ROOM_LOOK_S = 5.0, 0.5  # for the place of a spare, and between two looks


class Orders:
    """Carries out orders, one restart at a time. `other_weights` looks at the models' folders (plan.py)."""

    def __init__(
        self,
        keeper: Keeper,
        host: Host,
        reloading: Reloading,
        other_weights: Callable[[Iterable[PartSpec]], str],
    ) -> None:
        self._keeper, self._host, self._reloading = keeper, host, reloading
        self._other_weights = other_weights
        self._restart: Restart | None = None
        keeper.on_change = self._changed

    def obey(self, asked: HeardOrder) -> None:
        if asked.order.reload:
            self._reload(asked)
        elif self._restart is not None and not self._restart.is_over:
            asked.answer("error: a restart goes on: wait until it has ended, or interrupt it")
            asked.done()
        elif not asked.order.restart:
            self._scale(asked)
        elif not self._keeper.starts.is_open:
            asked.answer("error: it still starts: wait until it serves")
            asked.done()
        elif why := self._new_weights():
            asked.answer(f"error: nothing is restarted: {why}")
            asked.done()
        else:
            self._restart = Restart(self._keeper, self._host, asked)
            self._restart.go_on()

    def _changed(self, change: Change, part: str, why: str) -> None:
        if self._restart is not None and self._keeper.serves:
            self._restart.hear(change, part, why)

    def _reload(self, asked: HeardOrder) -> None:
        """Take new keys, certificates and settings, or none of them."""
        try:
            new, lines = self._reloading.read()
        except AlignedServeError as error:
            lines = [f"error: {error}"]
        else:
            lines += self._keeper.take(new)
            if why := self._new_weights():
                lines.append(f"the model stays as it is: {why}")
        for line in lines:
            say(f"reload: {line}")
            asked.answer(line)
        asked.done()

    def _new_weights(self) -> str:
        """Return why a restart cannot take what lies in the model's folder; empty where nothing else lies there. Parts
        that come one after another would answer with two models, and a stream would go on with the other one."""
        try:
            folder = self._other_weights(part.spec for part in self._keeper.parts())
        except AlignedServeError as error:
            return str(error)
        port = self._keeper.config.server.port
        how = f"`alignedserve stop --port {port}` and then `alignedserve serve` as before"
        return folder and f"{folder} has other weights than this deployment started with: {how} takes them"

    def _scale(self, asked: HeardOrder) -> None:
        """Start and retire workers as an order says."""
        keeper = self._keeper
        try:
            check_scale(keeper.config, asked.order)
            units = keeper.units.items()
            workers = [(unit.role, name) for name, unit in units if unit.role in WORKERS and not unit.spec.of_embed]
            leaving = [name for name, unit in keeper.units.items() if unit.is_retiring]
            scaling = scale(workers, leaving, asked.order)
            places = [(name, self._host.make_place(name)) for name in scaling.new]
        except Exception as error:  # Ray raises errors of many kinds
            asked.answer(f"error: {error}")
            return asked.done()
        if asked.order.why:
            say(f"scales by itself: {asked.order.why}")
        for name, place in places:
            for part in (*place.pools, name):
                keeper.add(part)
                asked.answer(place.lacks or f"{part} starts")
        for name in scaling.retiring:
            if keeper.units[name].is_there:  # or it ends at once
                asked.answer(f"{name} takes nothing new, and ends when nothing is left there")
            keeper.retire(name, asked)
        return asked.done() if not scaling.retiring else None


# --- Scale


@dataclass(frozen=True)
class Scaling:
    new: tuple[str, ...]  # names of workers
    retiring: tuple[str, ...]


def scale(workers: Iterable[tuple[Role, str]], leaving: Collection[str], order: LauncherOrder) -> Scaling:
    """Return the workers to start and to retire, given those that are there and those that leave already. The worker
    that came last is retired first."""
    workers = list(workers)
    new, retiring = list[str](), list[str]()
    for role, count in ((Role.PREFILL, order.prefill), (Role.DECODE, order.decode)):
        named = [name for its_role, name in workers if its_role is role]
        there = [name for name in named if name not in leaving]
        if count is not None:
            retiring += reversed(there[count:])
            new += itertools.islice(_free_names(role, named), max(0, count - len(there)))
    return Scaling(tuple(new), tuple(retiring))


def check_scale(config: Config, order: LauncherOrder) -> None:
    """Raise ControlError if the deployment cannot have this number of workers."""
    if config.topology.colocated and order.prefill is not None:
        raise ControlError("the deployment is colocated: it has only decode workers, which run the prompts too")
    for name, count, between, without in (
        ("prefill", order.prefill, config.scale.prefill, "no prompt would run"),
        ("decode", order.decode, config.scale.decode, "no request would decode"),
    ):
        if count is not None and count < 1:
            raise ControlError(f"without a {name} worker {without}: --{name} is 1 at least")
        if between is not None and count is not None and count not in between:
            raise ControlError(
                f"--{name} {count} is not in scale.{name} {between}, which the deployment was started with"
            )


def _free_names(role: Role, taken: Collection[str]) -> Iterable[str]:
    names = (f"{role.value}-{number}" for number in itertools.count())
    return (name for name in names if name not in taken)


# --- Restart


class Restart:
    """Replaces the parts of a deployment one after another.

        gateway, worker    a spare starts ──▶ the spare runs ──▶ the part is retired ──▶ it has ended ──▶ the next part
        all others         the part is ended ──▶ it has ended ──▶ its next life runs ──▶ the next part

    A worker's spare needs memory beside the worker. Where there is none, `in_place` treats workers as the others: their
    streams wait for the next life of a worker, or go on at once where another worker has room.
    """

    def __init__(self, keeper: Keeper, host: Host, asked: HeardOrder) -> None:
        self._keeper, self._host, self._asked = keeper, host, asked
        units = sorted(keeper.units.values(), key=lambda unit: RESTART_ORDER.index(unit.role))
        self._waiting = deque(unit.name for unit in units if not unit.is_retiring)
        self._began_at, self.is_over = time.monotonic(), False
        self._part = self._spare = ""  # the part that is replaced, and what replaces it, if that is another
        self._awaited: tuple[Change, str] | None = None

    def go_on(self) -> None:
        """Replace the next part."""
        if not self._waiting:
            return self._end(f"{RESTARTED} after {time.monotonic() - self._began_at:.0f} s")
        self._part, self._spare = self._waiting.popleft(), ""
        if self._asked.has_gone:
            return self._end(f"error: it was interrupted, and ends before {self._part}")
        return self._try(self._begin)

    def hear(self, change: Change, part: str, why: str) -> None:
        if self.is_over:
            return None
        if (change, part) == (Change.LEFT_OUT, self._spare):
            return self._give_up(f"{why}; --in-place ends a worker before the next one starts")
        # Left out, or gone with its pool: it will never run.
        if (change, part) == (Change.IS_OVER, self._spare or self._part) and part not in self._keeper.units:
            return self._give_up(f"{part} has ended for good; see the log")
        if (change, part) != self._awaited:
            return None
        if change is Change.RUNS and self._spare:
            return self._try(self._retire)
        if change is Change.IS_OVER and not self._spare:
            self._awaited = (Change.RUNS, self._part)
            return None
        return self.go_on()

    def _begin(self) -> None:
        unit, tell = self._keeper.units[self._part], self._asked.answer
        in_place = self._asked.order.in_place or unit.spec.of_embed
        if unit.role is Role.GATEWAY or (unit.role in WORKERS and not in_place):
            spare = next(iter(_free_names(unit.role, self._keeper.units)))
            for other in self._place_spare(spare).pools if unit.role in WORKERS else ():
                self._keeper.add(other)
            self._spare, self._awaited = spare, (Change.RUNS, spare)
            tell(f"{spare} starts, in place of {self._part}")
            self._keeper.add(spare, self._part)
        else:
            self._awaited = (Change.RUNS if unit.is_paused else Change.IS_OVER, self._part)
            tell(f"{self._part} ends, and starts again")
            if not unit.is_paused:
                self._keeper.end_softly(unit)

    def _retire(self) -> None:
        self._awaited = (Change.IS_OVER, self._part)
        self._asked.answer(f"{self._part} takes nothing new, and ends when nothing is left there")
        self._keeper.retire(self._part)

    def _place_spare(self, spare: str) -> NewPlace:
        """Make a place for the spare of a worker; raise where there is none.

        Ray shows only after a moment that the room of the worker before is free, so this looks again for ROOM_S. The
        keeper hears nothing else meanwhile: on a cluster that has no room, parts that end start again that much later.
        """
        until = time.monotonic() + ROOM_S
        ranks = [f"{spare}{rank_suffix(part.spec.rank)}" for part in self._keeper.units[self._part].parts]
        while (place := self._host.make_place(spare)).lacks:
            for other in (*place.pools, *ranks):
                self._host.forget(other)
            if time.monotonic() > until:
                raise AlignedServeError(f"{place.lacks}; --in-place ends a worker before the next one starts")
            time.sleep(ROOM_LOOK_S)
        return place

    def _try(self, step: Callable[[], None]) -> None:
        """Take a step. Where that fails, the restart ends there: what was replaced stays."""
        try:
            step()
        except Exception as error:  # Ray raises errors of many kinds
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._end(f"error: {self._part} is not replaced: {why}")

    def _end(self, line: str) -> None:
        say(f"restart: {line}")
        self.is_over, self._awaited = True, None
        self._asked.answer(line)
        self._asked.done()


# --- Reload


class Reloading:
    """The settings that were asked for, with a way to read them again where they came from."""

    def __init__(self, asked: Config, read: Callable[[], Config]) -> None:
        self._asked, self._read = asked, read

    @property
    def asked(self) -> dict[str, Any]:
        """Return the settings that were asked for last, as plain values."""
        return dump(self._asked)

    def read(self) -> tuple[Config, list[str]]:
        """Return the settings that are asked for now, and what is new, in lines. Raise a ConfigError where they cannot
        be taken, or not without a restart: nothing changes then."""
        again, declared = self._read(), every_setting()
        both = zip(leaves(self._asked), leaves(again), strict=True)
        changed = {path: new for (path, old), (_, new) in both if new != old}
        turns_tls = (again.server.tls_cert is None) is not (self._asked.server.tls_cert is None)
        fixed = [path for path in changed if not declared[path].reloads or (turns_tls and path == "server.tls_cert")]
        if fixed:
            raise ConfigError(f"nothing has changed, since this needs a restart: {', '.join(fixed)}")
        checked = check_exposure(again)
        self._asked = again
        lines = [f"{path}: {'new' if declared[path].secret else plain(new)}" for path, new in changed.items()]
        server = checked.server
        files = {"keys": server.keys_file, "certificate": server.tls_cert}
        return checked, [
            *(lines or ["no setting has changed"]),
            *(f"{what}: as {path} has them now" for what, path in files.items() if path is not None),
        ]
