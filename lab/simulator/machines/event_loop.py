"""An event loop of asyncio in virtual time: the shell of a simulated process runs on it unchanged.

The loop has no sockets, and its threads are modelled: what is given to a thread happens at once, after a while, and its
result is heard a while later. An executor of its own does its work in order. What is ready runs within an event of
the agenda, until nothing is ready. A process that stands still runs nothing, and one that is killed nothing any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from random import Random
from typing import Any

from alignedserve.lab.simulator.machines.clock import Agenda, Priority

_WORK_S = (2e-3, 2e-3, 0.1, 0.5)  # until a thread has done its work, on average: one of these in each life
_HEARD_S = 1e-3  # until its result is heard, on average


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, agenda: Agenda, seed: str, stands_still_until: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self._agenda, self._stands_still_until = agenda, stands_still_until
        self._draw = Random(seed)
        self._work_s, self._ordered_work_s = self._draw.choice(_WORK_S), self._draw.choice(_WORK_S[:-1])
        self._free_at = 0.0  # when the executor has done all its work
        self._queue: deque[asyncio.Handle] = deque()  # what is ready
        self._is_planned = False
        self.is_dead = False

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work; an exception that ends it is raised by the agenda."""
        self.watch(self.create_task(work))

    def watch(self, task: asyncio.Task[None]) -> None:
        """End the run with the exception that ends the task, if there is one."""
        task.add_done_callback(self._raise_failure)

    def kill(self) -> None:
        """End all coroutines where they are. What they say on their way out does not leave the process."""
        if self.is_dead:
            return
        self.is_dead = True
        for task in sorted(asyncio.all_tasks(self), key=_number):
            task.cancel()
        self._run_all()
        self.close()

    async def until(self, at: float) -> None:
        """Wait until this time."""
        came = self.create_future()
        self.call_at(at, partial(_resolve, came))
        await came

    def time(self) -> float:
        return self._agenda.now

    def call_soon(  # its arguments are not checked against the callback
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._agenda.at(when, Priority.CLIENT, partial(self._make_ready, timer))
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()
        if self.is_dead:
            done.cancel()
            return done
        if executor is None:
            at = self.time() + self._draw.expovariate(1 / self._work_s)
        else:
            self._free_at = at = max(self.time(), self._free_at) + self._draw.expovariate(1 / self._ordered_work_s)
        self.call_at(at, self._work, done, partial(func, *args))
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with the error of a callback.

        asyncio also reports errors that nobody asked for, but only when a task is collected, which is not at the same
        instant in every process: `watch` is for those.
        """
        if not self.is_dead and "handle" in context and isinstance(error := context.get("exception"), Exception):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run with this error, not only the coroutine that met it."""
        self._agenda.at(self._agenda.now, Priority.FAULT, partial(_raise, error))

    def _raise_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _work(self, done: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        """Do a thread's work, unless it was cancelled before it began."""
        if done.cancelled():
            return
        try:
            heard = partial(_resolve, done, work())
        except Exception as error:
            heard = partial(_reject, done, error)
        self.call_later(self._draw.expovariate(1 / _HEARD_S), heard)

    def _make_ready(self, handle: asyncio.Handle) -> None:
        if self.is_closed():
            return
        self._queue.append(handle)
        self._plan(self._agenda.now)

    def _plan(self, at: float) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._agenda.at(at, Priority.CLIENT, self._run_ready)

    def _run_ready(self) -> None:
        self._is_planned = False
        if self.is_dead:
            return None
        if self._agenda.now < (until := self._stands_still_until()):
            return self._plan(until)
        return self._run_all()

    def _run_all(self) -> None:
        """Run what is ready, and what gets ready by that."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._queue:
                handle = self._queue.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(before)


def _number(task: asyncio.Task[Any]) -> tuple[int, str]:
    """Return what sorts tasks by their beginning: asyncio numbers them."""
    return len(task.get_name()), task.get_name()


def _raise(error: BaseException) -> None:
    raise error


def _resolve(future: asyncio.Future[Any], result: Any = None) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
