"""Predict what places hold: the beginnings of prompts, and the memory of open requests.

A place is a pool, or a worker with its device. The name of a prompt's piece is made of its tokens, all tokens before
and the salt, like a page's name (protocol/page_names.py). A place may have dropped a piece since: then the prompt is
computed there as anywhere. A router that has just started knows nothing, and learns again.

A request that gets memory block by block (room: growing) holds prompt and output so far. Few requests are at their
longest at the same time, so together they hold less than the sum of their ends. The router takes each request to be at
any point of the output, independent of the others, and wants the memory that suffices in nine of ten such moments:

    sum of (prompt + output / 2)  +  square root of the sum of (output / 2) squared

For a single request that is prompt and output; for many requests hardly more than the sum of the halves. Open requests
are longer than new requests, since long requests stay longer: so an output counts with more than its mean, the more the
less sure the prediction is, and without a prediction with the upper value of the prior. Where a request gets all memory
at once (room: whole), requests hold the sum from the start. Where requests give back what no layer reads any more, or
fold what only some layers read, "prompt" and "output" above are what is kept of these.
The unit is half a token, in integers: sums come out the same in whatever order requests come and go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import isqrt
from typing import NamedTuple

from alignedserve.core import KEEPS_ALL, Request, Retention, ServiceClass
from alignedserve.protocol.page_names import chained_hashes
from alignedserve.scheduling.lengths import mean_and_upper
from alignedserve.scheduling.policy import Policy, Room

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
        """Return for each place how many of the prompt's first tokens are there."""
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


class HeldMemory(NamedTuple):
    """The memory of one request, in half tokens."""

    usual: int
    beyond: int  # what the request may hold beyond that
    is_rt: bool


class Holdings:
    def __init__(self, policy: Policy, retention: Retention = KEEPS_ALL) -> None:
        self._policy, self._retention = policy, retention
        self._held_by: dict[str, HeldMemory] = {}  # open request -> the memory it will hold
        # The sums of `usual`, and of `beyond` squared: of documents, and of chats.
        self._usual, self._squares = [0, 0], [0, 0]

    def __len__(self) -> int:
        return len(self._held_by)

    def put(self, request: Request, held: HeldMemory | None = None) -> None:
        """Count the request, with `held` if other holdings have computed that; a later attempt or another estimate
        replaces the earlier."""
        self.remove(request.id)
        self._held_by[request.id] = held = held or self._held(request)
        self._count(held, 1)

    def held_by(self, request: str) -> HeldMemory | None:
        return self._held_by.get(request)

    def remove(self, request: str) -> HeldMemory | None:
        if (held := self._held_by.pop(request, None)) is not None:
            self._count(held, -1)
        return held

    def _count(self, held: HeldMemory, number: int) -> None:
        self._usual[held.is_rt] += number * held.usual
        self._squares[held.is_rt] += number * held.beyond * held.beyond

    @property
    def tokens(self) -> int:
        return (sum(self._usual) + isqrt(sum(self._squares)) + 1) // 2

    @property
    def rt_tokens(self) -> int:
        """Return the tokens that real-time requests alone will hold."""
        return (self._usual[True] + isqrt(self._squares[True]) + 1) // 2

    def marginal_tokens(self, request: Request) -> int:
        """Return by how many tokens many such requests would each raise the sum."""
        return (self._held(request).usual + 1) // 2

    def _held(self, request: Request) -> HeldMemory:
        room, is_rt = self._policy.room, request.service is ServiceClass.RT
        if room is Room.WHOLE:
            return HeldMemory(2 * request.most_tokens, 0, is_rt)
        (mean, upper), num_prompt = mean_and_upper(request, self._policy), len(request.prompt)
        output = upper if request.estimate is None else _open_length(mean, upper)
        at_first = self._retention.of_decode(num_prompt)
        more = self._retention.of_decode(num_prompt + output) - at_first
        return HeldMemory(2 * at_first + more, more, is_rt)


def _open_length(mean: int, upper: int) -> int:
    """Return the mean length of outputs of open requests with this estimate, at most the upper value.

    Of outputs with this mean and variance, that is mean + variance / mean. Nine of ten outputs are below the upper
    value, so the root of the variance is about 0.65 of what is between.
    """
    return min(upper, mean + 2 * (upper - mean) ** 2 // (5 * mean))
