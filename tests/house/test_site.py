"""The docs as a site: it is built from the same files, every link and anchor holds, and search finds words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import ROOT

pytest.importorskip("material", reason="`make setup` installs the extra docs")


def _build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )


def test_every_page_is_in_the_site_and_is_found(tmp_path: Path) -> None:
    built = _build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    found = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = {entry["location"].partition("#")[0] for entry in found}
    written = {
        page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")
    }
    assert {page.replace("README.html", "index.html") for page in written} - pages == set()
    settings = " ".join(entry["text"] for entry in found if entry["location"].startswith("reference/settings.html"))
    assert "--pool-memory-mb" in settings, "what the code knows by itself is in the site"


def test_broken_links_fail(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    links = "[a link](missing.md) [a link](README.md#no-such-heading)"
    (tmp_path / "docs" / "README.md").write_text(f"# One page\n\n{links}\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: []\nnav: [README.md]\n", encoding="utf-8"
    )
    built = _build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert "missing.md" in built.stderr
    assert "no-such-heading" in built.stderr
