"""Order test files by how near they are to a source file, so that most mutants are killed within seconds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import zip_longest
from pathlib import Path

from draw_folders import imports, modules
from tests.mutants.callers import Test, callers
from tests.mutants.planted import SOURCE, Planted

# Folders of tests that start whole deployments, need a GPU or a model, or test the repository and the tests.
_LEFT_OUT = ("end_to_end", "cluster", "third_party", "real_models", "gpu", "chaos", "house", "mutants")
_NOWHERE = 1000  # more steps than any way has
_FAR = 9  # more imports than that lie between no two modules that have to do with each other


def near_tests(file: str, name: str = "") -> list[str]:
    """Return test files, the nearest first: the file's own, then those with fewer imports between them and the file.
    A file that has the module in its text uses it, even where it only patches something in it.

    Of two that are as near, the one in the folder of the file's tests comes first. Files that have a name in their text
    come before all others.
    """
    module = next(name for name, path in modules().items() if path == SOURCE / file)
    ways = _ways(module)
    ranked = []
    for test, imported in _imported_by_tests().items():
        steps = 0 if module in _text(test) else min((ways.get(name, _FAR) for name in imported), default=_FAR)
        is_elsewhere = not test.startswith(f"{folder_of_tests(file)}/")
        if steps < _FAR or not is_elsewhere:
            is_another = is_elsewhere or Path(test).stem != f"test_{Path(file).stem}"
            ranked.append((bool(name) and name not in _text(test), is_another, steps, is_elsewhere, test))
    return [test for *_, test in sorted(ranked)]


def ways_to(mutant: Planted) -> Mapping[Test, int]:
    """Return how far the nearest tests are that may run what a mutant is in (callers.py)."""
    name = mutant.place.function or mutant.imported_name
    return callers().distances(mutant.file, name, _LEFT_OUT) if name else {}


def near_files(mutant: Planted, ways: Mapping[Test, int]) -> list[str]:
    """Return test files, those first whose tests may run what a mutant is in, and then those near its file."""
    steps: dict[str, int] = {}
    for (file, _), far in ways.items():
        steps[file] = min(far, steps.get(file, far))
    near, ours = near_tests(mutant.file, mutant.imported_name), f"{folder_of_tests(mutant.file)}/"
    files = [*near, *sorted(steps.keys() - set(near))]
    ranked = sorted(files, key=lambda file: (steps.get(file, _NOWHERE), file in steps and not file.startswith(ours)))
    # Tests of a part see much through its core, to which no name leads: every other file is one of its own.
    own = [file for file in ranked if file.startswith(ours)]
    return [*dict.fromkeys(file for both in zip_longest(ranked, own) for file in both if file)]


@cache
def _text(test: str) -> str:
    return (SOURCE / test).read_text(encoding="utf-8")


def folder_of_tests(file: str) -> str:
    first, second, *_ = Path(file).parts
    return f"tests/{second if first == 'alignedserve' else first}"


def _ways(module: str) -> dict[str, int]:
    """Return how many imports lie between each module and one that it uses."""
    graph = _imports()
    ways, last = {module: 0}, {module}
    for steps in range(1, _FAR):
        last = {name for name, used in graph.items() if name not in ways and used & last}
        ways |= dict.fromkeys(last, steps)
    return ways


@lru_cache(maxsize=1)
def _imports() -> Mapping[str, set[str]]:
    known = modules()
    return {name: set(imports(path, known)) for name, path in known.items()}


@lru_cache(maxsize=1)
def _imported_by_tests() -> Mapping[str, set[str]]:
    """Return the modules that each file of tests imports, itself or through the tests' own modules."""
    known = modules()
    files = sorted(path for path in (SOURCE / "tests").rglob("*.py") if path.parts[-2] not in _LEFT_OUT)
    names = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in files}
    direct = {name: set(imports(path, known | names)) for name, path in names.items()}
    found = {}
    for name, path in names.items():
        if path.name.startswith("test_"):
            helpers = set().union(*(direct[used] for used in direct[name] if used in direct))
            found[str(path.relative_to(SOURCE))] = (direct[name] | helpers) & known.keys()
    return found
