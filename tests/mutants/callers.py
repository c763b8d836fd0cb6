"""Which tests may run a function, by names: who mentions it, who mentions those, and so on up to tests.

No code runs for this. A name stands for all functions of that name whose files have to do with the mentioning file, by
imports, so some ways lead nowhere; the shortest ones seldom do.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from draw_folders import imports, modules
from tests.mutants.planted import FUNCTIONS, SOURCE

Test = tuple[str, str]  # its file from the root, and the name of its function
_MOST = 8  # steps of a way
_ENOUGH = 100  # tests, the nearest of all
_FARTHER = 2  # a step to a file that imports the other's only through others, or that calls what the other hands to it


@dataclass(frozen=True, eq=False)
class _Code:
    """A function, the body of a class, or a statement of a module: under which names it runs, and what it mentions."""

    file: str
    names: frozenset[str]
    words: frozenset[str]

    @property
    def tests(self) -> Iterator[Test]:
        if Path(self.file).name.startswith("test_"):
            yield from ((self.file, name) for name in self.names if name.startswith("test"))


class Callers:
    """Who mentions whom in these modules, which are named as in Python, below a root."""

    def __init__(self, files: Mapping[str, Path], root: Path) -> None:
        self._files, self._root = files, root
        self._reached = cache(self._reach)

    def distances(self, file: str, function: str, left_out: Collection[str] = ()) -> Mapping[Test, int]:
        """Return how far the nearest tests are that may run a function, which is named as in its file: `Class.method`.
        Tests in folders that are left out are not among them."""
        *classes, name = function.split(".")
        names = _names(name, classes[-1] if classes else "")
        if classes and name not in self._mentioning:  # others' code calls it, as pydantic does a validator
            names = frozenset(classes[-1:])
        first = _Code(file, names, frozenset())
        waiting, reached, found = [(0, 0, first)], {first: 0}, dict[Test, int]()
        numbers = count(1)  # of equal steps
        while waiting and len(found) < _ENOUGH:
            steps, _, code = heappop(waiting)
            if steps > reached[code]:
                continue
            if Path(code.file).parent.name not in left_out:
                for test in code.tests:
                    found.setdefault(test, steps)
            for caller, more in self._callers(code):
                if steps + more < reached.get(caller, _MOST):
                    reached[caller] = steps + more
                    heappush(waiting, (steps + more, next(numbers), caller))
        return found

    def _callers(self, code: _Code) -> Iterator[tuple[_Code, int]]:
        """Yield what mentions a function, and how many steps that is."""
        for name in code.names:
            for caller in self._mentioning.get(name, ()):
                if caller.file == code.file or code.file in self._imported(caller.file):
                    yield caller, 1
                elif self._has_to_do(name, code, caller):
                    yield caller, _FARTHER

    def _has_to_do(self, name: str, code: _Code, caller: _Code) -> bool:
        if name.startswith("_"):
            return caller.file in self._imported(code.file)  # as a base class calls a method
        return code.file in self._reached(caller.file) or caller.file in self._reached(code.file)

    @cached_property
    def _mentioning(self) -> Mapping[str, list[_Code]]:
        found: dict[str, list[_Code]] = defaultdict(list)
        for path in self._files.values():
            for code in _codes(self._named(path), ast.parse(path.read_text(encoding="utf-8")).body, ""):
                for word in code.words:
                    found[word].append(code)
        return found

    @cached_property
    def _graph(self) -> Mapping[str, frozenset[str]]:
        """Return the files that each file imports."""
        return {
            self._named(path): frozenset(
                self._named(self._files[used]) for used in imports(path, self._files) if used in self._files
            )
            for path in self._files.values()
        }

    def _imported(self, file: str) -> frozenset[str]:
        """Return the files that a file imports. A test uses the fixtures beside it without an import."""
        beside = str(Path(file).with_name("conftest.py"))
        return self._graph[file] | ({beside} if file.startswith("tests/") and beside in self._graph else set())

    def _reach(self, file: str) -> frozenset[str]:
        """Return the files that a file imports, itself or through others."""
        found, waiting = set[str](), [file]
        while waiting:
            new = self._imported(waiting.pop()) - found
            found |= new
            waiting += new
        return frozenset(found)

    def _named(self, path: Path) -> str:
        return str(path.relative_to(self._root))


@cache
def callers() -> Callers:
    """Return who mentions whom in the product and its tests: to read all takes some seconds."""
    tests = sorted((SOURCE / "tests").rglob("*.py"))
    named = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in tests}
    return Callers({**modules(), **named}, SOURCE)


def _names(name: str, owner: str) -> frozenset[str]:
    """Return the names by which a function is called: where it has a name of Python's own, by its class."""
    return frozenset({owner} if owner and name.startswith("__") else {name})


def _codes(file: str, body: list[ast.stmt], owner: str) -> Iterator[_Code]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield from _codes(file, node.body, node.name)
                plain = [part for part in node.body if not isinstance(part, (*FUNCTIONS, ast.ClassDef))]
                yield _Code(file, frozenset({node.name}), _words(*node.bases, *node.decorator_list, *plain))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names = _names(node.name, owner)
                yield _Code(file, names, _words(node) - names)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield _Code(file, _words(*targets), _words(node))


def _words(*nodes: ast.AST) -> frozenset[str]:
    words = set()
    for node in nodes:
        for inner in ast.walk(node):
            match inner:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                    words.add(word)
    return frozenset(words)
