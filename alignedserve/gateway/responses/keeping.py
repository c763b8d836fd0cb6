"""Keep responses in the store of jobs, each for its owner and for a limited time, and find conversations in it.

A response in the background is a batch job of one line, which goes on after any part's restart. The jobs of a caller's
responses belong to an owner of their own, so that its lists of batches and files, and its limits of both, are as if
there were none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from pydantic import TypeAdapter

from alignedserve.config.sections import JobsConfig
from alignedserve.errors import BytesGone, Conflict, StoreError
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.openai.errors import ApiError, invalid, rate_limited
from alignedserve.gateway.openai.types import MOST_MESSAGES
from alignedserve.gateway.openai.writing import json_parts
from alignedserve.gateway.responses.answer import fail
from alignedserve.gateway.responses.types import (
    BackgroundOptions,
    InputItem,
    Item,
    ItemReference,
    MessageItem,
    ResponseRequest,
    own_ids,
    response_of,
)
from alignedserve.store.job import RESPONSES, Endpoint, Job, JobStatus
from alignedserve.store.storage import OpenStorage, Storage, check_shared
from alignedserve.store.store import OverQuota, OwnerUsage, Purpose, StoredFile, StoredResponse, seen_items

_log = logging.getLogger("alignedserve.gateway")
_MB = 1_000_000
_FIELDS = dict[str, msgspec.Raw]
_ITEMS: TypeAdapter[Any] = TypeAdapter(list[InputItem])
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


class ResponseKeeper:
    """The responses that this deployment keeps; none, if it has no store."""

    def __init__(
        self, open_storage: OpenStorage | None, config: JobsConfig, runner_away_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`runner_away_s` returns for how long there has been no job runner."""
        self._open_storage, self._config, self.runner_away_s = open_storage, config, runner_away_s

    @property
    def is_on(self) -> bool:
        return self._open_storage is not None

    async def _storage(self) -> Storage:
        assert self._open_storage is not None, "nothing is kept without a store"
        return await self._open_storage()

    def need_background(self) -> None:
        if not self.is_on:
            message = "this server runs nothing in the background: it has no store (jobs.store is off)"
            raise invalid(message, "background", "unsupported_parameter")

    async def _add(
        self, owner: str, items: Sequence[msgspec.Raw], answer: dict[str, Any], job: str | None = None
    ) -> StoredResponse:
        """Add a response to the store, with the items of its own input."""
        written = bytearray()
        for part in json_parts(answer):
            written += part
            await asyncio.sleep(0)  # the event loop turns: an answer with log-probabilities may have megabytes
        now = int(time.time())
        response = StoredResponse(
            id=answer["id"],
            owner=owner,
            created_at=now,
            expires_at=now + self._config.keep_s,
            input=[*items],
            answer=msgspec.Raw(written),
            previous=answer["previous_response_id"],
            job=job,
            seen=seen_items(answer["output"]),
        )
        await (await self._storage()).store.add_response(response, self._config.quota_mb * _MB)
        return response

    async def find(self, owner: str, id: str) -> StoredResponse:
        found = await self._get(owner, id)
        if found is None:
            raise ApiError(404, f"there is no response {id!r:.80}", param="id", code="response_not_found")
        return found

    async def remove(self, response: StoredResponse) -> None:
        await (await self._storage()).store.remove_response(response.owner, response.id)

    async def own_items(self, owner: str, body: ResponseRequest, room: KeptItemRoom) -> list[Item]:
        """Return the items of a body's own input, with the items that its references stand for."""
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input)]
        by_response: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)  # each is read once
        for number, item in enumerate(body.input):
            if isinstance(item, ItemReference):
                by_response[response_of(item.id)].append((number, item.id))
        found: dict[str, msgspec.Raw] = {}
        for response, references in by_response.items():
            turn = await self._get(owner, response) if response else None
            kept = {} if turn is None else {kept_id(item): item for item in turn.items}
            for number, id in references:
                if id not in kept:
                    message = f"there is no item {id!r:.80}: its response was not stored, was deleted or has expired"
                    raise ApiError(404, message, param=f"input[{number}].id", code="item_not_found")
                found[id] = room.take(kept[id], "input")
        meant = dict(zip(found, await asyncio.to_thread(_read_items, [*found.values()]), strict=True))
        return [meant[item.id] if isinstance(item, ItemReference) else item for item in body.input]

    async def items_before(self, owner: str, body: ResponseRequest, room: KeptItemRoom) -> list[Item]:
        """Return the items of the conversation that a body continues, the oldest first."""
        turns: list[list[msgspec.Raw]] = []
        id, num_items = body.previous_response_id, 0
        while id is not None:
            turn = await self._get(owner, id)
            if turn is None:
                message = f"there is no response {id!r:.80}: it was not stored, was deleted or has expired"
                raise invalid(message, "previous_response_id", "previous_response_not_found")
            if turn.job is not None and turn.status in ("queued", "in_progress"):
                raise invalid(f"{id:.80} has not ended yet", "previous_response_id", "previous_response_not_ended")
            turns.append([room.take(item, "previous_response_id") for item in turn.items])
            id, num_items = turn.previous, num_items + len(turns[-1])
            if num_items > MOST_MESSAGES:
                message = f"the conversation has more than {MOST_MESSAGES} items"
                raise invalid(message, "previous_response_id", "context_length_exceeded")
        return await asyncio.to_thread(_read_items, [item for turn in reversed(turns) for item in turn])

    async def keep(self, owner: str, items: Sequence[msgspec.Raw], answer: dict[str, Any]) -> bool:
        """Keep a response; return whether it is kept, which a store that cannot be reached does not do."""
        if self._open_storage is None:
            return False
        try:
            await self._add(owner, items, answer)
        except StoreError as error:
            _log.error("responses are not kept: %s", error)
            return False
        return True

    async def _get(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response as it is now."""
        if not self.is_on:
            return None
        found = await (await self._storage()).store.response(owner, id)
        return None if found is None or found.has_expired(time.time()) else await self._refresh(found)

    # --- In the background

    async def begin(
        self,
        caller: Caller,
        kept: Sequence[msgspec.Raw],
        head: dict[str, Any],
        body: ResponseRequest,
        items: Sequence[Item],
    ) -> None:
        """Keep a response that is only its head, with the items of its own input, and add the job that makes it;
        `items` are all of its conversation."""
        job = f"batch_{uuid4().hex}"
        response = await self._add(caller.id, kept, head, job)
        try:
            await self._add_job(job, caller, response.id, body, items)
        except BaseException:
            await self.remove(response)
            raise

    async def _add_job(
        self, id: str, caller: Caller, response: str, body: ResponseRequest, items: Sequence[Item]
    ) -> None:
        storage, owner, now = await self._storage(), caller.id + RESPONSES, int(time.time())
        await check_shared(storage.store, self._config, storage.holder, now, may_take=False)
        line = await asyncio.to_thread(_line, response, body, items)
        file = await self._add_file(storage, owner, response, line)
        window = (body.background_options or BackgroundOptions()).completion_window
        job = Job(
            id=id,
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

    async def _refresh(self, response: StoredResponse) -> StoredResponse:
        """Return the response as it is now, and save it once it has ended."""
        if response.job is None or response.status in _ENDED:
            return response
        storage = await self._storage()
        job = await storage.store.job(response.owner + RESPONSES, response.job)
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
        storage = await self._storage()
        while (now := await self._refresh(response)).status not in _ENDED:
            job = await storage.store.job(response.owner + RESPONSES, response.job or "")
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
        async with storage.writing(f"file-{uuid4().hex}") as writing:
            await storage.commit(writing, data)
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


def _line(id: str, body: ResponseRequest, items: Sequence[Item]) -> bytes:
    """Return the line of the job. It has a seed, so that another try says the same."""
    tree = body.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_HERE)
    tree.setdefault("seed", secrets.randbits(63))
    tree["input"] = [item.tree for item in items]
    return json.dumps({"custom_id": id, "method": "POST", "url": Endpoint.RESPONSES.value, "body": tree}).encode()


def _read_answer(storage: Storage, file_id: str, id: str) -> dict[str, Any]:
    """Return the fields of a response by the answer to the only line of its job, whose bulk stays JSON."""
    with storage.blobs.open(file_id) as file:
        line = msgspec.json.decode(file.read(), type=_FIELDS)
    answer = msgspec.json.decode(line["response"], type=_FIELDS | None)
    if answer is None:
        return _failed(500, msgspec.json.decode(line["error"])["message"])
    status, body = msgspec.json.decode(answer["status_code"]), msgspec.json.decode(answer["body"], type=_FIELDS)
    if status >= 400:
        return _failed(status, msgspec.json.decode(body["error"])["message"])
    output = msgspec.json.decode(body["output"], type=list[dict[str, msgspec.Raw]])
    return {**{name: body[name] for name in _OF_ANSWER}, "output": own_ids(id, output)}


def _failed(status: int, message: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    fail(fields, ApiError(status, message))
    return fields


class KeptItemRoom:
    """The room that what a body brings in from kept responses has in memory: as much as a body itself may take."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left = most_bytes

    def take(self, item: msgspec.Raw, param: str) -> msgspec.Raw:
        """Return the item, without the record that it is a part of; raise if there is no room for it."""
        self._left -= len(memoryview(item))
        if self._left < 0:
            message = f"the kept items that it brings in have more than {self._most_bytes} bytes, the limit of a body"
            raise invalid(f"{param}: {message}: refer to fewer or shorter ones", param, "too_large")
        return item.copy()


class _KeptItemId(msgspec.Struct):
    id: str


_ITEM_ID = msgspec.json.Decoder(_KeptItemId)


def kept_id(item: msgspec.Raw) -> str:
    """Return the id of a kept item, and decode nothing else."""
    return _ITEM_ID.decode(item).id


def _read_items(kept: Sequence[msgspec.Raw]) -> list[Item]:
    """Return items as they were kept."""
    items: list[Item] = _ITEMS.validate_python([msgspec.json.decode(item) for item in kept])
    return items
