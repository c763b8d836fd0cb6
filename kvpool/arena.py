"""The arena: the pool's memory on one node, one file that every worker of the node maps.

    0            file header, 4 KiB   magic │ version │ incarnation │ pages │ payload bytes │ page size
    4 KiB        page headers         page 0 │ page 1 │ ...   64 bytes each:
                                        generation   odd while the page is being written; 0: it never was
                                        incarnation  of the pool whose pages these are
                                        kind, length what it holds, and of how many tokens
                                        token hash   chained: of its tokens and all those before
                                        checksum     of the payload, 0: none
                                        (two words free)
    next 4 KiB   payloads             page 0 │ page 1 │ ...   each on 4 KiB; engine/copies.py draws their inside

All numbers are eight bytes, in the byte order of the machine.

Right or not at all. A lease makes a worker the only writer of a page, so a page that is read does not change. Should it
change all the same (a worker that was taken for dead, a message that came late), the reader must notice: `read` checks
the header before the copy and after it, and the generation makes any write in between visible.

Locks. They are flocks, which the kernel drops when a process dies, however it dies. (A child made by fork shares those
of its parent; processes are spawned here.)

    the arena's file   shared, by each process that maps it: what nobody holds is stale
    NAME.lock          exclusive, by the holder NAME: while it is held, the holder's leases stand
    the directory      exclusive, for a few system calls: who changes its names or tries a lock is alone

Weak spot: the generation counts on stores becoming visible in their order, as x86 promises. Other processors may swap
them around a copy that runs in the same microsecond; there, only the checksum tells.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from alignedserve.errors import ArenaError, ArenaTooSmall, LeaseError
from alignedserve.numa import Place, running_on

_ALIGN = 4096
_MAGIC = b"ALGNSRVE"
_VERSION = 1
_FILE_HEADER = struct.Struct("=8s5Q")
_HEADER_WORDS = 8
_WORD_BYTES = 8
_MIB = 1 << 20


class Kind(IntEnum):
    """What a page holds; 0 is a page that was never written."""

    KV = 1


@dataclass(frozen=True, slots=True)
class Contents:
    """What a page's header says to who looks for some tokens."""

    kind: Kind
    length: int  # in tokens
    token_hash: int


class _Header(NamedTuple):
    generation: int
    incarnation: int
    kind: int
    length: int
    token_hash: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The arena's file header, and where things lie in the file."""

    incarnation: int
    num_pages: int
    payload_bytes: int
    page_size: int

    @property
    def payloads_at(self) -> int:
        return _aligned(_ALIGN + self.num_pages * _HEADER_WORDS * _WORD_BYTES)

    @property
    def stride(self) -> int:
        """From one payload to the next."""
        return _aligned(self.payload_bytes)

    @property
    def size(self) -> int:
        return self.payloads_at + self.num_pages * self.stride

    def pack(self) -> bytes:
        return _FILE_HEADER.pack(_MAGIC, _VERSION, *astuple(self))

    @classmethod
    def read(cls, path: Path, fd: int) -> _Layout:
        raw = os.pread(fd, _FILE_HEADER.size, 0)
        if len(raw) < _FILE_HEADER.size or not raw.startswith(_MAGIC):
            raise ArenaError(f"{path} is not an arena of AlignedServe")
        _, version, *facts = _FILE_HEADER.unpack(raw)
        if version != _VERSION:
            raise ArenaError(f"{path} has layout {version}, this AlignedServe has {_VERSION}: restart the pool")
        layout = cls(*facts)
        if os.fstat(fd).st_size != layout.size:
            raise ArenaError(f"{path} does not have the {layout.size} bytes that its header tells of")
        return layout


