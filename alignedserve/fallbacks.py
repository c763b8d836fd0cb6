"""What this process does otherwise than it would, since something does not work here or is missing.

Whoever takes another way says so with `fell_back`, at the start or while requests run. It is logged once, goes to the
gateways with the figures of the process (shell/process.py), and stands there in /metrics, /health and /status;
`alignedserve doctor` shows what this machine would fall back on. What the operator cannot change is not reported.
"""

from __future__ import annotations

import logging

from alignedserve.core import Fallback

log = logging.getLogger("alignedserve.fallbacks")


_found: dict[str, Fallback] = {}  # by what does not work; one process has one of everything that may fail


def fell_back(what: str, why: str, instead: str) -> None:
    """Say that something else is done, and warn of it where that is news. Any thread may call this."""
    fallback = Fallback(what, why, instead)
    if _found.get(what) != fallback:
        _found[what] = fallback
        log.warning("%s: %s (%s)", what, instead, why)


def works(what: str) -> None:
    """Take back what was said: it works now."""
    _found.pop(what, None)


def fallbacks() -> tuple[Fallback, ...]:
    """Return all fallbacks of this process, by name."""
    return tuple(fallback for _, fallback in sorted(_found.items()))
