"""Those that are seated, in the order in which a step serves them (slo.Standing)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from typing import Any

from alignedserve.scheduling.policy import Choice, Order
from alignedserve.scheduling.slo import Rank
from alignedserve.worker.step.limits import Moment
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seated import Seated
from alignedserve.worker.step.waiting import Ranked


def ranked(these: Sequence[Running], at: Moment) -> Iterable[Ranked]:
    """Of those that are seated, as they are to be served."""
    match at.policy.order:
        case Order.SLACK:
            return Ranks.of(these, at)
        case Order.FCFS:
            return by_arrival(these)
    standings = ((one.promise.standing(at.now, one.work(at.chunk), at.times), one) for one in these)
    return sorted((((one.remaining, one.arrival_at, one.id), running) for one, running in standings), key=by_key)


def in_order(seated: Iterable[Running], at: Moment) -> list[Running]:
    """Those that are seated, as they are to be served."""
    return [running for _, running in ranked(tuple(seated), at)]


def last(prompts: Iterable[Running], at: Moment) -> Running:
    """Of those that are seated."""
    return in_order(prompts, at)[-1]


def by_arrival(seated: Iterable[Running]) -> list[Ranked]:
    """Before all that wait."""
    return [((-1,), running) for running in seated]


@dataclass(slots=True)
class Ranks:
    """Those that are seated, by what becomes of them; each list in its order."""

    urgent_rt: list[Ranked] = field(default_factory=list)
    urgent_be: list[Ranked] = field(default_factory=list)
    rt: list[Ranked] = field(default_factory=list)
    be: list[Ranked] = field(default_factory=list)
    late: list[Ranked] = field(default_factory=list)

    @classmethod
    def of(cls, these: Iterable[Running], at: Moment) -> Ranks:
        found, late, by_windows = cls(), at.policy.late, at.policy.selection is Choice.MULTI_RESOURCE
        lists = {
            Rank.URGENT_RT: found.urgent_rt,
            Rank.URGENT_BE: found.urgent_be,
            Rank.RT: found.rt,
            Rank.BE: found.be,
            Rank.LATE: found.late,
        }
        for running in these:
            standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
            key: tuple[Any, ...] = standing.key(at.times, late)
            if by_windows and key[0] is Rank.BE and (standing.is_prompt or at.policy.as_in_paper):
                key = (*key[:3], standing.slack_s, standing.remaining)
            lists[key[0]].append(((*key, standing.arrival_at, standing.id), running))
        for ranks in lists.values():
            ranks.sort(key=by_key)
        return found

    def __iter__(self) -> Iterator[Ranked]:
        return chain(self.urgent_rt, self.urgent_be, self.rt, self.be, self.late)

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        return self.urgent_rt if is_rt else self.urgent_be

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        """Of those that are not urgent."""
        return [one for one in (self.rt if is_rt else self.be) if one[1].decodes]

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        """Of those that are not urgent."""
        return [one for one in (self.rt if is_rt else self.be) if not one[1].decodes]

    def dropped(self) -> Iterable[Ranked]:
        return self.late


class KeptRanks:
    """The same of decodes whose order is kept between steps, and of prompts; nobody is ranked who is not asked for."""

    def __init__(self, kept: Seated, prompts: Iterable[Running], at: Moment) -> None:
        self._kept, self._prompts, self._at = kept, Ranks.of(prompts, at), at

    def __iter__(self) -> Iterator[Ranked]:
        for is_rt in (True, False):
            yield from self.urgent(is_rt)
        for is_rt in (True, False):
            yield from merge(self.decodes(is_rt), self.prompts(is_rt), key=by_key)
        yield from self.dropped()

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        decodes = self._kept.urgent(self._at.now, self._at.times.most_s, is_rt)
        return merge(decodes, self._prompts.urgent(is_rt), key=by_key)

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        return self._kept.later(self._at.now, self._at.times.most_s, is_rt)

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        return self._prompts.prompts(is_rt)

    def dropped(self) -> Iterable[Ranked]:
        return merge(self._kept.late(self._at.now), self._prompts.dropped(), key=by_key)


def by_key(one: Ranked) -> Any:
    return one[0]
