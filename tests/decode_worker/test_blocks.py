"""Blocks that two requests share: no request's vectors are lost, whatever happens to their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.core import NO_KV, KvForm
from alignedserve.papers.memory.block_ends import TwoEndedBlocks
from alignedserve.protocol.form_orders import CopySlots
from tests.conftest import examples


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


RT, BE = Side.LEFT, Side.RIGHT


@dataclass(eq=False)
class Owner:
    name: str
    side: Side
    prefix: int = 0
    kv: KvForm = NO_KV

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(max(block, ~block) for block in self.kv.blocks)


@dataclass
class Device:
    """Model slots and places as dictionaries; a token's vectors are its owner's name and its index."""

    slots: dict[int, object] = field(default_factory=dict)
    places: dict[int, object] = field(default_factory=dict)

    def perform(self, orders: Sequence[CopySlots]) -> None:
        for copies in orders:
            to_places = {place: self.slots[slot] for slot, place in copies.checkpoints}
            to_slots = {slot: self.places[place] for place, slot in copies.restores}
            moved = {target: self.slots[source] for source, target in copies.moves}
            assert not to_slots.keys() & moved.keys(), "a slot is written twice"
            self.places |= to_places
            self.slots |= to_slots | moved


class Sharing:
    def __init__(self, num_blocks: int, block_size: int, num_places: int) -> None:
        self.in_step: set[Owner] = set()  # that lose no slots
        self.blocks = TwoEndedBlocks(num_blocks, block_size, num_places, self.preemptable)
        self.block_size, self.num_hosts = block_size, num_places // block_size
        self.device = Device()
        self.done: list[CopySlots] = []

    def preemptable(self) -> list[Owner]:
        owners = [owner for owner in self.blocks.claimed if isinstance(owner, Owner)]
        return [owner for owner in reversed(owners) if owner not in self.in_step]

    def place(self, owner: Owner, token: int) -> int:
        """Return the token's slot as kernels compute it: from the blocks and their signs alone."""
        number, at = divmod(token, self.block_size)
        is_left = owner.kv.blocks[number] >= 0
        return owner.blocks[number] * self.block_size + (at if is_left else self.block_size - 1 - at)

    def slots(self, owner: Owner) -> dict[int, int]:
        """Return the slots of the tokens that have a slot: token -> slot."""
        found, size = dict[int, int](), self.block_size
        for number, block in enumerate(owner.kv.blocks):
            count = min(size, self.blocks.claimed[owner] - number * size)
            if block < 0:
                count = self.blocks.num_right(~block)
            found |= {token: self.place(owner, token) for token in range(number * size, number * size + count)}
        return found

    def num_missing(self, owner: Owner) -> int:
        return len(self.blocks.saved(owner, owner.prefix))

    def is_whole(self, owner: Owner, tokens: int) -> bool:
        return tokens <= self.blocks.claimed[owner] and owner not in self.blocks.losers

    def claim(self, owner: Owner, tokens: int) -> bool:
        return self.blocks.claim(owner, owner.side is RT, tokens)

    def fits(self, side: Side, tokens: int) -> bool:
        return self.blocks.claim(Owner("new", side), side is RT, tokens, is_dry=True)

    def release(self, owner: Owner) -> None:
        blocks, owner.kv = owner.kv.blocks, NO_KV
        self.blocks.give(blocks)

    def copies(self) -> CopySlots:
        """Perform the copies that are due; return them as one order."""
        orders = self.blocks.copies.take()
        self.device.perform(orders)
        self.done += orders
        return CopySlots(
            tuple(chain.from_iterable(each.checkpoints for each in orders)),
            tuple(chain.from_iterable(each.restores for each in orders)),
            tuple(chain.from_iterable(each.moves for each in orders)),
        )

    def run(self, *claims: tuple[Owner, int]) -> None:
        """Run a step of the requests that have claimed these numbers of tokens."""
        self.copies()
        for owner, tokens in claims:
            read = [self.device.slots[self.place(owner, token)] for token in range(owner.prefix)]
            assert read == [(owner.name, token) for token in range(owner.prefix)]
            for token in range(owner.prefix, tokens):
                self.device.slots[self.place(owner, token)] = (owner.name, token)
            owner.prefix = tokens

    def runs(self, owner: Owner, tokens: int) -> None:
        assert self.claim(owner, tokens)
        self.run((owner, tokens))


