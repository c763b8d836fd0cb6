"""A worker's core: parts that hear what has happened, and a turn of acts that follows each event."""

from __future__ import annotations

from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event
from alignedserve.protocol.messages import Member
from alignedserve.worker.device import DeviceMemory
from alignedserve.worker.faults import Faults
from alignedserve.worker.parts.part import Act, Roster
from alignedserve.worker.parts.pool_link import PoolLink


class ComposedCore:
    """What the cores of both workers show to others. A core makes its parts, enlists them, and names its turn."""

    def __init__(
        self, roster: Roster, turn: tuple[Act, ...], memory: DeviceMemory, pool: PoolLink, faults: Faults
    ) -> None:
        self._roster, self._turn = roster, turn
        self._memory, self._pool, self._faults = memory, pool, faults

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = self._roster.hear(event, now)
        for act in self._turn:
            commands += act(now)
        return commands

    @property
    def pool(self) -> Member | None:
        """Return the member whose pages are copied from and to."""
        return self._pool.member

    @property
    def pairs(self) -> list[int]:
        """Return each pair of the device once, as long as all is well."""
        return self._memory.pairs_with(self._roster.occupants())

    @property
    def free_share(self) -> float:
        """Return the share of the device's pairs that is free."""
        return self._memory.free_share

    @property
    def num_refused(self) -> int:
        """Return how many copies from the pool were not intact."""
        return self._faults.num_refused

    @property
    def num_failed_transfers(self) -> int:
        return self._faults.num_failed_transfers
