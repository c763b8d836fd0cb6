"""The README and the docs are true: folders, links, commands, settings, and the figures of the picture."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import draw_peers
import reference_pages
from alignedserve.cli.main import command_names
from alignedserve.config.config import every_setting
from tests.house import PARTS, ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
MEASURED = DOCS / "measured.md"  # its programs are those of the day
PAGES = sorted([*ROOT.glob("[A-Z]*.md"), *DOCS.rglob("*.md"), *(ROOT / "lab").rglob("*.md")])

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _prose(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are no links and `#` begins no heading."""
    return re.sub(r"^```[\s\S]*?^```|^    .*$", "", _text(page), flags=re.MULTILINE)


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


def test_links_resolve() -> None:
    assert [(str(page.relative_to(ROOT)), link) for page in PAGES for link in _broken(page)] == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](#one-two) [b](#three) [c](missing.md) [d](page.md#one-two) ![e](f.svg)"
    page.write_text(f"# One, two\n\n    [code](no.md)\n\n{links}\n")
    assert list(_broken(page)) == ["#three", "missing.md", "f.svg"]


def _named_pages() -> Iterator[tuple[str, str]]:
    """Yield each page of docs that a file outside docs names by its path, and that file."""
    suffixes = {".py", ".md", ".yaml", ".sh", ".toml", ".cpp", ".h", ".jsonl"}
    tops = [path for path in ROOT.iterdir() if path.name not in ("build", "docs") and path.name[0] != "."]
    walked = [
        Path(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names
    ]  # without links
    for path in sorted([*walked, *tops]):
        if path.suffix not in suffixes or path.is_symlink() or not path.is_file():
            continue
        for named in re.findall(r"\bdocs/[\w/]+\.\w+(?:#[\w-]+)?", _text(path)):
            yield named, str(path.relative_to(ROOT))


def test_pages_that_files_name_exist() -> None:
    def exists(named: str) -> bool:
        page, _, anchor = named.partition("#")
        return (ROOT / page).is_file() and (not anchor or anchor in _anchors(ROOT / page))

    here = str(Path(__file__).relative_to(ROOT))
    assert [(named, file) for named, file in _named_pages() if file != here and not exists(named)] == []


def test_each_generated_section_has_one_page() -> None:
    named = sorted(name for page in DOCS.rglob("*.md") for name in reference_pages.MARKER.findall(_text(page)))
    assert named == sorted(reference_pages.SECTIONS_OF_PAGES)


def test_a_page_gets_its_sections() -> None:
    text = reference_pages.on_page_markdown(_text(DOCS / "reference" / "settings.md"))
    assert "\n### `server`:" in text
    assert [path for path in every_setting() if f"`{path}`" not in text] == []
    commands = reference_pages.on_page_markdown(_text(DOCS / "reference" / "cli.md"))
    assert [name for name in command_names() if f"### `alignedserve {name}`\n" not in commands] == []
    assert "--window W" in commands, "of `batch submit`, a command of a command"


def test_the_picture_shows_what_was_measured() -> None:
    picture = draw_peers.PICTURE.read_text(encoding="utf-8")
    assert [text for text in draw_peers.shown() if text not in picture] == []


def test_the_picture_shows_real_weights_once_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = [{"name": f"m, decode {size} x 64, against llama.cpp", "ratio": 1 + size / 10} for size in (1, 8)]
    figures = (("all answered after", 80.0, 100.0), ("mean first token", 7.0, 20.0))
    crowd = [{"name": f"40 at once, ours: {what}", "value": ours, "baseline": peer} for what, ours, peer in figures]
    for name, rows in (("engine", engine), ("crowd", crowd)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, value in {"RESULTS": tmp_path, "CROWD": "crowd", "REAL_ENGINES": {"1.5B": "engine"}}.items():
        monkeypatch.setattr(draw_peers, name, value)
    assert draw_peers.shown() == [
        "100 s, first words after 20 s",
        "80 s, first words after 7 s",
        "2 cases: 1.10 to 1.80",
    ]
    draw_peers.draw(picture := tmp_path / "peers.svg", ink="#000000")
    assert [text for text in draw_peers.shown() if text not in picture.read_text(encoding="utf-8")] == []


def _named_paths(page: Path) -> Iterator[str]:
    """Yield the paths from the root that a page names in backticks: files of code, and folders."""
    for named in re.findall(r"`([a-z_]+(?:/[\w.]+)+/?)`", _prose(page)):
        if (ROOT / named.partition("/")[0]).is_dir():
            yield named


def test_paths_in_a_page_exist() -> None:
    named = ((str(page.relative_to(ROOT)), path) for page in PAGES if page != MEASURED for path in _named_paths(page))
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_commands_in_a_page_exist() -> None:
    """Modules named after `python -m` (lab.benchmarks) and `python tools/` must exist."""
    command = re.compile(r"python (?:-m )?(lab\.benchmarks\.[a-z_]+|tools/\w+(?=\.py))")
    named = {(page.name, name) for page in PAGES if page != MEASURED for name in command.findall(_text(page))}
    files = {(page, name): ROOT / f"{name.replace('.', '/')}.py" for page, name in named}
    assert sorted(found for found, file in files.items() if not file.exists()) == []


def test_settings_in_a_page_exist() -> None:
    known = every_setting()
    sections = {path.partition(".")[0] for path in known if "." in path}
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`([a-z]+\.[a-z_]+)[`:]", _text(page))
        if name.partition(".")[0] in sections and not name.endswith((".py", ".md"))
    }
    assert sorted((page, name) for page, name in named if name not in known) == []


def test_results_that_a_page_cites_exist() -> None:
    named = re.compile(r"`(?:\S*/)?([\w-]+\.jsonl)`")
    cited = {(page.name, name) for page in PAGES if page != MEASURED for name in named.findall(_text(page))}
    dated = [(page, name) for page, name in cited if re.match(r"\d{4}-", name)]
    assert sorted((page, name) for page, name in dated if not (draw_peers.RESULTS / name).exists()) == []


def test_classes_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", _text(DOCS / "architecture.md")))
    sources = (path for part in PARTS for path in (ROOT / part).rglob("*.py"))
    defined = {name for path in sources for name in re.findall(r"^class (\w+)", _text(path), re.MULTILINE)}
    assert sorted(named - defined) == []