class Anything(RuleBasedStateMachine):
    """Rounds of claims in any order, each followed by its step; requests come and leave."""

    @initialize(num_blocks=st.integers(1, 7), block_size=st.integers(1, 4), num_places=st.sampled_from((0, 3, 100)))
    def begin(self, num_blocks: int, block_size: int, num_places: int) -> None:
        self.all = num_blocks, num_places
        self.sharing = Sharing(num_blocks, block_size, num_places)
        self.owners: list[Owner] = []
        self.serial = 0

    @rule(side=st.sampled_from(Side), tokens=st.integers(1, 12), runs=st.booleans())
    def come(self, side: Side, tokens: int, runs: bool) -> None:
        owner = Owner(f"{side.value}-{self.serial}", side)
        self.serial += 1
        fits = self.sharing.fits(side, tokens)
        assert self.sharing.claim(owner, tokens) == fits
        if fits:
            self.owners.append(owner)
            self.sharing.run(*([(owner, tokens)] if runs else []))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Let requests claim more in any order. Those that are whole run; a chat that joins takes nothing from them."""
        order = data.draw(st.permutations(self.owners))
        more = data.draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
        claims = [(claim, claim.prefix + some) for claim, some in zip(order, more, strict=True) if claim.prefix + some]
        claimed = {owner: tokens for owner, tokens in claims if self.claims(owner, tokens)}
        runs = {owner: tokens for owner, tokens in claimed.items() if self.sharing.is_whole(owner, tokens)}
        self.sharing.in_step = set(runs)
        self.come(data.draw(st.sampled_from(Side)), data.draw(st.integers(1, 12)), runs=False)
        self.sharing.run(*runs.items())
        self.sharing.in_step = set()

    def claims(self, owner: Owner, tokens: int) -> bool:
        """Claim the tokens, and check that a failed claim leaves the request's slots as they were."""
        before = self.sharing.slots(owner)
        claimed = self.sharing.claim(owner, tokens)
        assert claimed or self.sharing.slots(owner) == before
        return claimed

    @rule(data=st.data())
    def some_leave(self, data: st.DataObject) -> None:
        for owner in data.draw(st.lists(st.sampled_from(self.owners), unique=True) if self.owners else st.just([])):
            self.sharing.release(owner)
            self.owners.remove(owner)

    @precondition(lambda self: hasattr(self, "sharing"))
    @invariant()
    def no_request_has_a_slot_of_another(self) -> None:
        blocks = self.sharing.blocks
        slots = [slot for owner in self.owners for slot in self.sharing.slots(owner).values()]
        assert len(slots) == len(set(slots))
        assert sorted([*blocks.free, *{*blocks.left, *blocks.right}]) == list(range(self.all[0]))

    @precondition(lambda self: hasattr(self, "sharing"))
    @invariant()
    def room_for_chats_can_be_taken(self) -> None:
        blocks, size = self.sharing.blocks, self.sharing.block_size
        num_alone = len(blocks.right.keys() - blocks.left.keys())
        assert blocks.room_for_rt == min(num_alone, self.sharing.num_hosts - len(blocks.cuts))
        if wanted := blocks.num_free + blocks.room_for_rt:
            assert self.sharing.fits(RT, wanted * size)

    @precondition(lambda self: hasattr(self, "sharing"))
    @invariant()
    def each_token_has_a_slot_or_a_place(self) -> None:
        blocks, device = self.sharing.blocks, self.sharing.device
        hosts = [cut.host for cut in blocks.cuts.values()]
        assert len(hosts) == len(set(hosts)) <= self.sharing.num_hosts
        assert all(block in blocks.left for block in blocks.cuts), "what a chat has left came back"
        self.sharing.copies()
        for owner in self.owners:
            held, saved = self.sharing.slots(owner), dict(blocks.saved(owner, owner.prefix))
            written = [token for token in held if token < owner.prefix]
            assert [device.slots[held[token]] for token in written] == [(owner.name, token) for token in written]
            assert [device.places[place] for place in saved.values()] == [(owner.name, token) for token in saved]
            assert sorted([*written, *saved]) == list(range(owner.prefix))
            if owner.side is RT:
                assert not saved, "a real-time request loses nothing"

    def teardown(self) -> None:
        if hasattr(self, "sharing"):
            for owner in self.owners:
                self.sharing.release(owner)
            assert (self.sharing.blocks.num_free, len(self.sharing.blocks.cuts)) == (self.all[0], 0)


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


