"""A worker's work in a thread of its own, in its order: while a step runs, its core hears what comes, and plans ahead.

    shell ── work ──▶ in line ──▶ done one after the other ─────────────────────▶ what came of it
                                   └─ a step: begun, and the next is begun while it runs ─▶ read ─▶ its tokens

On a GPU a step is begun long before it has run, so the next one is in line there when it ends. Reading is done by
another thread, which alone waits for the device. What is no step waits until all that were begun have been read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

import torch

from alignedserve.core import StepFailure, StepPlan, StepResult
from alignedserve.engine.device.devices import use
from alignedserve.engine.sampling.reading import Begun
from alignedserve.kernels.common.failing import noticing_loss
from alignedserve.protocol.events import Post, StepDone

Result = TypeVar("Result")


class InOrder:
    def __init__(self, device: torch.device) -> None:
        self._device, threads = device, torch.get_num_threads()

        def start() -> None:
            use(device)
            torch.set_num_threads(threads)  # each thread has a number of its own for OpenMP

        self._worker = ThreadPoolExecutor(1, "work", start)
        self._reader = ThreadPoolExecutor(1, "reading", start)
        self._reading: Future[None] | None = None  # of the last step that was begun
        self._has_failed = False  # that step
        self._broken: Exception | None = None  # what has ended it all
        self._read_at = 0.0

    def step(self, plan: StepPlan, begin: Callable[[StepPlan], Begun], post: Post) -> None:
        """One that goes on from a step that failed fails too: there is nothing that it could go on from."""

        def work() -> None:
            began = perf_counter()
            if self._has_failed and any(one.token is None for one in plan.decodes):
                failed = StepResult(plan.number, (), failure=StepFailure("the step before it has failed"))
                self._reading = self._reader.submit(post, StepDone(failed, 0.0))
                return
            begun = begin(plan)
            self._has_failed = begun.has_failed
            self._reading = self._reader.submit(self._read, begun, began, post)

        self._add(work, post)

    def do(self, begin_aside: Callable[[], bool], work: Callable[[], None], post: Post) -> None:
        """Something else, in its turn. What goes on aside touches nothing that the steps in line do."""

        def in_turn() -> None:
            if not begin_aside():
                self._await_steps()
                work()

        self._add(in_turn, post)

    def meanwhile(self, work: Callable[[], Result]) -> Result:
        """The same, and the caller waits for it."""

        def alone() -> Result:
            self._check()
            self._await_steps()
            return work()

        return self._worker.submit(alone).result()

    def close(self) -> None:
        """What is in line is not begun any more."""
        for thread in (self._worker, self._reader):
            thread.shutdown(wait=True, cancel_futures=True)

    def _add(self, work: Callable[[], None], post: Post) -> None:
        def guarded() -> None:
            if self._broken is not None:  # it has been posted; the process ends
                return
            try:
                work()
            except Exception as error:
                self._broken = error
                post(error)

        self._worker.submit(guarded)

    def _read(self, begun: Begun, began: float, post: Post) -> None:
        """A step's time counts from the end of the one before, which it waited for."""
        try:
            with noticing_loss(self._device):
                result = begun.result()
        except Exception as error:  # a device that is lost is noticed here
            self._broken = error
            post(error)
            return
        now = perf_counter()
        seconds, self._read_at = now - max(began, self._read_at), now
        post(StepDone(result, seconds))

    def _await_steps(self) -> None:
        if self._reading is not None:
            self._reading.result()
        self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
