"""Imports between folders run in one direction: no folder reaches itself through others, lazy imports included."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from alignedserve import LAB
from draw_folders import PAGE, Graph, folders_and_imports, imports, modules, page


@cache
def _graph() -> Graph:
    return folders_and_imports(modules())


def circle(graph: Graph) -> list[str]:
    """Return folders that import each other in a circle, with the first repeated at the end; empty without a circle."""
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
    assert " -> ".join(circle(_graph())) == ""


def test_a_circle_is_named() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_lazy_imports_count(tmp_path: Path) -> None:
    file = tmp_path / "lazy.py"
    file.write_text("def late():\n    from alignedserve.errors import AlignedServeError\n")
    assert set(imports(file, modules())) == {"alignedserve.errors"}


def test_the_product_never_imports_the_lab() -> None:
    known = modules()
    wrong = [
        (name, used)
        for name, path in known.items()
        for used in imports(path, known)
        if used.startswith(LAB) and not name.startswith(LAB)
    ]
    assert wrong == []


def test_workers_and_the_pool_never_import_the_router() -> None:
    graph = _graph()
    below = ("alignedserve.decode_worker", "alignedserve.prefill_worker", "alignedserve.kvpool", "alignedserve.worker")
    wrong = [(name, used) for name in graph for used in graph[name] if name.startswith(below) and "router" in used]
    assert wrong == []


def test_the_page_of_folders_is_made_of_the_sources() -> None:
    """The remedy is `python tools/draw_folders.py`."""
    assert PAGE.read_text(encoding="utf-8") == page()


# `kv` of a request is its blocks, and their form: a memory has it written there. Whoever else wants some asks a memory.
WRITES_KV = "worker/step/blocks.py"


def kv_writes(tree: ast.AST) -> list[int]:
    """Return the lines that assign to an attribute `kv`."""
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for assigned in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(assigned)
    ]
    return [target.lineno for target in targets if isinstance(target, ast.Attribute) and target.attr == "kv"]


def idle_texts(tree: ast.AST) -> list[int]:
    """Return the lines of texts that stand alone and are no docstrings, as nothing stands before a docstring."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module)))
    texts = (of.value for body in bodies for of in body[1:] if isinstance(of, ast.Expr))
    return [text.lineno for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]


def test_nothing_stands_before_a_docstring() -> None:
    wrong = {name: idle_texts(ast.parse(path.read_text(encoding="utf-8"))) for name, path in modules().items()}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_only_memory_writes_the_blocks_of_requests() -> None:
    product = {name: path for name, path in modules().items() if not name.startswith(LAB)}
    others = [path for path in product.values() if WRITES_KV not in path.as_posix()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in others}
    wrong = {name: found for name, text in texts.items() if ".kv" in text and (found := kv_writes(ast.parse(text)))}
    assert wrong == {}


# The parts of a worker's memory: who else wants a block written asks these.
MEMORY = (
    *(f"worker/{name}.py" for name in ("memory", "windows", "step/blocks", "step/device_pages", "step/seating")),
    "forms/memory/",
)


def writers(tree: ast.Module) -> set[str]:
    """Return the functions that write the blocks of a request: `keep_as`, and what calls such a function."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    uses = {of.name: {node.id for node in ast.walk(of) if isinstance(node, ast.Name)} for of in functions}
    found, before = {"keep_as"}, set[str]()
    while found != before:
        before = {*found}
        found |= {name for name, used in uses.items() if used & before}
    return found


def imported(tree: ast.AST) -> set[str]:
    """Return the names that a module imports from other modules."""
    return {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}


def test_only_a_memory_has_blocks_written() -> None:
    product = {name: path for name, path in modules().items() if not name.startswith(LAB)}
    [blocks] = [path for path in product.values() if path.as_posix().endswith(WRITES_KV)]
    names = writers(ast.parse(blocks.read_text(encoding="utf-8")))
    assert {"keep_as", "add_blocks", "take_blocks", "lose_kv", "fold_blocks"} <= names
    texts = {path.as_posix(): path.read_text(encoding="utf-8") for path in product.values()}
    others = {path: text for path, text in texts.items() if "step.blocks import" in text}
    callers = {path for path, text in others.items() if imported(ast.parse(text)) & names}
    assert len(callers) > 4, "these names are imported by name"
    assert [path for path in callers if not any(part in path for part in MEMORY)] == []


def test_a_write_of_blocks_is_seen() -> None:
    assert kv_writes(ast.parse("a.kv = b\nx = a.kv\na.kv, c = d\na.kv += e\nkv = a")) == [1, 3, 4]
