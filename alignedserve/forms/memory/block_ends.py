"""Blocks that two requests share: a real-time request from the left, a best-effort request from the right (BROS §5).

A request keeps the end where it began, also when its class changes. Below, real-time means from the left.

Token i of a request lies in the request's block i // block_size, at place i % block_size from the request's end. Places
are as if no block were shared: of sharing, kernels know only the end. Both ends grow towards each other:

    slot         0   1   2   3   4   5   6   7
    apart        A0  A1  A2  ·   ·   b2  b1  b0      nothing is copied
    they meet    A0  A1  A2  A3  A4  b2  b1  b0
    A goes on    A0  A1  A2  A3  A4  A5  b1  b0      b2 is at a place on the host: a checkpoint; b misses a slot
    b runs       A0  A1  A2  A3  A4  A5  ·   ·       b's part of the block moves to another block; b2 comes back there
    or A ends    ·   ·   ·   ·   ·   b2  b1  b0      b2 comes back where it was

A request that is to run claims a slot for each token, present and coming. A claim succeeds as a whole, or changes
nothing; after a successful claim the request is pinned, and loses nothing, until `unpin`.

    RT (FindPreemptBlock)   free blocks; then blocks of best-effort requests that are not pinned, the emptiest first. Of
                            full blocks, first those of a request that misses slots already, then those of the newest
                            request, from its end
    BE (FindBlock)          the slots that a real-time request leaves in the request's last block; free blocks; for the
                            part of a block, the real-time block with most empty slots

A real-time request takes the slots of best-effort tokens in the way, one by one as claimed; a best-effort request never
takes a slot from another. A token has a slot, or a place on the host, or no vectors yet. The `kept` of each
holding says which blocks were preempted, and how far: the preemption table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from alignedserve.core import NO_KV, KvForm, units_for
from alignedserve.forms.memory.slot_copies import SlotCopies
from alignedserve.forms.orders import CopySlots
from alignedserve.worker.step.blocks import BlockOwner, Blocks, keep_as


class Side(str, Enum):
    """The end from which a request fills its blocks."""

    LEFT = "left"  # real-time
    RIGHT = "right"  # best-effort


@dataclass(slots=True)
class SlotCounts:
    """The counts of what has happened to slots so far."""

    num_preempted: int = 0  # blocks that a real-time request has entered where a best-effort request was alone
    num_checkpoints: int = 0  # tokens, as the numbers below
    num_restored: int = 0
    num_moved: int = 0


@dataclass(eq=False, slots=True)
class _SlotHolding:
    """The blocks and places of a request."""

    owner: BlockOwner
    side: Side
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0  # that the request has claimed
    kept: dict[int, int] = field(default_factory=dict)  # number of a block -> how many of its first slots are left
    places: dict[int, int] = field(default_factory=dict)  # token without a slot -> where the vectors are
    num_alone: int = 0  # of a best-effort request: blocks without a real-time request


@dataclass(frozen=True, slots=True)
class _BlockPart:
    """A block of a holding."""

    holding: _SlotHolding
    number: int  # of the block among those of the holding


@dataclass(frozen=True, slots=True)
class _Loss:
    """The number of a part's first slots that are left after a claim."""

    part: _BlockPart
    kept: int


@dataclass(slots=True)
class _LeftPlan:
    free: int
    preempted: list[_BlockPart]
    losses: list[_Loss]
    apart: list[_BlockPart]  # pinned best-effort parts in the way: these go to free blocks


@dataclass(slots=True)
class _RightPlan:
    in_place: list[int]  # numbers of the request's blocks
    moving: list[int]
    new: list[int]
    last_shares: int | None  # the real-time block that has room for the last of those that move or are new


