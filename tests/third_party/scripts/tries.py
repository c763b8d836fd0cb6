"""Runs what a script tries of a client, each by itself, and reports it as JSON: {client, version, ran}.

report = Report("instructor")

@report.tries("chat")
def chat(): ...  # what it returns is told; what it raises is told too, and the rest is tried all the same

report.say()
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any

TRIAL_S = 240.0  # on a machine that others use


class Report:
    def __init__(self, package: str) -> None:
        self._head = {"client": package, "version": version(package)}
        self._trials: dict[str, Callable[[], Any]] = {}

    def tries(self, what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def keep(trial: Callable[[], Any]) -> Callable[[], Any]:
            self._trials[what] = trial
            return trial

        return keep

    def say(self) -> None:
        """Try everything on one event loop, in the order of the script, and print what came of it. What clients print
        themselves goes where their logs go."""
        with redirect_stdout(sys.stderr):
            ran = asyncio.run(self._run())
        print(json.dumps({**self._head, "ran": ran}))

    async def _run(self) -> dict[str, dict[str, Any]]:
        ran = {}
        for what, trial in self._trials.items():
            ran[what] = await _outcome(trial)
        return ran


async def _outcome(trial: Callable[[], Any]) -> dict[str, Any]:
    try:
        # a client that is not asynchronous may start a loop of its own, which is possible in a thread only
        asks = trial() if inspect.iscoroutinefunction(trial) else asyncio.to_thread(trial)
        return {"told": await asyncio.wait_for(asks, TRIAL_S)}
    except Exception as error:
        traceback.print_exc()
        return {"raised": f"{type(error).__module__}.{type(error).__qualname__}: {error}"}
