"""A field of a request has one writer, and blocks are written by a memory alone."""

from __future__ import annotations

import ast
from collections import defaultdict

from alignedserve import LAB
from draw_folders import modules
from measure_house import HERE, House

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


def test_only_memory_writes_the_blocks_of_requests() -> None:
    product = {name: path for name, path in modules().items() if not name.startswith(LAB)}
    others = [path for path in product.values() if WRITES_KV not in path.as_posix()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in others}
    wrong = {name: found for name, text in texts.items() if ".kv" in text and (found := kv_writes(ast.parse(text)))}
    assert wrong == {}


# The parts of a worker's memory: who else wants a block written asks these.
MEMORY = (
    *(f"worker/{name}.py" for name in ("memory", "windows", "step/blocks", "step/device_pages", "step/seating")),
    "papers/memory/",
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


def writers_of(fields: set[str], home: str, sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the files that assign to such an attribute of anything, in `home` or of anything but `self` elsewhere."""
    found = defaultdict[str, set[str]](set)
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in fields):
                continue
            if name == home or ast.unparse(node.value) != "self":
                found[node.attr].add(name)
    return found


def test_one_module_writes_a_field_of_a_request() -> None:
    """A growing list is not seen."""
    parts = "alignedserve/worker alignedserve/schedulers alignedserve/forms decode_worker prefill_worker".split()
    files = [path for part in parts for path in House(HERE).files(part) if path.suffix == ".py"]
    sources = {path.relative_to(HERE).as_posix(): path.read_text(encoding="utf-8") for path in files}
    home = "alignedserve/worker/step/request.py"
    [request] = [node for node in ast.parse(sources[home]).body if getattr(node, "name", "") == "WorkerRequest"]
    lines = request.body if isinstance(request, ast.ClassDef) else []
    fields = {ast.unparse(line.target) for line in lines if isinstance(line, ast.AnnAssign)}
    assert len(fields) > 20
    written = writers_of(fields, home, sources)
    assert {field: names for field, names in written.items() if len(names) > 1} == {}


def test_a_second_writer_of_a_field_is_seen() -> None:
    sources = {"home": "self.state = 1", "a": "of.state += 1", "b": "self.state = of.state"}
    assert writers_of({"state"}, "home", sources) == {"state": {"home", "a"}}
