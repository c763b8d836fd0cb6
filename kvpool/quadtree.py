"""The waiting requests of a pool, by prefix length: a quad-tree over 1..65,536 in flat arrays (AlignedServe §3.3).

    depth 0    one node                                     lengths 1 .. 65,536
    depth 1    four nodes                                   16,384 lengths each
    ...
    depth 8    65,536 leaves                                one length each

A node counts the requests below it and the device blocks that they will take. Longer prefixes count as 65,536. Within a
length the most urgent comes first, by the time at which it is due; of two alike the one that came first.

A node that is neither empty nor yields for long is starving. Only leaves keep a clock, and one heap over their alarms
tells who starves: whatever starves below a node does so in a leaf, and a search that starts there serves both.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

LONGEST = 65_536
DEPTHS = 8
_SHIFTS = tuple(2 * (DEPTHS - depth) for depth in range(DEPTHS + 1))  # leaf >> shift: its node at each depth
_BLOCKS = 28  # bits that a node's number of requests has below that of its blocks
_REQUESTS = (1 << _BLOCKS) - 1
STARVING_S = 30.0  # at the latest; sooner where somebody's slack is short


class Member(NamedTuple):
    """A waiting request, in the order in which its length is served."""

    due: float
    number: int  # of its arrival
    id: str
    blocks: int  # on the device, when it has joined
    leaf: int


class _Leaf:
    """One length that somebody waits at. To come and to go is O(1): an untidy leaf is sorted, and rid of those who have
    left, when somebody looks at it."""

    __slots__ = ("alarm_at", "is_tidy", "members", "started_at")

    def __init__(self, member: Member, now: float) -> None:
        self.members = [member]
        self.is_tidy = True
        self.started_at = now  # its clock: since it is not empty, or has last yielded
        self.alarm_at = inf  # when it may starve


@dataclass(frozen=True, slots=True)
class Node:
    depth: int
    index: int

    @property
    def leaves(self) -> range:
        shift = _SHIFTS[self.depth]
        return range(self.index << shift, (self.index + 1) << shift)

    @property
    def parent(self) -> Node:
        return Node(self.depth - 1, self.index >> 2)

    @property
    def children(self) -> list[Node]:
        return [Node(self.depth + 1, 4 * self.index + one) for one in range(4)]

    def ancestor(self, levels: int) -> Node:
        up = min(levels, self.depth)
        return Node(self.depth - up, self.index >> 2 * up)


ROOT = Node(0, 0)


def leaf_of(length: int) -> int:
    return min(length, LONGEST) - 1


class QuadTree:
    def __init__(self) -> None:
        # depth -> of each node, requests and their blocks in one number: to come or to go is one addition at each depth
        self._sums = [[0] * (1 << 2 * depth) for depth in range(DEPTHS + 1)]
        self._by_depth = tuple(zip(self._sums, _SHIFTS, strict=True))
        self._leaves: dict[int, _Leaf] = {}  # those that are not empty
        self._at: dict[str, Member] = {}
        self._arrivals = 0
        self._alarms: list[tuple[float, int]] = []  # heap of (alarm, leaf); those that no longer hold stay in it

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, request: str) -> bool:
        return request in self._at

    def num(self, node: Node) -> int:
        return self._sums[node.depth][node.index] & _REQUESTS

    def blocks(self, node: Node) -> int:
        return self._sums[node.depth][node.index] >> _BLOCKS

    def length_of(self, request: str) -> int:
        """Under which it stands."""
        return self._at[request].leaf + 1

    def members(self, leaf: int) -> list[Member]:
        """Of one length, most urgent first; not to be changed."""
        found = self._leaves.get(leaf)
        if found is None:
            return []
        if not found.is_tidy:
            here = self._at
            found.members = sorted([one for one in found.members if here.get(one.id) is one])
            found.is_tidy = True
        return found.members

    def insert(self, request: str, length: int, blocks: int, due: float, now: float) -> None:
        if request in self._at:
            raise ValueError(f"request {request} is in the tree already")
        number, one = leaf_of(length), (blocks << _BLOCKS) + 1
        for sums, shift in self._by_depth:
            sums[number >> shift] += one
        self._arrivals += 1
        self._at[request] = member = Member(due, self._arrivals, request, blocks, number)
        leaf = self._leaves.get(number)
        if leaf is None:
            self._leaves[number] = leaf = _Leaf(member, now)
        else:
            leaf.members.append(member)
            leaf.is_tidy = False
        alarm_at = _alarm_at(leaf.started_at, due)
        if alarm_at < leaf.alarm_at:
            leaf.alarm_at = alarm_at
            heapq.heappush(self._alarms, (alarm_at, number))

    def remove(self, request: str) -> None:
        _, _, _, blocks, number = self._at.pop(request)
        one = (blocks << _BLOCKS) + 1
        for sums, shift in self._by_depth:
            sums[number >> shift] -= one
        if sums[number]:  # of the last depth: the leaf's own
            self._leaves[number].is_tidy = False
        else:
            del self._leaves[number]

    def yielded(self, leaves: Iterable[int], now: float) -> None:
        """These lengths have given a batch some of theirs: their clocks start again."""
        for number in leaves:
            leaf = self._leaves.get(number)
            if leaf is not None:
                leaf.started_at = now
                leaf.alarm_at = _alarm_at(now, self.members(number)[0].due)
                heapq.heappush(self._alarms, (leaf.alarm_at, number))

    def starving(self, now: float) -> int | None:
        """The leaf that has starved longest, if one does."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            alarm_at, number = alarms[0]
            leaf = self._leaves.get(number)
            if leaf is None or leaf.alarm_at != alarm_at:
                heapq.heappop(alarms)
                continue
            # Its most urgent member may have left since.
            leaf.alarm_at = _alarm_at(leaf.started_at, self.members(number)[0].due)
            if leaf.alarm_at == alarm_at:
                return number
            heapq.heapreplace(alarms, (leaf.alarm_at, number))
        return None

    def filled(self, leaves: range) -> Iterator[int]:
        """Those that are not empty, shortest first."""
        return self._walk(leaves, (3, 2, 1, 0))

    def filled_down(self, leaves: range) -> Iterator[int]:
        """Those that are not empty, longest first."""
        return self._walk(leaves, (0, 1, 2, 3))

    def _walk(self, leaves: range, pushed: tuple[int, int, int, int]) -> Iterator[int]:
        """Over the nodes that hold somebody; of four children the one that is pushed last comes first."""
        low, high = leaves.start, leaves.stop
        stack = [(0, 0)]
        while stack:
            depth, index = stack.pop()
            shift = _SHIFTS[depth]
            if not self._sums[depth][index] or index << shift >= high or (index + 1) << shift <= low:
                continue
            if depth == DEPTHS:
                yield index
            else:
                stack += [(depth + 1, 4 * index + child) for child in pushed]


def _alarm_at(started_at: float, due: float) -> float:
    """When a clock that started then is older than half the slack that remains, or than STARVING_S."""
    return min(started_at + STARVING_S, (2 * started_at + due) / 3)
