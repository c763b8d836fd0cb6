"""Parts: the small objects that a worker's core is made of, and the verbs that all of them share.

    event ──▶ each part hears it ──▶ the acts of the turn ──▶ commands

A core keeps its parts in one tuple and asks them in that order. An event may concern several parts: then each of them
matches it. When the pool is lost, parts compare the lost member with the pool that they knew; so `PoolLink`, which
forgets it, comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.step.running import Running

REFRESH_S = 5.0  # after which what was not answered is said again
REFRESH = "refresh"  # name of the timer

Act: TypeAlias = Callable[[float], list[Command]]  # what a core does in each turn, whatever has happened; now is given


class CorePart:
    """A piece of a worker's core with state of its own. A verb that a part does not override does nothing."""

    def hear(self, event: Event, now: float) -> list[Command]:
        """Take note of the event, and return the commands that follow from it at once."""
        return []

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, and release what the pool keeps for it."""
        return []

    def attempts(self) -> list[Attempt]:
        """Return the attempts that this part has."""
        return []

    def occupants(self) -> list[Running]:
        """Return the requests of this part that have block pairs on the device."""
        return []

    def ask_again(self) -> None:
        """Prepare to repeat what was asked and not answered: the ask or its answer may have been lost."""

    def repeat(self, to: str) -> list[Command]:
        """Say again what a member may have missed, because a frame to it was lost."""
        return []

    @property
    def awaits_answer(self) -> bool:
        """Return whether this part may have to repeat something later, so that the refresh timer has to run."""
        return False


class Roster:
    """All parts of one core. Parts get the roster when they are made, and the core enlists them when all are there."""

    def __init__(self) -> None:
        self.parts: tuple[CorePart, ...] = ()
        # Asked at every event, so only the parts that have anything to answer:
        self._hears: tuple[Callable[[Event, float], list[Command]], ...] = ()
        self._attempts: tuple[Callable[[], list[Attempt]], ...] = ()
        self._occupants: tuple[Callable[[], list[Running]], ...] = ()

    def enlist(self, *parts: CorePart) -> None:
        self.parts = parts
        self._hears = tuple(part.hear for part in parts if type(part).hear is not CorePart.hear)
        self._attempts = tuple(part.attempts for part in parts if type(part).attempts is not CorePart.attempts)
        self._occupants = tuple(part.occupants for part in parts if type(part).occupants is not CorePart.occupants)

    def hear(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        for hear in self._hears:
            commands += hear(event, now)
        return commands

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, wherever it is."""
        return [command for part in self.parts for command in part.drop(request, attempt)]

    def attempts(self) -> list[Attempt]:
        """Return all attempts that are on this worker."""
        return [attempt for attempts in self._attempts for attempt in attempts()]

    def occupants(self) -> list[Running]:
        """Return all requests that have block pairs on the device."""
        return [running for occupants in self._occupants for running in occupants()]

    def ask_again(self) -> None:
        for part in self.parts:
            part.ask_again()

    def repeat(self, to: str) -> list[Command]:
        return [command for part in self.parts for command in part.repeat(to)]

    @property
    def awaits_answer(self) -> bool:
        return any(part.awaits_answer for part in self.parts)
