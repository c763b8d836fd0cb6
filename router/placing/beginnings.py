"""Find the places that have the beginning of a prompt, as far as the router knows: such prompts went there.

A place is a pool, or a worker with its device. Each piece of a prompt is named by its tokens, all tokens before them
and the salt, as pages are (protocol/page_names.py). A place may have given up since what it had: then the prompt is
computed there as it would be anywhere. A router that has just started knows nothing, and learns again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from alignedserve.core import Request
from alignedserve.protocol.page_names import chained_hashes

PIECE = 128  # tokens; fewer tokens are computed again as fast as they are found
MOST = 100_000  # pieces that the router remembers


def pieces_of(request: Request) -> tuple[int, ...]:
    """Return the names of a prompt's whole pieces."""
    tokens = request.tokens
    return chained_hashes(tokens[: len(tokens) // PIECE * PIECE], PIECE, request.kv_salt)


class Beginnings:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # piece -> places, in the order of last use
        self._alone: dict[str, tuple[str]] = {}  # place -> a shared tuple of it alone: most pieces are at one place

    def __len__(self) -> int:
        return len(self._places)

    def came(self, pieces: Iterable[int], place: str) -> None:
        for piece in pieces:
            places = self._places.pop(piece, ())
            more = places if place in places else (*places, place)
            self._places[piece] = more if len(more) > 1 else self._alone.setdefault(place, (place,))
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def tokens_at(self, pieces: Iterable[int]) -> dict[str, int]:
        """Return for each place how many of the prompt's first tokens it has."""
        found: dict[str, int] = {}
        have: tuple[str, ...] = ()  # the places that have all `tokens` so far
        tokens = 0
        for piece in pieces:
            places = self._places.get(piece, ())
            if tokens and places != have:  # mostly they are the same
                found.update(dict.fromkeys(have, tokens))
                places = tuple([place for place in places if found.get(place) == tokens])
            if not places:
                break
            have, tokens = places, tokens + PIECE
        found.update(dict.fromkeys(have, tokens))
        return found

    def forget(self, place: str) -> None:
        """Forget what the place had: it is gone, or has started again with nothing."""
        for piece, places in list(self._places.items()):
            if places == (place,):
                del self._places[piece]
            elif place in places:
                self._places[piece] = tuple(other for other in places if other != place)
