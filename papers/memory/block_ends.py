"""Blocks that two requests share: a real-time request from the left, a best-effort request from the right (BROS §5).

A request keeps the end where it began, also when its class changes. Below, real-time means from the left.

Token i of a request lies in the request's block i // block_size, at place i % block_size from the request's end. Places
are as if no block were shared: of sharing, kernels know only the end. Both ends grow towards each other:

    slot         0   1   2   3   4   5   6   7
    apart        A0  A1  A2  ·   ·   b2  b1  b0      nothing is copied
    they meet    A0  A1  A2  A3  A4  b2  b1  b0
    A goes on    A0  A1  A2  A3  A4  A5  b1  b0      b2 is on the host: a checkpoint; b misses a slot
    b moves      A0  A1  A2  A3  A4  A5  ·   ·       b's part of the block, b2 too, goes to another block
    or A ends    ·   ·   ·   ·   ·   b2  b1  b0      b2 comes back where it was, at once

A request that is to run claims a slot for each token, present and coming. A claim succeeds as a whole, or changes
nothing.

    RT (FindPreemptBlock)   free blocks; then blocks of best-effort requests that may lose slots: the last block of
                            each, the emptiest first, then full blocks of the newest request, from its end
    BE (FindBlock)          the slots that a real-time request leaves in the request's last block; free blocks; for the
                            part of a block, the real-time block with most empty slots

A real-time request takes the slots of best-effort tokens in the way, one by one as claimed; a best-effort request never
takes a slot from another. `cuts` is the preemption table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import islice
from typing import NamedTuple

from alignedserve.core import KvForm, units_for
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.worker.step.blocks import BlockOwner, Blocks, keep_as


class Cut(NamedTuple):
    """A block where a best-effort request misses slots."""

    host: int  # the block on the host that the rest is in
    kept: int  # how many of the request's first places in the block have a slot


class TwoEndedBlocks(Blocks):
    """The KvForm of a request from the right has ~block for each block."""

    def __init__(
        self, num_blocks: int, block_size: int, num_places: int, preemptable: Callable[[], Sequence[BlockOwner]]
    ) -> None:
        """`num_places` tokens without a slot have a place on the host; `preemptable` returns the requests that
        may lose slots, the newest first."""
        super().__init__(num_blocks)
        self._size, self._preemptable = block_size, preemptable
        self._hosts = Blocks(num_places // block_size)
        self.claimed: dict[BlockOwner, int] = {}  # tokens
        self.left: dict[int, BlockOwner] = {}  # by block
        self.right: dict[int, BlockOwner] = {}
        self.cuts: dict[int, Cut] = {}
        self.copies = SlotCopies()

    # --- What there is

    @property
    def room_for_rt(self) -> int:
        """Return the blocks that a real-time request could fill beside free blocks, where all may lose slots."""
        num_shared = len(self.left.keys() & self.right.keys())
        return min(len(self.right) - num_shared, self._hosts.num_free)

    @property
    def losers(self) -> Set[BlockOwner]:
        """Return the requests that miss slots."""
        return {self.right[block] for block in self.cuts}

    def saved(self, owner: BlockOwner, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return which of the request's first tokens have no slot, each with its place on the host."""
        if owner not in self.losers:
            return ()
        size, blocks = self._size, owner.kv.blocks
        found = [self._at(~blocks[token // size], token % size) for token in range(num_tokens)]
        return tuple([(token, ~at) for token, at in enumerate(found) if at < 0])

    # --- Claims

    def claim(self, owner: BlockOwner, from_left: bool, tokens: int, is_dry: bool = False) -> bool:
        """Give the request a slot for each of `tokens` tokens, lost slots too; return whether all fit.

        A dry claim changes nothing."""
        blocks, tokens = owner.kv.blocks, max(tokens, self.claimed.get(owner, 0))
        claim = self._claim_left if (blocks[0] >= 0 if blocks else from_left) else self._claim_right
        return claim(owner, tokens, is_dry)

    def _claim_left(self, owner: BlockOwner, tokens: int, is_dry: bool) -> bool:
        size, held, count = self._size, owner.kv.blocks, units_for(tokens, self._size)
        if count == len(held) and held[-1] not in self.right:  # most claims
            if not is_dry:
                self.claimed[owner] = tokens
            return True
        lacking = max(0, count - len(held) - self.num_free)
        entered = [*islice(self._to_enter(), lacking)]
        others = [*enumerate(held[-1:], len(held) - 1), *enumerate(entered, count - lacking)]
        kept = [(block, size - min(size, tokens - number * size)) for number, block in others]
        cuts = [(block, left) for block, left in kept if left < self.num_right(block)]
        fits = len(entered) == lacking and sum([of not in self.cuts for of, _ in cuts]) <= self._hosts.num_free
        if is_dry or not fits:
            return fits
        for block, left in cuts:
            self._put(block, block, left)
        new = (*(self.take(count - len(held) - lacking) or ()), *entered)
        self.left |= dict.fromkeys(new, owner)
        self.claimed[owner] = tokens
        keep_as(owner, KvForm(held + new))
        return True

    def _to_enter(self) -> Iterator[int]:
        """Yield the blocks where best-effort requests are alone, in the order of preemption."""
        owners = [owner.kv.blocks for owner in self._preemptable() if owner.kv.blocks and owner.kv.blocks[-1] < 0]
        yield from sorted([~last for *_, last in owners if ~last not in self.left], key=self.num_right)
        for *blocks, _ in owners:
            yield from (~block for block in reversed(blocks) if ~block not in self.left)

    def _claim_right(self, owner: BlockOwner, tokens: int, is_dry: bool) -> bool:
        size, blocks, num_free = self._size, [*owner.kv.blocks], self.num_free
        moving = [number for number, block in enumerate(blocks) if ~block in self.cuts] if self.cuts else []
        last = len(blocks) - 1
        if blocks and last not in moving and self.num_left(~blocks[last]) + min(size, tokens - last * size) > size:
            moving.append(last)
        wanted = [*moving, *range(len(blocks), units_for(tokens, size))]
        ends = self._widest_ends(tokens - wanted[-1] * size) if len(wanted) == num_free + 1 else []
        fits = len(wanted) <= num_free + len(ends)
        if is_dry or not fits:
            return fits
        free = self.take(len(wanted) - len(ends)) or ()
        for number, block in zip(wanted, (*free, *ends), strict=True):
            if number < len(blocks):
                self._put(~blocks[number], block, size)
                blocks[number] = ~block
            else:
                self.right[block] = owner
                blocks.append(~block)
        self.claimed[owner] = tokens
        keep_as(owner, KvForm(tuple(blocks)))
        return True

    def _widest_ends(self, slots: int) -> Sequence[int]:
        """Return the real-time block with most empty slots, if these are as many. Only last blocks have any."""
        lasts = [owner.kv.blocks[-1] for owner in self.claimed if owner.kv.blocks[-1] >= 0]
        ends = sorted([last for last in lasts if last not in self.right], key=self.num_left)[:1]
        return [end for end in ends if self.num_left(end) + slots <= self._size]

    # --- Blocks come free

    def give(self, blocks: Sequence[int]) -> None:
        """Free all blocks of a request. What it displaced comes back."""
        for end in blocks:
            block, own, other = (end, self.left, self.right) if end >= 0 else (~end, self.right, self.left)
            if (owner := own.pop(block, None)) is not None:
                self.claimed.pop(owner, None)
            if block not in other:
                super().give((block,))
            elif block in self.cuts and end >= 0:
                self._put(block, block, self._size)
            elif block in self.cuts:
                self._hosts.give((self.cuts.pop(block).host,))

    # --- Slots

    def _put(self, block: int, into: int, kept: int) -> None:
        """Put a best-effort request's part of a block into a block, maybe the same: the first `kept` tokens into slots,
        the rest to the host. Copy what is elsewhere so far."""
        owner = self.right.pop(block)
        number = owner.kv.blocks.index(~block)
        written = range(min(self._size, owner.prefix - number * self._size))
        sources = [self._at(block, place) for place in written]
        cut = self.cuts.pop(block, None)
        if kept < self._size:
            (host,) = (cut.host,) if cut is not None else self._hosts.take(1) or ()
            self.cuts[into] = Cut(host, kept)
        elif cut is not None:
            self._hosts.give((cut.host,))
        self.right[into] = owner
        for source, place in zip(sources, written, strict=True):
            if source != (target := self._at(into, place)):
                self.copies.add(source, target)

    def _at(self, block: int, place: int) -> int:
        """Return where the token at a place of a best-effort request is: the slot, or ~place on the host."""
        cut = self.cuts.get(block)
        if cut is not None and place >= cut.kept:
            return ~(cut.host * self._size + place)
        return block * self._size + self._size - 1 - place

    def num_left(self, block: int) -> int:
        """Return the slots from the left that a real-time request has claimed."""
        owner = self.left.get(block)
        return 0 if owner is None else self._num_claimed(owner, block)

    def num_right(self, block: int) -> int:
        """Return the slots from the right that a best-effort request has claimed, and not lost."""
        owner, cut = self.right.get(block), self.cuts.get(block)
        if cut is not None or owner is None:
            return 0 if cut is None else cut.kept
        return self._num_claimed(owner, ~block)

    def _num_claimed(self, owner: BlockOwner, end: int) -> int:
        *before, last = owner.kv.blocks
        return self._size if end != last else self.claimed[owner] - len(before) * self._size


class SlotCopies:
    """The copies of single tokens' vectors that are due before a step, collected while the step is planned (BROS
    §5.2).

    The device reads all sources of an order before it writes any target. So a copy from, or to, a target of the
    newest order begins another order. For example, slot 7 moves to slot 9, then slot 9 goes to the host: two
    orders. A number below 0 is ~place: memory on the host.
    """

    def __init__(self) -> None:
        self._orders: list[dict[int, int]] = [{}]  # target -> source

    def add(self, source: int, target: int) -> None:
        if source in self._orders[-1] or target in self._orders[-1]:
            self._orders.append({})
        self._orders[-1][target] = source

    def take(self) -> Sequence[CopySlots]:
        """Return what there is to copy, once."""
        orders, self._orders = self._orders, [{}]
        return [_order(copies) for copies in orders if copies]


def _order(copies: dict[int, int]) -> CopySlots:
    return CopySlots(
        tuple([(source, ~target) for target, source in copies.items() if target < 0]),
        tuple([(~source, target) for target, source in copies.items() if source < 0]),
        tuple([(source, target) for target, source in copies.items() if min(source, target) >= 0]),
    )
