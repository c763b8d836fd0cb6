"""The README and the docs say what is true: folders, links, figures of the picture, and how long reading takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import draw_peers
from tests.house.test_readme import PARTS, ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
MOST_LINES = 150  # of the README
MOST_WORDS = 60_000  # of all pages in docs: about an hour; the page of settings is generated and not counted
NOT_READ = ("settings.md",)  # a list to look things up in

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _prose(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are no links and `#` begins no heading."""
    return re.sub(r"^```.*?^```|^    .*$", "", _text(page), flags=re.MULTILINE | re.DOTALL)


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken(page: Path) -> Iterator[str]:
    for groups in LINK.findall(_prose(page)):
        link = next(group for group in groups if group)
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert list(_broken(page)) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](#one-two) [b](#three) [c](missing.md) [d](page.md#one-two) ![e](f.svg)\n")
    assert list(_broken(page)) == ["#three", "missing.md", "f.svg"]


def _named_pages() -> Iterator[tuple[str, str]]:
    """Yield each page of docs that a file outside docs names by its path, and that file."""
    suffixes = {".py", ".md", ".yaml", ".sh", ".toml", ".cpp", ".h", ".jsonl"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.suffix not in suffixes or parts[0] in ("build", "docs") or parts[0].startswith("."):
            continue
        if path.is_symlink() or any(parent.is_symlink() for parent in path.parents) or not path.is_file():
            continue
        for named in re.findall(r"\bdocs/[\w/]+\.\w+(?:#[\w-]+)?", _text(path)):
            yield named, str(path.relative_to(ROOT))


def test_pages_that_files_name_exist() -> None:
    def exists(named: str) -> bool:
        page, _, anchor = named.partition("#")
        return (ROOT / page).is_file() and (not anchor or anchor in _anchors(ROOT / page))

    here = str(Path(__file__).relative_to(ROOT))
    assert [(named, file) for named, file in _named_pages() if file != here and not exists(named)] == []


def _folders() -> set[str]:
    """Return every folder of the package and of the parts that has modules, as a path from the root."""
    folders = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py")} | {ROOT / "kernels"}
    real = {path for path in folders if not any(folder.is_symlink() for folder in (path, *path.parents))}
    return {f"{path.relative_to(ROOT).as_posix()}/" for path in real}


def _named_folders() -> set[str]:
    """Return the folders that the README names at the beginning of a line of its list."""
    return set(re.findall(r"^    ([\w./]+/) +\S", _text(README), re.MULTILINE))


def test_the_readme_names_every_folder() -> None:
    assert _folders() - _named_folders() == set()


def test_every_folder_in_the_readme_exists() -> None:
    assert [folder for folder in sorted(_named_folders()) if not (ROOT / folder).is_dir()] == []


def test_the_readme_is_short() -> None:
    assert len(_text(README).splitlines()) <= MOST_LINES


def test_the_docs_read_in_an_hour() -> None:
    words = sum(len(_text(page).split()) for page in DOCS.rglob("*.md") if page.name not in NOT_READ)
    assert words <= MOST_WORDS


def test_the_picture_shows_what_was_measured() -> None:
    picture = draw_peers.PICTURE.read_text(encoding="utf-8")
    shown = [bar.text for bar in draw_peers.chats()] + [
        draw_peers.speed_text(case) for case in draw_peers.speeds().values()
    ]
    assert [text for text in shown if text not in picture] == []
