"""The event loop of asyncio: uvloop's where that is installed, which is faster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from alignedserve.fallbacks import fell_back
from alignedserve.shell.loop_watch import LoopWatch

# What ends a task, or the process. All else that is raised is an error, also where it is no Exception: so libraries in
# Rust end where they panic, such as the tokeniser.
ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


def run_loop(main: Coroutine[Any, Any, None], watch: LoopWatch | None = None) -> None:
    """Run the coroutine to its end, under this watch."""
    if watch is not None:
        main = _watched(main, watch)
    try:
        import uvloop
    except ImportError as error:
        fell_back("uvloop", f"it cannot be imported: {error}", "asyncio's own event loop runs, which is slower")
        asyncio.run(main)
    else:
        uvloop.run(main)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks, and return when they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watched(main: Coroutine[Any, Any, None], watch: LoopWatch) -> None:
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(turns)

    with watch.over("event loop", wake) as turns:
        await main
