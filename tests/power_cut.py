"""A disk that loses what was not synced, for the processes that write to it.

    processes ── power_cut.c notes each change ──▶ notes ──▶ the disk at any moment ──▶ cut: what it kept ──▶ a folder

A disk keeps the bytes of a file that was synced, and the names in a folder that was synced. Of later writes it keeps
any, the last of them perhaps in part; of later names the first ones, since file systems keep their order.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_HEADER = struct.Struct("=6q4048x")  # as in power_cut.c
_SYNC, _TEAR, _VICTIM, _TORN_BY, _ERROR = 8, 16, 24, 32, 40  # where its fields are
_NOTE = struct.Struct("=5q")  # kind, file, folder, place, bytes that follow
_SHARES = (0.0, 0.5, 1.0)  # of the writes that were not synced, those that a disk keeps


@dataclass
class _File:
    kept: bytearray = field(default_factory=bytearray)
    loose: list[tuple[int, bytes | None]] = field(default_factory=list)  # writes; without bytes the file ends there

    def sync(self) -> None:
        for change in self.loose:
            _apply(self.kept, *change)
        self.loose = []

    def bytes_now(self) -> bytes:
        now = bytearray(self.kept)
        for change in self.loose:
            _apply(now, *change)
        return bytes(now)

    def bytes_after(self, draw: Random | None) -> bytes:
        kept = bytearray(self.kept)
        if draw is not None:
            share = draw.choice(_SHARES)
            changes = [change for change in self.loose if draw.random() < share]
            for at, data in changes[:-1]:
                _apply(kept, at, data)
            for at, data in changes[-1:]:
                _apply(kept, at, data and data[: draw.randint(0, len(data))])
        return bytes(kept)


def _apply(into: bytearray, at: int, data: bytes | None) -> None:
    into.extend(bytes(max(0, at - len(into))))  # a gap reads as zeros
    if data is None:
        del into[at:]
    else:
        into[at : at + len(data)] = data


@dataclass
class _Folder:
    kept: dict[str, _Node] = field(default_factory=dict)
    now: dict[str, _Node] = field(default_factory=dict)
    loose: list[dict[str, _Node | None]] = field(default_factory=list)  # names that came, or None: went

    def change(self, names: dict[str, _Node | None]) -> None:
        self.loose.append(names)
        _rename(self.now, names)

    def sync(self) -> None:
        self.kept, self.loose = dict(self.now), []

    def names_after(self, draw: Random | None) -> dict[str, _Node]:
        kept = dict(self.kept)
        if draw is not None:
            num_kept = draw.choice((0, draw.randint(0, len(self.loose)), len(self.loose)))
            for names in self.loose[:num_kept]:
                _rename(kept, names)
        return kept


_Node: TypeAlias = _File | _Folder


def _rename(into: dict[str, _Node], names: dict[str, _Node | None]) -> None:
    for name, node in names.items():
        into.pop(name, None)
        if node is not None:
            into[name] = node


@dataclass(frozen=True)
class Note:
    kind: str
    file: int
    folder: int
    at: int
    data: bytes


class Disk:
    """The disk after the first notes, at first after none of them."""

    def __init__(self, folder: Path) -> None:
        self._nodes: dict[int, _Node] = {}  # inode -> what has it now
        self._root = self._found(folder)

    def _found(self, path: Path) -> _Node:
        if path.is_dir():
            names = {each.name: self._found(each) for each in path.iterdir()}
            node: _Node = _Folder(names, dict(names))
        else:
            node = _File(bytearray(path.read_bytes()))
        self._nodes[path.stat().st_ino] = node
        return node

    def apply(self, note: Note) -> None:
        node, folder = self._nodes.get(note.file), self._nodes.get(note.folder)
        match note.kind:
            case "c" | "m":
                assert isinstance(folder, _Folder)
                made = self._nodes[note.file] = _File() if note.kind == "c" else _Folder()
                folder.change({note.data.decode(): made})
            case "u":
                assert isinstance(folder, _Folder)
                folder.change({note.data.decode(): None})
            case "r":
                assert isinstance(folder, _Folder)
                assert note.folder == note.at, "a name that moves to another folder"
                old, new = note.data.decode().split("/")
                folder.change({old: None, new: folder.now[old]})
            case "w" | "t":
                assert isinstance(node, _File)
                node.loose.append((note.at, note.data if note.kind == "w" else None))
            case "s":
                assert node is not None
                node.sync()

    def read(self, path: str) -> bytes:
        """Return the bytes of a file as processes see them; none if there is no such file."""
        node: _Node | None = self._root
        for name in path.split("/"):
            node = node.now.get(name) if isinstance(node, _Folder) else None
        return node.bytes_now() if isinstance(node, _File) else b""

    def cut(self, into: Path, draw: Random | None = None) -> None:
        """Write to a new folder what the disk has after a power cut; without `draw`, only what was synced."""
        _write(self._root, into, draw)


def _write(node: _Node, path: Path, draw: Random | None) -> None:
    if isinstance(node, _File):
        path.write_bytes(node.bytes_after(draw))
        return
    path.mkdir()
    for name, each in node.names_after(draw).items():
        _write(each, path / name, draw)


@cache
def _library() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no disk loses anything: there is no C compiler")
    folder = tempfile.mkdtemp(prefix="power-cut-")
    atexit.register(shutil.rmtree, folder)
    library = Path(folder) / "power_cut.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    return library


class Power:
    """The power of the disk on which a folder lies, for processes that have `environment`."""

    def __init__(self, folder: Path, beside: Path) -> None:
        """The folder is there, and what it has is synced. What this needs goes to `beside`, which is made."""
        beside.mkdir()
        self.folder, self._notes = folder.resolve(), beside / "notes"
        self._notes.write_bytes(_HEADER.pack(_HEADER.size, *[0] * 5))
        self._disk = Disk(self.folder)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(_library()),
            "DISK_FOLDER": str(self.folder),
            "DISK_LOG": str(self._notes),
        }

    def slow_down(self, sync_s: float) -> None:
        """Let each sync of a file take this many seconds from now on."""
        self._tell(_SYNC, int(sync_s * 1e9))

    @contextmanager
    def failing(self, error: int) -> Iterator[None]:
        """Let each change fail with this `errno` during the block: EIO, or EROFS as where the disk turns read-only."""
        self._tell(_ERROR, error)
        try:
            yield
        finally:
            self._tell(_ERROR, 0)

    def tear(self, share: float, victim: int = 0) -> None:
        """Kill this process, or the one that writes next, once it has written this share of the bytes of a write."""
        with self.no_turn():
            self._tell(_TORN_BY, 0)
            self._tell(_VICTIM, victim)
            self._tell(_TEAR, 1 + int(share * 999))

    def tear_nothing(self) -> None:
        with self.no_turn():
            self._tell(_TEAR, 0)

    @property
    def torn_by(self) -> int:
        """The process that was killed since the last `tear`, or 0."""
        return self._header()[4]

    def _tell(self, field: int, value: int) -> None:
        with self._notes.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), struct.pack("=q", value), field)

    @contextmanager
    def no_turn(self) -> Iterator[None]:
        """Let no process change anything meanwhile. One that is killed elsewhere may leave a change without its note:
        then the next process builds on what the disk of the notes never had."""
        with self._notes.open("r+b", buffering=0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    @property
    def num_bytes(self) -> int:
        """The bytes of the notes so far."""
        return self._header()[0]

    def _header(self) -> tuple[int, ...]:
        with self._notes.open("rb") as file:
            return _HEADER.unpack(file.read(_HEADER.size))

    @property
    def num_changes(self) -> int:
        return sum(1 for _ in self._read())

    def moments(self) -> Iterator[Disk]:
        """Yield the disk before all changes and after each of them: always the same object."""
        yield self._disk
        for note in self._read():
            self._disk.apply(note)
            yield self._disk

    def _read(self) -> Iterator[Note]:
        notes = self._notes.read_bytes()
        (end, *_), at = _HEADER.unpack_from(notes), _HEADER.size
        while at < end:
            kind, file, folder, place, size = _NOTE.unpack_from(notes, at)
            at += _NOTE.size + size
            yield Note(chr(kind), file, folder, place, notes[at - size : at])
