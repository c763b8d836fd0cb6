"""Which layers' room takes the KV of which others, once it lies behind the windows of the layers that have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFold:
    """Gives each layer that reads all the room of some layers with a window: there lie K and V of its older pairs.

    layers of a pair   0 window   1 window   2 reads all   3 window   4 window   5 reads all
    folded: pair of    1          2          0             1          2          0           rooms 2 0 1, and 5 3 4
    """

    window: int  # the widest
    rooms: dict[int, tuple[int, ...]]  # layer that reads all -> layers in whose room its pairs lie, its own first

    @property
    def pairs(self) -> int:
        """Return how many pairs become one."""
        return len(next(iter(self.rooms.values())))


def fold_of(windows: Sequence[int | None], positions: int) -> LayerFold | None:
    """Return how layers with these windows are folded; None where that spares nothing."""
    whole = [layer for layer, window in enumerate(windows) if window is None]
    narrow = [layer for layer, window in enumerate(windows) if window is not None]
    widest = max((window for window in windows if window is not None), default=positions)
    if not whole or len(narrow) < len(whole) or widest >= positions:
        return None
    more = len(narrow) // len(whole)
    rooms = {layer: (layer, *narrow[more * at : more * (at + 1)]) for at, layer in enumerate(whole)}
    return LayerFold(widest, rooms)
