"""Every folder says what its files are for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("alignedserve", "router", "prefill_worker", "decode_worker", "kvpool", "kernels", "papers", "lab")


def _folders() -> list[Path]:
    folders = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py")}
    return sorted(folder for folder in folders if not any(path.is_symlink() for path in (folder, *folder.parents)))


def _page(folder: Path) -> str:
    """Return the text with a line per file: the docstring of the package, or a README where there is no package."""
    package = folder / "__init__.py"
    if not package.exists():
        return (folder / "README.md").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""


def test_a_folder_names_its_files() -> None:
    wrong: dict[str, set[str]] = {}
    for folder in _folders():
        named = set(re.findall(r"^ *(\w+\.py) +\S", _page(folder), re.MULTILINE))
        wrong[str(folder.relative_to(ROOT))] = named ^ ({path.name for path in folder.glob("*.py")} - {"__init__.py"})
    assert {folder: names for folder, names in wrong.items() if names} == {}


def test_the_lab_names_its_folders() -> None:
    named = set(re.findall(r"^ *(\w+)/ +\S", _page(ROOT / "lab"), re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "lab").glob("*/__init__.py")}
