"""Runs a command as the first process of a container: in a namespace of processes, where the system gives us one."""

from __future__ import annotations

import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

_START_S = 60.0


@cache
def as_first_process() -> tuple[str, ...]:
    """Return the words to put before a command; skip the test where there are none."""
    for more in ((), ("--user", "--map-root-user")):
        words = ("unshare", *more, "--pid", "--fork", "--mount-proc", "--kill-child")
        if (
            shutil.which("unshare")
            and not subprocess.run([*words, "true"], capture_output=True, check=False).returncode
        ):
            return words
    pytest.skip("this system gives no namespace of processes")


def first_process(unshare: int) -> int:
    """Return the pid, as it is seen from here, of the first process that unshare has started."""
    children, deadline = Path(f"/proc/{unshare}/task/{unshare}/children"), time.monotonic() + _START_S
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, "unshare starts nothing"
        time.sleep(0.01)
    return int(found[0])
