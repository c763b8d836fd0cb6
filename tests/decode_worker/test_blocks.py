"""Blocks that two requests share: no request's vectors are lost, whatever happens to their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from alignedserve.core import NO_KV, KvForm
from alignedserve.forms.memory.block_ends import Side, TwoEndedBlocks
from alignedserve.forms.orders import CopySlots
from tests.conftest import examples

RT, BE = Side.LEFT, Side.RIGHT


@dataclass(eq=False)
class Owner:
    name: str
    side: Side
    prefix: int = 0
    kv: KvForm = NO_KV

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(block if self.side is RT else ~block for block in self.kv.blocks)


@dataclass
class Device:
    """Model slots and places as dictionaries; a token's vectors are its owner's name and its index."""

    slots: dict[int, object] = field(default_factory=dict)
    places: dict[int, object] = field(default_factory=dict)

    def perform(self, copies: CopySlots | None) -> None:
        if copies is None:
            return
        to_places = {place: self.slots[slot] for slot, place in copies.checkpoints}
        to_slots = {slot: self.places[place] for place, slot in copies.restores}
        moved = {target: self.slots[source] for source, target in copies.moves}
        assert not to_slots.keys() & moved.keys(), "a slot is written twice"
        self.places |= to_places
        self.slots |= to_slots | moved


class Sharing:
    def __init__(self, num_blocks: int, block_size: int, num_places: int) -> None:
        self.blocks = TwoEndedBlocks(num_blocks, block_size, num_places)
        self.block_size = block_size
        self.device = Device()

    def place(self, owner: Owner, token: int) -> int:
        """Return the token's slot as kernels compute it: from the blocks and the request's side alone."""
        at, size = token % self.block_size, self.block_size
        return owner.blocks[token // size] * size + (at if owner.side is RT else size - 1 - at)

    def claim(self, owner: Owner, tokens: int) -> bool:
        return self.blocks.claim(owner, owner.side, tokens)

    def run(self, *claims: tuple[Owner, int]) -> None:
        """Run a step of the requests that have claimed these numbers of tokens."""
        self.device.perform(self.blocks.copies())
        for owner, tokens in claims:
            read = [self.device.slots[self.place(owner, token)] for token in range(owner.prefix)]
            assert read == [(owner.name, token) for token in range(owner.prefix)]
            for token in range(owner.prefix, tokens):
                self.device.slots[self.place(owner, token)] = (owner.name, token)
            owner.prefix = tokens
        self.blocks.unpin()

    def runs(self, owner: Owner, tokens: int) -> None:
        assert self.claim(owner, tokens)
        self.run((owner, tokens))


def test_every_slot_that_is_claimed_is_listed_once() -> None:
    sharing = Sharing(num_blocks=3, block_size=4, num_places=0)
    sharing.runs(Owner("chat", RT), 2)
    sharing.runs(Owner("document", BE), 6)
    claimed = sharing.blocks.claimed
    assert len(claimed) == len(set(claimed)) == 8


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
        fits = self.sharing.blocks.fits(side, tokens)
        assert self.sharing.claim(owner, tokens) == fits
        if fits:
            self.owners.append(owner)
            self.sharing.run(*([(owner, tokens)] if runs else []))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.owners))
        more = data.draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
        claims = [(claim, claim.prefix + some) for claim, some in zip(order, more, strict=True) if claim.prefix + some]
        blocks, first = self.sharing.blocks, data.draw(st.integers(0, len(claims)))
        growing = [claim for claim in claims[:first] if claim[0].side is RT or not blocks.has_lost(claim[0])]
        runs = self.claimed(growing)
        blocks.unpin()  # before a step is chosen: later claims may take what the earlier claims have taken
        runs |= self.claimed(claims[first:])
        self.claimed([(claimed, tokens) for claimed, tokens in claims if blocks.has_lost(claimed)])
        self.sharing.run(*(run for run in runs.items() if blocks.is_whole(*run)))

    def claimed(self, claims: list[tuple[Owner, int]]) -> dict[Owner, int]:
        """Return the claims that succeeded, and check that a failed claim leaves the request's slots as they were."""
        successful = {}
        for owner, tokens in claims:
            before = self.sharing.blocks.slots(owner)
            if self.sharing.claim(owner, tokens):
                successful[owner] = tokens
            else:
                assert self.sharing.blocks.slots(owner) == before
        return successful

    @rule(data=st.data())
    def some_leave(self, data: st.DataObject) -> None:
        for owner in data.draw(st.lists(st.sampled_from(self.owners), unique=True) if self.owners else st.just([])):
            self.sharing.blocks.release(owner)
            self.owners.remove(owner)

    @precondition(lambda self: hasattr(self, "sharing"))
    @invariant()
    def no_request_has_a_slot_of_another(self) -> None:
        blocks = self.sharing.blocks
        slots = [slot for owner in self.owners for slot in blocks.slots(owner).values()]
        assert len(slots) == len(set(slots))
        assert sorted([*blocks.free, *blocks.taken]) == list(range(self.all[0]))

    @precondition(lambda self: hasattr(self, "sharing"))
    @invariant()
    def room_for_chats_can_be_taken(self) -> None:
        blocks, size = self.sharing.blocks, self.sharing.block_size
        chats = {block for owner in self.owners if owner.side is RT for block in owner.blocks}
        alone = {block for owner in self.owners if owner.side is BE for block in owner.blocks} - chats
        assert blocks.room_for_rt == min(len(alone), blocks.num_free_places // size)
        assert blocks.fits(RT, (blocks.num_free + blocks.room_for_rt) * size)

    @precondition(lambda self: hasattr(self, "sharing"))
    @invariant()
    def each_token_has_a_slot_or_a_place(self) -> None:
        blocks, device = self.sharing.blocks, self.sharing.device
        saved = sum(blocks.num_missing(owner) for owner in self.owners)
        assert blocks.num_free_places + saved == self.all[1]
        for owner in self.owners:
            held = blocks.slots(owner)
            assert all(slot == self.sharing.place(owner, token) for token, slot in held.items())
            right = [token for token in held if token < owner.prefix]
            assert [device.slots[held[token]] for token in right] == [(owner.name, token) for token in right]
            assert len(right) + blocks.num_missing(owner) == owner.prefix
            if owner.side is RT:
                assert len(right) == owner.prefix, "a real-time request loses nothing"

    def teardown(self) -> None:
        if hasattr(self, "sharing"):
            for owner in self.owners:
                self.sharing.blocks.release(owner)
            assert (self.sharing.blocks.num_free, self.sharing.blocks.num_free_places) == self.all


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
            assert sharing.claim(chat, tokens)
            assert sharing.blocks.copies() is None
            sharing.run((chat, tokens))
        assert chat.blocks == emptier.blocks
        assert sharing.blocks.is_whole(emptier, 2)

    def test_sends_only_the_slot_that_it_is_about_to_take(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(best_effort, 3)
        sharing.runs(chat, 1)
        assert sharing.claim(chat, 2)
        assert sharing.blocks.copies() == CopySlots(checkpoints=((1, 0),))
        assert sharing.blocks.num_missing(best_effort) == 1
        assert not sharing.blocks.is_whole(best_effort, 3)

    def test_sends_nothing_of_a_slot_that_was_never_written(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 0), be(), rt()
        assert sharing.claim(best_effort, 4)
        sharing.run()
        sharing.runs(chat, 4)
        assert sharing.blocks.copies() is None

    def test_a_chat_enters_no_block_of_a_request_in_the_step(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        assert sharing.claim(best_effort, 1)
        assert not sharing.claim(chat, 1)
        sharing.run((best_effort, 1))
        assert sharing.claim(chat, 1)

    def test_has_somebody_in_the_step_step_aside(self) -> None:
        sharing, best_effort, chat = Sharing(2, 4, 100), be(), rt()
        second_chat = rt("other")
        sharing.runs(second_chat, 8 - 4)
        sharing.runs(best_effort, 2)
        sharing.runs(chat, 2)
        shared = chat.blocks
        assert shared == best_effort.blocks
        sharing.blocks.release(second_chat)
        assert sharing.claim(best_effort, 2)
        assert sharing.claim(chat, 3)
        assert best_effort.blocks != shared
        sharing.run((best_effort, 2), (chat, 3))
        assert sharing.blocks.counts.num_moved == 2

    def test_goes_without_where_nobody_has_a_place_for_what_it_would_take(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 1), be(), rt()
        sharing.runs(best_effort, 4)
        assert sharing.claim(chat, 1)
        assert not sharing.claim(chat, 2)
        sharing.run((chat, 1))
        assert sharing.blocks.num_missing(best_effort) == 1

    def test_a_chat_takes_more_of_a_request_that_misses_some_already(self) -> None:
        sharing, older, newer, chat = Sharing(4, 2, 100), be("older"), be("newer"), rt()
        sharing.runs(older, 4)
        sharing.runs(newer, 4)
        sharing.runs(chat, 2)
        sharing.runs(chat, 4)
        assert sharing.blocks.is_whole(older, 4)
        assert sharing.blocks.num_missing(newer) == 4

    def test_counts_what_it_could_have(self) -> None:
        sharing, best_effort = Sharing(3, 4, 4), be()
        sharing.runs(best_effort, 8)
        assert (sharing.blocks.num_free, sharing.blocks.room_for_rt) == (1, 1), "of two, one can be sent away"
        assert sharing.blocks.fits(RT, 8)
        assert not sharing.blocks.fits(RT, 12)


class TestBestEffort:
    def alone_with(self, chat_tokens: int, num_blocks: int = 2) -> tuple[Sharing, Owner, Owner]:
        """Return a best-effort request that misses two of three tokens, and the chat that has taken their slots."""
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(best_effort, 3)
        sharing.runs(chat, chat_tokens)
        return sharing, best_effort, chat

    def test_gets_its_slots_back_in_place_when_the_chat_has_left(self) -> None:
        sharing, best_effort, chat = self.alone_with(3)
        blocks = best_effort.blocks
        assert sharing.blocks.num_missing(best_effort) == 2
        assert not sharing.claim(best_effort, 4)
        sharing.blocks.release(chat)
        assert sharing.claim(best_effort, 4)
        assert best_effort.blocks == blocks
        copies = sharing.blocks.copies()
        assert copies is not None
        assert (copies.checkpoints, len(copies.restores), copies.moves) == ((), 2, ())

    def test_keeps_its_end_where_it_has_become_real_time(self) -> None:
        """Found by `alignedserve fuzz --seed 940013613`: blocks of both ends were freed at one."""
        sharing, once = Sharing(2, 4, 0), be()
        sharing.runs(once, 4)
        assert sharing.blocks.claim(once, RT, 5)
        sharing.run((once, 5))
        sharing.blocks.release(once)
        assert sharing.blocks.num_free == 2

    def test_or_moves_with_its_share_to_a_free_block(self) -> None:
        sharing, best_effort, chat, second_chat = Sharing(2, 4, 100), be(), rt(), rt("other")
        sharing.runs(second_chat, 4)
        sharing.runs(best_effort, 3)
        sharing.runs(chat, 3)
        sharing.blocks.release(second_chat)
        sharing.runs(best_effort, 4)
        assert not set(best_effort.blocks) & set(chat.blocks)
        counts = sharing.blocks.counts
        assert (counts.num_restored, counts.num_moved, counts.num_checkpoints) == (2, 1, 2)

    def test_grows_in_a_shared_block_as_far_as_the_chat_has_not_come(self) -> None:
        sharing, best_effort, chat = Sharing(1, 4, 100), be(), rt()
        sharing.runs(chat, 2)
        sharing.runs(best_effort, 1)
        assert best_effort.blocks == chat.blocks
        sharing.runs(best_effort, 2)
        assert not sharing.claim(best_effort, 3), "it takes no slot of a chat"

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
        sharing.blocks.release(second_chat)
        assert sharing.claim(best_effort, 3)
        copies = sharing.blocks.copies()
        assert copies is not None
        assert (copies.restores, len(copies.moves)) == ((), 3)
        sharing.device.perform(copies)
        sharing.run((chat, 3), (best_effort, 3))

    def test_leaves_nothing_behind(self) -> None:
        sharing, best_effort, _ = self.alone_with(3)
        sharing.blocks.release(best_effort)
        assert sharing.blocks.num_free_places == 100


@pytest.mark.parametrize("sides", [(RT, RT), (BE, BE), (RT, BE), (BE, RT)])
def test_a_request_that_is_alone_may_have_the_whole_device(sides: Sequence[Side]) -> None:
    sharing = Sharing(3, 4, 12)
    for number, side in enumerate(sides):
        owner = Owner(f"{number}", side)
        sharing.runs(owner, 12)
        if side is BE or side is sides[-1]:
            sharing.blocks.release(owner)
        else:
            assert sharing.blocks.num_free == 0
            sharing.blocks.release(owner)
