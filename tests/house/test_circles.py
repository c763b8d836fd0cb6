"""No files import each other in a circle, and no packages: each stands on a floor above those that it imports.

Imports inside functions and for types alone count. The remedy is mostly one moved function.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

from alignedserve import LAB
from alignedserve.scheduling.offered import PAPERS
from draw_folders import Graph, folders_and_imports, imports, modules


@cache
def files() -> Graph:
    """Return the modules that each module imports."""
    known = modules()
    return {
        name: {used for used in imports(path, known) if used in known and used != name} for name, path in known.items()
    }


def packages(graph: Graph) -> Graph:
    """Return the packages that each package imports: `alignedserve.worker.step.view` is of `alignedserve.worker`."""
    found: dict[str, set[str]] = {}
    for name, used in graph.items():
        own = package_of(name)
        found.setdefault(own, set()).update(other for each in used if (other := package_of(each)) != own)
    return found


def package_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def circle(graph: Graph) -> list[str]:
    """Return names that import each other in a circle, with the first repeated at the end; empty without a circle."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for used in sorted(graph.get(name, ())):
                if found := search(used, [*way, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


def test_no_files_import_each_other_in_a_circle() -> None:
    assert " -> ".join(circle(files())) == ""


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert " -> ".join(circle(folders_and_imports(modules()))) == ""


def test_no_package_imports_one_that_imports_it() -> None:
    found = circle(packages(files()))
    steps = {(package_of(name), package_of(used)): f"{name} -> {used}" for name in files() for used in files()[name]}
    assert [steps[pair] for pair in pairwise(found)] == []


def test_a_circle_is_named() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert packages({"p.a.x": {"p.b.y"}, "p.b.y": {"p.b.z"}, "p.b.z": set()}) == {"p.a": {"p.b"}, "p.b": set()}


def test_lazy_imports_count(tmp_path: Path) -> None:
    file = tmp_path / "lazy.py"
    file.write_text("def late():\n    from alignedserve.errors import AlignedServeError\n")
    assert set(imports(file, modules())) == {"alignedserve.errors"}


def test_the_product_imports_neither_the_lab_nor_the_papers() -> None:
    beside = LAB, PAPERS
    wrong = [(name, used) for name in files() for used in files()[name] if used.startswith(beside)]
    assert [(name, used) for name, used in wrong if not name.startswith(beside)] == []
