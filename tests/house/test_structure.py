"""Imports between folders run one way: no folder reaches itself again by way of others, lazy imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import alignedserve

PACKAGE = Path(alignedserve.__file__).parent
ROOT = PACKAGE.parent
PARTS = ("router", "prefill_worker", "decode_worker", "kvpool", "kernels")  # folders at the root, links in the package
MOST_FILES = 17  # of a folder; about a dozen is the aim

Graph = Mapping[str, set[str]]


def _modules() -> Mapping[str, Path]:
    """Return every module of the package by its name, each once."""
    found = {}
    for folder in (PACKAGE, *(ROOT / part for part in PARTS)):
        base = PACKAGE if folder == PACKAGE else ROOT
        for path in folder.rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder)):
                parts = path.relative_to(base).with_suffix("").parts
                found[".".join(("alignedserve", *(part for part in parts if part != "__init__")))] = path
    return found


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of ours that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module)


def _folder(name: str, modules: Mapping[str, Path]) -> str:
    """Return the folder of a module; `__main__` is above all folders, as a folder of its own."""
    if name.endswith("__main__"):
        return name
    return name if modules[name].name == "__init__.py" else name.rpartition(".")[0]


def folders_and_imports(modules: Mapping[str, Path]) -> Graph:
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        folder = _folder(name, modules)
        used = {_folder(other, modules) for other in _imports(path, modules) if other in modules}
        graph.setdefault(folder, set()).update(used - {folder})
    return graph


def circle(graph: Graph) -> list[str]:
    """Return folders that import each other in a circle, the first one again at the end; empty where there is none."""
    done: set[str] = set()

    def search(folder: str, way: list[str]) -> list[str]:
        if folder in way:
            return [*way[way.index(folder) :], folder]
        if folder not in done:
            for used in sorted(graph.get(folder, ())):
                if found := search(used, [*way, folder]):
                    return found
            done.add(folder)
        return []

    return next((found for folder in sorted(graph) if (found := search(folder, []))), [])


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert " -> ".join(circle(folders_and_imports(_modules()))) == ""


def test_a_circle_is_named() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_lazy_imports_count(tmp_path: Path) -> None:
    file = tmp_path / "lazy.py"
    file.write_text("def late():\n    from alignedserve.errors import AlignedServeError\n")
    assert set(_imports(file, _modules())) == {"alignedserve.errors"}


def test_workers_and_the_pool_never_import_the_router() -> None:
    graph = folders_and_imports(_modules())
    below = ("alignedserve.decode_worker", "alignedserve.prefill_worker", "alignedserve.kvpool", "alignedserve.worker")
    wrong = [(name, used) for name in graph for used in graph[name] if name.startswith(below) and "router" in used]
    assert wrong == []


def test_no_folder_has_too_many_files() -> None:
    sizes: dict[Path, int] = {}
    for path in _modules().values():
        sizes[path.parent] = sizes.get(path.parent, 0) + 1
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_FILES} == {}
