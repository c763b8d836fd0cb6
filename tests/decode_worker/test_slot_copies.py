"""Copies that are collected and then made at once mean the same as single copies in the order of the plan."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from alignedserve.forms.memory.slot_copies import SlotCopies
from alignedserve.forms.orders import CopySlots

SLOTS, PLACES = range(5), range(4)
KINDS = ("checkpoint", "restore", "move")
# (kind, slot, place, target slot)
COPIES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(SLOTS), st.sampled_from(PLACES), st.sampled_from(SLOTS))
)


@given(copies=COPIES)
@example(copies=[("restore", 0, 0, 0), ("move", 0, 0, 1)])
@settings(deadline=None)
def test_any_copies(copies: list[tuple[str, int, int, int]]) -> None:
    collected = SlotCopies()
    slots = {slot: f"slot {slot}" for slot in SLOTS}
    places = {place: f"place {place}" for place in PLACES}
    before = dict(slots), dict(places)
    for kind, slot, place, target in copies:
        if kind == "checkpoint" and slots[slot].startswith("slot"):  # a request keeps a slot that it has just got back
            collected.checkpoint(slot, place)
            places[place] = slots[slot]
        elif kind == "restore":
            collected.restore(place, slot)
            slots[slot] = places[place]
        elif kind == "move" and slot != target:
            collected.move(slot, target)
            slots[target] = slots[slot]
    done = collected.take() or CopySlots()
    after = before[0] | {slot: before[1][place] for place, slot in done.restores}
    after |= {target: before[0][source] for source, target in done.moves}
    assert after == slots
    assert before[1] | {place: before[0][slot] for slot, place in done.checkpoints} == places
    assert collected.take() is None
