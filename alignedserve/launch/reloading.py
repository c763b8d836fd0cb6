"""Read settings again, for `alignedserve reload` and SIGHUP, and find what may change while it serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from alignedserve.config.config import Config, dump, every_setting, plain
from alignedserve.config.setting import leaves
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.exposure import check_exposure


class Reloading:
    """The settings that were asked for, with a way to read them again where they came from."""

    def __init__(self, asked: Config, read: Callable[[], Config]) -> None:
        self._asked, self._read = asked, read

    @property
    def asked(self) -> dict[str, Any]:
        """Return the settings that were asked for last, as plain values."""
        return dump(self._asked)

    def read(self) -> tuple[Config, list[str]]:
        """Return the settings that are asked for now, and what is new, in lines. Raise a ConfigError where they cannot
        be taken, or not without a restart: nothing changes then."""
        again, declared = self._read(), every_setting()
        both = zip(leaves(self._asked), leaves(again), strict=True)
        changed = {path: new for (path, old), (_, new) in both if new != old}
        turns_tls = (again.server.tls_cert is None) is not (self._asked.server.tls_cert is None)
        fixed = [path for path in changed if not declared[path].reloads or (turns_tls and path == "server.tls_cert")]
        if fixed:
            raise ConfigError(f"nothing has changed, since this needs a restart: {', '.join(fixed)}")
        checked = check_exposure(again)
        self._asked = again
        lines = [f"{path}: {'new' if declared[path].secret else plain(new)}" for path, new in changed.items()]
        server = checked.server
        files = {"keys": server.keys_file, "certificate": server.tls_cert}
        return checked, [
            *(lines or ["no setting has changed"]),
            *(f"{what}: as {path} has them now" for what, path in files.items() if path is not None),
        ]


def hears_hangup() -> bool:
    """Return whether SIGHUP is a command here: neither a terminal that hangs up sends it, nor is it ignored (nohup)."""
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return False
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
