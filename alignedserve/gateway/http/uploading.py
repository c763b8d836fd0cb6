"""Read a multipart form with a file as it arrives: the file goes to disk and is never whole in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request as HttpRequest

from alignedserve.gateway.http.bodies import parts_of_file
from alignedserve.gateway.http.middleware import tab_of
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.store.blobs import Writing

_MOST_FIELDS, _MOST_FIELD_BYTES = 16, 4096
MOST_PARTS, MOST_BESIDE_BYTES = 32, 96 << 10  # of a form; all bytes but the file's: boundaries, headers, fields
_SLICE_BYTES = 4 << 10  # that are parsed before the event loop turns, where they are not the file's
_PIECE_BYTES = 1 << 20  # bytes of the file that are written together

UploadForm: TypeAlias = tuple[str | None, dict[str, str]]  # the name of its file, if it has any; its other fields

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of broken forms, which any client can send


async def receive(http: HttpRequest, writing: Writing, limit_bytes: int, disk: ThreadPoolExecutor) -> UploadForm:
    """Return the form without its field `file`, which is written and for which the caller pays; raise as soon as the
    file is known to be too large.

    The file is found in no time, and all else byte by byte: so all else is limited, and parsed in slices."""
    reader, loop, num_bytes = _FormReader(http.headers.get("content-type", "")), asyncio.get_running_loop(), 0
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes + MOST_BESIDE_BYTES:
        raise _too_large(limit_bytes)
    tab = tab_of(http)
    async for part in parts_of_file(http):
        tab.receive(len(part))
        for start in range(0, len(part), _SLICE_BYTES):
            data, before = part[start : start + _SLICE_BYTES], reader.num_file_bytes
            reader.feed(data)
            num_bytes += len(data)
            if num_bytes - reader.num_file_bytes > MOST_BESIDE_BYTES:
                message = f"the form has more than {MOST_BESIDE_BYTES} bytes beside its file"
                raise invalid(message, code="form_too_large")
            if reader.num_file_bytes == before:
                await asyncio.sleep(0)  # the event loop turns
        if reader.num_file_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        if len(reader.data) >= _PIECE_BYTES:
            await loop.run_in_executor(disk, writing.write, reader.take())
    await loop.run_in_executor(disk, writing.write, reader.take())
    return reader.form()


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the file is larger than {limit_bytes} bytes", param="file", code="file_too_large")


@contextmanager
def _refuse_broken_form() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise invalid(f"the form is broken: {error}") from None


class _FormReader:
    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise invalid("send a file as multipart/form-data, with the fields file and purpose")
        self.data = bytearray()  # bytes of the file that are not written yet
        self.num_file_bytes = 0
        self._num_parts = 0
        self._filename: str | None = None
        self._values: dict[str, bytearray] = {}
        self._header, self._value, self._field = bytearray(), bytearray(), ""
        self._in_file = self._is_whole = False
        with _refuse_broken_form():
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_part_data": self._add_data,
                    "on_end": self._end_form,
                },
            )

    def feed(self, data: bytes) -> None:
        with _refuse_broken_form():
            self._parser.write(data)

    def take(self) -> bytes:
        taken, self.data = bytes(self.data), bytearray()
        return taken

    def form(self) -> UploadForm:
        if not self._is_whole:
            raise invalid("the form ends too early")
        return self._filename, {name: value.decode("utf-8", "replace") for name, value in self._values.items()}

    def _begin_part(self) -> None:
        self._num_parts += 1
        self._field, self._in_file = "", False
        if self._num_parts > MOST_PARTS:
            raise invalid(f"the form has more than {MOST_PARTS} parts", code="form_too_large")

    def _end_header(self) -> None:
        name, value = bytes(self._header).lower(), bytes(self._value)
        self._header.clear()
        self._value.clear()
        if name != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._field == "file"
        if self._in_file:
            if self._filename is not None:
                raise invalid("only one file in a form", "file")
            self._filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:255]

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.data += data[start:end]
            self.num_file_bytes += end - start
            return
        value = self._values.setdefault(self._field, bytearray())
        value += data[start:end]
        if len(value) > _MOST_FIELD_BYTES or len(self._values) > _MOST_FIELDS:
            raise invalid("the form's fields beside the file are too long or too many", self._field)

    def _end_form(self) -> None:
        self._is_whole = True
