"""The search for requests that decode together: Density First Search, and sliding (AlignedServe §3.3).

    root ── too many blocks ──▶ the child with most requests ──▶ ... ──▶ a node that fits
                                                                            │ too few requests
                                                                            ▼
                                        left siblings, right siblings, then the parent's: nearest lengths first
                                                                            │
                            the tightest window of as many requests, two levels up, replaces it  (slide)

A batch is contiguous in length, with all requests between the shortest and the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from alignedserve.kvpool.quadtree import DEPTHS, ROOT, QuadTree, TreeMember, TreeNode

SLIDE_LEVELS = 2


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """The bounds of a batch."""

    most_blocks: int  # B_max; a request that alone takes more is a batch by itself
    room: int  # blocks of the device
    least: int  # N_min: requests, where blocks and waiting requests suffice
    most: int  # N_max: requests


@dataclass(slots=True)
class BatchWindow:
    """A batch in the making: whole lengths; of the outermost lengths the most urgent requests."""

    taken: dict[int, int] = field(default_factory=dict)  # leaf -> how many of its members
    num: int = 0
    blocks: int = 0

    @property
    def low(self) -> int:
        return min(self.taken)

    @property
    def high(self) -> int:
        return max(self.taken)

    @property
    def spread(self) -> int:
        return self.high - self.low

    def members(self, tree: QuadTree) -> list[TreeMember]:
        """Return the requests, shortest first."""
        return [member for leaf in sorted(self.taken) for member in tree.members(leaf)[: self.taken[leaf]]]


def find_batch(tree: QuadTree, wanted: BatchBounds, now: float) -> BatchWindow:
    """Return the next batch; the batch is empty where no request waits or fits.

    The batch is empty too while a starving request does not fit: others would take the room as it becomes free.
    """
    starving = tree.starving(now)
    if starving is not None:
        window, _ = _search(tree, wanted, TreeNode(DEPTHS, starving))
    else:
        window = _slid(tree, wanted, *_search(tree, wanted, ROOT))
        if not window.num:
            window = _shortest(tree, wanted)
    return window


def _shortest(tree: QuadTree, wanted: BatchBounds) -> BatchWindow:
    """Return the shortest requests, so that a worker without room for the batch that was found need not idle."""
    window = BatchWindow()
    for leaf in tree.filled(ROOT.leaves):
        if not _take(tree, window, leaf, wanted.least, wanted):
            break
    return window


# --- Density First Search


def _search(tree: QuadTree, wanted: BatchBounds, start: TreeNode) -> tuple[BatchWindow, TreeNode]:
    """Return a batch, and the node around which it was found."""
    node = start
    while tree.blocks(node) > wanted.most_blocks and node.depth < DEPTHS:  # case 2
        node = max(node.children, key=tree.num)
    window = BatchWindow()
    goal = min(wanted.most, max(wanted.least, tree.num(node)))  # case 1: a node that fits is taken whole
    for leaf in _nearest(tree, node):  # case 3
        if not _take(tree, window, leaf, goal, wanted):
            break
    return window, node


def _nearest(tree: QuadTree, node: TreeNode) -> Iterator[int]:
    """Yield leaves with requests: the node's, its left siblings', its right siblings', then likewise for its parent."""
    yield from tree.filled(node.leaves)
    for depth in range(node.depth, 0, -1):
        child = node.ancestor(node.depth - depth)
        around = child.parent.leaves
        yield from tree.filled_down(range(around.start, child.leaves.start))
        yield from tree.filled(range(child.leaves.stop, around.stop))


def _take(tree: QuadTree, window: BatchWindow, leaf: int, goal: int, wanted: BatchBounds) -> bool:
    """Take requests of one length, and return whether the window may take the next length too."""
    members = tree.members(leaf)
    taken = 0
    for member in members:
        most = wanted.most_blocks if window.num else wanted.room
        if window.num >= goal or window.blocks + member.blocks > most:
            break
        window.num += 1
        window.blocks += member.blocks
        taken += 1
    if taken:
        window.taken[leaf] = taken
    return taken == len(members) and window.num < goal


# --- Sliding


def _slid(tree: QuadTree, wanted: BatchBounds, found: BatchWindow, node: TreeNode) -> BatchWindow:
    """Return the tightest window of as many requests near the found window."""
    if found.num < 2 or not found.spread:
        return found
    near = node.ancestor(SLIDE_LEVELS).leaves
    low, high = min(near.start, found.low), max(near.stop, found.high + 1)
    leaves = list(tree.filled(range(low, high)))
    counts = [tree.num(TreeNode(DEPTHS, leaf)) for leaf in leaves]
    best, tightest = found, found.spread
    first = held = 0
    for last, leaf in enumerate(leaves):
        held += counts[last]
        while held - counts[first] >= found.num:
            held -= counts[first]
            first += 1
        if held >= found.num and leaf - leaves[first] < tightest:
            window = _cut_to(tree, leaves[first : last + 1], found.num)
            if window.blocks <= wanted.most_blocks:
                best, tightest = window, leaf - leaves[first]
    return best


def _cut_to(tree: QuadTree, leaves: list[int], num: int) -> BatchWindow:
    """Return a window of `num` requests of these lengths, without the longest, which take most blocks."""
    window = BatchWindow()
    for leaf in leaves:
        members = tree.members(leaf)[: num - window.num]
        if members:
            window.taken[leaf] = len(members)
            window.num += len(members)
            window.blocks += sum(member.blocks for member in members)
    return window
