"""Which nodes' pools have the beginning of a prompt, as far as the router can know: what begins so has come there.

Prompts are named piece by piece, each piece with all that is before it and its salt, as pages are (kvpool/pages.py).
What a pool has had it may have given up since: then the prompt is computed there as it would be anywhere. A router that
has just started knows nothing of it, and learns again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from alignedserve.core import Request
from alignedserve.protocol.page_names import chained_hashes

PIECE = 256  # tokens: less is computed anew as fast as it is found
MOST = 50_000  # pieces that are remembered


class Beginnings:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._nodes: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # piece -> nodes; who came last is last
        self._alone: dict[str, tuple[str]] = {}  # most pieces are on one node
        self._named: tuple[Request | None, tuple[int, ...]] = None, ()  # who was named last, as it is asked for again

    def __len__(self) -> int:
        return len(self._nodes)

    def came(self, request: Request, node: str) -> None:
        for piece in self._pieces(request):
            nodes = self._nodes.pop(piece, ())
            more = nodes if node in nodes else (*nodes, node)
            self._nodes[piece] = more if len(more) > 1 else self._alone.setdefault(node, (node,))
        while len(self._nodes) > self._most:
            self._nodes.popitem(last=False)

    def tokens_at(self, request: Request) -> Counter[str]:
        """Node -> so many of its first tokens."""
        found: Counter[str] = Counter()
        for number, piece in enumerate(self._pieces(request)):
            have_all = [node for node in self._nodes.get(piece, ()) if found[node] == number * PIECE]
            if not have_all:
                break
            found.update(dict.fromkeys(have_all, PIECE))
        return found

    def forget(self, node: str) -> None:
        """Its pool has gone, or is another one."""
        for piece, nodes in list(self._nodes.items()):
            if nodes == (node,):
                del self._nodes[piece]
            elif node in nodes:
                self._nodes[piece] = tuple(one for one in nodes if one != node)

    def _pieces(self, request: Request) -> tuple[int, ...]:
        named, pieces = self._named
        if named is not request:
            tokens = request.tokens
            whole = tokens[: len(tokens) // PIECE * PIECE]
            pieces = chained_hashes(whole, PIECE, request.salt.encode())
            self._named = request, pieces
        return pieces
