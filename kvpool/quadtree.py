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
from typing import NamedTuple

LONGEST = 65_536
DEPTHS = 8
_SHIFTS = tuple(2 * (DEPTHS - depth) for depth in range(DEPTHS + 1))  # leaf >> shift: its node at each depth
STARVING_S = 30.0  # at the latest; sooner where somebody's slack is short


class Member(NamedTuple):
    """A waiting request, in the order in which its length is served."""

    due: float
    number: int  # of its arrival
    id: str
    blocks: int  # on the device, when it has joined


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
        self._num = [[0] * (1 << 2 * depth) for depth in range(DEPTHS + 1)]
        self._blocks = [[0] * (1 << 2 * depth) for depth in range(DEPTHS + 1)]
        self._by_depth = tuple(zip(self._num, self._blocks, _SHIFTS, strict=True))
        # leaf -> its members, never none. To come and to go is O(1): an untidy leaf is sorted, and rid of those who
        # have left, when somebody looks at it.
        self._members: dict[int, list[Member]] = {}
        self._untidy: set[int] = set()
        self._at: dict[str, tuple[int, Member]] = {}  # id -> (leaf, member)
        self._arrivals = 0
        self._started_at: dict[int, float] = {}  # leaf -> its clock: since it is not empty, or has last yielded
        self._alarm_at: dict[int, float] = {}  # leaf -> when it may starve
        self._alarms: list[tuple[float, int]] = []  # heap of (alarm, leaf); those that no longer hold stay in it

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, request: str) -> bool:
        return request in self._at

    def num(self, node: Node) -> int:
        return self._num[node.depth][node.index]

    def blocks(self, node: Node) -> int:
        return self._blocks[node.depth][node.index]

    def length_of(self, request: str) -> int:
        """Under which it stands."""
        return self._at[request][0] + 1

    def members(self, leaf: int) -> list[Member]:
        """Of one length, most urgent first; not to be changed."""
        members = self._members.get(leaf)
        if members is None:
            return []
        if leaf in self._untidy:
            self._untidy.discard(leaf)
            here = self._at
            members[:] = [one for one in members if here.get(one.id, (0, None))[1] is one]
            members.sort()
        return members

    def insert(self, request: str, length: int, blocks: int, due: float, now: float) -> None:
        if request in self._at:
            raise ValueError(f"request {request} is in the tree already")
        leaf = leaf_of(length)
        for num, of_blocks, shift in self._by_depth:
            node = leaf >> shift
            num[node] += 1
            of_blocks[node] += blocks
        self._arrivals += 1
        member = Member(due, self._arrivals, request, blocks)
        self._at[request] = leaf, member
        members = self._members.get(leaf)
        if members is None:
            self._members[leaf] = [member]
            self._started_at[leaf] = now
        else:
            members.append(member)
            self._untidy.add(leaf)
        self._alarm(leaf, _alarm_at(self._started_at[leaf], due))

    def remove(self, request: str) -> None:
        leaf, member = self._at.pop(request)
        blocks = member.blocks
        for num, of_blocks, shift in self._by_depth:
            node = leaf >> shift
            num[node] -= 1
            of_blocks[node] -= blocks
        self._untidy.add(leaf)
        if not self._num[DEPTHS][leaf]:
            del self._members[leaf], self._started_at[leaf], self._alarm_at[leaf]
            self._untidy.discard(leaf)

    def yielded(self, leaves: Iterable[int], now: float) -> None:
        """These lengths have given a batch some of theirs: their clocks start again."""
        for leaf in leaves:
            if leaf in self._members:
                self._started_at[leaf] = now
                self._alarm_at.pop(leaf)
                self._alarm(leaf, _alarm_at(now, self.members(leaf)[0].due))

    def starving(self, now: float) -> int | None:
        """The leaf that has starved longest, if one does."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            alarm_at, leaf = alarms[0]
            if self._alarm_at.get(leaf) != alarm_at:
                heapq.heappop(alarms)
                continue
            # Its most urgent member may have left since.
            now_at = _alarm_at(self._started_at[leaf], self.members(leaf)[0].due)
            if now_at == alarm_at:
                return leaf
            self._alarm_at[leaf] = now_at
            heapq.heapreplace(alarms, (now_at, leaf))
        return None

    def _alarm(self, leaf: int, at: float) -> None:
        before = self._alarm_at.get(leaf)
        if before is None or at < before:
            self._alarm_at[leaf] = at
            heapq.heappush(self._alarms, (at, leaf))

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
            if not self._num[depth][index] or index << shift >= high or (index + 1) << shift <= low:
                continue
            if depth == DEPTHS:
                yield index
            else:
                stack += [(depth + 1, 4 * index + child) for child in pushed]


def _alarm_at(started_at: float, due: float) -> float:
    """When a clock that started then is older than half the slack that remains, or than STARVING_S."""
    return min(started_at + STARVING_S, (2 * started_at + due) / 3)
