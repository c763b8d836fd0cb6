"""Runs a worker's work in a thread of its own, in order: while a step runs, the core takes events and plans ahead.

    shell ── work ──▶ queue ──▶ done one after the other ─────────────────────▶ its result
                                 └─ a step: begun, and the next is begun while it runs ─▶ read ─▶ its tokens

On a GPU a step is begun long before it has run, so the next step is queued there when it ends. Another thread reads
results, and only that thread waits for the device. Work that is not a step waits until all begun steps have been read.

A step on a CPU may pause between two layers, for a step of chats' prompts (`step_amid`), and goes on then:

    step N  begun ──▶ layers 1 to k ┐                 ┌─▶ the other layers ──▶ its tokens, and the time of both parts
    step M                          └─▶ its tokens ───┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

import torch

from alignedserve.core import StepFailure, StepPlan, StepResult
from alignedserve.engine.device.devices import use
from alignedserve.engine.sampling.reading import Begun, Done
from alignedserve.kernels.common.decoder import Pauses
from alignedserve.kernels.common.failing import noticing_loss
from alignedserve.protocol.events import Post, StepDone

Result = TypeVar("Result")


class DeviceQueue:
    """A worker's queue of steps and other work."""

    def __init__(self, device: torch.device, pauses: Pauses | None = None) -> None:
        self._device, threads = device, torch.get_num_threads()
        self._pauses = pauses
        self._amid = deque[Callable[[], None]]()  # steps for pauses, in order, that have not begun
        self._paused_s = 0.0  # that all pauses have taken
        if pauses is not None:
            pauses.work = self._run_amid

        def start() -> None:
            use(device)
            torch.set_num_threads(threads)  # OpenMP keeps this number for each thread

        self._worker = ThreadPoolExecutor(1, "work", start)
        self._reader = ThreadPoolExecutor(1, "reading", start)
        self._reading: Future[None] | None = None  # of the newest step that was begun
        self._failed: StepPlan | None = None  # that step, if it has failed
        self._broken: Exception | None = None  # the error after which no more work is done
        self._read_at = 0.0  # when the newest result was read

    def step(self, plan: StepPlan, begin: Callable[[StepPlan], Begun], post: Post) -> None:
        """Queue a step. A step that continues a failed step fails too: its input tokens, or KV before, do not exist."""

        def work() -> None:
            began = perf_counter()
            if self._failed is not None and plan.continues(self._failed):
                self._failed = None
                failed = StepResult(plan.number, (), failure=StepFailure("the step before it has failed"))
                self._reading = self._reader.submit(post, StepDone(failed, 0.0))
                return
            paused_s = self._paused_s
            begun = begin(plan)
            began += self._paused_s - paused_s
            self._failed = plan if begun.has_failed else None
            if isinstance(begun, Done) and not self._is_reading:  # nothing to wait for: no other thread is woken
                self._read(begun, began, post)
            else:
                self._reading = self._reader.submit(self._read, begun, began, post)

        self._add(work, post)

    def step_amid(self, plan: StepPlan, begin: Callable[[StepPlan], Begun], post: Post) -> None:
        """Run a step in a pause of the step that runs, or behind that step if it ends first."""

        def work() -> None:
            began = perf_counter()
            result = begin(plan).result()
            seconds = perf_counter() - began
            self._paused_s += seconds
            post(StepDone(result, seconds))

        def behind() -> None:
            """Run this step if no pause has. A later step is not for now: work that is queued before it comes first."""
            if self._amid and self._amid[0] is own:
                self._amid.popleft()()

        assert self._pauses is not None, "no step of this engine pauses"
        own = self._guarded(work, post)
        self._amid.append(own)
        self._pauses.ask()
        self._add(behind, post)

    def _run_amid(self) -> None:
        while self._amid:
            self._amid.popleft()()

    def do(self, begin_aside: Callable[[], bool], work: Callable[[], None], post: Post) -> None:
        """Queue other work. Work that `begin_aside` takes over runs beside the steps and shares no memory with them."""

        def in_turn() -> None:
            if not begin_aside():
                self._await_steps()
                work()

        self._add(in_turn, post)

    def meanwhile(self, work: Callable[[], Result]) -> Result:
        """Queue work that is done between steps, wait for it, and return its result."""

        def alone() -> Result:
            self._check()
            self._await_steps()
            return work()

        return self._worker.submit(alone).result()

    def close(self) -> None:
        """End both threads; queued work is not begun any more."""
        for thread in (self._worker, self._reader):
            thread.shutdown(wait=True, cancel_futures=True)

    def _add(self, work: Callable[[], None], post: Post) -> None:
        self._worker.submit(self._guarded(work, post))

    def _guarded(self, work: Callable[[], None], post: Post) -> Callable[[], None]:
        def guarded() -> None:
            if self._broken is not None:  # the error has been posted, and the process ends
                return
            try:
                work()
            except BaseException as error:  # also what a library in Rust raises where it panics
                self._break(error, post)

        return guarded

    def _read(self, begun: Begun, began: float, post: Post) -> None:
        """Read a step's result and post it. Its time counts from the end of the step before, as it waited for that."""
        try:
            with noticing_loss(self._device):
                result = begun.result()
        except BaseException as error:  # a lost device is noticed here
            self._break(error, post)
            return
        now = perf_counter()
        seconds, self._read_at = now - max(began, self._read_at), now
        post(StepDone(result, seconds))

    def _break(self, error: BaseException, post: Post) -> None:
        self._broken = error if isinstance(error, Exception) else RuntimeError(f"a library has failed: {error!r}")
        post(self._broken)

    @property
    def _is_reading(self) -> bool:
        """Return whether the result of an earlier step is still to be posted."""
        return self._reading is not None and not self._reading.done()

    def _await_steps(self) -> None:
        if self._reading is not None:
            self._reading.result()
        self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
