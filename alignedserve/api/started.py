"""The process that a `Deployment` starts: `alignedserve serve`, which ends when its parent does.

The parent holds the other end of the standard input. However the parent ends, this process sees the end of its input.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from alignedserve.__main__ import main


def _end_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    sys.exit(main())