def rt(name: str = "A") -> Owner:
    return Owner(name, RT)


def be(name: str = "b") -> Owner:
    return Owner(name, BE)


class TestRealTime:
    def test_takes_what_is_free_first(self) -> None:
        sharing, best_effort, chat = Sharing(3, 4, 100), be(), rt()
        sharing.runs(best_effort, 5)
        sharing.runs(chat, 4)
        assert not set(chat.blocks) & set(best_effort.blocks)

    def test_enters_the_emptiest_block_and_copies_nothing_until_they_meet(self) -> None:
        sharing, fuller, emptier, chat = Sharing(2, 4, 100), be("fuller"), be("emptier"), rt()
        sharing.runs(fuller, 3)
        sharing.runs(emptier, 2)
        for tokens in (1, 2):
            sharing.runs(chat, tokens)
        assert not sharing.done
        assert chat.blocks == emptier.blocks
        assert sharing.is_whole(emptier, 2)

    def test_sends_only_the_slot_that_it_is_about_to_take(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(best_effort, 3)
        sharing.runs(chat, 1)
        assert sharing.claim(chat, 2)
        assert sharing.copies().checkpoints == ((1, 2),), "b2, at place 2 of the host's block"
        assert sharing.num_missing(best_effort) == 1
        assert not sharing.is_whole(best_effort, 3)

    def test_sends_nothing_of_a_slot_that_was_never_written(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 4), be(), rt()
        assert sharing.claim(best_effort, 4)
        sharing.runs(chat, 4)
        assert not sharing.done

    def test_a_chat_enters_no_block_of_a_request_in_the_step(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        assert sharing.claim(best_effort, 1)
        sharing.in_step = {best_effort}
        assert not sharing.claim(chat, 1)
        sharing.run((best_effort, 1))
        sharing.in_step = set()
        assert sharing.claim(chat, 1)

    def test_goes_without_where_nobody_has_a_place_for_what_it_would_take(self) -> None:
        sharing, older, newer, chat = Sharing(2, 4, 4), be("older"), be("newer"), rt()
        sharing.runs(older, 3)
        sharing.runs(newer, 4)
        sharing.runs(chat, 4)
        assert sharing.num_missing(older) == 3
        assert not sharing.claim(chat, 5)
        assert sharing.is_whole(newer, 4)

    def test_a_chat_takes_the_newest_request_from_its_end(self) -> None:
        sharing, older, newer, chat = Sharing(5, 2, 100), be("older"), be("newer"), rt()
        sharing.runs(older, 4)
        sharing.runs(newer, 5)
        sharing.runs(chat, 1)
        assert chat.blocks == newer.blocks[2:], "the emptiest"
        sharing.runs(chat, 7)
        assert sharing.num_missing(newer) == 5 - 1
        assert sharing.num_missing(older) == 2, "the end of each before the middle of one"

    def test_counts_what_it_could_have(self) -> None:
        sharing, best_effort = Sharing(3, 4, 4), be()
        sharing.runs(best_effort, 8)
        assert (sharing.blocks.num_free, sharing.blocks.room_for_rt) == (1, 1), "of two, one can be sent away"
        assert sharing.fits(RT, 8)
        assert not sharing.fits(RT, 12)


class TestBestEffort:
    def alone_with(self, chat_tokens: int) -> tuple[Sharing, Owner, Owner]:
        """Return a best-effort request that misses slots of three tokens, and the chat that has taken them."""
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(best_effort, 3)
        sharing.runs(chat, chat_tokens)
        return sharing, best_effort, chat

    def test_gets_its_slots_back_in_place_when_the_chat_has_left(self) -> None:
        sharing, best_effort, chat = self.alone_with(3)
        blocks = best_effort.blocks
        assert sharing.num_missing(best_effort) == 2
        assert not sharing.claim(best_effort, 4)
        sharing.release(chat)
        assert best_effort.blocks == blocks
        copies = sharing.copies()
        assert (copies.checkpoints, len(copies.restores), copies.moves) == ((), 2, ())
        sharing.runs(best_effort, 4)

    def test_keeps_its_end_where_it_has_become_real_time(self) -> None:
        """Found by `alignedserve fuzz --seed 940013613`: blocks of both ends were freed at one."""
        sharing, once = Sharing(2, 4, 0), be()
        sharing.runs(once, 4)
        once.side = RT
        sharing.runs(once, 5)
        assert max(once.kv.blocks) < 0
        sharing.release(once)
        assert sharing.blocks.num_free == 2

    def test_or_moves_with_its_share_to_a_free_block(self) -> None:
        sharing, best_effort, chat, second_chat = Sharing(2, 4, 100), be(), rt(), rt("other")
        sharing.runs(second_chat, 4)
        sharing.runs(best_effort, 3)
        sharing.runs(chat, 3)
        sharing.release(second_chat)
        assert sharing.claim(best_effort, 4)
        assert not set(best_effort.blocks) & set(chat.blocks)
        copies = sharing.copies()
        assert (len(copies.restores), len(copies.moves), copies.checkpoints) == (2, 1, ())
        sharing.run((best_effort, 4))

    def test_grows_in_a_shared_block_as_far_as_the_chat_has_not_come(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(chat, 2)
        sharing.runs(best_effort, 1)
        assert best_effort.blocks == chat.blocks
        sharing.runs(best_effort, 2)
        assert not sharing.claim(best_effort, 3), "it takes no slot of a chat"

    def test_enters_no_slots_that_the_chat_has_grown_into(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(chat, 1)
        sharing.runs(chat, 3)
        assert not sharing.claim(best_effort, 2)
        sharing.runs(best_effort, 1)
        sharing.run((chat, 3))

    def test_enters_the_chat_block_with_most_empty_slots_where_nothing_is_free(self) -> None:
        sharing, fuller, emptier, best_effort = Sharing(2, 4, 100), rt("fuller"), rt("emptier"), be()
        sharing.runs(fuller, 2)
        sharing.runs(emptier, 1)
        sharing.runs(best_effort, 2)
        assert best_effort.blocks == emptier.blocks

    def test_that_is_checkpointed_and_wanted_in_one_round_moves(self) -> None:
        sharing, best_effort, chat, second_chat = Sharing(2, 4, 100), be(), rt(), rt("other")
        sharing.runs(second_chat, 4)
        sharing.runs(best_effort, 3)
        assert sharing.claim(chat, 3)
        sharing.release(second_chat)
        assert sharing.claim(best_effort, 3)
        sharing.run((chat, 3), (best_effort, 3))

    def test_leaves_nothing_behind(self) -> None:
        sharing, best_effort, chat = self.alone_with(3)
        sharing.release(best_effort)
        assert not sharing.blocks.cuts
        sharing.release(chat)
        assert sharing.blocks.num_free == 1


@pytest.mark.parametrize("sides", [(RT, RT), (BE, BE), (RT, BE), (BE, RT)])
def test_a_request_that_is_alone_may_have_the_whole_device(sides: Sequence[Side]) -> None:
    sharing = Sharing(3, 4, 12)
    for number, side in enumerate(sides):
        owner = Owner(f"{number}", side)
        sharing.runs(owner, 12)
        if side is BE or side is sides[-1]:
            sharing.release(owner)
        else:
            assert sharing.blocks.num_free == 0
            sharing.release(owner)
