"""The routes of /v1/files: the files that batch jobs read and write. Each key sees its own files only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import IO, Any, TypeAlias
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.config.sections import JobsConfig
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.access.shared_bound import SharedBound
from alignedserve.gateway.http.limits import MOST_ROWS, BytePace, LookPace
from alignedserve.gateway.http.middleware import caller_of, tab_of
from alignedserve.gateway.http.uploading import UploadForm, receive
from alignedserve.gateway.openai.errors import ApiError, invalid, no_room
from alignedserve.gateway.openai.streaming import WatchedStream, json_response
from alignedserve.gateway.openai.writing import encoded_runs
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.store.storage import OpenStorage, Storage
from alignedserve.store.store import Listing, ListPage, OverQuota, OwnerUsage, Purpose, Record, StoredFile

Answer: TypeAlias = Callable[[HttpRequest], Awaitable[Response]]
HttpRoute: TypeAlias = tuple[str, str, Answer]  # method, path, what answers it

MOST_LISTED = 10_000
MOST_FILES = 10_000  # of a caller
MOST_FILE_MB = 200  # OpenAI's limit for the file of a batch
EXPIRES_S = (3_600, 2_592_000)  # a file may expire from an hour to 30 days after it was made
MOST_TRANSFERS = 64  # uploads and downloads at a gateway at once: no quota counts an upload until it is complete
_DISK_THREADS = 2  # for uploads alone: chats wait in the usual threads, which a slow disk must not fill
_MB = 1_000_000
_PIECE_BYTES = 1 << 18


class FileRoutes:
    def __init__(self, open_storage: OpenStorage, config: JobsConfig) -> None:
        self._open_storage, self._config = open_storage, config
        self._transfers = SharedBound()
        self._arriving = Counter[str]()  # owner -> bytes of uploads that are not complete
        self._looks, self._pace = LookPace(MOST_ROWS, "rows of files"), BytePace()
        self._disk = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="upload")

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (
            ("POST", "/v1/files", self.add),
            ("GET", "/v1/files", self.list),
            ("GET", "/v1/files/{id}", self.get),
            ("DELETE", "/v1/files/{id}", self.remove),
            ("GET", "/v1/files/{id}/content", self.content),
        )

    async def add(self, http: HttpRequest) -> Response:
        caller = caller_of(http)
        tab_of(http).need_token()
        self._begin_transfer(caller)
        try:
            return JSONResponse(file_object(await self._receive(http, caller.id)))
        finally:
            self._transfers.give(caller, 1)

    def _begin_transfer(self, caller: Caller) -> None:
        if not self._transfers.take(caller, 1, MOST_TRANSFERS):
            raise no_room(caller, "uploads and downloads")

    async def _receive(self, http: HttpRequest, owner: str) -> StoredFile:
        storage, id, arrived = await self._open_storage(), f"file-{uuid4().hex}", 0
        quota = OwnerUsage(MOST_FILES, self._config.quota_mb * _MB)

        async def grow(num_bytes: int) -> None:
            """Count bytes that are written next, as if the owner had them already."""
            nonlocal arrived
            total = (await storage.store.usage(owner)).bytes + self._arriving[owner] + num_bytes
            if total > quota.bytes:
                raise _over_quota(f"your files would take {total} bytes, the limit is {quota.bytes}")
            arrived += num_bytes
            self._arriving[owner] += num_bytes

        try:
            async with storage.writing(id) as writing:
                form = await receive(http, writing, MOST_FILE_MB * _MB, self._disk, self._pace, grow)
                file = _make_file(form, id, owner, writing.num_bytes, self._config.keep_s)
                await storage.commit(writing, threads=self._disk)
        finally:
            self._arriving[owner] -= arrived
        try:
            await storage.add(file, writing, quota)
        except OverQuota as error:
            total = error.usage.bytes + file.bytes
            is_large = total > quota.bytes
            said = f"your files would take {total} bytes, the limit is {quota.bytes}"
            raise _over_quota(said if is_large else f"you have {error.usage.files} files") from None
        return file

    async def list(self, http: HttpRequest) -> Response:
        page = parse_page(http, MOST_LISTED, usual=MOST_LISTED)
        name = http.query_params.get("purpose")
        if name not in (None, *(purpose.value for purpose in Purpose)):
            return JSONResponse(list_object((), (), has_more=False))  # no file has an unknown purpose
        storage, purpose = await self._open_storage(), None if name is None else Purpose(name)
        owner = caller_of(http).id
        async with self._looks.turn(owner):
            listing = need_listing(await storage.store.files(owner, page, purpose, time.time()), page)
            self._looks.take(owner, len(listing.records) + listing.num_passed)
        return list_response(listing, file_object)

    async def get(self, http: HttpRequest) -> Response:
        _, file = await self._find(http)
        return JSONResponse(file_object(file))

    async def remove(self, http: HttpRequest) -> Response:
        storage, file = await self._find(http)
        jobs = [job.id for job in await storage.store.open_jobs(file.owner) if job.input_file_id == file.id]
        if jobs:
            raise ApiError(409, f"{jobs[0]} reads {file.id}: cancel that batch first", code="file_in_use")
        await storage.remove(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def content(self, http: HttpRequest) -> Response:
        storage, file = await self._find(http)
        stalled_s, kind = GatewaySettings.stalled_client_s, "application/octet-stream"
        if http.method == "HEAD":
            return Response(headers={"content-length": str(file.bytes)}, media_type=kind)
        async with AsyncExitStack() as held:
            self._begin_transfer(caller := caller_of(http))
            held.callback(self._transfers.give, caller, 1)
            opened = await asyncio.to_thread(storage.blobs.open, file.id)
            held.push_async_callback(asyncio.to_thread, opened.close)
            on_end = held.pop_all().aclose
        return WatchedStream(
            self._pieces(opened, caller), stalled_s, on_end=on_end, num_bytes=file.bytes, media_type=kind
        )

    async def _pieces(self, opened: IO[bytes], caller: Caller) -> AsyncGenerator[bytes, None]:
        while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
            await self._pace.take(caller.id, len(piece))
            yield piece

    async def _find(self, http: HttpRequest) -> tuple[Storage, StoredFile]:
        storage = await self._open_storage()
        return storage, await find_file(storage, caller_of(http).id, http.path_params["id"])


def _over_quota(why: str) -> ApiError:
    return ApiError(413, f"{why}: delete some", param="file", code="quota_exceeded")


async def find_file(storage: Storage, owner: str, id: str, param: str = "id") -> StoredFile:
    """Return the owner's file; the error is the same whether or not another owner has a file with this id."""
    file = await storage.store.file(owner, id)
    if file is None or file.has_expired(time.time()):
        raise ApiError(404, f"there is no file {id!r:.80}", param=param, code="file_not_found")
    return file


