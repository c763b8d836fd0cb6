"""The copies of single tokens' vectors that are due before a step, collected while it is planned (BROS §5.2).

    checkpoint   slot of the device ──▶ place in the worker's own memory on the host
    restore      place              ──▶ slot
    move         slot               ──▶ slot

All are read before any is written, so what is collected means one thing in whatever order it was decided: each source
is a place or a slot as it was before the first of them. Only who is checkpointed and restored in one plan is looked
after: that is a move.
"""

from __future__ import annotations

from alignedserve.messages import CopySlots


class SlotCopies:
    def __init__(self) -> None:
        self._moves: dict[int, int] = {}  # target -> source
        self._restores: dict[int, int] = {}  # slot -> place
        self._checkpoints: dict[int, int] = {}  # place -> slot

    def checkpoint(self, slot: int, place: int) -> None:
        self._checkpoints[place] = slot

    def restore(self, place: int, slot: int) -> None:
        if place in self._checkpoints:
            self._moves[slot] = self._checkpoints[place]
        else:
            self._restores[slot] = place

    def move(self, source: int, target: int) -> None:
        self._moves[target] = source

    def take(self) -> CopySlots | None:
        """What there is to copy, once."""
        moves, restores, checkpoints = self._moves, self._restores, self._checkpoints
        if not moves and not restores and not checkpoints:
            return None
        self._moves, self._restores, self._checkpoints = {}, {}, {}
        return CopySlots(
            tuple((slot, place) for place, slot in checkpoints.items()),
            tuple((place, slot) for slot, place in restores.items()),
            tuple((source, target) for target, source in moves.items()),
        )
