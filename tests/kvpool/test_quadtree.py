"""The quad-tree against a plain list, and the batches found in it against all possible windows."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.kvpool.batching import BatchBounds, BatchWindow, find_batch
from alignedserve.kvpool.quadtree import DEPTHS, LONGEST, ROOT, STARVING_S, QuadTree, TreeNode, leaf_of
from tests.conftest import examples

BLOCK = 16
LENGTHS = st.one_of(st.integers(1, 200), st.integers(1, LONGEST), st.just(LONGEST + 5))


@dataclass(frozen=True)
class Waiting:
    id: str
    length: int
    blocks: int
    due: float

    @property
    def leaf(self) -> int:
        return leaf_of(self.length)


def blocks_of(length: int) -> int:
    return -(-(length + 1) // BLOCK)


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = QuadTree()
        self.plain: list[Waiting] = []  # in the order of arrival
        self.now, self.number = 0.0, 0

    @rule(length=LENGTHS, slack=st.floats(0.1, 200.0))
    def insert(self, length: int, slack: float) -> None:
        self.number += 1
        waiting = Waiting(f"r{self.number}", length, blocks_of(length), self.now + slack)
        self.plain.append(waiting)
        self.tree.insert(waiting.id, waiting.length, waiting.blocks, waiting.due, self.now)

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.take_out(data.draw(st.sampled_from(self.plain)))

    def take_out(self, waiting: Waiting) -> None:
        self.plain.remove(waiting)
        self.tree.remove(waiting.id)

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        blocks=st.integers(1, 400),
        more=st.integers(0, 400),
        least=st.integers(1, 12),
        extra=st.integers(0, 8),
    )
    def batch(self, blocks: int, more: int, least: int, extra: int) -> None:
        wanted = BatchBounds(blocks, room=blocks + more, least=least, most=least + extra)
        starving = self.tree.starving(self.now)
        window = find_batch(self.tree, wanted, self.now)
        taken = [self.waiting_request(member.id) for member in window.members(self.tree)]
        check(window, taken, self.plain, wanted, starving)
        self.tree.yielded(window.taken, self.now)
        for waiting in taken:
            self.take_out(waiting)

    def waiting_request(self, request: str) -> Waiting:
        return next(waiting for waiting in self.plain if waiting.id == request)

    @invariant()
    def counters_equal_contents(self) -> None:
        assert len(self.tree) == len(self.plain)
        for depth in range(DEPTHS + 1):
            nodes: dict[int, list[Waiting]] = {}
            for waiting in self.plain:
                nodes.setdefault(waiting.leaf >> 2 * (DEPTHS - depth), []).append(waiting)
            for index, inside in nodes.items():
                assert self.tree.num(TreeNode(depth, index)) == len(inside)
                assert self.tree.blocks(TreeNode(depth, index)) == sum(waiting.blocks for waiting in inside)
        filled = list(self.tree.filled(ROOT.leaves))
        assert (
            filled == sorted({waiting.leaf for waiting in self.plain}) == list(self.tree.filled_down(ROOT.leaves))[::-1]
        )

    @invariant()
    def within_a_length_the_most_urgent_is_first(self) -> None:
        for leaf in {waiting.leaf for waiting in self.plain}:
            inside = sorted(
                (waiting for waiting in self.plain if waiting.leaf == leaf), key=lambda waiting: waiting.due
            )
            assert [member.id for member in self.tree.members(leaf)] == [waiting.id for waiting in inside]


def check(
    window: BatchWindow, taken: list[Waiting], plain: list[Waiting], wanted: BatchBounds, starving: int | None
) -> None:
    assert window.num == len(taken) <= wanted.most
    assert window.blocks == sum(waiting.blocks for waiting in taken)
    assert window.blocks <= (wanted.most_blocks if len(taken) > 1 else wanted.room)
    if not taken:
        fits = [waiting for waiting in plain if waiting.blocks <= wanted.room]
        assert not fits or starving is not None, "a worker idles though somebody fits"
        return
    low, high = min(waiting.leaf for waiting in taken), max(waiting.leaf for waiting in taken)
    between = [waiting for waiting in plain if low < waiting.leaf < high]
    assert all(waiting in taken for waiting in between), "contiguous in length"
    for edge in {low, high}:
        inside = sorted((waiting for waiting in plain if waiting.leaf == edge), key=lambda waiting: waiting.due)
        chosen = [waiting for waiting in inside if waiting in taken]
        assert chosen == inside[: len(chosen)], "of the outermost lengths the most urgent"
    if starving is not None:
        assert low <= starving <= high
    if len(taken) < min(wanted.least, len(plain)):
        left = [waiting for waiting in plain if waiting not in taken]
        smallest = min(waiting.blocks for waiting in left)
        assert window.blocks + max(waiting.blocks for waiting in left) > wanted.most_blocks or smallest == 0, (
            "fewer than N_min only where the next would not fit"
        )


def test_a_request_that_starves_does_so_until_it_yields() -> None:
    """A leaf also counts as starving when its more urgent request has left, and its wait is shorter than was noted."""
    tree = QuadTree()
    tree.insert("urgent", 8, 1, due=1.0, now=0.0)
    tree.insert("other", 8, 1, due=25.0, now=0.0)
    tree.remove("urgent")
    assert [tree.starving(now=10.0) for _ in range(3)] == [leaf_of(8)] * 3
    tree.yielded([leaf_of(8)], 10.0)
    assert tree.starving(now=10.0) is None


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def tree_of(lengths: list[int], due: float = 1e6) -> QuadTree:
    tree = QuadTree()
    for number, length in enumerate(lengths):
        tree.insert(f"r{number}", length, blocks_of(length), due, 0.0)
    return tree


def spread(lengths: list[int]) -> int:
    return max(lengths) - min(lengths)


@given(lengths=st.lists(st.integers(1, 3000), min_size=40, max_size=120), most=st.integers(500, 4000))
@settings(max_examples=examples(60), deadline=None)
def test_no_window_near_it_is_tighter_by_much(lengths: list[int], most: int) -> None:
    tree = tree_of(lengths)
    window = find_batch(tree, BatchBounds(most, most, 36, 64), 0.0)
    ordered = sorted(lengths)
    windows = [ordered[i : i + window.num] for i in range(len(ordered) - window.num + 1)]
    fitting = [window for window in windows if sum(map(blocks_of, window)) <= most]
    assert window.spread <= spread(ordered)
    if len(lengths) <= 60:  # the whole tree is then within two levels of where the search ends, or nearly
        assert window.spread <= 3 * min(map(spread, fitting)) + 64


def test_on_average_the_spread_is_within_three_tenths_of_the_least() -> None:
    draw, found, best = random.Random(0), 0, 0
    for _ in range(40):
        lengths = [max(1, int(draw.lognormvariate(5.5, 1.1))) for _ in range(400)]
        tree = tree_of(lengths)
        window = find_batch(tree, BatchBounds(2000, 4000, 36, 64), 0.0)
        ordered = sorted(lengths)
        windows = (ordered[i : i + window.num] for i in range(len(ordered) - window.num + 1))
        best += min(spread(run) for run in windows if sum(map(blocks_of, run)) <= window.blocks)
        found += window.spread
    assert found <= 1.3 * best


def test_the_tightest_of_as_many_near_it_takes_the_place_of_what_was_found() -> None:
    tree = tree_of([1, 50, 100, 150, 200, 201, 202, 203])
    window = find_batch(tree, BatchBounds(1000, 1000, 4, 4), 0.0)
    assert [member.id for member in window.members(tree)] == ["r4", "r5", "r6", "r7"]


def test_a_request_that_starves_is_searched_for_first() -> None:
    tree = tree_of([100] * 40)
    tree.insert("lonely", 30_000, blocks_of(30_000), 1e6, 0.0)
    wanted = BatchBounds(500, 4000, 36, 64)
    first = find_batch(tree, wanted, STARVING_S - 1)
    assert "lonely" not in {member.id for member in first.members(tree)}
    tree.yielded(first.taken, STARVING_S - 1)
    assert [member.id for member in find_batch(tree, wanted, STARVING_S + 1).members(tree)] == ["lonely"]


def test_a_request_that_is_due_soon_starves_sooner() -> None:
    tree = tree_of([100] * 40)
    tree.insert("soon", 30_000, 10, due=9.0, now=0.0)
    assert tree.starving(2.9) is None
    assert tree.starving(3.1) == leaf_of(30_000)  # 3.1 s waited are more than half of 5.9 s left
    tree.remove("soon")
    assert tree.starving(3.1) is None


def test_where_none_of_the_most_common_length_fits_a_small_batch_of_the_shortest_is_found() -> None:
    tree = tree_of([30_000] * 60 + [10] * 50)
    window = find_batch(tree, BatchBounds(500, 500, 36, 64), 0.0)
    assert (window.num, window.high) == (36, leaf_of(10))


def test_the_same_request_twice_is_refused() -> None:
    tree = tree_of([5])
    with pytest.raises(ValueError, match="r0 is in the tree already"):
        tree.insert("r0", 7, 1, 1.0, 0.0)


def test_requests_that_have_left_leave_no_memory_behind() -> None:
    """Alarms do not pile up although nobody asks for starving leaves."""
    tree = QuadTree()
    tracemalloc.start()
    for at in range(20_000):
        tree.insert("chat", at % 500, 1, due=at + 1.0, now=float(at))
        tree.remove("chat")
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 500_000
