"""The waiting requests of a pool, by prefix length: a quad-tree over 1..65,536 in flat arrays (AlignedServe §3.3).

    depth 0    one node                                     lengths 1 .. 65,536
    depth 1    four nodes                                   16,384 lengths each
    ...
    depth 8    65,536 leaves                                one length each

A node counts the requests below, and the device blocks that these will take. Longer prefixes count as 65,536. Within a
length requests are ordered by due time, then by arrival.

A node that is not empty and yields no request for long is starving. Only leaves keep a clock, and one heap over their
alarms tells which leaf starves: what starves below a node does so in a leaf, and a search from there serves both.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

LONGEST = 65_536
DEPTHS = 8
_SHIFTS = tuple(2 * (DEPTHS - depth) for depth in range(DEPTHS + 1))  # leaf >> shift is its node at each depth
_BLOCKS = 28  # the lower bits of a node's sum count requests, the higher bits blocks
_REQUESTS = (1 << _BLOCKS) - 1
_OUTDATED = 1000  # outdated alarms that may stay, beside one for each leaf
STARVING_S = 30.0  # until a leaf starves; sooner where a request has less slack


class TreeMember(NamedTuple):
    """A waiting request, in the order in which a length is served."""

    due: float
    number: int  # order of arrival
    id: str
    blocks: int  # blocks on a device
    leaf: int


class _Leaf:
    """One length with waiting requests. Insertion and removal are O(1): the leaf is sorted, and rid of requests that
    have left, when it is read."""

    __slots__ = ("alarm_at", "is_tidy", "members", "started_at")

    def __init__(self, member: TreeMember, now: float) -> None:
        self.members = [member]
        self.is_tidy = True
        self.started_at = now  # its clock: when the first request came, or when the leaf yielded last
        self.alarm_at = inf  # when the leaf may starve


@dataclass(frozen=True, slots=True)
class TreeNode:
    depth: int
    index: int

    @property
    def leaves(self) -> range:
        shift = _SHIFTS[self.depth]
        return range(self.index << shift, (self.index + 1) << shift)

    @property
    def parent(self) -> TreeNode:
        return TreeNode(self.depth - 1, self.index >> 2)

    @property
    def children(self) -> list[TreeNode]:
        return [TreeNode(self.depth + 1, 4 * self.index + child) for child in range(4)]

    def ancestor(self, levels: int) -> TreeNode:
        up = min(levels, self.depth)
        return TreeNode(self.depth - up, self.index >> 2 * up)


ROOT = TreeNode(0, 0)


def leaf_of(length: int) -> int:
    return min(length, LONGEST) - 1


class QuadTree:
    def __init__(self) -> None:
        # depth -> node -> requests and blocks in one number: an insertion is one addition at each depth
        self._sums = [[0] * (1 << 2 * depth) for depth in range(DEPTHS + 1)]
        self._by_depth = tuple(zip(self._sums, _SHIFTS, strict=True))
        self._leaves: dict[int, _Leaf] = {}  # leaves that are not empty
        self._at: dict[str, TreeMember] = {}
        self._arrivals = 0
        self._alarms: list[tuple[float, int]] = []  # heap of (alarm, leaf); outdated alarms stay in it

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, request: str) -> bool:
        return request in self._at

    def num(self, node: TreeNode) -> int:
        return self._sums[node.depth][node.index] & _REQUESTS

    def blocks(self, node: TreeNode) -> int:
        return self._sums[node.depth][node.index] >> _BLOCKS

    def length_of(self, request: str) -> int:
        """Return the length under which the request waits."""
        return self._at[request].leaf + 1

    def members(self, leaf: int) -> list[TreeMember]:
        """Return the requests of one length, most urgent first. The caller must not change the list."""
        found = self._leaves.get(leaf)
        if found is None:
            return []
        if not found.is_tidy:
            here = self._at
            found.members = sorted([member for member in found.members if here.get(member.id) is member])
            found.is_tidy = True
        return found.members

    def insert(self, request: str, length: int, blocks: int, due: float, now: float) -> None:
        if request in self._at:
            raise ValueError(f"request {request} is in the tree already")
        number, amount = leaf_of(length), (blocks << _BLOCKS) + 1
        for sums, shift in self._by_depth:
            sums[number >> shift] += amount
        self._arrivals += 1
        self._at[request] = member = TreeMember(due, self._arrivals, request, blocks, number)
        leaf = self._leaves.get(number)
        if leaf is None:
            self._leaves[number] = leaf = _Leaf(member, now)
        else:
            leaf.members.append(member)
            leaf.is_tidy = False
        alarm_at = _alarm_at(leaf.started_at, due)
        if alarm_at < leaf.alarm_at:
            self._set_alarm(leaf, number, alarm_at)

    def remove(self, request: str) -> None:
        _, _, _, blocks, number = self._at.pop(request)
        amount = (blocks << _BLOCKS) + 1
        for sums, shift in self._by_depth:
            sums[number >> shift] -= amount
        if sums[number]:  # the sums of the last depth are those of leaves
            self._leaves[number].is_tidy = False
        else:
            del self._leaves[number]

    def yielded(self, leaves: Iterable[int], now: float) -> None:
        """Start the clocks of these leaves again after they gave requests to a batch."""
        for number in leaves:
            leaf = self._leaves.get(number)
            if leaf is not None:
                leaf.started_at = now
                self._set_alarm(leaf, number, _alarm_at(now, self.members(number)[0].due))

    def _set_alarm(self, leaf: _Leaf, number: int, at: float) -> None:
        """Set the alarm of a leaf. Where nobody asks for starving leaves, outdated alarms would stay for ever."""
        leaf.alarm_at = at
        if len(self._alarms) < 2 * len(self._leaves) + _OUTDATED:
            heapq.heappush(self._alarms, (at, number))
        else:
            self._alarms = [(leaf.alarm_at, number) for number, leaf in self._leaves.items()]
            heapq.heapify(self._alarms)

    def starving(self, now: float) -> int | None:
        """Return the leaf that has starved longest, or None."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            alarm_at, number = alarms[0]
            leaf = self._leaves.get(number)
            if leaf is None or leaf.alarm_at != alarm_at:
                heapq.heappop(alarms)
                continue
            # The most urgent request of the leaf may have left since.
            leaf.alarm_at = _alarm_at(leaf.started_at, self.members(number)[0].due)
            if leaf.alarm_at == alarm_at:
                return number
            heapq.heapreplace(alarms, (leaf.alarm_at, number))
        return None

    def filled(self, leaves: range) -> Iterator[int]:
        """Yield the leaves that are not empty, shortest first."""
        return self._walk(leaves, (3, 2, 1, 0))

    def filled_down(self, leaves: range) -> Iterator[int]:
        """Yield the leaves that are not empty, longest first."""
        return self._walk(leaves, (0, 1, 2, 3))

    def _walk(self, leaves: range, pushed: tuple[int, int, int, int]) -> Iterator[int]:
        """Walk the nodes that are not empty; of four children the one that is pushed last comes first."""
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
    """Return when a clock is older than half the remaining slack, or than STARVING_S."""
    return min(started_at + STARVING_S, (2 * started_at + due) / 3)
