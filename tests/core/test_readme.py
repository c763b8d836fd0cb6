"""The README's tree is whole: every module that is in the repository stands there by its name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("alignedserve", "router", "prefill_worker", "decode_worker", "kvpool", "kernels", "tools")


def test_every_module_is_in_the_tree() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    named = set(re.findall(r"[\w/]+\.py", tree))
    for folder in PARTS:
        files = [path for path in (ROOT / folder).rglob("*.py") if not path.name.startswith("__")]
        missing = [str(path.relative_to(ROOT)) for path in files if not _named(path, named)]
        assert missing == []


def _named(path: Path, named: set[str]) -> bool:
    return path.name in named or f"{path.parent.name}/{path.name}" in named


def test_every_module_in_the_tree_is_there() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    files = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert {name.rpartition("/")[2] for name in re.findall(r"[\w/]+\.py", tree)} <= files
