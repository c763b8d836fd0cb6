"""/v1/files: what batch jobs read and write, of each key its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, TypeAlias
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.config.config import JobsConfig
from alignedserve.gateway.http.middleware import caller_of
from alignedserve.gateway.http.uploading import Form, receive
from alignedserve.gateway.openai.admission import GatewaySettings
from alignedserve.gateway.openai.errors import ApiError, invalid, limited
from alignedserve.gateway.streaming import WatchedStream
from alignedserve.store.opening import Keeping
from alignedserve.store.store import Listing, OverQuota, Page, Purpose, Record, StoredFile, Taken

Open: TypeAlias = Callable[[], Awaitable[Keeping]]
Route: TypeAlias = tuple[str, str, Callable[[HttpRequest], Awaitable[Response]]]  # method, path, answer

MOST_LISTED = 10_000
MOST_FILES = 10_000  # of a caller
MOST_FILE_MB = 200  # as OpenAI has it for the file of a batch
EXPIRES_S = (3_600, 2_592_000)  # an hour to 30 days after it was made
MOST_UPLOADS = 16  # of a caller at once, at each gateway: what is not whole yet is held against no quota
_MB = 1_000_000
_PIECE_BYTES = 1 << 18


class FileRoutes:
    def __init__(self, keeping: Open, config: JobsConfig) -> None:
        self._keeping, self._config = keeping, config
        self._uploading: Counter[str] = Counter()  # by caller

    @property
    def routes(self) -> Sequence[Route]:
        return (
            ("POST", "/v1/files", self.add),
            ("GET", "/v1/files", self.list),
            ("GET", "/v1/files/{id}", self.get),
            ("DELETE", "/v1/files/{id}", self.remove),
            ("GET", "/v1/files/{id}/content", self.content),
        )

    async def add(self, http: HttpRequest) -> Response:
        owner = caller_of(http).id
        with self._one_more(owner):
            return JSONResponse(file_object(await self._received(http, owner)))

    @contextmanager
    def _one_more(self, owner: str) -> Iterator[None]:
        if self._uploading[owner] >= MOST_UPLOADS:
            raise limited(f"{MOST_UPLOADS} uploads at once", 1.0)
        self._uploading[owner] += 1
        try:
            yield
        finally:
            self._uploading[owner] -= 1

    async def _received(self, http: HttpRequest, owner: str) -> StoredFile:
        keeping, id = await self._keeping(), f"file-{uuid4().hex}"
        writing = await keeping.begin(id)
        try:
            form = await receive(http, writing, MOST_FILE_MB * _MB)
            file = _file_of(form, id, owner, writing.num_bytes, self._config.keep_s)
            await asyncio.to_thread(writing.commit)
        except BaseException:
            await keeping.abandon(writing)
            raise
        most = Taken(MOST_FILES, self._config.quota_mb * _MB)
        try:
            await keeping.add(file, writing, most)
        except OverQuota as error:
            raise _over(error.taken, file, most) from None
        return file

    async def list(self, http: HttpRequest) -> Response:
        page = page_of(http, MOST_LISTED, usual=MOST_LISTED)
        purpose = http.query_params.get("purpose")
        if purpose not in (None, *(one.value for one in Purpose)):
            return JSONResponse(list_object((), has_more=False))  # there can be none
        keeping, only = await self._keeping(), None if purpose is None else Purpose(purpose)
        found = await keeping.store.files(caller_of(http).id, page, only, time.time())
        return JSONResponse(listed(found, page, file_object))

    async def get(self, http: HttpRequest) -> Response:
        return JSONResponse(file_object(await self._found(http)))

    async def remove(self, http: HttpRequest) -> Response:
        file, keeping = await self._found(http), await self._keeping()
        jobs = [job.id for job in await keeping.store.open_jobs() if job.input_file_id == file.id]
        if jobs:
            raise ApiError(409, f"{file.id} is read by {jobs[0]}: cancel that first", code="file_in_use")
        await keeping.remove(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def content(self, http: HttpRequest) -> Response:
        file, keeping = await self._found(http), await self._keeping()
        opened = await asyncio.to_thread(keeping.blobs.open, file.id)
        headers = {"Content-Length": str(file.bytes)}
        stalled_s = GatewaySettings.stalled_client_s
        return WatchedStream(_pieces(opened), stalled_s, media_type="application/octet-stream", headers=headers)

    async def _found(self, http: HttpRequest) -> StoredFile:
        id = http.path_params["id"]
        return await file_of(await self._keeping(), caller_of(http).id, id)


async def file_of(keeping: Keeping, owner: str, id: str, param: str = "id") -> StoredFile:
    """Nobody is told whether others have a file of this id."""
    file = await keeping.store.file(owner, id)
    if file is None or file.has_expired(time.time()):
        raise ApiError(404, f"there is no file {id!r:.80}", param=param, code="file_not_found")
    return file


def _over(taken: Taken, file: StoredFile, most: Taken) -> ApiError:
    message = f"you have {taken.files} files: delete some"
    if taken.bytes + file.bytes > most.bytes:
        message = f"your files would take {taken.bytes + file.bytes} bytes, the limit is {most.bytes}: delete some"
    return ApiError(413, message, param="file", code="quota_exceeded")


def _file_of(form: Form, id: str, owner: str, num_bytes: int, keep_s: int) -> StoredFile:
    if form.filename is None:
        raise invalid("file is missing", "file", "missing_required_parameter")
    purpose = form.fields.pop("purpose", None)
    if purpose is None:
        raise invalid("purpose is missing", "purpose", "missing_required_parameter")
    if purpose != Purpose.BATCH.value:
        raise invalid(f"purpose: files are for batches here: say batch, not {purpose!r:.40}", "purpose")
    if not num_bytes:
        raise invalid("the file is empty", "file", "empty_file")
    created_at = int(time.time())
    anchor, seconds = (form.fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds"))
    if form.fields:
        name = next(iter(form.fields))
        raise invalid(f"{name:.80}: there is no such field", name[:80], "unknown_parameter")
    lives_s = keep_s if anchor is None and seconds is None else _lifetime(anchor, seconds)
    return StoredFile(id, owner, form.filename, num_bytes, Purpose.BATCH, created_at, created_at + lives_s)


def _lifetime(anchor: str | None, seconds: str | None) -> int:
    least, most = EXPIRES_S
    lives_s = _whole(seconds or "")
    if anchor != "created_at" or not least <= lives_s <= most:
        message = f"expires_after: its anchor is created_at, its seconds are {least} to {most}"
        raise invalid(message, "expires_after")
    return lives_s


async def _pieces(opened: IO[bytes]) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
            yield piece
    finally:
        await asyncio.to_thread(opened.close)


def file_object(file: StoredFile) -> dict[str, Any]:
    """By OpenAI's schema no field of it is null."""
    lives = {} if file.expires_at is None else {"expires_at": file.expires_at}
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        **lives,
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
    }


# --- Lists


def _whole(written: str) -> int:
    """0 where it is no whole number that anybody would write."""
    return int(written) if written.isascii() and written.isdecimal() and len(written) < 10 else 0


def page_of(http: HttpRequest, most: int, usual: int) -> Page:
    limit, order = http.query_params.get("limit", str(usual)), http.query_params.get("order", "desc")
    if not 1 <= _whole(limit) <= most:
        raise invalid(f"limit must be 1 to {most}, not {limit!r:.40}", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, not {order!r:.40}", "order")
    return Page(int(limit), http.query_params.get("after"), order == "desc")


def listed(found: Listing[Record] | None, page: Page, shape: Callable[[Record], dict[str, Any]]) -> dict[str, Any]:
    if found is None:
        raise invalid(f"after: there is no {page.after!r:.80}", "after")
    return list_object([shape(record) for record in found.records], found.has_more)


def list_object(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": list(data), "first_id": first, "last_id": last, "has_more": has_more}
