"""Plays a load test: tells the core what has happened, and does what the core orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter

import msgspec

from alignedserve.lab.bench.connections import Address, Connections
from alignedserve.lab.bench.core import AskServer, Command, HangUp, LoadProgress, LoadTest, Wake

CONNECT_S = 10.0
_LOOK_S = 0.25  # between two looks at the progress, and at requests that are silent

OnProgress = Callable[[LoadProgress, int, float], None]  # its state, the tokens that were read, seconds since its start


class Player:
    """Plays one test on one server. `stop` ends it: what has ended until then is measured."""

    def __init__(self, test: LoadTest, address: Address, silence_s: float, on_progress: OnProgress) -> None:
        self._test, self._silence_s, self._on_progress = test, silence_s, on_progress
        self._began_at = perf_counter()
        self._connections = Connections(address, self._now, CONNECT_S)
        self._tasks = set[asyncio.Task[None]]()
        self._over = asyncio.Event()
        self._error: BaseException | None = None

    def _now(self) -> float:
        return perf_counter() - self._began_at

    async def play(self) -> None:
        self._began_at = perf_counter()
        looks = asyncio.create_task(self._look())
        self._hear(self._test.begin)
        await self._over.wait()
        self._connections.close()
        for task in (looks, *self._tasks):
            task.cancel()
        await asyncio.gather(looks, *self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._over.set()

    def _hear(self, event: Callable[[float], list[Command]]) -> None:
        if self._over.is_set():
            return
        for command in event(self._now()):
            self._perform(command)
        if self._test.is_over:
            self._over.set()

    def _perform(self, command: Command) -> None:
        match command:
            case Wake(at, then):
                asyncio.get_running_loop().call_later(max(0.0, at - self._now()), self._hear, then)
            case AskServer():
                task = asyncio.create_task(self._ask(command))
                self._tasks.add(task)
                task.add_done_callback(self._done)
            case HangUp(request):
                self._connections.hang_up(request, "its client left")

    async def _ask(self, asked: AskServer) -> None:
        answer = await self._connections.ask(asked.request, asked.path, msgspec.json.encode(asked.body))
        self._hear(partial(self._test.end, asked.request, answer))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self._over.set()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self._now()
            for request in self._connections.silent(now - self._silence_s):
                self._connections.hang_up(request, f"silent for {self._silence_s:g} s")
            self._on_progress(self._test.progress(), self._connections.num_tokens, now)
