"""Read a multipart form with a file as it arrives: the file goes to disk and is never whole in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeAlias

from python_multipart.multipart import parse_options_header
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.http.bodies import parts_of_file
from alignedserve.gateway.http.limits import BytePace
from alignedserve.gateway.http.middleware import tab_of
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.store.blobs import Writing

_MOST_FIELDS, _MOST_FIELD_BYTES = 16, 4096
_MOST_BOUNDARY_BYTES = 256
_MOST_HEAD_BYTES = 8 << 10  # of a part
MOST_PARTS, MOST_BESIDE_BYTES = 32, 96 << 10  # of a form; all bytes but the file's: boundaries, headers, fields
SLICE_BYTES = 64 << 10  # that are read, in about 20 µs, before the event loop turns
_PIECE_BYTES = 1 << 20  # bytes of the file that are written together

UploadForm: TypeAlias = tuple[str | None, dict[str, str]]  # the name of its file, if it has any; its other fields


async def receive(
    http: HttpRequest,
    writing: Writing,
    limit_bytes: int,
    disk: ThreadPoolExecutor,
    pace: BytePace,
    grow: Callable[[int], Awaitable[None]],
) -> UploadForm:
    """Return the form without its field `file`, which is written, at the caller's pace, and for which the caller pays;
    raise as soon as the file is known to be too large. `grow` hears of bytes before they are written, and may raise."""
    reader, loop, num_bytes = _FormReader(http.headers.get("content-type", "")), asyncio.get_running_loop(), 0
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes + MOST_BESIDE_BYTES:
        raise _too_large(limit_bytes)
    tab = tab_of(http)
    async for part in parts_of_file(http):
        for start in range(0, len(part), SLICE_BYTES):
            data = part[start : start + SLICE_BYTES]
            tab.receive(len(data))
            reader.feed(data)
            num_bytes += len(data)
            if num_bytes - reader.num_file_bytes > MOST_BESIDE_BYTES:
                message = f"the form has more than {MOST_BESIDE_BYTES} bytes beside its file"
                raise invalid(message, code="form_too_large")
            await pace.take(tab.caller.id, len(data))
        if reader.num_file_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        if len(reader.data) >= _PIECE_BYTES:
            await grow(len(reader.data))
            await loop.run_in_executor(disk, writing.write, reader.take())
    await grow(len(reader.data))
    await loop.run_in_executor(disk, writing.write, reader.take())
    return reader.form()


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the file is larger than {limit_bytes} bytes", param="file", code="file_too_large")


def _broken(why: str) -> NoReturn:
    raise invalid(f"the form is broken: {why}", logged="the form is broken")


class _FormReader:
    """Finds the lines between the parts by `bytes.find`. A line that begins with the boundary and goes on is refused,
    which RFC 2046 allows: so no client can have each of its bytes looked at in Python."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise invalid("send a file as multipart/form-data, with the fields file and purpose")
        if len(boundary) > _MOST_BOUNDARY_BYTES:
            _broken(f"its boundary has more than {_MOST_BOUNDARY_BYTES} bytes")
        self.data = bytearray()  # bytes of the file that are not written yet
        self.num_file_bytes = 0
        self._num_parts = 0
        self._filename: str | None = None
        self._values: dict[str, bytearray] = {}
        self._field = ""
        self._in_head = self._in_file = self._is_whole = False
        self._between = b"\r\n--" + boundary
        self._rest = b"\r\n"  # what is not read yet; no line is before the first boundary

    def feed(self, data: bytes) -> None:
        self._rest += data
        while not self._is_whole and (self._read_head() if self._in_head else self._read_data()):
            pass
        if self._is_whole:
            self._rest = b""  # what follows the end counts, and says nothing

    def _read_data(self) -> bool:
        """Read up to the next boundary, and return whether it was there."""
        at = self._rest.find(self._between)
        end = at if at >= 0 else max(0, len(self._rest) - len(self._between) + 1)
        self._add_data(self._rest[:end])
        self._in_head = at >= 0
        self._rest = self._rest[end + len(self._between) if self._in_head else end :]
        return self._in_head

    def _read_head(self) -> bool:
        """Read the rest of a boundary's line and the head of the part behind it; return whether all of it was there."""
        if self._rest.startswith(b"--"):
            self._is_whole = True
            return True
        end = self._rest.find(b"\r\n\r\n")
        padding = self._rest.partition(b"\r\n")[0].strip(b" \t")
        if padding and (end >= 0 or padding not in (b"-", b"\r")):
            _broken("a line begins with its boundary and does not end there")
        if end < 0:
            if len(self._rest) > _MOST_HEAD_BYTES:
                _broken(f"the head of a part has more than {_MOST_HEAD_BYTES} bytes")
            return False
        self._begin_part(self._rest[:end].split(b"\r\n")[1:])
        self._rest, self._in_head = self._rest[end + 4 :], False
        return True

    def take(self) -> bytes:
        taken, self.data = bytes(self.data), bytearray()
        return taken

    def form(self) -> UploadForm:
        if not self._is_whole:
            raise invalid("the form ends too early")
        return self._filename, {name: value.decode("utf-8", "replace") for name, value in self._values.items()}

    def _begin_part(self, head: list[bytes]) -> None:
        self._num_parts += 1
        self._field, self._in_file = "", False
        if self._num_parts > MOST_PARTS:
            raise invalid(f"the form has more than {MOST_PARTS} parts", code="form_too_large")
        for line in head:
            name, colon, value = line.partition(b":")
            if not colon:
                _broken("a line in the head of a part has no colon")
            if name.lower() == b"content-disposition":
                self._begin_field(parse_options_header(value.strip())[1])

    def _begin_field(self, options: dict[bytes, bytes]) -> None:
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._field == "file"
        if self._in_file:
            if self._filename is not None:
                raise invalid("only one file in a form", "file")
            self._filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:255]

    def _add_data(self, data: bytes) -> None:
        if not self._num_parts:
            if data.strip(b"\r\n"):
                _broken("it does not begin with its boundary")
            return
        if self._in_file:
            self.data += data
            self.num_file_bytes += len(data)
            return
        value = self._values.setdefault(self._field, bytearray())
        value += data
        if len(value) > _MOST_FIELD_BYTES or len(self._values) > _MOST_FIELDS:
            raise invalid("the form's fields beside the file are too long or too many", self._field)