class TwoEndedBlocks(Blocks):
    def __init__(self, num_blocks: int, block_size: int, num_places: int) -> None:
        """`num_places` is how many tokens without a slot the worker's own memory on the host holds."""
        super().__init__(num_blocks)
        self._num_blocks, self._block_size = num_blocks, block_size
        self._places = Blocks(num_places)
        self._holdings: dict[BlockOwner, _SlotHolding] = {}  # the newest last
        self._left: dict[int, _BlockPart] = {}  # by block
        self._right: dict[int, _BlockPart] = {}
        self._losers: set[_SlotHolding] = set()  # holdings that miss slots
        self._pinned: set[_SlotHolding] = set()
        self._copies = SlotCopies()
        self.counts = SlotCounts()

    # --- Claims

    def claim(self, owner: BlockOwner, side: Side, tokens: int) -> bool:
        """Give the request a slot for each of `tokens` tokens, lost slots too; pin it and return True if all fit."""
        holding = self._holdings.get(owner)
        if holding is not None and not holding.kept and self._grows_alone(holding, tokens):
            self._pinned.add(holding)
            return True
        new = holding or _SlotHolding(owner, side)
        if not (self._claim_left(new, tokens) if new.side is Side.LEFT else self._claim_right(new, tokens)):
            return False
        self._holdings[owner] = new
        self._pinned.add(new)
        _settle(new)
        return True

    def _grows_alone(self, holding: _SlotHolding, tokens: int) -> bool:
        """Claim slots of the last block if no other request is in it, as most claims do; return whether they
        suffice."""
        if tokens > holding.num_tokens:
            others = self._right if holding.side is Side.LEFT else self._left
            if tokens > len(holding.blocks) * self._block_size or holding.blocks[-1] in others:
                return False
            holding.num_tokens = tokens
        return True

    def fits(self, side: Side, tokens: int) -> bool:
        """Return whether a new request could claim `tokens`."""
        new = _SlotHolding(_NO_OWNER, side)
        if side is Side.LEFT:
            return self._plan_left(new, tokens) is not None
        return self._plan_right(new, tokens) is not None

    def is_whole(self, owner: BlockOwner, tokens: int) -> bool:
        """Return whether the request has the slots of all `tokens`."""
        holding = self._holdings.get(owner)
        return holding is not None and not holding.kept and tokens <= holding.num_tokens

    @property
    def have_lost(self) -> bool:
        """Return whether some request misses slots."""
        return bool(self._losers)

    def has_lost(self, owner: BlockOwner) -> bool:
        return bool(self._holdings[owner].kept)

    def num_missing(self, owner: BlockOwner) -> int:
        """Return the tokens whose vectors must come back before the request can run: what that costs."""
        return len(self._holdings[owner].places)

    def saved(self, owner: BlockOwner) -> tuple[tuple[int, int], ...]:
        """Return those tokens, each with its place on the host."""
        return tuple(self._holdings[owner].places.items())

    def is_shared(self, owner: BlockOwner) -> bool:
        """Return whether another request is in a block of this request."""
        holding = self._holdings[owner]
        others = self._right if holding.side is Side.LEFT else self._left
        return any(block in others for block in holding.blocks)

    def pin(self, owners: Iterable[BlockOwner]) -> None:
        self._pinned.update(map(self._holdings.__getitem__, owners))

    def unpin(self) -> None:
        """Unpin all requests: between steps, or in a plan while no planned request has got slots back."""
        self._pinned.clear()

    def copies(self) -> CopySlots | None:
        """Return what is to be copied before whatever is ordered next; once."""
        return self._copies.take()

    def release(self, owner: BlockOwner) -> None:
        """Free all that the request has."""
        holding = self._holdings.pop(owner)
        self._pinned.discard(holding)
        self._losers.discard(holding)
        for number in range(len(holding.blocks)):
            self._leave(_BlockPart(holding, number))
        self._places.give(tuple(holding.places.values()))
        keep_as(owner, NO_KV)

    # --- What there is

    @property
    def room_for_rt(self) -> int:
        """Return the full blocks that a real-time request could claim beside free blocks, once none is pinned."""
        alone = sum([holding.num_alone for holding in self._holdings.values()])
        return min(alone, self._places.num_free // self._block_size)

    @property
    def taken(self) -> list[int]:
        """Return each block that some request is in, once."""
        return list(self._left | self._right)

    @property
    def num_saved(self) -> int:
        """Return the tokens in the worker's own memory."""
        return sum([len(holding.places) for holding in self._holdings.values()])

    @property
    def num_free_places(self) -> int:
        return self._places.num_free

    @property
    def claimed(self) -> list[int]:
        """Return all slots that some request has: each once, as long as all is well."""
        return [slot for owner in self._holdings for slot in self.slots(owner).values()]

    def slots(self, owner: BlockOwner) -> dict[int, int]:
        """Return the slots of the request's tokens that have a slot: token -> block * block_size + offset."""
        holding = self._holdings[owner]
        return {
            number * self._block_size + place: self._slot(holding, number, place)
            for number in range(len(holding.blocks))
            for place in range(self._present(_BlockPart(holding, number)))
        }

    # --- Real-time claims

    def _claim_left(self, holding: _SlotHolding, tokens: int) -> bool:
        plan = self._plan_left(holding, tokens)
        if plan is None:
            return False
        for part in plan.apart:
            self._move(part.holding, part.number, self._take_one())
            _settle(part.holding)
        for loss in plan.losses:
            self._lose(loss)
        free = self.take(plan.free)
        assert free is not None, "a plan takes more than there is"
        blocks = [*free, *(part.holding.blocks[part.number] for part in plan.preempted)]
        self.counts.num_preempted += len(plan.preempted)
        for part in plan.preempted:
            part.holding.num_alone -= 1
        for block in blocks:
            self._left[block] = _BlockPart(holding, len(holding.blocks))
            holding.blocks.append(block)
        holding.num_tokens = max(holding.num_tokens, tokens)
        return True

    def _plan_left(self, holding: _SlotHolding, tokens: int) -> _LeftPlan | None:
        size, have = self._block_size, len(holding.blocks)
        plan = _LeftPlan(0, [], [], [])
        for number in range(holding.num_tokens // size, min(have, units_for(tokens, size))):
            part = self._right.get(holding.blocks[number])
            kept = size - min(size, tokens - number * size)
            if part is None or self._present(part) <= kept:
                continue
            if part.holding in self._pinned:
                plan.apart.append(part)
            else:
                plan.losses.append(_Loss(part, kept))
        wanted = max(0, units_for(tokens, size) - have)
        plan.free = min(wanted, self.num_free - len(plan.apart))
        plan.preempted = list(islice(self._emptiest(), max(0, wanted - plan.free)))
        if plan.free < 0 or plan.free + len(plan.preempted) < wanted:
            return None
        for number, part in enumerate(plan.preempted, have + plan.free):
            kept = size - min(size, tokens - number * size)
            if self._present(part) > kept:
                plan.losses.append(_Loss(part, kept))
        if sum([len(self._lost(loss)) for loss in plan.losses]) > self._places.num_free:
            return None
        return plan

    def _emptiest(self) -> Iterator[_BlockPart]:
        """Yield blocks with best-effort requests alone, in the order of preemption."""
        preemptable, hollow = self._preemptable, list[_BlockPart]()
        for holding in preemptable:
            may_be_hollow = dict.fromkeys((*holding.kept, len(holding.blocks) - 1))
            hollow += [_BlockPart(holding, number) for number in may_be_hollow if self._is_hollow(holding, number)]
        hollow.sort(key=self._present)
        yield from hollow
        seen = {(id(part.holding), part.number) for part in hollow}
        for holding in sorted(preemptable, key=lambda holding: not holding.kept):
            for number in reversed(range(len(holding.blocks))):
                if holding.blocks[number] not in self._left and (id(holding), number) not in seen:
                    yield _BlockPart(holding, number)

    @property
    def _preemptable(self) -> list[_SlotHolding]:
        """Return the best-effort holdings that may lose slots, the newest first."""
        newest_first = (holding for holding in reversed(self._holdings.values()) if holding.side is Side.RIGHT)
        return [holding for holding in newest_first if holding not in self._pinned and holding.blocks]

    def _is_hollow(self, holding: _SlotHolding, number: int) -> bool:
        alone = holding.blocks[number] not in self._left
        return alone and self._present(_BlockPart(holding, number)) < self._block_size

    def _lost(self, loss: _Loss) -> range:
        """Return the tokens that have vectors and lose their slots."""
        first, owner = loss.part.number * self._block_size, loss.part.holding.owner
        return range(first + loss.kept, min(first + self._present(loss.part), owner.prefix))

    def _lose(self, loss: _Loss) -> None:
        holding, number = loss.part.holding, loss.part.number
        lost = self._lost(loss)
        places = self._places.take(len(lost))
        assert places is not None, "a plan needs no more places than there are"
        for token, place in zip(lost, places, strict=True):
            self._copies.checkpoint(self._slot(holding, number, token % self._block_size), place)
            holding.places[token] = place
        self.counts.num_checkpoints += len(lost)
        holding.kept[number] = loss.kept
        self._losers.add(holding)

    # --- Best-effort claims

    def _claim_right(self, holding: _SlotHolding, tokens: int) -> bool:
        tokens = max(tokens, holding.num_tokens)
        plan = self._plan_right(holding, tokens)
        if plan is None:
            return False
        last = units_for(tokens, self._block_size) - 1
        for number in plan.in_place:
            self._restore(holding, number)
        for number in plan.moving:
            self._move(holding, number, self._block_for(number == last, plan))
        for number in plan.new:
            holding.blocks.append(self._block_for(number == last, plan))
            self._enter_right(_BlockPart(holding, number))
        holding.num_tokens = tokens
        return True

    def _plan_right(self, holding: _SlotHolding, tokens: int) -> _RightPlan | None:
        size, have, all_blocks = self._block_size, len(holding.blocks), units_for(tokens, self._block_size)
        plan = _RightPlan([], [], [], None)
        changed = {*holding.kept, *range(holding.num_tokens // size, all_blocks)}
        for number in sorted(changed):
            if number >= have:
                plan.new.append(number)
            elif self._level(holding.blocks[number]) + min(size, tokens - number * size) <= size:
                plan.in_place.append(number)
            else:
                plan.moving.append(number)
        lacking = len(plan.moving) + len(plan.new) - self.num_free
        if lacking <= 0:
            return plan
        last = all_blocks - 1
        if lacking == 1 and last in (*plan.moving, *plan.new):
            plan.last_shares = self._widest_end(tokens - last * size)
        return plan if plan.last_shares is not None else None

    def _block_for(self, is_last: bool, plan: _RightPlan) -> int:
        return plan.last_shares if is_last and plan.last_shares is not None else self._take_one()

    def _take_one(self) -> int:
        free = self.take(1)
        assert free is not None, "a plan takes more than there is"
        return free[0]

    def _widest_end(self, slots: int) -> int | None:
        """Return the real-time block with most empty slots, if these are as many. Only last blocks have any."""
        best, most = None, slots - 1
        for holding in self._holdings.values():
            if holding.side is Side.LEFT and (block := holding.blocks[-1]) not in self._right:
                empty = self._block_size - self._level(block)
                if empty > most:
                    best, most = block, empty
        return best

    def _level(self, block: int) -> int:
        """Return the slots from the left that a real-time request has claimed."""
        part = self._left.get(block)
        return 0 if part is None else self._present(part)

    def _restore(self, holding: _SlotHolding, number: int) -> None:
        """Bring the vectors back of those tokens of this block that have no slot, where the block lies now."""
        size = self._block_size
        kept = holding.kept.pop(number, size)
        if not holding.kept:
            self._losers.discard(holding)
        for token in range(number * size + kept, (number + 1) * size):
            if (place := holding.places.pop(token, None)) is not None:
                self._copies.restore(place, self._slot(holding, number, token % size))
                self._places.give((place,))
                self.counts.num_restored += 1

    def _move(self, holding: _SlotHolding, number: int, block: int) -> None:
        """Move a part to another block, whole."""
        part, size = _BlockPart(holding, number), self._block_size
        written = min(self._present(part), holding.owner.prefix - number * size)
        sources = [self._slot(holding, number, place) for place in range(written)]
        self._leave(part)
        holding.blocks[number] = block
        self._enter_right(part)
        for place, source in enumerate(sources):
            self._copies.move(source, self._slot(holding, number, place))
        self.counts.num_moved += len(sources)
        self._restore(holding, number)

    # --- Slots

    def _present(self, part: _BlockPart) -> int:
        """Return how many of its places there have a slot: always the first."""
        holding, number, size = part.holding, part.number, self._block_size
        return holding.kept.get(number, min(size, holding.num_tokens - number * size))

    def _slot(self, holding: _SlotHolding, number: int, place: int) -> int:
        offset = place if holding.side is Side.LEFT else self._block_size - 1 - place
        return holding.blocks[number] * self._block_size + offset

    def _enter_right(self, part: _BlockPart) -> None:
        block = part.holding.blocks[part.number]
        self._right[block] = part
        part.holding.num_alone += block not in self._left

    def _leave(self, part: _BlockPart) -> None:
        block = part.holding.blocks[part.number]
        if part.holding.side is Side.LEFT:
            del self._left[block]
            if (other := self._right.get(block)) is not None:
                other.holding.num_alone += 1
                return
        else:
            del self._right[block]
            if block in self._left:
                return
            part.holding.num_alone -= 1
        self.give((block,))


def _settle(holding: _SlotHolding) -> None:
    blocks = holding.blocks if holding.side is Side.LEFT else [~block for block in holding.blocks]
    keep_as(holding.owner, KvForm(tuple(blocks)))


@dataclass(eq=False)
class _NoOwner:
    prefix: int = 0
    kv: KvForm = NO_KV


_NO_OWNER = _NoOwner()
