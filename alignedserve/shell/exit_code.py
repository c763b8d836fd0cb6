"""How a part's process says, as it ends, whether to start it again."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """After every code but STOPPED and USER_ERROR the launcher, if it still lives, starts the part again."""

    STOPPED = 0
    BROKEN = 1  # an error that was not expected: Python itself ends with this code
    USER_ERROR = 2  # starting the part again would not help
    LAUNCHER_GONE = 3
    CAST_OUT = 4
    RANK_LOST = 5
    DEVICE_LOST = 6
