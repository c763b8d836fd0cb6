"""The open requests of the router, each with its present attempt, and how many are in each state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from alignedserve.core import ServiceClass
from alignedserve.protocol.figures import ByClass, Stages
from alignedserve.protocol.messages import Attempt, Member
from alignedserve.router.lifecycle import OPEN, PLACES, Fact, OpenRequest, State


class OpenRequests:
    def __init__(self) -> None:
        self._all: dict[str, OpenRequest] = {}  # by the request's id
        self._num: dict[ServiceClass, Counter[State]] = {service: Counter() for service in ServiceClass}
        self.waiting: dict[str, OpenRequest] = {}  # those in WAITING, in their order of arrival
        self.suspects: dict[str, OpenRequest] = {}  # those that may run only alone, in their order of arrival
        self._tried: dict[ServiceClass, dict[str, State]] = {service: {} for service in ServiceClass}  # with a death
        self._given_up: Counter[tuple[ServiceClass, Fact]] = Counter()  # attempts that were lost or came back

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._all.values())

    def get(self, id: str) -> OpenRequest | None:
        return self._all.get(id)

    def current(self, key: Attempt) -> OpenRequest | None:
        """Return the open request if this is its present attempt."""
        opened = self._all.get(key[0])
        return opened if opened is not None and opened.request.attempt == key[1] else None

    def is_unknown(self, key: Attempt) -> bool:
        """Return whether neither this attempt nor a later one is open."""
        opened = self._all.get(key[0])
        return opened is None or opened.request.attempt < key[1]

    def stages(self, service: ServiceClass) -> Stages:
        """Count the open requests of a class by the place that has them."""
        return Stages(*(self._num[service][state] for state in OPEN))

    def num_tried(self, service: ServiceClass) -> tuple[int, int]:
        """Count the requests of a class that members have, and whose last worker ended at about where they are: those
        at prefill workers, and all."""
        states = self._tried[service].values()
        return sum(state is State.PREFILL for state in states), len(states)

    def acquit(self, opened: OpenRequest) -> None:
        self._tried[opened.request.service].pop(opened.request.id, None)
        opened.request = replace(opened.request, deaths=0)

    def num_given_up(self, fact: Fact) -> ByClass:
        """Count how often a worker gave a request back, or an attempt was lost, so far."""
        return ByClass(*(self._given_up[service, fact] for service in ServiceClass))

    def add(self, opened: OpenRequest) -> None:
        self._all[opened.request.id] = self.waiting[opened.request.id] = opened
        self._num[opened.request.service][opened.state] += 1
        if opened.request.is_suspect:
            self.suspects[opened.request.id] = opened

    def move(self, opened: OpenRequest, to: Member, fact: Fact, now: float) -> None:
        """Record that `to` has the request now."""
        self.waiting.pop(opened.request.id, None)
        num = self._num[opened.request.service]
        num[opened.state] -= 1
        opened.becomes(PLACES[to.role], fact, to.name)
        opened.moved_at = now
        if fact is Fact.RETURNED:
            self._given_up[opened.request.service, fact] += 1
        num[opened.state] += 1
        if opened.request.deaths:
            self._tried[opened.request.service][opened.request.id] = opened.state

    def remove(self, opened: OpenRequest, end: State, fact: Fact) -> None:
        """Forget the request, which has come to this end."""
        self.waiting.pop(opened.request.id, None)
        self.suspects.pop(opened.request.id, None)
        self._tried[opened.request.service].pop(opened.request.id, None)
        self._num[opened.request.service][opened.state] -= 1
        del self._all[opened.request.id]
        opened.becomes(end, fact)
        if fact is Fact.LOST:
            self._given_up[opened.request.service, fact] += 1
