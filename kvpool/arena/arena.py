"""The arena: the pool's memory on one node, a single file that every worker of the node maps.

    0            file header, 4 KiB   magic │ version │ incarnation │ page size │ extents │ for each kind: pages of it
                                      in an extent │ for each kind: payload bytes
    4 KiB        page headers         page 0 │ page 1 │ ...   for each number (extents.py), 64 bytes:
                                        generation   odd while the page is being written; 0: never written
                                        incarnation  of the pool whose pages these are
                                        kind, length what the page holds, and of how many tokens
                                        token hash   chained: of its tokens and all tokens before
                                        checksum     of the payload, 0: none
                                        extent       the extent's word, below, when the page was written
                                        (a word free)
                 extents' words       extent 0 │ extent 1 │ ...   8 x (changes of its kind) + its kind
    next 4 KiB   payloads             extent 0 │ extent 1 │ ...   each at a multiple of 4 KiB, its pages one after the
                                      other; engine/copying/copies.py draws their inside

All numbers are eight bytes, in the byte order of the machine.

Right or not at all. A lease makes a worker the only writer of a page, so a page does not change while it is read. If it
changes all the same (by a worker that was given up for dead, or a late message), the reader must notice: `read` checks
the header before the copy and after it, and the generation shows any write in between. Pages of different kinds share
the room of an extent, but not their headers: the first write of another kind changes the extent's word, so pages that
were written there before no longer pass a reader's check.

Each process that maps the arena's file locks it (shared_files.py): a file without locks is stale.

Weak spot: the generation counts on stores becoming visible in their order, as x86 promises. Other processors may
reorder them around a copy in the same microsecond; there, only the checksum detects it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from alignedserve.errors import ArenaError
from alignedserve.kvpool.arena.numa import NumaPlace, running_on
from alignedserve.machine.shared_files import alone, check_space, fill, new_file, open_file, remove_stale, unlink
from alignedserve.protocol.extents import MEMORY_PAGE, Extents, PageBytes, PageKind

_MAGIC = b"ALGNSRVE"
_VERSION = 3
_FILE_HEADER = struct.Struct("=8s8Q")
_KINDS = 8  # most kinds that an extent's word can tell apart
_HEADER_WORDS = 8
_WORD_BYTES = 8
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; `mmap` has no name for it
_MAPPED_AT_ONCE = 4 << 20  # bytes: a millisecond


@dataclass(frozen=True, slots=True)
class Contents:
    """The fields of a page's header, for a reader that looks for certain tokens."""

    kind: PageKind
    length: int  # in tokens
    token_hash: int


class Header(NamedTuple):
    generation: int
    incarnation: int
    kind: int
    length: int
    token_hash: int
    checksum: int
    extent: int  # the extent's word


