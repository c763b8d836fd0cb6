"""A folder with files that are named like modules: each notes that it was imported, and then raises."""

from __future__ import annotations

from pathlib import Path

SHADOWED = ("statistics", "json", "torch", "msgspec", "numpy", "zmq", "ray", "sitecustomize", "yaml", "tokenizers")
_NOTE = """
from pathlib import Path
Path(__file__).with_suffix(".imported").touch()
raise RuntimeError(f"{__file__} was imported")
"""


def make_hostile(folder: Path) -> Path:
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(_NOTE)
    return folder


def imported(folder: Path) -> list[str]:
    """Return the names of the files that were imported."""
    return sorted(path.stem for path in folder.glob("*.imported"))
