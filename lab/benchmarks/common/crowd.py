"""Other processes that want the machine's processors, beside what is measured.

As many processes compute that at least a number for each processor can run, whatever else does: they are stopped and go
on as other work comes and goes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread

_LOOK_S = 0.5


@contextmanager
def crowd(times: float) -> Iterator[None]:
    """Keep `times` as many processes running or ready to run as there are processors."""
    wanted = round(times * (os.cpu_count() or 1))
    context, has_ended = get_context("spawn"), Event()
    processes = [context.Process(target=_compute_for_ever, daemon=True) for _ in range(wanted)]
    for process in processes:
        process.start()
    keeps = Thread(target=_keep, args=([process.pid for process in processes], wanted, has_ended))
    keeps.start()
    try:
        yield
    finally:
        has_ended.set()
        keeps.join()
        for process in processes:
            process.kill()
            process.join()


def _keep(pids: list[int], wanted: int, has_ended: Event) -> None:
    num_computing = len(pids)
    while not has_ended.wait(_LOOK_S):
        if _num_ready() > wanted and num_computing > 0:
            num_computing -= 1
            os.kill(pids[num_computing], signal.SIGSTOP)
        elif _num_ready() < wanted and num_computing < len(pids):
            os.kill(pids[num_computing], signal.SIGCONT)
            num_computing += 1


def _num_ready() -> int:
    """Return how many processes run or could run now, without this one."""
    lines = Path("/proc/stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("procs_running ")) - 1


def _compute_for_ever() -> None:
    while True:
        pass
