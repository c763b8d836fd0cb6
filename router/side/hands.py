"""The router's hands: what its core orders of the length predictor goes to the side process, and comes back as events.

Nothing here waits. What the side process has no time for is left out, and if it ends it is started again: then there
is no answer to some, and the prior holds for them.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from alignedserve.core import Estimate
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain
from alignedserve.protocol.events import Event, Predicted
from alignedserve.router.side.frames import Asked, frames, written
from alignedserve.scheduling.policy import Predictor
from alignedserve.shell.turn import NoHands

log = logging.getLogger("alignedserve.predictor")

MOST_WAITING = 4096  # orders: more are left out
_AGAIN_S = (0.1, 1.0, 10.0)  # before it is started again; the last for all later times
_END_S = 5.0  # to keep what it has learnt


class SideProcess(NoHands):
    """`path` is where it keeps what it has learnt, if anywhere."""

    def __init__(self, predictor: Predictor, path: Path | None) -> None:
        self._command = [sys.executable, "-m", "alignedserve.router.side.process", predictor.value]
        self._command += [str(path)] if path is not None else []
        self._post: Callable[[Event], None] = lambda _: None
        self._waiting: queue.Queue[Asked] = queue.Queue(MOST_WAITING)
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="side-process", daemon=True)

    def start(self, post: Callable[[Event], None]) -> None:
        """`post` gets the answers, in another thread."""
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
        """It keeps what it has learnt."""
        self._stopped.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(Retrain())  # whoever waits for an order looks again
        self._thread.join(2 * _END_S)

    def _run(self) -> None:
        num_ended = 0
        while not self._stopped.is_set():
            self._live()
            if self._stopped.is_set():
                return
            again_s = _AGAIN_S[min(num_ended, len(_AGAIN_S) - 1)]
            log.warning("the side process has ended: no length is predicted until it is back, in %g s", again_s)
            num_ended += 1
            self._stopped.wait(again_s)

    def _live(self) -> None:
        """One life of it."""
        with subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_calm()) as process:
            self._process = process
            reader = threading.Thread(target=self._read, args=(process,), name="predictions", daemon=True)
            reader.start()
            with suppress(OSError):  # it has ended
                self._write(process)
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            self._end(process)

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        while not self._stopped.is_set() and process.poll() is None:
            try:
                asked = self._waiting.get(timeout=1.0)  # between two looks at whether it lives
            except queue.Empty:
                continue
            process.stdin.write(written(asked))
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


def _calm() -> dict[str, str]:
    """One thread: the other cores are the workers'."""
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
