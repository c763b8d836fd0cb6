"""Code reads in one go: a function fits on a screen, and words that were struck stay away."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from draw_folders import modules

MOST_LINES = 70  # of a function; a Triton kernel is one piece, which cannot be cut
STRUCK = ("goes not with", "so many times as many")


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES:
                yield f"{node.name}: {lines} lines"


def test_a_function_fits_on_a_screen() -> None:
    files = {name: path for name, path in modules().items() if ".kernels.triton." not in name}
    found = {name: [*long_functions(ast.parse(path.read_text(encoding="utf-8")))] for name, path in files.items()}
    assert {name: long for name, long in found.items() if long} == {}


def test_a_long_function_is_seen() -> None:
    body = "    pass\n" * MOST_LINES
    assert [*long_functions(ast.parse(f"def far():\n{body}"))] == [f"far: {MOST_LINES + 1} lines"]


def test_struck_words_stay_away() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    assert [(name, words) for name, text in texts.items() for words in STRUCK if words in text] == []
