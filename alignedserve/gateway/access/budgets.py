"""The tokens that each key has used in this day and this month (UTC), for the budgets of keys.

    bodies, lines end ──▶ used, in memory ──▶ every second: spent.sqlite beside the jobs ◀──▶ other gateways, job runner

The file outlives the deployment. Open bodies hold what they may use (ledger.py), so a key goes beyond its budget only
by what other gateways have counted in the last second, and by what costs tokens without an output.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from alignedserve.config.sections import JobsConfig
from alignedserve.gateway.access.keys import Limits
from alignedserve.locks import NotPrivate, open_private
from alignedserve.store.storage import data_folder, is_on

FILE = "spent.sqlite"
WRITE_S, BUSY_S = 1.0, 5.0
_READ = "SELECT caller, period, tokens FROM spent WHERE period IN (?, ?)"
_MAKE = "CREATE TABLE IF NOT EXISTS spent (caller TEXT, period TEXT, tokens INTEGER, PRIMARY KEY (caller, period))"
_ADD = "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens"

log = logging.getLogger("alignedserve.keys")


class Budgets:
    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        """Without `path` what was used is known to this process alone, and forgotten with it."""
        self._path, self._now = path, now
        self._lock, self._exchanging = threading.Lock(), threading.Lock()  # a thread writes
        self._written: dict[tuple[str, str], int] = {}  # (caller, period) -> tokens, of all processes
        self._new: Counter[tuple[str, str]] = Counter()  # that are not written yet
        self._fault = ""

    def use(self, caller: str, tokens: int) -> None:
        with self._lock:
            for period in _periods(self._now()):
                self._new[caller, period] += tokens

    def used(self, caller: str) -> tuple[int, int]:
        """Return the tokens that a caller has used today and this month."""
        with self._lock:
            day, month = (
                self._written.get((caller, period), 0) + self._new[caller, period] for period in _periods(self._now())
            )
        return day, month

    def left(self, caller: str, limits: Limits) -> int:
        """Return the tokens that are left of a caller's budgets."""
        pairs = zip((limits.tokens_per_day, limits.tokens_per_month), self.used(caller), strict=True)
        return min(most - used for most, used in pairs if most is not None)

    def over(self, caller: str, limits: Limits, tokens: int = 1) -> tuple[str, float] | None:
        """Return the budget in which a caller has fewer than these tokens left, and the seconds until another one."""
        if not limits.has_budget:
            return None
        (day, month), now = self.used(caller), self._now()
        day, month = day + tokens - 1, month + tokens - 1
        today = datetime.fromtimestamp(now, timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        if limits.tokens_per_month is not None and month >= limits.tokens_per_month:
            next_month = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
            return f"{limits.tokens_per_month} tokens in a month", next_month.timestamp() - now
        if limits.tokens_per_day is not None and day >= limits.tokens_per_day:
            return f"{limits.tokens_per_day} tokens in a day", (today + timedelta(days=1)).timestamp() - now
        return None

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write what is used, and read what others have used, every second and at the end."""
        if self._path is None:
            yield
            return
        await asyncio.to_thread(self.exchange)
        writing = asyncio.create_task(self._write())
        try:
            yield
        finally:
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            self.exchange()

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            await asyncio.to_thread(self.exchange)

    def exchange(self) -> None:
        """Write what is new, and read what all processes have written. A file that is away is tried again later."""
        with self._exchanging:  # the last time at the end, while a thread may still write the same
            with self._lock:
                new = +self._new
            try:
                written = self._exchange(new)
                self._fault = ""
            except (sqlite3.Error, OSError, NotPrivate) as error:
                if str(error) != self._fault:
                    log.error("what keys use is counted here alone, since %s cannot be written: %s", self._path, error)
                self._fault = str(error)
                return
            with self._lock:
                self._written = written
                self._new -= new

    def _exchange(self, new: Counter[tuple[str, str]]) -> dict[tuple[str, str], int]:
        assert self._path is not None
        if not new and not self._path.exists():
            return {}  # no key has a budget
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_private(self._path))
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as file, file:
            file.execute(_MAKE)
            file.executemany(_ADD, [(*key, tokens) for key, tokens in new.items()])
            rows = file.execute(_READ, _periods(self._now()))
            return {(caller, period): tokens for caller, period, tokens in rows}


def budgets_of(jobs: JobsConfig) -> Budgets:
    return Budgets(data_folder(jobs) / FILE if is_on(jobs) else None)


def _periods(now: float) -> tuple[str, str]:
    """Return the names of the day and the month: 2026-11-27 and 2026-11."""
    day = datetime.fromtimestamp(now, timezone.utc).date().isoformat()
    return day, day[:7]
