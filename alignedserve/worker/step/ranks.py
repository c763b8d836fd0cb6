"""Seated requests, in the order in which a step serves them (slo.Standing)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from typing import Any

from alignedserve.scheduling.orders import ByKey
from alignedserve.scheduling.slo import Rank
from alignedserve.worker.step.decode_order import DecodeOrder
from alignedserve.worker.step.lines import Ranked
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.view import StepContext


def ranked(seated: Sequence[Running], at: StepContext) -> Iterable[Ranked]:
    """Return seated requests with their keys, as they are to be served."""
    ordering = at.policy.ordering
    if ordering.goes_by_promises:
        return RankedRequests.build(seated, at)
    return ranked_by_key(seated, at, ordering) if isinstance(ordering, ByKey) else ranked_by_arrival(seated)


def in_order(seated: Iterable[Running], at: StepContext) -> list[Running]:
    """Return seated requests as they are to be served."""
    return [running for _, running in ranked(tuple(seated), at)]


def last(prompts: Iterable[Running], at: StepContext) -> Running:
    """Return the seated prompt that is served last."""
    return in_order(prompts, at)[-1]


def ranked_by_arrival(seated: Iterable[Running]) -> list[Ranked]:
    """Return seated requests before all that wait."""
    return [((-1,), running) for running in seated]


def ranked_by_key(seated: Iterable[Running], at: StepContext, ordering: ByKey) -> list[Ranked]:
    """Return seated requests in an order by a fixed key."""

    def place(running: Running) -> Ranked:
        standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
        return (ordering.key(standing), standing.arrival_at, standing.id), running

    return sorted(map(place, seated), key=key_of)


@dataclass(slots=True)
class RankedRequests:
    """Seated requests in one list per rank; each list is in the order of its rank."""

    urgent_rt: list[Ranked] = field(default_factory=list)
    urgent_be: list[Ranked] = field(default_factory=list)
    rt: list[Ranked] = field(default_factory=list)
    be: list[Ranked] = field(default_factory=list)
    late: list[Ranked] = field(default_factory=list)

    @classmethod
    def build(cls, seated: Iterable[Running], at: StepContext) -> RankedRequests:
        found, late, by_slack = cls(), at.policy.late, at.policy.ranks_be_by_slack
        lists = {
            Rank.URGENT_RT: found.urgent_rt,
            Rank.URGENT_BE: found.urgent_be,
            Rank.RT: found.rt,
            Rank.BE: found.be,
            Rank.LATE: found.late,
        }
        for running in seated:
            standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
            key: tuple[Any, ...] = standing.key(at.times, late)
            if by_slack and key[0] is Rank.BE:
                key = (*key[:3], standing.slack_s, standing.remaining)
            lists[key[0]].append(((*key, standing.arrival_at, standing.id), running))
        for ranks in lists.values():
            ranks.sort(key=key_of)
        return found

    def __iter__(self) -> Iterator[Ranked]:
        return chain(self.urgent_rt, self.urgent_be, self.rt, self.be, self.late)

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        return self.urgent_rt if is_rt else self.urgent_be

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        """Return the decodes that are not urgent."""
        return [found for found in (self.rt if is_rt else self.be) if found[1].decodes]

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        """Return the prompts that are not urgent."""
        return [found for found in (self.rt if is_rt else self.be) if not found[1].decodes]

    def dropped(self) -> Iterable[Ranked]:
        """Return the requests that are dropped to the end because they are late."""
        return self.late


class KeptRanks:
    """The same for decodes whose order is kept between steps, and for prompts. Only what is asked for is ranked."""

    def __init__(self, kept: DecodeOrder, prompts: Iterable[Running], at: StepContext) -> None:
        self._kept, self._prompts, self._at = kept, RankedRequests.build(prompts, at), at

    def __iter__(self) -> Iterator[Ranked]:
        for is_rt in (True, False):
            yield from self.urgent(is_rt)
        for is_rt in (True, False):
            yield from merge(self.decodes(is_rt), self.prompts(is_rt), key=key_of)
        yield from self.dropped()

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        decodes = self._kept.urgent(self._at.now, self._at.times.most_s, is_rt)
        return merge(decodes, self._prompts.urgent(is_rt), key=key_of)

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        return self._kept.later(self._at.now, self._at.times.most_s, is_rt)

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        return self._prompts.prompts(is_rt)

    def dropped(self) -> Iterable[Ranked]:
        return merge(self._kept.late(self._at.now), self._prompts.dropped(), key=key_of)


def key_of(ranked: Ranked) -> Any:
    return ranked[0]


def in_turn(*orders: Iterable[Ranked]) -> Iterable[Ranked]:
    """Return several orders as one."""
    return merge(*orders, key=key_of)