@dataclass(frozen=True, slots=True)
class _ArenaLayout:
    """The arena's file header, and where the parts of the file lie."""

    incarnation: int
    page_size: int
    extents: Extents
    payload_bytes: PageBytes

    @property
    def num_words(self) -> int:
        """Return the words of all headers and extents."""
        return self.extents.num_numbers * _HEADER_WORDS + self.extents.count

    @property
    def payloads_at(self) -> int:
        return -(-(MEMORY_PAGE + self.num_words * _WORD_BYTES) // MEMORY_PAGE) * MEMORY_PAGE

    @property
    def extent_bytes(self) -> int:
        return self.payload_bytes.extent(self.extents)

    @property
    def size(self) -> int:
        return self.payloads_at + self.extents.count * self.extent_bytes

    def payload_at(self, extent: int, index: int, kind: PageKind) -> int:
        return self.payloads_at + extent * self.extent_bytes + index * self.payload_bytes.stride(kind)

    def pack(self) -> bytes:
        facts = (self.incarnation, self.page_size, *astuple(self.extents), *astuple(self.payload_bytes))
        return _FILE_HEADER.pack(_MAGIC, _VERSION, *facts)

    @classmethod
    def read(cls, path: Path, fd: int) -> _ArenaLayout:
        raw = os.pread(fd, _FILE_HEADER.size, 0)
        if len(raw) < _FILE_HEADER.size or not raw.startswith(_MAGIC):
            raise ArenaError(f"{path} is not an arena of AlignedServe")
        _, version, incarnation, page_size, *facts = _FILE_HEADER.unpack(raw)
        if version != _VERSION:
            raise ArenaError(f"{path} has layout {version}, this AlignedServe has {_VERSION}: restart the pool")
        layout = cls(incarnation, page_size, Extents(*facts[:3]), PageBytes(*facts[3:]))
        if os.fstat(fd).st_size != layout.size:
            raise ArenaError(f"{path} does not have the {layout.size} bytes that its header names")
        return layout


class Arena:
    """A mapping of the arena, which `create` or `attach` makes."""

    def __init__(self, path: Path, fd: int, layout: _ArenaLayout) -> None:
        self.path = path
        self._fd = fd
        self._layout = layout
        self._mapping = mmap.mmap(fd, layout.size)
        self._bytes = memoryview(self._mapping)
        words = self._bytes[MEMORY_PAGE : MEMORY_PAGE + layout.num_words * _WORD_BYTES]
        self._headers = words.cast("Q")  # each word is written by one store; the words of extents come last
        self._first_extent = layout.extents.num_numbers * _HEADER_WORDS

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        pages: Extents | int,
        payload_bytes: PageBytes | int,
        page_size: int,
        incarnation: int,
        place: NumaPlace | None = None,
        advance: Callable[[int], object] = lambda _: None,
    ) -> Arena:
        """Make an arena. Plain numbers mean pages that are all of kind KV.

        The file gets its name when it is whole. Its memory comes from the NUMA node of `place`, while that has
        some. An earlier arena loses its name at once; processes that map it keep it until they close it. `advance` is
        told the bytes of each piece that is allocated.
        """
        extents = Extents(pages) if isinstance(pages, int) else pages
        sizes = PageBytes(payload_bytes) if isinstance(payload_bytes, int) else payload_bytes
        layout = _ArenaLayout(incarnation, page_size, extents, sizes)
        with alone(path.parent):
            path.unlink(missing_ok=True)
        remove_stale(path.parent, f"{path.name}.")  # what a life has left that was killed before its file was whole
        check_space(path.parent, layout.size)
        unfinished, fd = new_file(path)
        try:
            with running_on(place):
                fill(path.parent, fd, layout.size, advance=advance)
                os.pwrite(fd, layout.pack(), 0)
            arena = cls(path, fd, layout)
            with alone(path.parent):
                unfinished.rename(path)
        except BaseException:
            unfinished.unlink()
            os.close(fd)
            raise
        return arena

    @classmethod
    def attach(cls, path: Path, *, incarnation: int | None = None) -> Arena:
        """Map the arena of the pool with this incarnation; None takes any arena."""
        with alone(path.parent):
            fd = open_file(path)
            if fd is None:
                raise ArenaError(f"there is no arena at {path}: its pool has ended or not yet started")
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            layout = _ArenaLayout.read(path, fd)
            if incarnation not in (None, layout.incarnation):
                raise ArenaError(f"{path} is of pool incarnation {layout.incarnation}, not {incarnation}")
            return cls(path, fd, layout)
        except BaseException:
            os.close(fd)
            raise

    @property
    def extents(self) -> Extents:
        return self._layout.extents

    @property
    def page_bytes(self) -> PageBytes:
        return self._layout.payload_bytes

    @property
    def num_pages(self) -> int:
        """Return the pages of the first kind that the arena holds, if all pages were of that kind."""
        return self.extents.num_pages(self.extents.first_kind)

    @property
    def payload_bytes(self) -> int:
        """Return the payload bytes of such a page."""
        return self.page_bytes.payload(self.extents.first_kind)

    @property
    def page_size(self) -> int:
        return self._layout.page_size

    @property
    def incarnation(self) -> int:
        return self._layout.incarnation

    def kind_of(self, page: int) -> PageKind:
        return self._place(page)[2]

    def map_ahead(self, start: int) -> int | None:
        """Have the system map some megabytes for this process, from byte `start` on; return where to go on, or None at
        the end and where the system cannot.

        Otherwise it maps each 4 KiB when a copy first writes there, which then takes several times as long.
        """
        size = min(_MAPPED_AT_ONCE, self._layout.size - start)
        try:
            self._mapping.madvise(POPULATE_WRITE, start, size)
        except OSError:
            return None
        return start + size if start + size < self._layout.size else None

    def pieces(self, most_bytes: int) -> list[tuple[int, int]]:
        """Return pieces of the mapping, (first byte, bytes), that together hold all payloads and cut none: each has
        about `most_bytes`, in whole extents."""
        each = max(1, most_bytes // self._layout.extent_bytes) * self._layout.extent_bytes
        starts = range(self._layout.payloads_at, self._layout.size, each)
        return [(start, min(each, self._layout.size - start)) for start in starts]

    def memory(self) -> memoryview:
        """Return the whole mapping; release it before `close`."""
        return self._bytes[:]

    def payload(self, page: int) -> memoryview:
        """Return the page's bytes: writers stay between `begin_write` and `end_write`, readers use `read`."""
        extent, index, kind = self._place(page)
        start = self._layout.payload_at(extent, index, kind)
        return self._bytes[start : start + self.page_bytes.payload(kind)]

    def begin_write(self, page: int) -> None:
        """Make the page unreadable until `end_write`; it stays so if the writer dies in between."""
        extent, _, kind = self._place(page)
        word = self._extent(extent)
        if word % _KINDS != kind:  # two writers that find this at once write the same
            self._headers[self._first_extent + extent] = (word // _KINDS + 1) * _KINDS + kind
        generation = self._header(page).generation
        self._headers[page * _HEADER_WORDS] = generation + 1 + generation % 2

    def end_write(self, page: int, contents: Contents, checksum: int = 0) -> None:
        generation = self._header(page).generation
        if generation % 2 == 0:
            raise ArenaError(f"page {page} is not being written")
        first = page * _HEADER_WORDS
        extent = self._extent(self._place(page)[0])
        facts = (self.incarnation, contents.kind, contents.length, contents.token_hash, checksum, extent)
        for word, fact in enumerate(facts, first + 1):
            self._headers[word] = fact
        self._headers[first] = generation + 1

    def contents(self, page: int) -> Contents | None:
        """Return what a whole page of this pool holds, or None."""
        header = self._header(page)
        kind = self.kind_of(page)
        if not self._is_whole(page, header) or header.kind != kind:
            return None
        return Contents(kind, header.length, header.token_hash)

    def read(self, page: int, expected: Contents, copy: Callable[[memoryview], int | None]) -> bool:
        """Copy a page; return False where it was not as expected all the time: then the copy must not be used.

        Where `copy` returns the checksum of what it read, a page whose header has another, or none, is not as expected.
        """
        before = self.begin_read(page, expected)
        return before is not None and self.end_read(page, expected, before, copy(self.payload(page)))

    def begin_read(self, page: int, expected: Contents) -> Header | None:
        """Begin to copy a page beside others; `end_read` says whether the copy may be used.

        Return None where the page is not as expected.
        """
        before = self._header(page)
        return before if self._holds(page, before, expected) else None

    def end_read(self, page: int, expected: Contents, before: Header, checksum: int | None = None) -> bool:
        if checksum is not None and checksum != before.checksum:
            return False
        return self._holds(page, self._header(page), expected) and self._header(page) == before

    def close(self) -> None:
        """Close the mapping. Raises BufferError while a payload, or a tensor on it, is still in use."""
        self._headers.release()
        self._bytes.release()
        self._mapping.close()
        os.close(self._fd)

    def unlink(self) -> None:
        """Remove the file's name, unless another arena has it now; processes that map the arena keep it."""
        with alone(self.path.parent):
            unlink(self.path, self._fd)

    def _holds(self, page: int, header: Header, expected: Contents) -> bool:
        found = (header.kind, header.length, header.token_hash)
        return self._is_whole(page, header) and found == (expected.kind, expected.length, expected.token_hash)

    def _is_whole(self, page: int, header: Header) -> bool:
        """Return whether a worker of this pool has written the page, and no page of another kind lies there now."""
        whole = header.generation > 0 and header.generation % 2 == 0 and header.incarnation == self.incarnation
        return whole and header.extent == self._extent(self._place(page)[0])

    def _extent(self, extent: int) -> int:
        return self._headers[self._first_extent + extent]

    def _header(self, page: int) -> Header:
        self._place(page)
        first = page * _HEADER_WORDS
        return Header(*self._headers[first : first + len(Header._fields)])

    def _place(self, page: int) -> tuple[int, int, PageKind]:
        try:
            return self.extents.place(page)
        except ValueError as error:
            raise ArenaError(f"{self.path}: {error}") from None
