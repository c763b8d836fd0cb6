"""Imports between folders run in one direction: no folder reaches itself through others, lazy imports included."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from alignedserve import LAB
from alignedserve.scheduling.offered import PAPERS
from draw_folders import Graph, folders_and_imports, imports, modules
from measure_house import HERE, House


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


def test_the_product_imports_neither_the_lab_nor_the_papers() -> None:
    known = modules()
    beside = (LAB, PAPERS)
    wrong = [
        (name, used)
        for name, path in known.items()
        for used in imports(path, known)
        if used.startswith(beside) and not name.startswith(beside)
    ]
    assert wrong == []


def test_workers_and_the_pool_never_import_the_router() -> None:
    graph = _graph()
    below = ("alignedserve.decode_worker", "alignedserve.prefill_worker", "alignedserve.kvpool", "alignedserve.worker")
    wrong = [(name, used) for name in graph for used in graph[name] if name.startswith(below) and "router" in used]
    assert wrong == []


# The most files that a core loads: all that one reads to know what it decides.
MOST_LOADED = {"alignedserve.router.state": 30, "alignedserve.decode_worker.state": 60}


def test_cores_load_few_files() -> None:
    house = House(HERE)
    loaded = {core: house.closure(core) for core in MOST_LOADED}
    assert all(core in files for core, files in loaded.items()), "a core has another name"
    assert [f"{core} loads {len(files)}" for core, files in loaded.items() if len(files) > MOST_LOADED[core]] == []


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


# What a request passes. Mechanisms of little use plug in (forms/): few of these files may know them.
_IN_PACKAGE = "cost engine executor protocol scheduling schedulers transport worker".split()
SERVING = (
    "alignedserve/core.py",
    *(f"alignedserve/{part}" for part in _IN_PACKAGE),
    *"router prefill_worker decode_worker kvpool kernels".split(),
)
MOST_KNOWING = 3
# Words that only those have who know the mechanism.
MECHANISMS = {
    "two-ended blocks": r"from_right|right end|bidirectional|BIDIRECTIONAL|Shared(Memory|Blocks|Seating|Pairs)"
    r"|[Tt]wo.?[Ee]nded|SlotCopies|Checkpoints\b|\.checkpoints\b|\bsaved[:=(]|num_places"
    r"|two requests (may )?(share|be in)",
    "hidden vectors": r"CacheKind|half_blocks|ProjectKv|[Hh]idden vector|Hidden(Form|Attention|Pairs|Vectors)"
    r"|[Hh]ybrid|HYBRID|\.is_hidden|num_hidden\b|hidden_(token|slots)|keeps_hidden"
    r"|(check|write|read|with|add|not)_hidden|WeighedMemory",
    "int8 pages of the pool": r"KV_INT8|kv_int8|Int8(Pages|Layout)|[Cc]ompress(Page|ion|or\b|ible)",
    "prefetch to prefill workers": r"Prefetch|prefetch|Evict\b",
}


def knowing(words: str, folders: Iterable[str]) -> list[Path]:
    """Return the files among these, or in these folders, that have such words."""
    files = [path for name in folders for path in House(HERE).files(name) or [HERE / name] if path.suffix != ".sh"]
    return [path for path in files if re.search(words, path.read_text(encoding="utf-8"))]


def test_few_files_know_a_mechanism_that_plugs_in() -> None:
    for name, words in MECHANISMS.items():
        folders = [folder for folder in SERVING if (folder, name) != ("kernels", "prefetch to prefill workers")]
        assert len(found := knowing(words, folders)) <= MOST_KNOWING, (name, found)
        assert knowing(words, ["alignedserve/forms"]), f"words of {name}"


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
