"""How much memory open requests are to hold together, as predicted.

Who gets memory block by block (room: growing) holds its prompt, and of its output what it has said so far. Few are at
their longest at the same time, so together they hold less than the sum of what each holds at its end. Each is taken to
be anywhere in its output, whatever the others are at, and what suffices in nine of ten such moments is wanted:

    sum of (prompt + mean / 2)  +  square root of the sum of (upper - mean / 2) squared

For one alone that is its prompt and the upper estimate of its output; for many hardly more than the sum of the halves.
Where all is given at once (room: whole, predicted) each holds all of it from the start, and together they hold the sum.
Counted in whole halves of tokens: sums come out the same in whatever order requests come and go.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from alignedserve.core import Request
from alignedserve.lengths import expected
from alignedserve.policy import Policy, Room


@dataclass(frozen=True, slots=True)
class _Held:
    """By one request, in half tokens."""

    usual: int
    beyond: int  # that it may hold besides


class Holdings:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._of: dict[str, _Held] = {}  # open request -> what it is to hold
        self._usual, self._squares = 0, 0  # sums, the latter of what is beyond

    def __len__(self) -> int:
        return len(self._of)

    def put(self, request: Request) -> None:
        """Also another attempt of it, or another estimate."""
        self.remove(request.id)
        self._of[request.id] = held = self._held(request)
        self._usual += held.usual
        self._squares += held.beyond**2

    def remove(self, request: str) -> None:
        if (held := self._of.pop(request, None)) is not None:
            self._usual -= held.usual
            self._squares -= held.beyond**2

    @property
    def tokens(self) -> int:
        return _tokens(self._usual, self._squares)

    def with_one_more(self, request: Request) -> int:
        """Tokens, if it were among them."""
        held = self._held(request)
        return _tokens(self._usual + held.usual, self._squares + held.beyond**2)

    def without(self, request: str) -> int:
        """Tokens, if it were not among them."""
        held = self._of[request]
        return _tokens(self._usual - held.usual, self._squares - held.beyond**2)

    def usual(self, request: Request) -> int:
        """Tokens, by which many like it would want more."""
        return _tokens(self._held(request).usual, 0)

    def _held(self, request: Request) -> _Held:
        estimate, num_prompt = expected(request, self._policy), len(request.prompt)
        match self._policy.room:
            case Room.WHOLE:
                return _Held(2 * request.most_tokens, 0)
            case Room.PREDICTED:
                return _Held(2 * (num_prompt + estimate.upper), 0)
            case _:
                return _Held(2 * num_prompt + estimate.mean, 2 * estimate.upper - estimate.mean)


def _tokens(usual: int, squares: int) -> int:
    return (usual + isqrt(squares) + 1) // 2
