"""Draw the floor plan into docs/architecture.md: every folder above the folders that it imports.

    python tools/draw_folders.py

Sources are parsed and never imported; imports inside functions count. There are layers because no folders import each
other in a circle, which tests/house/test_structure.py holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "alignedserve"
PARTS = ("router", "prefill_worker", "decode_worker", "kvpool", "kernels", "lab")  # at the root, links in the package
PROGRAMS = ROOT / "lab" / "benchmarks"  # they run in a checkout, and nothing is made of them
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- folders:begin -->", "<!-- folders:end -->"
WIDTH = 100  # characters of a line

Graph = Mapping[str, set[str]]


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
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
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


def drawn(page: str) -> str:
    """Return the page with today's floor plan between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{drawing(folders_and_imports(modules()))}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
