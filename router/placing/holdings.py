"""How much memory open requests are to hold together, as predicted.

Who gets memory block by block (room: growing) holds its prompt, and of its output what it has said so far. Few are at
their longest at the same time, so together they hold less than the sum of what each holds at its end. Each is taken to
be anywhere in its output, whatever the others are at, and what suffices in nine of ten such moments, if lengths are
as they were predicted, is wanted (docs/how/router.md says what came of it, and what was tried for those that are not):

    sum of (prompt + mean / 2)  +  square root of the sum of (upper - mean / 2) squared

For one alone that is its prompt and the upper estimate of its output; for many hardly more than the sum of the halves.
Where all is given at once (room: whole) each holds all of it from the start, and together they hold the sum.
Counted in whole halves of tokens: sums come out the same in whatever order requests come and go.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from alignedserve.core import Request, ServiceClass
from alignedserve.scheduling.lengths import expected
from alignedserve.scheduling.policy import Policy, Room


class _Held(NamedTuple):
    """By one request, in half tokens."""

    usual: int
    beyond: int  # that it may hold besides
    is_rt: bool


class _Sum:
    """Over some requests."""

    def __init__(self) -> None:
        self._usual, self._squares = 0, 0  # the latter of what is beyond

    def add(self, held: _Held) -> None:
        self._usual += held.usual
        self._squares += held.beyond**2

    def take(self, held: _Held) -> None:
        self._usual -= held.usual
        self._squares -= held.beyond**2

    @property
    def tokens(self) -> int:
        return _tokens(self._usual, self._squares)

    def with_one_more(self, held: _Held) -> int:
        return _tokens(self._usual + held.usual, self._squares + held.beyond**2)

    def without(self, held: _Held) -> int:
        return _tokens(self._usual - held.usual, self._squares - held.beyond**2)


class Holdings:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._of: dict[str, _Held] = {}  # open request -> what it is to hold
        self._all, self._rt = _Sum(), _Sum()

    def __len__(self) -> int:
        return len(self._of)

    def put(self, request: Request) -> None:
        """Also another attempt of it, or another estimate."""
        self.remove(request.id)
        self._of[request.id] = held = self._held(request)
        self._all.add(held)
        if held.is_rt:
            self._rt.add(held)

    def remove(self, request: str) -> None:
        if (held := self._of.pop(request, None)) is not None:
            self._all.take(held)
            if held.is_rt:
                self._rt.take(held)

    @property
    def tokens(self) -> int:
        return self._all.tokens

    @property
    def rt_tokens(self) -> int:
        """Of real-time ones alone."""
        return self._rt.tokens

    def rt_with_one_more(self, request: Request) -> int:
        return self._rt.with_one_more(self._held(request))

    def rt_freed_by(self, request: str) -> int:
        """One of them, if it went."""
        return self._rt.tokens - self._rt.without(self._of[request])

    def usual(self, request: Request) -> int:
        """By so many tokens many like it would want more."""
        return _tokens(self._held(request).usual, 0)

    def _held(self, request: Request) -> _Held:
        room, is_rt = self._policy.room, request.service is ServiceClass.RT
        if room is Room.WHOLE:
            return _Held(2 * request.most_tokens, 0, is_rt)
        estimate, num_prompt = expected(request, self._policy), len(request.prompt)
        return _Held(2 * num_prompt + estimate.mean, 2 * estimate.upper - estimate.mean, is_rt)


def _tokens(usual: int, squares: int) -> int:
    return (usual + isqrt(squares) + 1) // 2
