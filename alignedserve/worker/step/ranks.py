"""Requests with a seat, in the order of service of a step (slo.Standing)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import Any

from alignedserve.scheduling.orders import ByKey
from alignedserve.scheduling.slo import Rank
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.waiting_prompts import Ranked


def ranked(seated: Sequence[WorkerRequest], at: StepContext) -> Iterable[Ranked]:
    """Return seated requests with their keys, in the order of service."""
    ordering = at.policy.ordering
    if ordering.goes_by_promises:
        return RankedRequests(seated, at)
    if not isinstance(ordering, ByKey):
        return ranked_by_arrival(seated)
    by_key = list[Ranked]()
    for running in seated:
        standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
        by_key.append(((ordering.key(standing), standing.arrival_at, standing.id), running))
    return sorted(by_key, key=key_of)


def in_order(seated: Iterable[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
    """Return seated requests in the order of service."""
    return [running for _, running in ranked(tuple(seated), at)]


def of_old_batch(requests: Sequence[WorkerRequest], at: StepContext) -> Sequence[WorkerRequest]:
    """Return the requests of the old batch during a batch switch, otherwise all (AlignedServe §3.4)."""
    return [running for running in requests if running.batch != at.newest_batch] or requests


def last_of_old(requests: Sequence[WorkerRequest], at: StepContext) -> WorkerRequest:
    """Return the request of the old batch that is served last."""
    return in_order(of_old_batch(requests, at), at)[-1]


def as_they_leave(requests: Sequence[WorkerRequest], at: StepContext) -> list[WorkerRequest]:
    """Return seated requests, the first to leave last."""
    return sorted(in_order(requests, at), key=lambda running: running.batch != at.newest_batch)


def ranked_by_arrival(seated: Iterable[WorkerRequest]) -> list[Ranked]:
    """Return seated requests before all that wait."""
    return [((-1,), running) for running in seated]


class RankedRequests:
    """Seated requests in one sorted list per rank."""

    def __init__(self, seated: Iterable[WorkerRequest], at: StepContext) -> None:
        late, document_key = at.policy.late, at.policy.ordering.document_key
        self._lists: dict[float, list[Ranked]] = {rank: [] for rank in Rank}
        for running in seated:
            standing = running.promise.standing(at.now, running.work(at.chunk), at.times)
            key: tuple[Any, ...] = standing.key(at.times, late)
            if key[0] is Rank.BE:
                key = (*key[:3], *document_key(standing), standing.remaining)
            self._lists[key[0]].append(((*key, standing.arrival_at, standing.id), running))
        for ranks in self._lists.values():
            ranks.sort(key=key_of)

    def __iter__(self) -> Iterator[Ranked]:
        for is_rt in (True, False):
            yield from self.urgent(is_rt)
        for is_rt in (True, False):
            yield from in_turn(self.decodes(is_rt), self.prompts(is_rt))
        yield from self.dropped()

    def urgent(self, is_rt: bool) -> Iterable[Ranked]:
        return self._lists[Rank.URGENT_RT if is_rt else Rank.URGENT_BE]

    def decodes(self, is_rt: bool) -> Iterable[Ranked]:
        """Return the decodes that are not urgent."""
        return [found for found in self._lists[Rank.RT if is_rt else Rank.BE] if found[1].decodes]

    def prompts(self, is_rt: bool) -> Iterable[Ranked]:
        """Return the prompts that are not urgent."""
        return [found for found in self._lists[Rank.RT if is_rt else Rank.BE] if not found[1].decodes]

    def dropped(self) -> Iterable[Ranked]:
        """Return the late requests, which are dropped to the end."""
        return self._lists[Rank.LATE]


def key_of(ranked: Ranked) -> Any:
    return ranked[0]


def in_turn(*orders: Iterable[Ranked]) -> Iterable[Ranked]:
    """Return several sorted orders as one."""
    return merge(*orders, key=key_of)
