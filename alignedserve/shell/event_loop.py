"""The event loop of asyncio: uvloop's where that is installed, which is faster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from alignedserve.fallbacks import fell_back


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine to its end."""
    try:
        import uvloop
    except ImportError as error:
        fell_back("uvloop", f"it cannot be imported: {error}", "asyncio's own event loop runs, which is slower")
        asyncio.run(main)
    else:
        uvloop.run(main)
