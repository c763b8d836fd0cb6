"""What each folder is for, and a floor plan with every folder above those it imports, as a section of the docs.

    python tools/draw_folders.py    prints it; `make site` puts it into the site (tools/reference_pages.py)

Sources are parsed and never imported; imports inside functions count. There are layers because no folders import each
other in a circle, which tests/house/test_circles.py holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "alignedserve"
PARTS = (
    "router",
    "prefill_worker",
    "decode_worker",
    "kvpool",
    "kernels",
    "papers",
    "lab",
)  # at the root, links in the package
PROGRAMS = ROOT / "lab" / "benchmarks"  # they run in a checkout, and nothing is made of them
PLAN = """
## Floor plan

A folder imports folders of lower lines only, and no folders import each other in a circle
(`tests/house/test_circles.py`). Workers and the pool never import the router: they answer with events.
"""
WIDTH = 100  # characters of a line

Graph = Mapping[str, set[str]]
_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def modules() -> dict[str, Path]:
    """Return the file of every module of the package by the module's name, without links and benchmarks."""
    found = {}
    for folder in (PACKAGE, *(ROOT / part for part in PARTS)):
        for path in folder.rglob("*.py"):
            is_linked = any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder))
            if not is_linked and not path.is_relative_to(PROGRAMS):
                parts = path.relative_to(PACKAGE if folder == PACKAGE else ROOT).with_suffix("").parts
                found[".".join(("alignedserve", *(part for part in parts if part != "__init__")))] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, at its top or inside a function."""
    for node in _import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        else:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


@cache
def _import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return them without a look into expressions, which are most of a tree."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        nodes += (inner for inner in ast.iter_child_nodes(node) if isinstance(inner, _WITH_STATEMENTS))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def folder_of(name: str, known: Mapping[str, Path]) -> str:
    """Return the folder of a module; `__main__` is above all folders, as a folder of its own."""
    if name.endswith("__main__"):
        return name
    return name if known[name].name == "__init__.py" else name.rpartition(".")[0]


def folders_and_imports(known: Mapping[str, Path]) -> Graph:
    """Return the folders that each folder imports."""
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        folder = folder_of(name, known)
        used = {folder_of(other, known) for other in imports(path, known) if other in known}
        graph.setdefault(folder, set()).update(used - {folder})
    return graph


def layers(graph: Graph) -> list[list[str]]:
    """Return the folders in layers, the lowest first: a folder imports folders of lower layers only."""
    heights: dict[str, int] = {}

    def height(folder: str) -> int:
        if folder not in heights:
            heights[folder] = max((height(used) + 1 for used in graph.get(folder, ())), default=0)
        return heights[folder]

    highest = max(height(folder) for folder in graph)
    return [sorted(folder for folder in graph if heights[folder] == layer) for layer in range(highest + 1)]


def drawing(graph: Graph) -> str:
    """Return the layers as text, the highest first."""
    return "\n".join(line for layer in reversed(layers(graph)) for line in _lines(layer))


def _lines(layer: list[str]) -> Iterator[str]:
    """Yield a layer's folders without the package's name, in as many lines as the width needs."""
    line = ""
    for folder in layer:
        name = folder.removeprefix("alignedserve.").replace(".", "/")
        if line and len(line) + 3 + len(name) > WIDTH:
            yield line
            line = "  "
        line = f"{line}   {name}" if line.strip() else f"    {line}{name}"
    yield line


def purpose(folder: Path) -> str:
    """Return the first sentence of a folder's `__init__.py`, or of its README."""
    package = folder / "__init__.py"
    if package.exists():
        return (ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or "").splitlines()[0]
    told = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    return f"{' '.join(told.split()).partition('. ')[0]}."


def section() -> str:
    """Return what the sources give: a table of folders, and the plan."""
    known = modules()
    of_modules = {path.parent.relative_to(ROOT).as_posix() for path in known.values()}
    named = sorted({*of_modules, "kernels"} - {name for name in of_modules if name.startswith("lab")})
    rows = (f"| `{name}/` | {purpose(ROOT / name)} |" for name in named)
    table = ("## Purposes", "", "| folder | |", "|---|---|", *rows)
    return "\n".join((*table, PLAN, drawing(folders_and_imports(known)), ""))


if __name__ == "__main__":
    print(section())
