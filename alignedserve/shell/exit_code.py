"""The exit codes by which a part's process says whether to start it again."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code. The launcher, if it still runs, starts the part again after all but STOPPED and USER_ERROR."""

    STOPPED = 0
    BROKEN = 1  # an error that was not expected: Python itself ends with this code
    USER_ERROR = 2  # starting the part again would not help
    LAUNCHER_GONE = 3
    CAST_OUT = 4
    RANK_LOST = 5
    DEVICE_LOST = 6
    WORK_HUNG = 7
