"""Hand what arrives in the owner's thread to the coroutines that wait for it on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

_AT_ONCE = 8  # requests that get their arrivals before the event loop looks at bytes of others: each wakes a coroutine

T = TypeVar("T")


class ArrivalQueue(Generic[T]):
    """What arrives for one request, inside of `with`. An asyncio.Queue takes 3 KB while it is empty."""

    __slots__ = ("_among", "_arrived", "_request", "_wakes")

    def __init__(self, request: str, among: dict[str, ArrivalQueue[T]]) -> None:
        self._request, self._among = request, among
        self._arrived: list[T] = []
        self._wakes: asyncio.Future[None] | None = None  # the coroutine that waits

    def __enter__(self) -> ArrivalQueue[T]:
        self._among[self._request] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._among[self._request]

    def __len__(self) -> int:
        return len(self._arrived)

    def put(self, arrival: T) -> None:
        self._arrived.append(arrival)
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    async def get(self) -> T:
        """Take the first arrival; wait for it where there is none."""
        while not self._arrived:
            self._wakes = asyncio.get_running_loop().create_future()
            await self._wakes
        return self._arrived.pop(0)


class ArrivalQueues(Generic[T]):
    """Queues of arrivals, one per request. The event loop is woken once for all that has arrived until it is awake:
    a step's tokens arrive together.

    Requests take turns, and each turn hands on all arrivals of one request: so a request with few arrivals does not
    wait for all others when the event loop is behind."""

    def __init__(self) -> None:
        self._waiting: dict[str, ArrivalQueue[T]] = {}  # by request; on the event loop
        self._arrived: deque[tuple[str, T]] = deque()
        self._in_turn: dict[str, list[T]] = {}  # of these, by request; on the event loop
        self._is_waking = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def waiting_for(self, request: str) -> ArrivalQueue[T]:
        """Return the queue of what arrives for this request, inside of `with`."""
        self._loop = asyncio.get_running_loop()
        return ArrivalQueue(request, self._waiting)

    def has(self, request: str) -> bool:
        """Return whether an arrival waits for the coroutine of this request. Only the event loop may call this."""
        queue = self._waiting.get(request)
        return queue is not None and (len(queue) > 0 or request in self._in_turn)

    def put(self, request: str, arrival: T) -> None:
        """Put an arrival into the request's queue, or drop the arrival where no coroutine waits any more. Any thread
        may call this."""
        self._arrived.append((request, arrival))
        if not self._is_waking and self._loop is not None:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop has ended, and all coroutines with it
                self._loop.call_soon_threadsafe(self._hand_out)

    def call(self, work: Callable[[], object]) -> None:
        """Have the event loop call this. Any thread may call it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(work)

    def put_to_all(self, arrival: T) -> None:
        """Put an arrival into every queue. Only the event loop may call this."""
        for queue in self._waiting.values():
            queue.put(arrival)

    def _hand_out(self) -> None:
        self._is_waking = False  # before the first is taken: later arrivals wake the loop again
        while self._arrived:
            request, arrival = self._arrived.popleft()
            self._in_turn.setdefault(request, []).append(arrival)
        for request in [*islice(self._in_turn, _AT_ONCE)]:
            arrivals = self._in_turn.pop(request)
            if (queue := self._waiting.get(request)) is not None:
                for arrival in arrivals:
                    queue.put(arrival)
        if self._in_turn and self._loop is not None and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._hand_out)
