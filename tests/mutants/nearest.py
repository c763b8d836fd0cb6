"""Order the unit tests by how near they are to a mutated file, so that most mutants are killed within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import SOURCE, Mutant

# Tests of these folders may find a mutant of any core. The simulator's tests run the fuzzer, which has its own column.
_FOLDERS = (
    "protocol",
    "owner",
    "router",
    "prefill_worker",
    "decode_worker",
    "worker",
    "kvpool",
    "jobs",
    "transport",
    "shell",
)

# Tests that find most mutants of what both cores share.
_OF_CORES = (
    "tests/decode_worker/test_state.py",
    "tests/decode_worker/test_writing.py",
    "tests/decode_worker/test_candidates.py",
    "tests/prefill_worker/test_state.py",
    "tests/prefill_worker/test_offering.py",
    "tests/worker/test_shared_pages.py",
)


def nearest_first(mutant: Mutant) -> Iterator[list[str]]:
    """Return groups of test files: of the module, of its folder, and those of other folders that import its package."""
    folder = _files(mutant.tests)
    others = [file for name in _FOLDERS for file in _files(f"tests/{name}") if file not in folder]
    same = [file for file in folder if Path(file).stem == f"test_{Path(mutant.file).stem}"]
    importing = [file for file in (*folder, *others) if _mentions(file, f"{_module(mutant)} import ")]
    shared = _OF_CORES if mutant.file.startswith("alignedserve/worker/") else ()
    near = list(dict.fromkeys([*same, *importing, *shared]))
    yield near
    yield [file for file in folder if file not in near]
    yield [file for file in others if file not in near and _mentions(file, _package(mutant))]


def _files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in (SOURCE / folder).rglob("test_*.py"))


def _mentions(file: str, text: str) -> bool:
    return text in (SOURCE / file).read_text(encoding="utf-8")


def is_there(test: str) -> bool:
    """Return whether a test still has the name that it had when it killed a mutant."""
    file, _, name = test.partition("::")
    return (SOURCE / file).is_file() and _mentions(file, name.partition("[")[0].rpartition("::")[2])


def _module(mutant: Mutant) -> str:
    return ".".join(Path(mutant.file).with_suffix("").parts).removeprefix("alignedserve.")


def _package(mutant: Mutant) -> str:
    first, second, *_ = Path(mutant.file).parts
    return f"alignedserve.{second if first == 'alignedserve' else first}"