class Arena:
    """A mapping of the arena; made by `create` or `attach`."""

    def __init__(self, path: Path, fd: int, layout: _Layout) -> None:
        self.path = path
        self._fd = fd
        self._layout = layout
        self._mapping = mmap.mmap(fd, layout.size)
        self._bytes = memoryview(self._mapping)
        headers = self._bytes[_ALIGN : _ALIGN + layout.num_pages * _HEADER_WORDS * _WORD_BYTES]
        self._headers = headers.cast("Q")  # each word is written by one store

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        pages: int,
        payload_bytes: int,
        page_size: int,
        incarnation: int,
        place: Place | None = None,
    ) -> Arena:
        """It gets its name when it is whole. Its memory is of the NUMA node that is named, as far as that has some.

        An earlier arena loses the name at once: who maps that one keeps it until it closes, then its memory is free.
        """
        layout = _Layout(incarnation, pages, payload_bytes, page_size)
        with _alone(path.parent):
            path.unlink(missing_ok=True)
        check_space(path.parent, layout.size)
        unfinished, fd = _new_file(path)
        try:
            with running_on(place):
                _fill(path.parent, fd, layout)
            arena = cls(path, fd, layout)
            with _alone(path.parent):
                unfinished.rename(path)
        except BaseException:
            unfinished.unlink()
            os.close(fd)
            raise
        return arena

    @classmethod
    def attach(cls, path: Path, *, incarnation: int | None = None) -> Arena:
        """The arena of the pool of this incarnation; None takes the one that is there."""
        with _alone(path.parent):
            fd = _open(path)
            if fd is None:
                raise ArenaError(f"there is no arena at {path}: its pool has ended or not yet started")
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            layout = _Layout.read(path, fd)
            if incarnation not in (None, layout.incarnation):
                raise ArenaError(f"{path} is of pool incarnation {layout.incarnation}, not {incarnation}")
            return cls(path, fd, layout)
        except BaseException:
            os.close(fd)
            raise

    @property
    def num_pages(self) -> int:
        return self._layout.num_pages

    @property
    def payload_bytes(self) -> int:
        return self._layout.payload_bytes

    @property
    def page_size(self) -> int:
        """In tokens."""
        return self._layout.page_size

    @property
    def incarnation(self) -> int:
        return self._layout.incarnation

    def memory(self) -> memoryview:
        """All of the mapping, to be released before it is closed."""
        return self._bytes[:]

    def payload(self, page: int) -> memoryview:
        """The bytes themselves: writers stay between `begin_write` and `end_write`, readers use `read`."""
        self._check(page)
        start = self._layout.payloads_at + page * self._layout.stride
        return self._bytes[start : start + self._layout.payload_bytes]

    def begin_write(self, page: int) -> None:
        """From here to `end_write` nobody can read the page; if the writer dies in between, nobody ever will."""
        generation = self._header(page).generation
        self._headers[page * _HEADER_WORDS] = generation + 1 + generation % 2

    def end_write(self, page: int, contents: Contents, checksum: int = 0) -> None:
        generation = self._header(page).generation
        if generation % 2 == 0:
            raise ArenaError(f"page {page} is not being written")
        first = page * _HEADER_WORDS
        facts = (self.incarnation, contents.kind, contents.length, contents.token_hash, checksum)
        for word, fact in enumerate(facts, first + 1):
            self._headers[word] = fact
        self._headers[first] = generation + 1

    def read(
        self,
        page: int,
        expected: Contents,
        copy: Callable[[memoryview], None],
        checksum: Callable[[memoryview], int] | None = None,
    ) -> bool:
        """Copies a page. False where it was not as expected all the while: then nothing of the copy may be used.

        Where a `checksum` is given, a page that has another one, or none, is not as expected either.
        """
        before = self._header(page)
        if not self._holds(before, expected):
            return False
        payload = self.payload(page)
        copy(payload)
        if checksum is not None and checksum(payload) != before.checksum:
            return False
        return self._header(page) == before

    def close(self) -> None:
        """BufferError where a payload, or a tensor on one, is still about: it would point nowhere."""
        self._headers.release()
        self._bytes.release()
        self._mapping.close()
        os.close(self._fd)

    def unlink(self) -> None:
        """Takes the name away, unless another arena has it by now; who maps the arena keeps it."""
        with _alone(self.path.parent):
            _unlink(self.path, self._fd)

    def _holds(self, header: _Header, expected: Contents) -> bool:
        whole = header.generation > 0 and header.generation % 2 == 0
        found = (header.incarnation, header.kind, header.length, header.token_hash)
        return whole and found == (self.incarnation, expected.kind, expected.length, expected.token_hash)

    def _header(self, page: int) -> _Header:
        self._check(page)
        first = page * _HEADER_WORDS
        return _Header(*self._headers[first : first + len(_Header._fields)])

    def _check(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ArenaError(f"page {page} is outside {self.path}, which has {self.num_pages} pages")


class HolderLock:
    """Held by a process that has leases, for its life: `is_held` tells others whether it still lives."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = _lock_path(directory, name)
        with _alone(directory):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise LeaseError(f"holder {name} lives in another process: {self._path} is locked") from None

    def release(self) -> None:
        with _alone(self._path.parent):
            _unlink(self._path, self._fd)
            os.close(self._fd)


def is_held(directory: Path, name: str) -> bool:
    """Whether the process that took the holder's lock still lives."""
    with _alone(directory):
        fd = _open(_lock_path(directory, name))
        if fd is None:
            return False
        held = not _is_lockable(fd)
        os.close(fd)
        return held


def remove_stale(directory: Path, prefix: str) -> tuple[Path, ...]:
    """Removes the arenas and holder locks of that prefix that no process holds any more, and returns their paths."""
    with _alone(directory):
        files = [path for path in directory.iterdir() if path.name.startswith(prefix) and path.is_file()]
        return tuple(path for path in sorted(files) if _remove_if_stale(path))


def check_space(directory: Path, bytes_needed: int) -> None:
    """Raises `ArenaTooSmall` where the directory has no room for so many bytes."""
    with _alone(directory):
        there = os.statvfs(directory)
    if bytes_needed > there.f_bavail * there.f_frsize:
        raise _too_small(directory, bytes_needed)


def _too_small(directory: Path, needed: int) -> ArenaTooSmall:
    there = os.statvfs(directory)
    return ArenaTooSmall(
        f"{directory} has {there.f_bavail * there.f_frsize // _MIB} MiB free and the KV pool needs {-(-needed // _MIB)}"
        " MiB: lower --pool-memory-mb or, in a container, raise its --shm-size"
    )


def _new_file(path: Path) -> tuple[Path, int]:
    """A file beside the path, locked before anyone could find it stale."""
    with _alone(path.parent):
        fd, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return Path(name), fd


def _fill(directory: Path, fd: int, layout: _Layout) -> None:
    """All of its memory now: a page that is missing later would be a SIGBUS in whoever touches it."""
    try:
        os.posix_fallocate(fd, 0, layout.size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ArenaError(f"no memory for the KV pool in {directory}: {error.strerror}") from error
        raise _too_small(directory, layout.size) from error
    os.pwrite(fd, layout.pack(), 0)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Without it, who tries a lock would seem to hold it, and a name could change between a look and its removal."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        raise ArenaError(f"{directory} is not there: the KV pool needs a directory in shared memory") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None


def _is_lockable(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = _open(path)
    except PermissionError:  # another user's
        return False
    if fd is None:
        return False
    stale = _is_lockable(fd)
    if stale:
        path.unlink()
    os.close(fd)
    return stale


def _unlink(path: Path, fd: int) -> None:
    """The name, if it still is this file's."""
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(fd)):
            path.unlink()


def _lock_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.lock"


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
