"""The layers whose room takes the KV of other layers, once they read none of their own tokens there any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from alignedserve.core import Fold, Sight


@dataclass(frozen=True)
class LayerFold:
    """Gives each layer that reads all the room of some layers that do not: there lie K and V of its older blocks.

    layers of a block   0 window   1 window   2 reads all   3 window   4 window   5 reads all
    folded: block of    1          2          0             1          2          0           rooms 2 0 1, and 5 3 4
    """

    fold: Fold
    rooms: dict[int, tuple[int, ...]]  # layer that reads all -> layers in whose room its blocks lie, its own first


def fold_of(sights: Sequence[Sight | None], positions: int) -> LayerFold | None:
    """Return how layers are folded where some have a sight and the others read all; None where that spares
    nothing."""
    whole = [layer for layer, sight in enumerate(sights) if sight is None]
    narrow = [layer for layer, sight in enumerate(sights) if sight is not None]
    widest = _widest(sights)
    if not whole or len(narrow) < len(whole) or widest.most >= positions:
        return None
    more = len(narrow) // len(whole)
    rooms: dict[int, tuple[int, ...]] = {
        layer: (layer, *narrow[more * at : more * (at + 1)]) for at, layer in enumerate(whole)
    }
    return LayerFold(Fold(widest, 1 + more), rooms)


def _widest(sights: Sequence[Sight | None]) -> Sight:
    """Return a sight that reads all that any of these reads."""
    windows = [sight.window for sight in sights if sight is not None and sight.window is not None]
    stretches = [sight.stretch for sight in sights if sight is not None and sight.stretch is not None]
    # A stretch of the least common multiple begins only where a stretch of each length begins.
    return Sight(max(windows, default=None), lcm(*stretches) if stretches else None)
