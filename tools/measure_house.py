"""Measure how the repository reads: sizes, depths, colliding names, settings and words, printed as one table.

The sources are parsed and never imported, so the same script measures older commits too:

    python tools/measure_house.py                  this repository
    python tools/measure_house.py --at ../older    another checkout
    python tools/measure_house.py --list           also each colliding class name, with its files
    python tools/measure_house.py --warn           a line for each measure that is exceeded, and nothing else

What breaks people is tested (tests/house): circles of imports, cores that do IO or load many files, second writers of
a field, long functions.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PACKAGE, LAB, PAPERS = "alignedserve", "lab", "papers"
PARTS = (PACKAGE, "router", "prefill_worker", "decode_worker", "kvpool", "kernels", PAPERS, LAB)  # what is installed
BENCHMARKS = "benchmarks"  # in lab/ now
BESIDE = ("tools", "deploy", BENCHMARKS)  # counted as code, but nobody installs it
CODE = {".py", ".cpp", ".h", ".hpp", ".sh"}
MOST_PAGES, MOST_WORDS = 35, 30_000  # that people read or look up: two hours at 275 words a minute
MOST_README_LINES = 110
MOST_FILES = 17  # in a folder; about a dozen is the aim
SETTINGS, EXPERIMENT = ("setting", "common"), "experiment"  # the functions of config/setting.py that declare them
CORES = ("router.state", "kvpool.state", "prefill_worker.state", "decode_worker.state", "owner.core", "jobs.state")


@dataclass(frozen=True)
class Module:
    name: str  # as it is imported: alignedserve.router.state
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def is_folder(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Return (module, name in that module) by the name in this one, for imports from the package."""
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE)
            for alias in node.names
        }


