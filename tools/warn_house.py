"""Warn where the repository grows beyond its own measure: words to read, lines of the README, files in a folder.

    python tools/warn_house.py        one line for each measure that is exceeded; it never fails

What breaks people is tested (tests/house): links, circles of imports, cores that do IO, generated pages out of date.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from draw_folders import modules
from measure_house import House

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MOST_WORDS = 30_000  # that people read or look up: two hours at 275 words a minute
MOST_README_LINES = 110
MOST_FILES = 17  # in a folder; about a dozen is the aim
MOST_READING_LINES = 1500  # on the way of docs/reading.md through the code
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Stop(NamedTuple):
    """A row of the table in docs/reading.md: what is read of a file."""

    path: Path
    has_all: bool
    has_docstring: bool
    names: list[str]  # `function`, `TABLE`, `Class` or `Class.method`


def stops() -> Iterator[Stop]:
    """Yield the rows of the page's table."""
    page = (DOCS / "reading.md").read_text(encoding="utf-8")
    for path, read in re.findall(r"^\| \d+ \| `([^`]+)` \| ([^|]+) \|", page, re.MULTILINE):
        yield Stop(ROOT / path, read.strip() == "all", "docstring" in read, re.findall(r"`([\w.]+)`", read))


def definition(tree: ast.AST, name: str) -> ast.stmt | None:
    """Return the class, function or table of this name, a method as `Class.method`."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, DEFINITIONS) and node.name == first:
            return definition(node, rest) if rest else node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
    return None


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _length(stop: Stop) -> int:
    text = stop.path.read_text(encoding="utf-8")
    if stop.has_all:
        return len(text.splitlines())
    tree = ast.parse(text)
    found = [node for name in stop.names if (node := definition(tree, name)) is not None]
    return sum(map(_num_lines, found)) + (_num_lines(tree.body[0]) if stop.has_docstring else 0)


def measures() -> Iterator[tuple[str, int, int]]:
    """Yield what is measured, how much there is, and how much there should be at most."""
    yield "words in docs/, without notebook and generated pages", House(ROOT).words_to_read("docs")[1], MOST_WORDS
    yield "lines of README.md", len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()), MOST_README_LINES
    yield "lines to read on the way of docs/reading.md", sum(map(_length, stops())), MOST_READING_LINES
    for folder, count in sorted(Counter(path.parent for path in modules().values()).items()):
        yield f"files in {folder}", count, MOST_FILES


if __name__ == "__main__":
    for what, found, most in measures():
        if found > most:
            print(f"warning: {found:,} {what}, of at most {most:,}")
