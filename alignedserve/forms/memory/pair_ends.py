"""Block pairs that two requests share: a real-time one from the left, a best-effort one from the right (BROS §5).

A request's token i lies in its pair i // block_size, at place i % block_size from its own end. That is as if each had
its pairs for itself, and the kernels know no more than which end it is. Both ends grow towards each other:

    slot         0   1   2   3   4   5   6   7
    apart        A0  A1  A2  ·   ·   b2  b1  b0      nothing is copied
    they meet    A0  A1  A2  A3  A4  b2  b1  b0
    A goes on    A0  A1  A2  A3  A4  A5  b1  b0      b2 is at a place on the host: a checkpoint; b misses a slot
    b runs       A0  A1  A2  A3  A4  A5  ·   ·       its share of the pair moves to another pair, b2 comes back there
    or A ends    ·   ·   ·   ·   ·   b2  b1  b0      b2 comes back where it was

A request that is to run claims its tokens: all that it has, and a slot for each that is to come. A claim succeeds as a
whole, or changes nothing; a request whose claim has succeeded is pinned, and loses nothing, until `unpin`.

    RT (FindPreemptBlock)   free pairs; then pairs of best-effort requests that are not pinned, the emptiest first. Of
                            full pairs, first those of a request that misses slots already, then those of the newest
                            request, from its end
    BE (FindBlock)          its own last pair as far as the real-time request in it has not come; free pairs; for the
                            part of a pair, the real-time pair with most empty slots

A real-time request takes the slots of best-effort tokens in its way, one by one as it claims them; a best-effort
request never takes a slot from another. A token has a slot, or a place on the host, or no vectors yet. Which pairs were
preempted, and how far, is each holding's `kept`: the preemption table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Protocol

from alignedserve.core import NO_KV, KvForm, units_for
from alignedserve.forms.memory.slot_copies import SlotCopies
from alignedserve.forms.orders import CopySlots
from alignedserve.worker.step.blocks import Blocks


class Side(str, Enum):
    """The end from which a request fills its pairs."""

    LEFT = "left"  # real-time
    RIGHT = "right"  # best-effort


class SlotOwner(Protocol):
    prefix: int  # of its tokens have vectors
    kv: KvForm  # set here


@dataclass(slots=True)
class SlotCounts:
    """The counts of what has happened to slots so far."""

    num_preempted: int = 0  # pairs that a real-time request has entered where a best-effort one was alone
    num_checkpoints: int = 0  # tokens, as the numbers below
    num_restored: int = 0
    num_moved: int = 0


@dataclass(eq=False, slots=True)
class _SlotHolding:
    """The pairs and places of a request."""

    owner: SlotOwner
    side: Side
    pairs: list[int] = field(default_factory=list)
    num_tokens: int = 0  # that it has claimed
    kept: dict[int, int] = field(default_factory=dict)  # number of its pair -> how many of its first slots are left
    places: dict[int, int] = field(default_factory=dict)  # token -> where its vectors are, for lack of a slot
    num_alone: int = 0  # of a best-effort request: pairs that no real-time one is in


@dataclass(frozen=True, slots=True)
class _PairPart:
    """A pair of a holding."""

    holding: _SlotHolding
    number: int  # of the pair among those of the holding


@dataclass(frozen=True, slots=True)
class _Loss:
    """The number of a part's first slots that are left after a claim."""

    part: _PairPart
    kept: int


@dataclass(slots=True)
class _LeftPlan:
    free: int
    preempted: list[_PairPart]
    losses: list[_Loss]
    apart: list[_PairPart]  # best-effort parts that are pinned, and in the way: they go to free pairs


@dataclass(slots=True)
class _RightPlan:
    in_place: list[int]  # numbers of its pairs
    moving: list[int]
    new: list[int]
    last_shares: int | None  # the real-time pair that has room for the last of those that move or are new


