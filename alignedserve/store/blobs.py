"""The bytes of files, each under its id, at a URL that fsspec knows: a folder of this machine, or s3:// and others.

What is written appears whole or not at all. In a folder it is written beside its name, synced and renamed; an object
store makes an object when it is closed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from alignedserve.errors import BytesGone, StoreError, StoreFull

_PART = ".part"


class Blobs:
    """All of it waits for the disk: not for an event loop's thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StoreError(f"files cannot be kept at {url}: {error}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def make(self) -> None:
        """The folder; StoreError where nothing can be written to it."""
        with self._told():
            self._fs.makedirs(self._root, exist_ok=True)
            if self._is_local:
                check_writable(self._root)

    def begin(self, id: str) -> Writing:
        with self._told():
            path = self._path(id)
            name = path + _PART if self._is_local else path
            return Writing(self, id, self._fs.open(name, "wb"), name, path)

    def open(self, id: str) -> IO[bytes]:
        with self._told():
            try:
                opened: IO[bytes] = self._fs.open(self._path(id), "rb")
            except FileNotFoundError:
                raise BytesGone(f"the bytes of {id} are not at {self.url} any more") from None
            return opened

    def remove(self, id: str) -> None:
        """Also where it was never written to its end."""
        for path in (self._path(id), self._path(id) + _PART):
            with self._told(), suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def sizes(self) -> dict[str, int]:
        """Of all that is there: id -> bytes."""
        with self._told():
            found = self._fs.ls(self._root, detail=True)
        return {one["name"].rpartition("/")[2]: int(one["size"]) for one in found if one["type"] == "file"}

    def _path(self, id: str) -> str:
        return f"{self._root}/{id}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"no space is left at {self.url}: free some") from error
            raise StoreError(f"files cannot be kept at {self.url}: {error.strerror or error}") from error


class Writing:
    """A file that is being written. `commit` ends it, or `abandon`, also after a commit."""

    def __init__(self, blobs: Blobs, id: str, file: Any, name: str, path: str) -> None:
        self._blobs, self._file, self._name, self._path = blobs, file, name, path
        self.id, self.num_bytes = id, 0

    def write(self, data: bytes) -> None:
        with self._blobs._told():
            self._file.write(data)
        self.num_bytes += len(data)

    def commit(self) -> None:
        with self._blobs._told():
            if not self._blobs._is_local:
                self._file.close()
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._name, self._path)
            _sync_folder(os.path.dirname(self._path))

    def abandon(self) -> None:
        with suppress(OSError):  # its last bytes may find no room either
            self._file.close()
        for name in {self._name, self._path}:
            with suppress(OSError):
                self._blobs._fs.rm_file(name)


def check_writable(folder: str | Path) -> None:
    """OSError where no file can be made in it."""
    if not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number))


def _sync_folder(path: str) -> None:
    """So that a name in it survives a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