def _make_file(form: UploadForm, id: str, owner: str, num_bytes: int, keep_s: int) -> StoredFile:
    filename, fields = form
    if filename is None:
        raise invalid("file is missing", "file", "missing_required_parameter")
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise invalid("purpose is missing", "purpose", "missing_required_parameter")
    if purpose != Purpose.BATCH.value:
        raise invalid(f"purpose must be batch, not {purpose!r:.40}: files are only for batches here", "purpose")
    if not num_bytes:
        raise invalid("the file is empty", "file", "empty_file")
    created_at, lives_s = int(time.time()), keep_s
    anchor, seconds = (fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds"))
    if fields:
        name = next(iter(fields))
        said = "there is no such field"
        raise invalid(f"{name:.80}: {said}", name[:80], "unknown_parameter", logged=said)
    if anchor is not None or seconds is not None:
        lives_s, (least, most) = _parse_number(seconds or ""), EXPIRES_S
        if anchor != "created_at" or not least <= lives_s <= most:
            message = f"expires_after: its anchor must be created_at, and its seconds {least} to {most}"
            raise invalid(message, "expires_after")
    return StoredFile(id, owner, filename, num_bytes, Purpose.BATCH, created_at, created_at + lives_s)


def file_object(file: StoredFile) -> dict[str, Any]:
    """Return OpenAI's file object. Its schema allows no null, so fields without a value are left out."""
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


def _parse_number(text: str) -> int:
    """Return a whole number of at most nine digits, or 0 if the text is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def parse_page(http: HttpRequest, most: int, usual: int) -> ListPage:
    limit, order = http.query_params.get("limit", str(usual)), http.query_params.get("order", "desc")
    if not 1 <= _parse_number(limit) <= most:
        raise invalid(f"limit must be 1 to {most}, not {limit!r:.40}", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, not {order!r:.40}", "order")
    return ListPage(int(limit), http.query_params.get("after"), order == "desc")


def need_listing(listing: Listing[Record] | None, page: ListPage) -> Listing[Record]:
    if listing is None:
        raise invalid(f"after: there is no {page.after!r:.80}", "after")
    return listing


def list_response(listing: Listing[Record], make_object: Callable[[Record], dict[str, Any]]) -> Response:
    """Return a list, whose rows are written some at a time, as it is sent."""
    ids = [record.id for record in listing.records]
    listed = list_object(ids, encoded_runs(map(make_object, listing.records)), listing.has_more)
    return json_response(listed, {}, GatewaySettings.stalled_client_s)


def list_object(ids: Sequence[str], data: Iterable[Any], has_more: bool) -> dict[str, Any]:
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