class TwoEndedBlocks(Blocks):
    def __init__(self, num_pairs: int, block_size: int, num_places: int) -> None:
        """`num_places` is how many tokens without a slot the worker's own memory on the host holds."""
        super().__init__(num_pairs)
        self._num_pairs, self._block_size = num_pairs, block_size
        self._places = Blocks(num_places)
        self._holdings: dict[SlotOwner, _SlotHolding] = {}  # the newest last
        self._left: dict[int, _PairPart] = {}  # by pair
        self._right: dict[int, _PairPart] = {}
        self._losers: set[_SlotHolding] = set()  # holdings that miss slots
        self._pinned: set[_SlotHolding] = set()
        self._copies = SlotCopies()
        self.counts = SlotCounts()

    # --- Claims

    def claim(self, owner: SlotOwner, side: Side, tokens: int) -> bool:
        """Give the request all its slots, and one for each of so many tokens; pin it and return True if that can be."""
        holding = self._holdings.get(owner)
        if holding is not None and not holding.kept and self._grows_alone(holding, tokens):
            self._pinned.add(holding)
            return True
        new = holding or _SlotHolding(owner, side)
        if not (self._claim_left(new, tokens) if side is Side.LEFT else self._claim_right(new, tokens)):
            return False
        self._holdings[owner] = new
        self._pinned.add(new)
        _settle(new)
        return True

    def _grows_alone(self, holding: _SlotHolding, tokens: int) -> bool:
        """Claim slots of the last pair if no other request is in it, as most claims do; return whether they suffice."""
        if tokens > holding.num_tokens:
            others = self._right if holding.side is Side.LEFT else self._left
            if tokens > len(holding.pairs) * self._block_size or holding.pairs[-1] in others:
                return False
            holding.num_tokens = tokens
        return True

    def fits(self, side: Side, tokens: int) -> bool:
        """Return whether a new request could claim `tokens`."""
        new = _SlotHolding(_NO_OWNER, side)
        if side is Side.LEFT:
            return self._plan_left(new, tokens) is not None
        return self._plan_right(new, tokens) is not None

    def is_whole(self, owner: SlotOwner, tokens: int) -> bool:
        """Return whether the request has the slots of all `tokens`."""
        holding = self._holdings.get(owner)
        return holding is not None and not holding.kept and tokens <= holding.num_tokens

    @property
    def have_lost(self) -> bool:
        """Return whether some request misses slots."""
        return bool(self._losers)

    def has_lost(self, owner: SlotOwner) -> bool:
        return bool(self._holdings[owner].kept)

    def num_missing(self, owner: SlotOwner) -> int:
        """Return the tokens whose vectors must come back before the request can run: what that costs."""
        return len(self._holdings[owner].places)

    def saved(self, owner: SlotOwner) -> tuple[tuple[int, int], ...]:
        """Return those tokens, each with its place."""
        return tuple(self._holdings[owner].places.items())

    def is_shared(self, owner: SlotOwner) -> bool:
        """Return whether another request is in one of its pairs."""
        holding = self._holdings[owner]
        others = self._right if holding.side is Side.LEFT else self._left
        return any(pair in others for pair in holding.pairs)

    def pin(self, owners: Iterable[SlotOwner]) -> None:
        self._pinned.update(map(self._holdings.__getitem__, owners))

    def unpin(self) -> None:
        """Unpin all requests: between steps, or in a plan as long as no request in it has got slots back."""
        self._pinned.clear()

    def copies(self) -> CopySlots | None:
        """Return what is to be copied before whatever is ordered next; once."""
        return self._copies.take()

    def release(self, owner: SlotOwner) -> None:
        """Free all that the request has."""
        holding = self._holdings.pop(owner)
        self._pinned.discard(holding)
        self._losers.discard(holding)
        for number in range(len(holding.pairs)):
            self._leave(_PairPart(holding, number))
        self._places.give(tuple(holding.places.values()))
        owner.kv = NO_KV

    # --- What there is

    @property
    def room_for_rt(self) -> int:
        """Return the full pairs that a real-time request could claim beside the free ones, once none is pinned."""
        alone = sum([holding.num_alone for holding in self._holdings.values()])
        return min(alone, self._places.num_free // self._block_size)

    @property
    def taken(self) -> list[int]:
        """Return each pair that some request is in, once."""
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

    def slots(self, owner: SlotOwner) -> dict[int, int]:
        """Return the slot of each of its tokens that has one: token -> pair * block_size + offset."""
        holding = self._holdings[owner]
        return {
            number * self._block_size + place: self._slot(holding, number, place)
            for number in range(len(holding.pairs))
            for place in range(self._present(_PairPart(holding, number)))
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
        pairs = [*free, *(part.holding.pairs[part.number] for part in plan.preempted)]
        self.counts.num_preempted += len(plan.preempted)
        for part in plan.preempted:
            part.holding.num_alone -= 1
        for pair in pairs:
            self._left[pair] = _PairPart(holding, len(holding.pairs))
            holding.pairs.append(pair)
        holding.num_tokens = max(holding.num_tokens, tokens)
        return True

    def _plan_left(self, holding: _SlotHolding, tokens: int) -> _LeftPlan | None:
        block, have = self._block_size, len(holding.pairs)
        plan = _LeftPlan(0, [], [], [])
        for number in range(holding.num_tokens // block, min(have, units_for(tokens, block))):
            part = self._right.get(holding.pairs[number])
            kept = block - min(block, tokens - number * block)
            if part is None or self._present(part) <= kept:
                continue
            if part.holding in self._pinned:
                plan.apart.append(part)
            else:
                plan.losses.append(_Loss(part, kept))
        wanted = max(0, units_for(tokens, block) - have)
        plan.free = min(wanted, self.num_free - len(plan.apart))
        plan.preempted = list(islice(self._emptiest(), max(0, wanted - plan.free)))
        if plan.free < 0 or plan.free + len(plan.preempted) < wanted:
            return None
        for number, part in enumerate(plan.preempted, have + plan.free):
            kept = block - min(block, tokens - number * block)
            if self._present(part) > kept:
                plan.losses.append(_Loss(part, kept))
        if sum([self._num_to_save(loss) for loss in plan.losses]) > self._places.num_free:
            return None
        return plan

    def _emptiest(self) -> Iterator[_PairPart]:
        """Yield pairs that best-effort requests have for themselves, in the order in which they are preempted."""
        preemptable, hollow = self._preemptable, list[_PairPart]()
        for holding in preemptable:
            may_be_hollow = dict.fromkeys((*holding.kept, len(holding.pairs) - 1))
            hollow += [_PairPart(holding, number) for number in may_be_hollow if self._is_hollow(holding, number)]
        hollow.sort(key=self._present)
        yield from hollow
        seen = {(id(part.holding), part.number) for part in hollow}
        for holding in sorted(preemptable, key=lambda holding: not holding.kept):
            for number in reversed(range(len(holding.pairs))):
                if holding.pairs[number] not in self._left and (id(holding), number) not in seen:
                    yield _PairPart(holding, number)

    @property
    def _preemptable(self) -> list[_SlotHolding]:
        """Return the best-effort holdings that may lose slots, the newest first."""
        newest_first = (holding for holding in reversed(self._holdings.values()) if holding.side is Side.RIGHT)
        return [holding for holding in newest_first if holding not in self._pinned and holding.pairs]

    def _is_hollow(self, holding: _SlotHolding, number: int) -> bool:
        alone = holding.pairs[number] not in self._left
        return alone and self._present(_PairPart(holding, number)) < self._block_size

    def _num_to_save(self, loss: _Loss) -> int:
        return len(self._lost(loss))

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
            self._move(holding, number, self._pair_for(number == last, plan))
        for number in plan.new:
            holding.pairs.append(self._pair_for(number == last, plan))
            self._enter_right(_PairPart(holding, number))
        holding.num_tokens = tokens
        return True

    def _plan_right(self, holding: _SlotHolding, tokens: int) -> _RightPlan | None:
        block, have, all_pairs = self._block_size, len(holding.pairs), units_for(tokens, self._block_size)
        plan = _RightPlan([], [], [], None)
        changed = {*holding.kept, *range(holding.num_tokens // block, all_pairs)}
        for number in sorted(changed):
            if number >= have:
                plan.new.append(number)
            elif self._level(holding.pairs[number]) + min(block, tokens - number * block) <= block:
                plan.in_place.append(number)
            else:
                plan.moving.append(number)
        lacking = len(plan.moving) + len(plan.new) - self.num_free
        if lacking <= 0:
            return plan
        last = all_pairs - 1
        if lacking == 1 and last in (*plan.moving, *plan.new):
            plan.last_shares = self._widest_end(tokens - last * block)
        return plan if plan.last_shares is not None else None

    def _pair_for(self, is_last: bool, plan: _RightPlan) -> int:
        return plan.last_shares if is_last and plan.last_shares is not None else self._take_one()

    def _take_one(self) -> int:
        free = self.take(1)
        assert free is not None, "a plan takes more than there is"
        return free[0]

    def _widest_end(self, slots: int) -> int | None:
        """Return the real-time pair with most empty slots, if these are as many. Only last pairs have any."""
        best, most = None, slots - 1
        for holding in self._holdings.values():
            if holding.side is Side.LEFT and (pair := holding.pairs[-1]) not in self._right:
                empty = self._block_size - self._level(pair)
                if empty > most:
                    best, most = pair, empty
        return best

    def _level(self, pair: int) -> int:
        """Return the slots from the left that a real-time request has claimed."""
        part = self._left.get(pair)
        return 0 if part is None else self._present(part)

    def _restore(self, holding: _SlotHolding, number: int) -> None:
        """Bring the vectors back of those tokens of this pair that have no slot, where the pair lies now."""
        block = self._block_size
        kept = holding.kept.pop(number, block)
        if not holding.kept:
            self._losers.discard(holding)
        for token in range(number * block + kept, (number + 1) * block):
            if (place := holding.places.pop(token, None)) is not None:
                self._copies.restore(place, self._slot(holding, number, token % block))
                self._places.give((place,))
                self.counts.num_restored += 1

    def _move(self, holding: _SlotHolding, number: int, pair: int) -> None:
        """Move a part to another pair, whole."""
        part, block = _PairPart(holding, number), self._block_size
        written = min(self._present(part), holding.owner.prefix - number * block)
        sources = [self._slot(holding, number, place) for place in range(written)]
        self._leave(part)
        holding.pairs[number] = pair
        self._enter_right(part)
        for place, source in enumerate(sources):
            self._copies.move(source, self._slot(holding, number, place))
        self.counts.num_moved += len(sources)
        self._restore(holding, number)

    # --- Slots

    def _present(self, part: _PairPart) -> int:
        """Return how many of its places there have a slot: always the first."""
        holding, number, block = part.holding, part.number, self._block_size
        return holding.kept.get(number, min(block, holding.num_tokens - number * block))

    def _slot(self, holding: _SlotHolding, number: int, place: int) -> int:
        offset = place if holding.side is Side.LEFT else self._block_size - 1 - place
        return holding.pairs[number] * self._block_size + offset

    def _enter_right(self, part: _PairPart) -> None:
        pair = part.holding.pairs[part.number]
        self._right[pair] = part
        part.holding.num_alone += pair not in self._left

    def _leave(self, part: _PairPart) -> None:
        pair = part.holding.pairs[part.number]
        if part.holding.side is Side.LEFT:
            del self._left[pair]
            if (other := self._right.get(pair)) is not None:
                other.holding.num_alone += 1
                return
        else:
            del self._right[pair]
            if pair in self._left:
                return
            part.holding.num_alone -= 1
        self.give((pair,))


def _settle(holding: _SlotHolding) -> None:
    owner = holding.owner
    pairs = holding.pairs if holding.side is Side.LEFT else [~pair for pair in holding.pairs]
    owner.kv = KvForm(tuple(pairs))


@dataclass(eq=False)
class _NoOwner:
    prefix: int = 0
    kv: KvForm = NO_KV


_NO_OWNER = _NoOwner()
