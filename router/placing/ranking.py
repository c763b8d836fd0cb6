"""Workers in order: by the work ahead, and decode workers by room.

A wait is predicted, and grows shorter as time passes. So a worker is filed by the moment at which its prompts will be
done, rounded; and as soon as a new prompt would hardly wait there, the worker counts as idle. Among idle workers, and
among workers with the same moment, the worker with the fewest tokens held comes first: predictions of waits that differ
by less say nothing, and workers that hold more decode slower and are the first that lack memory.

A prompt should go on to a decode worker with room and a batch of about the prompt's length. A worker's room is what it
told last, less what has been sent there since. Bands are kept in the order of their middles, so that the router looks
only at the few nearest ones, however many workers there are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from alignedserve.core import KEEPS_ALL, Retention
from alignedserve.protocol.messages import Report

_SLACK = 64
_ROUNDED_S = 0.1
_IDLE_S = 0.25  # a wait that is as good as none


class Least:
    """A heap of names by their keys. A name may have several entries; only the entry with its present key counts."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[Any, ...]] = {}
        self._heap: list[tuple[Any, ...]] = []

    def put(self, entry: tuple[Any, ...]) -> None:
        """File the name, which is the last item of the entry."""
        name = entry[-1]
        if self._now.get(name) == entry:
            return
        self._now[name] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._now) + _SLACK:
            self._heap = sorted(self._now.values())

    def remove(self, name: str) -> None:
        self._now.pop(name, None)

    def first(self) -> tuple[Any, ...] | None:
        """Return the least entry."""
        while self._heap and self._now.get(self._heap[0][-1]) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def least(self) -> str | None:
        """Return the name with the least entry."""
        first = self.first()
        return None if first is None else str(first[-1])


class Loads:
    """Workers by when their prompts will be done, and by the tokens that their requests hold."""

    def __init__(self) -> None:
        self._busy, self._idle = Least(), Least()
        self.changed: set[str] = set()  # workers that are to be put before the next look

    def put(self, worker: str, through_at: float, tokens: int, now: float = -inf) -> None:
        at = round(through_at / _ROUNDED_S)
        if at * _ROUNDED_S <= now + _IDLE_S:
            self._busy.remove(worker)
            self._idle.put((tokens, worker))
        else:
            self._idle.remove(worker)
            self._busy.put((at, tokens, worker))

    def remove(self, worker: str) -> None:
        self.changed.discard(worker)
        self._busy.remove(worker)
        self._idle.remove(worker)

    def least(self, now: float) -> str | None:
        while (first := self._busy.first()) is not None and first[0] * _ROUNDED_S <= now + _IDLE_S:
            _, tokens, worker = first
            self._busy.remove(worker)
            self._idle.put((tokens, worker))
        idle = self._idle.first()
        if idle is not None:
            first = idle
        return None if first is None else str(first[-1])


_LOOKED_AT = 8  # nearest bands to each side of a length that are looked at


@dataclass(slots=True)
class _WorkerRoom:
    free_blocks: int = 0  # negative where many requests were sent there since
    given_blocks: int = 0  # that best-effort requests have, and give to chats
    band: tuple[int, int] | None = None

    @property
    def for_chats(self) -> int:
        return self.free_blocks + self.given_blocks


class Rooms:
    def __init__(self, block_size: int, by_band: bool = False, retention: Retention = KEEPS_ALL) -> None:
        """`block_size` is the number of tokens in a block on the workers' devices."""
        self._block_size, self._by_band, self._retention = block_size, by_band, retention
        self._rooms: dict[str, _WorkerRoom] = {}
        self._changed: set[str] = set()  # workers whose load has changed since the two orders below
        self._fullest_last, self._fullest_of_chats_last = Least(), Least()
        self._bands: list[tuple[int, str]] = []  # (twice the middle of the band, worker), sorted

    def tell(self, worker: str, free_blocks: int) -> None:
        if (room := self._rooms.get(worker)) is None:
            self._rooms[worker] = room = _WorkerRoom()
        room.free_blocks = free_blocks
        self._changed.add(worker)

    def report(self, worker: str, report: Report) -> None:
        self.tell(worker, report.free_blocks)
        self._unband(worker)
        self._rooms[worker].band, self._rooms[worker].given_blocks = report.band, report.given_blocks
        if report.band is not None:
            insort(self._bands, (sum(report.band), worker))

    def forget(self, worker: str) -> None:
        self._unband(worker)
        self._rooms.pop(worker, None)
        self._changed.discard(worker)
        self._fullest_last.remove(worker)
        self._fullest_of_chats_last.remove(worker)

    def _emptiest(self, of: Least) -> str | None:
        """Return the worker with most room."""
        for worker in self._changed:
            room = self._rooms[worker]
            self._fullest_last.put((-room.free_blocks, worker))
            self._fullest_of_chats_last.put((-room.for_chats, worker))
        self._changed.clear()
        return of.least()

    @property
    def is_any(self) -> bool:
        """Return whether there is any worker."""
        return bool(self._rooms)

    def for_chats(self, worker: str) -> int | None:
        """Return the blocks that chats find on the worker, free or given to chats; None where the worker has not told
        yet."""
        room = self._rooms.get(worker)
        return None if room is None else room.for_chats

    @property
    def most_for_chats(self) -> int | None:
        """Return the same of the worker where it is most; None where no worker has told yet."""
        worker = self._emptiest(self._fullest_of_chats_last)
        return None if worker is None else self._rooms[worker].for_chats

    @property
    def most_free(self) -> float:
        """Return the free blocks of the worker that has most; minus infinity where there is no worker."""
        worker = self._emptiest(self._fullest_last)
        return float("-inf") if worker is None else self._rooms[worker].free_blocks

    def choose(self, tokens: Sequence[int], most: int = 0, gives: bool = False) -> str:
        """Return a worker for a prompt that may grow to `most` tokens, and count the room as taken; "" for none.

        `gives` says whether the request gives room to chats.
        """
        worker = self._nearest(len(tokens), max(most, len(tokens))) if self._by_band else None
        worker = worker or self._emptiest(self._fullest_last)
        if worker is None:
            return ""
        room, taken = self._rooms[worker], self.blocks(len(tokens))
        room.given_blocks += taken if gives else 0
        self.tell(worker, room.free_blocks - taken)
        return worker

    def _nearest(self, length: int, most: int) -> str | None:
        """Return the worker with room whose band is nearest; among equals the one with most room."""
        at, blocks, rooms = bisect_left(self._bands, (2 * length, "")), self.blocks(most), self._rooms
        places = [
            (_distance(length, room.band), -room.free_blocks, worker)
            for _, worker in self._bands[max(0, at - _LOOKED_AT) : at + _LOOKED_AT]
            if (room := rooms[worker]).free_blocks >= blocks
        ]
        return min(places)[2] if places else None

    def _unband(self, worker: str) -> None:
        room = self._rooms.get(worker)
        if room is not None and room.band is not None:
            del self._bands[bisect_left(self._bands, (sum(room.band), worker))]
            room.band = None

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a request with a prompt of `tokens` tokens takes on arrival."""
        return self._retention.of_prompt(tokens) // self._block_size + 1


def _distance(length: int, band: tuple[int, int] | None) -> int:
    shortest, longest = band or (length, length)
    if length < shortest:
        return shortest - length
    return length - longest if length > longest else 0
