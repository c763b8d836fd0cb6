"""The copies of single tokens' vectors that are due before a step, collected while the step is planned (BROS §5.2).

    checkpoint   slot of the device ──▶ place in the worker's own memory on the host
    restore      place              ──▶ slot
    move         slot               ──▶ slot

All sources are read before any target is written: each source is as it was before the first copy. So a copy on from a
target of the same plan goes back to the first source. For example, restore place 3 to slot 7, then move slot 7 to slot
9: both slots are restored from place 3.
"""

from __future__ import annotations

from alignedserve.forms.orders import CopySlots


class SlotCopies:
    def __init__(self) -> None:
        self._moves: dict[int, int] = {}  # target -> source
        self._restores: dict[int, int] = {}  # slot -> place
        self._checkpoints: dict[int, int] = {}  # place -> slot

    def checkpoint(self, slot: int, place: int) -> None:
        assert slot not in self._restores, "a slot that has just come back is lost before anything has run"
        self._checkpoints[place] = self._moves.get(slot, slot)

    def restore(self, place: int, slot: int) -> None:
        if place in self._checkpoints:
            self._moves[slot] = self._checkpoints[place]
            self._restores.pop(slot, None)
        else:
            self._restores[slot] = place
            self._moves.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        if (place := self._restores.get(source)) is not None:
            self._restores[target] = place
            self._moves.pop(target, None)
        else:
            self._moves[target] = self._moves.get(source, source)
            self._restores.pop(target, None)

    def take(self) -> CopySlots | None:
        """Return what there is to copy, once."""
        moves, restores, checkpoints = self._moves, self._restores, self._checkpoints
        if not moves and not restores and not checkpoints:
            return None
        self._moves, self._restores, self._checkpoints = {}, {}, {}
        return CopySlots(
            tuple((slot, place) for place, slot in checkpoints.items()),
            tuple((place, slot) for slot, place in restores.items()),
            tuple((source, target) for target, source in moves.items()),
        )
