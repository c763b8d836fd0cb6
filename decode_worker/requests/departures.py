"""Requests that leave a decode worker for a prefill worker; each has its pairs until it is sent (leaving.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alignedserve.protocol.messages import Attempt, Member
from alignedserve.worker.step.running import Running


@dataclass(eq=False)
class Departure:
    running: Running  # with its pairs
    to: Member
    wait_s: float  # until it is back, as was expected
    number: int | None = None  # of the transfer, once it is pulled
    is_wanted: bool = True

    @property
    def is_unpulled(self) -> bool:
        """Return whether it is wanted and its receiver has not pulled it yet."""
        return self.is_wanted and self.number is None


class Departures:
    def __init__(self) -> None:
        self._departures: list[Departure] = []

    def __iter__(self) -> Iterator[Departure]:
        return iter(self._departures)

    def __len__(self) -> int:
        return len(self._departures)

    def add(self, departure: Departure) -> None:
        self._departures.append(departure)

    def remove(self, departure: Departure) -> None:
        self._departures.remove(departure)

    @property
    def wanted(self) -> list[Departure]:
        return [departure for departure in self._departures if departure.is_wanted]

    @property
    def unpulled(self) -> list[Departure]:
        return [departure for departure in self._departures if departure.is_unpulled]

    def find(self, attempt: Attempt) -> Departure | None:
        """Return the departure of this attempt, if it is wanted."""
        return next((departure for departure in self.wanted if departure.running.key == attempt), None)

    def pulled_as(self, receiver: str, number: int) -> Departure | None:
        """Return the departure that this holder has pulled under this number."""
        found = (
            departure for departure in self._departures if (departure.to.holder, departure.number) == (receiver, number)
        )
        return next(found, None)

    def attempts_to(self, member: str) -> set[Attempt]:
        """Return the attempts on their way to the member of this name."""
        return {departure.running.key for departure in self.wanted if departure.to.name == member}
