"""Find the places that have the beginning of a prompt, as far as the router knows: such prompts went there.

A place is a pool, or a worker with its device. Each piece of a prompt is named by its tokens, all tokens before them
and the salt, as pages are (protocol/page_names.py). A place may have given up since what it had: then the prompt is
computed there as it would be anywhere. A router that has just started knows nothing, and learns again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from alignedserve.core import Request
from alignedserve.protocol.page_names import chained_hashes

PIECE = 128  # tokens; fewer tokens are computed again as fast as they are found
MOST = 100_000  # pieces that the router remembers


class Beginnings:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # piece -> places, in the order of last use
        self._alone: dict[str, tuple[str]] = {}  # place -> a shared tuple of it alone: most pieces are at one place
        self._named: tuple[Request | None, tuple[int, ...]] = (
            None,
            (),
        )  # the last prompt's pieces

    def __len__(self) -> int:
        return len(self._places)

    def came(self, request: Request, place: str) -> None:
        for piece in self._pieces(request):
            places = self._places.pop(piece, ())
            more = places if place in places else (*places, place)
            self._places[piece] = more if len(more) > 1 else self._alone.setdefault(place, (place,))
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def tokens_at(self, request: Request) -> Counter[str]:
        """Return for each place how many of the prompt's first tokens it has."""
        found: Counter[str] = Counter()
        for number, piece in enumerate(self._pieces(request)):
            have_all = [place for place in self._places.get(piece, ()) if found[place] == number * PIECE]
            if not have_all:
                break
            found.update(dict.fromkeys(have_all, PIECE))
        return found

    def forget(self, place: str) -> None:
        """Forget what the place had: it is gone, or has started again with nothing."""
        for piece, places in list(self._places.items()):
            if places == (place,):
                del self._places[piece]
            elif place in places:
                self._places[piece] = tuple(other for other in places if other != place)

    def _pieces(self, request: Request) -> tuple[int, ...]:
        named, pieces = self._named
        if named is not request:
            tokens = request.tokens
            whole = tokens[: len(tokens) // PIECE * PIECE]
            pieces = chained_hashes(whole, PIECE, request.kv_salt)
            self._named = request, pieces
        return pieces
