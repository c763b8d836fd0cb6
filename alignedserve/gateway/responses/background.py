"""Run responses in the background: each is a batch job of one line, which goes on after any part's restart.

The jobs of a caller's responses belong to an owner of their own, so that its lists of batches and files, and its limits
of both, are as if there were none.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import BytesGone, Conflict
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.openai.errors import ApiError, rate_limited
from alignedserve.gateway.responses.answer import fail
from alignedserve.gateway.responses.types import BackgroundOptions, Item, ResponseRequest, own_ids
from alignedserve.store.job import RESPONSES, Endpoint, Job, JobStatus
from alignedserve.store.response import StoredResponse
from alignedserve.store.storage import OpenStorage, Storage, check_shared
from alignedserve.store.store import OverQuota, OwnerUsage, Purpose, StoredFile

_MB = 1_000_000
TIER = "flex"  # of responses in the background, whatever their bodies ask for
_WINDOWS_S = {"soonest": 3_600, "2h": 7_200, "8h": 28_800}  # what a response may take; then it has failed
MOST_OPEN = 100  # responses of a caller in the background that have not ended
_MOST_FILES = 10_000  # of responses that nobody has fetched since they ended
_STATUSES = {  # of responses whose job is open
    JobStatus.VALIDATING: "queued",
    JobStatus.IN_PROGRESS: "in_progress",
    JobStatus.FINALIZING: "in_progress",
    JobStatus.CANCELLING: "cancelled",
}
_LOOK_S = 0.1  # between two looks at a job that ends
_HERE = {"background", "background_options", "input", "previous_response_id", "store", "stream", "stream_options"}
_ENDED = ("completed", "incomplete", "failed", "cancelled")
_OF_ANSWER = ("completed_at", "incomplete_details", "service_tier", "status", "temperature", "top_p", "usage")


class Background:
    def __init__(self, open_storage: OpenStorage, config: JobsConfig) -> None:
        self._open_storage, self._config = open_storage, config

    async def begin(
        self, caller: Caller, response: StoredResponse, body: ResponseRequest, items: Sequence[Item]
    ) -> None:
        """Add the job of a response that is kept; `items` are all of its conversation."""
        assert response.job is not None
        storage, owner, now = await self._open_storage(), _owner(caller.id), int(time.time())
        await check_shared(storage.store, self._config, storage.holder, now, may_take=False)
        line = await asyncio.to_thread(_line, response.id, body, items)
        file = await self._add_file(storage, owner, response.id, line)
        window = (body.background_options or BackgroundOptions()).completion_window
        job = Job(
            id=response.job,
            owner=owner,
            salt=caller.salt,
            input_file_id=file.id,
            endpoint=Endpoint.RESPONSES,
            window=window,
            created_at=now,
            expires_at=now + _WINDOWS_S[window],
        )
        try:
            await storage.store.add_job(job, MOST_OPEN)
        except OverQuota:
            await storage.remove(file)
            raise rate_limited(f"{MOST_OPEN} responses in the background at once", 60.0) from None

    async def refresh(self, response: StoredResponse) -> StoredResponse:
        """Return the response as it is now, and save it once it has ended."""
        if response.job is None or response.status in _ENDED:
            return response
        storage = await self._open_storage()
        job = await storage.store.job(_owner(response.owner), response.job)
        if job is not None and job.is_open:
            return response.with_answer({"status": _STATUSES[job.status]})
        try:
            ended = await self._ended(storage, response, job)
        except BytesGone:  # another gateway has saved the response and removed the job's files
            again = await storage.store.response(response.owner, response.id)
            return response if again is None else again
        await storage.store.save_response(ended)
        if job is not None:
            await self._remove_files(storage, job)
        return ended

    async def cancel(self, response: StoredResponse) -> StoredResponse:
        """Cancel the response if it has not ended, and return it as it is then."""
        storage = await self._open_storage()
        while (now := await self.refresh(response)).status not in _ENDED:
            job = await storage.store.job(_owner(response.owner), response.job or "")
            if job is not None and job.status in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
                try:
                    await storage.store.save_job(job.move(JobStatus.CANCELLING, time.time()))
                except Conflict:  # the job runner has changed it meanwhile
                    continue
            elif job is not None and job.status is JobStatus.FINALIZING:
                await asyncio.sleep(_LOOK_S)  # its answer is being written
        return now

    async def _add_file(self, storage: Storage, owner: str, name: str, data: bytes) -> StoredFile:
        now = int(time.time())
        writing = await storage.begin(f"file-{uuid4().hex}")
        try:
            await storage.commit(writing, data)
        except BaseException:
            await storage.abandon(writing)
            raise
        file = StoredFile(writing.id, owner, name, len(data), Purpose.BATCH, now, now + self._config.keep_s)
        try:
            await storage.add(file, writing, OwnerUsage(_MOST_FILES, self._config.quota_mb * _MB))
        except OverQuota:
            message = "the inputs of your responses in the background take all the room that they may take"
            raise ApiError(413, message, param="background", code="quota_exceeded") from None
        return file

    async def _ended(self, storage: Storage, response: StoredResponse, job: Job | None) -> StoredResponse:
        """Return the response of a job that has ended, or is gone."""
        if job is not None and job.status is JobStatus.CANCELLED:
            return response.with_answer({"status": "cancelled"})
        if job is not None and job.status is JobStatus.COMPLETED:
            file_id = job.output_file_id or job.error_file_id or ""
            return response.with_answer(await asyncio.to_thread(_read_answer, storage, file_id, response.id))
        problems = [] if job is None else [problem.message for problem in job.problems]
        return response.with_answer(_failed(500, (problems or ["it did not end within its completion window"])[0]))

    async def _remove_files(self, storage: Storage, job: Job) -> None:
        for id in (job.input_file_id, job.output_file_id, job.error_file_id):
            file = None if id is None else await storage.store.file(job.owner, id)
            if file is not None:
                await storage.remove(file)


def _owner(caller: str) -> str:
    """Return the owner of the jobs of a caller's responses."""
    return caller + RESPONSES


def _line(id: str, body: ResponseRequest, items: Sequence[Item]) -> bytes:
    """Return the line of the job. It has a seed, so that another try says the same."""
    tree = body.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_HERE)
    tree.setdefault("seed", secrets.randbits(63))
    tree["input"] = [item.tree for item in items]
    return json.dumps({"custom_id": id, "method": "POST", "url": Endpoint.RESPONSES.value, "body": tree}).encode()


class _LineResponse(msgspec.Struct):
    status_code: int
    body: dict[str, msgspec.Raw]


class _JobAnswer(msgspec.Struct):
    response: _LineResponse | None
    error: msgspec.Raw


def _read_answer(storage: Storage, file_id: str, id: str) -> dict[str, Any]:
    """Return the fields of a response by the answer to the only line of its job, whose bulk stays JSON."""
    with storage.blobs.open(file_id) as file:
        line = msgspec.json.decode(file.read(), type=_JobAnswer)
    if line.response is None:
        return _failed(500, msgspec.json.decode(line.error)["message"])
    body = line.response.body
    if line.response.status_code >= 400:
        return _failed(line.response.status_code, msgspec.json.decode(body["error"])["message"])
    output = msgspec.json.decode(body["output"], type=list[dict[str, msgspec.Raw]])
    return {**{name: body[name] for name in _OF_ANSWER}, "output": own_ids(id, output)}


def _failed(status: int, message: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    fail(fields, ApiError(status, message))
    return fields
