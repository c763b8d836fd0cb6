"""A changed source file: where the change stands, and the syntax tree with it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2]
Step = str | int  # a field of a node, or a place in a list
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    """A node of a syntax tree, and the function around it: the outermost, since its code holds that of the others."""

    path: tuple[Step, ...]
    node: ast.AST
    function: str = ""  # qualified; nothing outside of functions
    name: str = ""  # its name alone
    line: int = 0  # its first, that of a decorator included; 0 where the node runs when the module is imported

    def __truediv__(self, step: tuple[Step, ...]) -> Place:
        node: Any = self.node
        for part in step:
            node = node[part] if isinstance(part, int) else getattr(node, part)
        return Place((*self.path, *step), node, self.function, self.name, self.line)


@dataclass(frozen=True)
class Planted:
    name: str
    file: str  # from the root of the repository
    place: Place
    new: tuple[ast.AST, ...]  # what stands there instead
    count: int = 1  # of how many nodes of a list

    @property
    def folder(self) -> str:
        return str(Path(self.file).parent)

    @property
    def imported_name(self) -> str:
        """Return the class, function or constant that is another when the file is imported; nothing in a function."""
        match self.place.line or parsed(self.file).body[int(self.place.path[1])]:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                return name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                return name
        return ""

    def tree(self) -> ast.Module:
        tree = copy.deepcopy(parsed(self.file))
        holder: Any = tree
        *way, last = self.place.path
        for step in way:
            holder = holder[step] if isinstance(step, int) else getattr(holder, step)
        new = [_at(copy.deepcopy(node), self.place.node) for node in self.new]
        if isinstance(last, int):
            holder[last : last + self.count] = new
        else:
            setattr(holder, last, new[0])
        return ast.fix_missing_locations(tree)


def _at(node: ast.AST, place: ast.AST) -> ast.AST:
    for inner in ast.walk(node):
        if hasattr(place, "lineno"):
            ast.copy_location(inner, place)
    return node


@lru_cache(maxsize=8)
def parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


@lru_cache(maxsize=8)
def all_places(file: str) -> tuple[Place, ...]:
    return tuple(places(Place((), parsed(file))))


def places(place: Place) -> Iterator[Place]:
    """Yield a node and all nodes in it."""
    yield place
    for inner in parts(place):
        yield from places(inner)


def parts(place: Place) -> Iterator[Place]:
    """Yield the nodes right below a node, with the function that runs them."""
    for field, value in ast.iter_fields(place.node):
        steps = [(field, index) for index in range(len(value))] if isinstance(value, list) else [(field,)]
        for step in steps:
            inner = place / step
            if isinstance(inner.node, ast.AST):
                yield _entered(inner, place, field)


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _entered(inner: Place, outer: Place, field: str) -> Place:
    """Return a place with the function that runs it."""
    node = inner.node
    if outer.line or outer.name:
        return inner
    if isinstance(outer.node, FUNCTIONS) and field == "body":
        return Place(inner.path, node, outer.function, outer.node.name, first_line(outer.node))
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return Place(inner.path, node, f"{outer.function}.{node.name}".lstrip("."))
    return inner