@dataclass(frozen=True)
class House:
    """One checkout of the repository."""

    root: Path

    def files(self, folder: str) -> list[Path]:
        """Return the folder's code files; the links of the package to the parts are not followed."""
        found = (path for path in (self.root / folder).rglob("*") if path.suffix in CODE and path.is_file())
        return sorted(path for path in found if not self._is_linked(path) and "__pycache__" not in path.parts)

    def _is_linked(self, path: Path) -> bool:
        return any(above.is_symlink() for above in (path, *path.parents) if above.is_relative_to(self.root))

    @cached_property
    def modules(self) -> dict[str, Module]:
        found = {}
        for path in (path for part in (*PARTS, BENCHMARKS) for path in self.files(part) if path.suffix == ".py"):
            parts = path.relative_to(self.root).with_suffix("").parts
            name = ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts)).removesuffix(".__init__")
            found[name] = Module(name, path)
        return found

    def function_sizes(self) -> list[int]:
        """Return the lines of every function of the package, from its `def` to its end."""
        nodes = (node for module in self.modules.values() for node in ast.walk(module.tree))
        functions = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)

    def class_chain(self, module: Module, name: str) -> list[str]:
        """Return the longest chain of our own classes from this class up: the class itself comes first."""
        node = module.classes.get(name)
        if node is None:
            origin, original = module.imported.get(name, ("", ""))
            return self.class_chain(self.modules[origin], original) if origin in self.modules else []
        bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
        names = [base.id for base in bases if isinstance(base, ast.Name) and base.id != name]
        chains = (self.class_chain(module, base) for base in names)
        return [name, *max(chains, key=len, default=[])]

    def deepest_class(self) -> list[str]:
        chains = (self.class_chain(module, name) for module in self.modules.values() for name in module.classes)
        return max(chains, key=len, default=[])

    def flat_modules(self) -> int:
        return sum(path.name != "__init__.py" for path in (self.root / PACKAGE).glob("*.py"))

    def largest_folder(self) -> tuple[int, Path]:
        """Return the number of modules of the largest folder, its `__init__.py` not counted, and the folder."""
        paths = (module.path for module in self.modules.values() if module.path.name != "__init__.py")
        counts = Counter(path.parent.relative_to(self.root) for path in paths)
        folder, number = max(counts.items(), key=lambda item: (item[1], str(item[0])))
        return number, folder

    def colliding_names(self) -> dict[str, list[str]]:
        """Return each class name that stands in several files, a leading underscore left out, with the files."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    found[node.name.lstrip("_")].add(str(module.path.relative_to(self.root)))
        return {name: sorted(paths) for name, paths in sorted(found.items()) if len(paths) > 1}

    def settings(self, *made_by: str) -> Counter[str]:
        """Return the number of settings by dataclass of `config`: fields that call one of these functions."""
        found: Counter[str] = Counter()
        for module in self.modules.values():
            if f"{module.name}.".startswith(f"{PACKAGE}.config."):
                for name, node in module.classes.items():
                    values = (line.value for line in node.body if isinstance(line, ast.AnnAssign))
                    found[name] += sum(_is_call(value, made_by) for value in values)
        return found

    def words(self, folder: str) -> tuple[int, int]:
        """Return the number of pages in Markdown under a folder and of their words."""
        pages = list((self.root / folder).rglob("*.md"))
        return len(pages), sum(len(page.read_text(encoding="utf-8").split()) for page in pages)

    def readme_lines(self) -> int:
        return len((self.root / "README.md").read_text(encoding="utf-8").splitlines())

    def subsystems(self) -> dict[str, tuple[int, int]]:
        """Return the files of code and their non-blank lines by folder: the package's and the lab's one level deeper.

        Files at the root are `.`; tests are not counted.
        """
        paths = [path for folder in (*PARTS, *BESIDE) for path in self.files(folder)]
        found: dict[str, tuple[int, int]] = {}
        for path in (*paths, *(path for path in self.root.glob("*.py") if path.is_file())):
            folders = path.relative_to(self.root).parts[:-1]
            name = "/".join(folders[: 2 if folders[:1] in ((PACKAGE,), (LAB,)) else 1]) or "."
            files, lines = found.get(name, (0, 0))
            found[name] = (
                files + 1,
                lines + sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines()),
            )
        return found

    def closure(self, name: str) -> set[str]:
        """Return the modules that are loaded with this one: itself and what it imports, in any number of steps. Imports
        inside functions, or for types alone, load nothing; an `__init__` that is only a docstring does not count."""
        found: set[str] = set()
        left = [name]
        while left:
            if (name := left.pop()) in self.modules and name not in found:
                found.add(name)
                left += _loads(self.modules[name].tree)
        return {name for name in found if len(self.modules[name].tree.body) > 1 or not self.modules[name].is_folder}

    def class_names(self) -> int:
        return len({name for module in self.modules.values() for name in module.classes})


# --- What warns of growth


def exceeded(house: House) -> Iterator[tuple[str, int, int]]:
    """Yield what is measured, how much there is, and how much there should be at most, where there is more."""
    pages, words = house.words("docs")
    measures = [
        ("pages in docs/", pages, MOST_PAGES),
        ("words in docs/", words, MOST_WORDS),
        ("lines of README.md", house.readme_lines(), MOST_README_LINES),
    ]
    folders = Counter(module.path.parent.relative_to(house.root) for module in house.modules.values())
    measures += [(f"files in {folder}", count, MOST_FILES) for folder, count in sorted(folders.items())]
    yield from (measure for measure in measures if measure[1] > measure[2])


def _loads(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a module imports as it is loaded, and perhaps names in them."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_call(value: ast.expr | None, names: Container[str]) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in names


def rows(house: House) -> Iterator[tuple[str, str]]:
    """Yield each figure with its name, in the order of the table."""
    sizes, deepest = house.function_sizes(), house.deepest_class()
    largest, folder = house.largest_folder()
    settings = house.settings(*SETTINGS)
    pages, words = house.words("docs")
    quantiles = statistics.quantiles(sizes, n=10)
    yield "functions of product and lab", f"{len(sizes):,}"
    yield "their lines, median / p90 / max", f"{statistics.median(sizes):.0f} / {quantiles[8]:.0f} / {sizes[-1]}"
    yield "deepest class", f"{len(deepest)}: {' < '.join(deepest)}"
    yield "modules flat in the package", f"{house.flat_modules()}"
    yield "modules of the largest folder", f"{largest}: {folder}"
    yield "class names that stand in several files", f"{len(house.colliding_names())}"
    yield "settings, and of them the schedule's", f"{settings.total()}, {settings['ScheduleConfig']}"
    yield "numbers that only presets and experiments set", f"{house.settings(EXPERIMENT).total()}"
    yield "README, lines", f"{house.readme_lines()}"
    yield "docs, pages and words", f"{pages}, {words:,}"
    yield "class names", f"{house.class_names():,}"
    for core in (f"{PACKAGE}.{name}" for name in CORES):
        if core in house.modules:
            yield f"files that {core} loads", f"{len(house.closure(core))}"
    found = house.subsystems()
    for title, names in _groups(found).items():
        yield title, _size(found, names)
    yield from ((f"    {name}", _size(found, [name])) for name in sorted(found))


def _groups(found: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    """Return the subsystems of the product, of the lab, of the papers, and of all with what stands beside them."""
    lab = [name for name in found if name.partition("/")[0] in (LAB, BENCHMARKS)]
    product = [name for name in found if name.partition("/")[0] in PARTS and name not in (*lab, PAPERS)]
    papers = [name for name in found if name == PAPERS]
    return {"product, without tests": product, "lab": lab, "papers": papers, "all code without tests": list(found)}


def _size(found: Mapping[str, tuple[int, int]], names: Collection[str]) -> str:
    files, lines = (sum(found[name][at] for name in names) for at in (0, 1))
    return f"{files:,} files, {lines:,} lines that are not blank"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at", type=Path, default=HERE, help="the checkout to measure")
    parser.add_argument("--list", action="store_true", help="list the colliding class names with their files")
    parser.add_argument("--warn", action="store_true", help="say where the repository grows beyond its own measure")
    options = parser.parse_args()
    house = House(options.at.resolve())
    if options.warn:
        print(
            "".join(f"warning: {found:,} {what}, of at most {most:,}\n" for what, found, most in exceeded(house)),
            end="",
        )
        return
    table = list(rows(house))
    width = max(len(name) for name, _ in table)
    print("\n".join(f"{name:{width}}  {figure}" for name, figure in table))
    if options.list:
        print("\n".join(f"{name}: {' '.join(paths)}" for name, paths in house.colliding_names().items()))


if __name__ == "__main__":
    main()
