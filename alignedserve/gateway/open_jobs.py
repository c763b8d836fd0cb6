"""The open jobs for the live page, read from the store of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from alignedserve.dashboard.picture import JobPicture, JobsPicture
from alignedserve.errors import StoreError
from alignedserve.store.job import Job, JobStatus
from alignedserve.store.storage import OpenStorage
from alignedserve.store.store import Store

_MOST_JOBS = 20  # in a picture
_SILENT_STORE_S = 5.0


class OpenJobs:
    """The open jobs as they were read last. They are read aside: no picture waits for a store that hangs."""

    def __init__(self, open_storage: OpenStorage, now: Callable[[], float]) -> None:
        self._open_storage, self._now = open_storage, now
        self.known = JobsPicture(trouble="The jobs have not been read yet.")
        self._reading: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    def picture(self) -> JobsPicture:
        """Return what is known now, and begin to read anew."""
        if self._reading is None or self._reading.done():
            self._reading, self._asked_at = asyncio.create_task(self._read()), self._now()
        silent_s = self._now() - self._asked_at
        if silent_s > _SILENT_STORE_S:
            return replace(self.known, trouble=f"The store has not answered for {silent_s:.0f} s.")
        return self.known

    def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        try:
            storage = await self._open_storage()
            self.known = await open_jobs(storage.store)
        except StoreError as error:
            self.known = JobsPicture(trouble=f"The store of jobs does not answer: {error}")


async def open_jobs(store: Store) -> JobsPicture:
    """Return the open jobs whose deadlines are next."""
    jobs = sorted(await store.open_jobs(), key=lambda job: job.expires_at)
    pictures = [await _job_picture(store, job) for job in jobs[:_MOST_JOBS]]
    return JobsPicture(tuple(pictures), max(0, len(jobs) - _MOST_JOBS))


async def _job_picture(store: Store, job: Job) -> JobPicture:
    counts, forecast = await store.counts(job.id), await store.forecast(job.id)
    is_running = forecast is not None and job.status is JobStatus.IN_PROGRESS
    return JobPicture(
        id=job.id,
        owner=job.owner,
        status=job.status.value,
        done=counts.done,
        failed=counts.failed,
        total=job.total,
        created_at=job.created_at,
        deadline=job.expires_at,
        finish_at=forecast.finish_at if forecast is not None and is_running else None,
        is_late=forecast is not None and is_running and forecast.is_late,
    )
