"""The router's hands: they send the core's orders to the side process, whose answers come back as events.

The router never waits here. Orders that the side process has no time for are left out, and a side process that ends is
started again. Some prompts then get no prediction, and the prior holds.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from alignedserve.core import Estimate
from alignedserve.machine.one_thread import ONE_THREAD
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain
from alignedserve.protocol.events import Event, Predicted
from alignedserve.router.side.frames import PredictorOrder, frames, write
from alignedserve.safe_path import module_command
from alignedserve.shell.turn import NoHands

log = logging.getLogger("alignedserve.predictor")

MOST_WAITING = 4096  # orders that wait; more are left out
_AGAIN_S = (0.1, 1.0, 10.0)  # pauses before the process is started again; the last one repeats
_END_S = 5.0  # time for the process to save what it has learnt


class SideProcess(NoHands):
    """The side process and the queue of its orders. It saves what it has learnt at `path`, if one is given."""

    def __init__(self, path: Path | None) -> None:
        named = [] if path is None else [str(path)]
        self._command = module_command("alignedserve.router.side.process", *named)
        self._post: Callable[[Event], None] = lambda _: None
        self._waiting: queue.Queue[PredictorOrder] = queue.Queue(MOST_WAITING)
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="side-process", daemon=True)

    def start(self, post: Callable[[Event], None]) -> None:
        """Start the process; a thread calls `post` with each answer."""
        self._post = post
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def perform(self, command: Command) -> Event | None:
        assert isinstance(command, Predict | Learn | Retrain), f"a router cannot perform {command}"
        with suppress(queue.Full):
            self._waiting.put_nowait(command)
        return None

    def stop(self) -> None:
        """End the process after it has saved what it has learnt."""
        self._stopped.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(Retrain())  # wakes the thread that waits for an order
        self._thread.join(2 * _END_S)

    def _run(self) -> None:
        num_ended = 0
        while not self._stopped.is_set():
            self._live()
            if self._stopped.is_set():
                return
            again_s = _AGAIN_S[min(num_ended, len(_AGAIN_S) - 1)]
            log.warning("the side process has ended; no lengths are predicted for %g s", again_s)
            num_ended += 1
            self._stopped.wait(again_s)

    def _live(self) -> None:
        """Start the process and feed it until it ends."""
        with subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | ONE_THREAD
        ) as process:
            self._process = process
            reader = threading.Thread(target=self._read, args=(process,), name="predictions", daemon=True)
            reader.start()
            with suppress(OSError):  # the process has ended
                self._write(process)
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            self._end(process)

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        while not self._stopped.is_set() and process.poll() is None:
            try:
                order = self._waiting.get(timeout=1.0)  # then look whether the process lives
            except queue.Empty:
                continue
            process.stdin.write(write(order))
            if self._waiting.empty():
                process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for request, attempt, mean, upper in frames(process.stdout):
            self._post(Predicted(request, attempt, Estimate(mean, upper)))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        end_at = time.monotonic() + _END_S
        with suppress(subprocess.TimeoutExpired):
            process.wait(end_at - time.monotonic())
        if process.poll() is None:
            process.kill()
