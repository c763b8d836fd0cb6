"""A disk that tests can fill and close: a real file system of a few MB, in memory."""

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
        """Fill the disk to the last byte, or leave `but` bytes free."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                file.truncate(max(0, file.tell() - but))

    def make_room(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        """Make the disk read-only. No process may have a file open for writing."""
        _mount("-o", "remount,ro", str(self.folder))


@contextmanager
def small_disk(folder: Path, size: str = _SIZE) -> Iterator[SmallDisk]:
    """Yield a small disk, or skip the test where it cannot be mounted: mounting takes root."""
    if shutil.which("mount") is None:
        pytest.skip("there is no program `mount` here")
    folder.mkdir()
    why = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    if why:
        pytest.skip(f"no disk can be mounted here: {why}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*arguments: str) -> str:
    """Run `mount`, and return its error, or an empty string."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
