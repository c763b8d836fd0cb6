"""The page docs/reading.md leads through the code: every name on its way exists, and the way is short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.test_readme import ROOT

PAGE = ROOT / "docs" / "reading.md"
MOST_LINES = 2000
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Stop(NamedTuple):
    path: Path
    has_all: bool
    has_docstring: bool
    names: list[str]  # `function`, `Class` or `Class.method`


def _stops() -> Iterator[Stop]:
    """Yield the rows of the page's table."""
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for path, read in rows:
        yield Stop(ROOT / path, read.strip() == "all", "docstring" in read, re.findall(r"`([\w.]+)`", read))


def _definition(tree: ast.AST, name: str) -> ast.stmt | None:
    """Return the class or function of this name, a method as `Class.method`."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, DEFINITIONS) and node.name == first:
            return _definition(node, rest) if rest else node
    return None


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _length(stop: Stop) -> int:
    text = stop.path.read_text(encoding="utf-8")
    if stop.has_all:
        return len(text.splitlines())
    tree = ast.parse(text)
    found = [node for name in stop.names if (node := _definition(tree, name)) is not None]
    return sum(map(_num_lines, found)) + (_num_lines(tree.body[0]) if stop.has_docstring else 0)


STOPS = list(_stops())


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.path.name)
def test_what_is_to_be_read_is_there(stop: Stop) -> None:
    tree = ast.parse(stop.path.read_text(encoding="utf-8")) if stop.path.suffix == ".py" else ast.Module([], [])
    assert [name for name in stop.names if _definition(tree, name) is None] == []
    assert stop.has_all or stop.names or stop.has_docstring


def test_the_way_is_short() -> None:
    lengths = {f"{stop.path.relative_to(ROOT)}": _length(stop) for stop in STOPS}
    assert len(lengths) > 15
    assert sum(lengths.values()) <= MOST_LINES, lengths
