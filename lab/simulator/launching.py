"""The launcher of a simulated deployment: starts and stops workers when `alignedserve scale` or the router asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from alignedserve.core import Role
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.machines.world import World
from alignedserve.launch.orders import Scaling, scale
from alignedserve.shell.control import LauncherOrder

WORKERS = (Role.PREFILL, Role.DECODE)


class SimulatedLauncher:
    """Starts and retires workers in a simulated world; `start` begins the first life of a worker."""

    def __init__(
        self,
        world: World,
        members: Mapping[str, Role],
        node_of: Callable[[str, Role], str],
        start: Callable[[str, Role], None],
        start_s: float,
        drain_s: float,
    ) -> None:
        self._world, self._node_of, self._start = world, node_of, start
        self._start_s, self._drain_s = start_s, drain_s
        self._members = dict(members)  # those that run, are about to start, or are leaving
        self._leaving: set[str] = set()
        self._starts_at: dict[str, float] = {}  # new workers that have not started yet
        self.workers = {
            name: role for name, role in members.items() if role in WORKERS
        }  # all workers of the run, also those that have gone
        self.log: list[tuple[float, Scaling]] = []
        world.on_gone = self._remove

    @property
    def members(self) -> Mapping[str, Role]:
        return self._members

    def scale(self, prefill: int | None, decode: int | None) -> None:
        agenda = self._world.agenda
        workers = [(role, name) for name, role in self._members.items() if role in WORKERS]
        changes = scale(workers, self._leaving, LauncherOrder(prefill=prefill, decode=decode))
        if changes.new or changes.retiring:
            self.log.append((agenda.now, changes))
        for name in changes.new:
            role = Role(name.partition("-")[0])
            self._members[name] = self.workers[name] = role
            self._world.welcome(name)
            self._starts_at[name] = at = agenda.now + self._start_s
            agenda.at(at, Priority.FAULT, partial(self._begin, name, role, at))
        for name in changes.retiring:
            self._leaving.add(name)
            self._starts_at.pop(name, None)
            self._world.retire(name)
            agenda.at(agenda.now + self._drain_s, Priority.FAULT, partial(self._end_overdue, name))

    def _begin(self, name: str, role: Role, at: float) -> None:
        if self._starts_at.get(name) == at:
            del self._starts_at[name]
            self._start(name, role)

    def _end_overdue(self, name: str) -> None:
        if name in self._leaving:
            self._world.end_for_good(name)

    def _remove(self, name: str) -> None:
        """Remove a member that has gone for good; a pool ends with the last decode worker of its node."""
        role = self._members.pop(name)
        self._leaving.discard(name)
        if role is not Role.DECODE:
            return
        node = self._node_of(name, role)
        if all(self._node_of(worker, role) != node for worker in self._members_as(role)):
            for pool in self._members_as(Role.POOL):
                if self._node_of(pool, Role.POOL) == node:
                    self._world.end_for_good(pool)

    def _members_as(self, role: Role) -> list[str]:
        return [name for name, its_role in self._members.items() if its_role is role]
