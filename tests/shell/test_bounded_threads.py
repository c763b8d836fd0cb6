"""Tests of threads whose work is given up when it takes too long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from alignedserve.shell import bounded_threads
from alignedserve.shell.bounded_threads import MOST_LEFT, BoundedThreads, WorkTooLong


def test_work_that_ends_late_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process would end after eight slow bodies, however long it has run."""
    monkeypatch.setattr(bounded_threads, "WORK_S", 0.01)

    async def give_up_one_after_another() -> None:
        threads = BoundedThreads(1, "slow")
        for _ in range(MOST_LEFT + 1):
            may_end, has_ended = threading.Event(), threading.Event()

            def work(may_end: threading.Event = may_end, has_ended: threading.Event = has_ended) -> None:
                may_end.wait()
                has_ended.set()

            with pytest.raises(WorkTooLong):
                await threads.do(work)
            may_end.set()
            assert await asyncio.to_thread(has_ended.wait, 10.0)
        assert await threads.do(lambda: "done") == "done"

    asyncio.run(give_up_one_after_another())
