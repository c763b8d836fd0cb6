"""A disk that tests can fill and close: a real file system of 4 MB, in memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SIZE = "4m"


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, but: int = 0) -> None:
        """To the last byte, or but for so many."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                file.truncate(max(0, file.tell() - but))

    def make_room(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        """From now on it can only be read. Nobody may have a file open for writing."""
        _mount("-o", "remount,ro", str(self.folder))


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Skips the test where none may be mounted: it takes root."""
    if shutil.which("mount") is None:
        pytest.skip("there is no program `mount` here")
    folder.mkdir()
    why = _mount("-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder))
    if why:
        pytest.skip(f"no disk can be mounted here: {why}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*arguments: str) -> str:
    """What it says against it."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
