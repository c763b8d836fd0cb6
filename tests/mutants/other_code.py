"""Give functions that are loaded already the code that they have in another syntax tree of their file."""

from __future__ import annotations

import ast
import builtins
import copy
import gc
import os
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType

from tests.mutants.planted import FUNCTIONS, SOURCE, first_line, parsed

Function = tuple[str, int, str]  # its file from the root, its first line, its name
_PROBE = "__ran__"


def give_code(trees: Mapping[str, ast.Module]) -> set[Function]:
    """Give the functions of files their code in these trees, wherever they are held; return which have it."""
    new: dict[Function, CodeType] = {}
    for file, tree in trees.items():
        for code in _codes(compile(tree, str(SOURCE / file), "exec", dont_inherit=True)):
            new[file, code.co_firstlineno, code.co_name] = code
    given = set()
    gc.unfreeze()  # or the objects that were there after the collection of tests are not listed
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__name__ != "<lambda>":  # two may be in one line
            where = function_of(function.__code__)
            if where in new and function.__code__.co_freevars == new[where].co_freevars:
                function.__code__ = new[where]
                given.add(where)
    return given


def probe(files: set[str]) -> set[Function]:
    """Let all functions of files say that they run; return the set into which they say it."""
    ran: set[Function] = set()
    setattr(builtins, _PROBE, ran.add)
    trees = {file: copy.deepcopy(parsed(file)) for file in files}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                has_docstring = ast.get_docstring(node) is not None
                said = ast.parse(f"{_PROBE}({(file, first_line(node), node.name)!r})").body
                node.body[has_docstring:has_docstring] = [ast.copy_location(each, node.body[0]) for each in said]
        ast.fix_missing_locations(tree)
    give_code(trees)
    return ran


def function_of(code: CodeType) -> Function:
    return _file(code.co_filename), code.co_firstlineno, code.co_name


@cache
def _file(name: str) -> str:
    """Return a file's path from the root, without links."""
    return os.path.realpath(name).removeprefix(f"{SOURCE}{os.sep}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
