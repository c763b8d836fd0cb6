"""Keep the bytes of files, each under its id, at a URL that fsspec knows: a folder of this machine, s3:// and others.

A file appears whole or not at all. In a folder, it is written under another name, synced and renamed; an object store
makes an object only when it is closed.
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
    """The files at a URL. All methods wait for the disk, so an event loop must not call them."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StoreError(f"files cannot be kept at {url}: {error}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def make(self) -> None:
        """Make the folder; raise StoreError if nothing can be written to it."""
        with self._store_errors():
            self._fs.makedirs(self._root, exist_ok=True)
            if self._is_local:
                check_writable(self._root)
                sync_path(Path(self._root))

    def begin(self, id: str) -> Writing:
        with self._store_errors():
            path = self._path(id)
            name = path + _PART if self._is_local else path
            file = open(name, "wb", opener=_private) if self._is_local else self._fs.open(name, "wb")  # noqa: SIM115
            return Writing(self, id, file, name, path)

    def open(self, id: str) -> IO[bytes]:
        with self._store_errors():
            try:
                opened: IO[bytes] = self._fs.open(self._path(id), "rb")
            except FileNotFoundError:
                raise BytesGone(f"the bytes of {id} are gone") from None
            return opened

    def remove(self, id: str) -> None:
        """Remove the file, also if it was never completed; a loss of power does not bring it back."""
        for path in (self._path(id), self._path(id) + _PART):
            with self._store_errors(), suppress(FileNotFoundError):
                self._fs.rm_file(path)
        if self._is_local:
            with self._store_errors():
                _sync_folder(self._root)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files: id -> bytes."""
        with self._store_errors():
            entries = self._fs.ls(self._root, detail=True)
        return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def _path(self, id: str) -> str:
        return f"{self._root}/{id}"

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"no space is left at {self.url}: free some") from error
            raise StoreError(f"files cannot be kept at {self.url}: {error.strerror or error}") from error


class Writing:
    """A file that is being written. `commit` completes it; `abandon` removes it, even after a commit."""

    def __init__(self, blobs: Blobs, id: str, file: Any, name: str, path: str) -> None:
        self._blobs, self._file, self._name, self._path = blobs, file, name, path
        self.id, self.num_bytes = id, 0

    def write(self, data: bytes) -> None:
        with self._blobs._store_errors():
            self._file.write(data)
        self.num_bytes += len(data)

    def commit(self) -> None:
        with self._blobs._store_errors():
            if not self._blobs._is_local:
                self._file.close()
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._name, self._path)
            _sync_folder(os.path.dirname(self._path))

    def abandon(self) -> None:
        with suppress(OSError):  # the disk may have no room for its last bytes either
            self._file.close()
        self._blobs.remove(self.id)


def check_writable(folder: str | Path) -> None:
    """Raise OSError if no file can be made in the folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number))


def sync_path(folder: Path) -> None:
    """Sync the folder and those above it that may be new, so that a loss of power does not take them away."""
    for each in ((whole := folder.resolve()), *whole.parents):
        _sync_folder(each)
        if each.is_mount() or not os.access(each.parent, os.R_OK | os.W_OK):
            break


def _sync_folder(path: str | Path) -> None:
    """Sync the folder, so that a loss of power neither takes new names away nor brings old ones back."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _private(path: str, flags: int) -> int:
    """Open a file that no other user of the machine may read: it holds what clients sent."""
    return os.open(path, flags, 0o600)
