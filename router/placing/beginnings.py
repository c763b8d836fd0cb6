"""Find the nodes whose pools have the beginning of a prompt, as far as the router knows: such prompts went there.

Each piece of a prompt is named by its tokens, all tokens before them and the salt, as pages are
(protocol/page_names.py). A pool may have given up since what it had: then the prompt is computed there as it would be
anywhere. A router that has just started knows nothing, and learns again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from alignedserve.core import Request
from alignedserve.protocol.page_names import chained_hashes

PIECE = 256  # tokens; fewer tokens are computed again as fast as they are found
MOST = 50_000  # pieces that the router remembers


class Beginnings:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._nodes: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # piece -> nodes, in the order of last use
        self._alone: dict[str, tuple[str]] = {}  # node -> a shared tuple of it alone, since most pieces are on one node
        self._named: tuple[Request | None, tuple[int, ...]] = (
            None,
            (),
        )  # the last prompt's pieces

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
        """Return for each node how many of the prompt's first tokens its pool has."""
        found: Counter[str] = Counter()
        for number, piece in enumerate(self._pieces(request)):
            have_all = [node for node in self._nodes.get(piece, ()) if found[node] == number * PIECE]
            if not have_all:
                break
            found.update(dict.fromkeys(have_all, PIECE))
        return found

    def forget(self, node: str) -> None:
        """Forget what the node's pool had: the pool is gone, or another one has started."""
        for piece, nodes in list(self._nodes.items()):
            if nodes == (node,):
                del self._nodes[piece]
            elif node in nodes:
                self._nodes[piece] = tuple(other for other in nodes if other != node)

    def _pieces(self, request: Request) -> tuple[int, ...]:
        named, pieces = self._named
        if named is not request:
            tokens = request.tokens
            whole = tokens[: len(tokens) // PIECE * PIECE]
            pieces = chained_hashes(whole, PIECE, request.salt.encode())
            self._named = request, pieces
        return pieces
