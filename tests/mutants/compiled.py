"""Mutants of the C++ kernels' dispatch: what chooses instruction sets and kernels, and divides work among threads.

A draw changes one line of text in which such a choice stands. The changed source is compiled for the best instruction
set of this CPU alone, and linked with the others' objects into a library that the nearest tests load.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.forked import Crashed, TakesTooLong, forked
from tests.mutants.planted import SOURCE
from tests.mutants.results import commit
from tests.mutants.score import Row
from tests.mutants.trying import KILLED, OPTIONS, SURVIVED, TIMED_OUT, Tried

FOLDER = "kernels/csrc"
_TESTS_S = 60.0  # of processor time; the tests of one source take half as long
_DISPATCHES = re.compile(r"thread|parts?\b|\bisa\b|cpu|dtype|WORTH|panels?\b|packed|quantised\b|is_|has_|can_", re.I)
_NO_CODE = re.compile(r"^\s*(//|#|static_assert|using |template|case |struct |class |namespace |})")
_SWAPS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    "(!": "(",
}
_STATEMENT = re.compile(r"^(\s*)(if \(.*\) )?[\w.>\[\]-]+(\(.*\)| [-+*/|]?= .*);$")
_NUMBER = re.compile(r"(?<![\w.\"])\d+(?![\w.\"])")


@dataclass(frozen=True)
class TextMutant:
    file: str  # in csrc/
    line: int
    operator: str
    old: str
    new: str

    @property
    def name(self) -> str:
        return " | ".join((f"{FOLDER}/{self.file}", "-", self.operator, " ".join(self.old.split())))


def draw(seed: int) -> list[TextMutant]:
    """Draw changes of lines, no two of one line."""
    lines: dict[tuple[str, int], list[TextMutant]] = {}
    for path in sorted((SOURCE / FOLDER).glob("*.cpp")):
        for place, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            is_wanted = _DISPATCHES.search(line.partition("//")[0]) and not _NO_CODE.match(line)
            if is_wanted and (found := list(_changes(path.name, place, line))):
                lines[path.name, place] = found
    luck = random.Random(f"{seed} {FOLDER}")
    drawn = [luck.choice(choices) for choices in lines.values()]
    luck.shuffle(drawn)
    return drawn


def _changes(file: str, place: int, line: str) -> Iterator[TextMutant]:
    code = line.partition("//")[0].rstrip()
    for old, new in _SWAPS.items():
        for found in re.finditer(re.escape(old), code):
            changed = code[: found.start()] + new + code[found.end() :]
            yield TextMutant(file, place, f"{old.strip()} to {new.strip()}", code, changed)
    for found in _NUMBER.finditer(code):
        changed = code[: found.start()] + str(int(found[0]) + 1) + code[found.end() :]
        yield TextMutant(file, place, f"constant {found[0]} +1", code, changed)
    if statement := _STATEMENT.match(code):
        yield TextMutant(file, place, "statement left out", code, f"{statement[1]};")


def tried(mutants: Sequence[TextMutant], say: Callable[[str], None]) -> Iterator[tuple[TextMutant, Tried]]:
    """Yield what becomes of each mutant that compiles."""
    with TemporaryDirectory(prefix="mutants-") as scratch:
        builder = _Builder(Path(scratch))
        whole = builder.link({})
        failing = set[str]()
        known = set[str]()
        for mutant in mutants:
            builder.restore()
            while mutant.file not in known:  # leave out what fails anyway: some tests need other instruction sets
                failed = forked(lambda file=mutant.file: _first_failing(whole, file, failing), inf)
                (failing if failed else known).add(failed or mutant.file)
            library = builder.mutated(mutant)
            if library is None:
                continue
            found = Tried(SURVIVED) if mutant.name in EQUIVALENT else _verdict(library, mutant.file, failing)
            say(f"  {found.verdict} by {found.test or 'none'}: {mutant.name} -> {mutant.new.strip()}")
            yield mutant, found


def _verdict(library: Path, file: str, failing: set[str]) -> Tried:
    try:
        failed = forked(lambda: _first_failing(library, file, failing), _TESTS_S)
    except TakesTooLong:
        return Tried(TIMED_OUT)
    except Crashed:
        return Tried(KILLED, "the process ended")
    return Tried(KILLED if failed else SURVIVED, failed)


def _first_failing(library: Path, file: str, failing: set[str]) -> str:
    """Return the first test that fails with the library in place of the one that was built, or nothing."""
    from alignedserve.kernels import build

    name = build.sources()
    build.LIBRARY, build.SOURCES, build.sources = library, library.parent / "csrc", lambda: name
    stem = Path(file).stem.removesuffix("_attention")
    tests = sorted((SOURCE / "tests/kernels").glob("test_*.py"), key=lambda test: (stem not in test.stem, test.stem))
    near = [str(test) for test in tests if stem in test.stem or test.stem in _ALWAYS]
    if file == build.ONCE:
        near = [f"{SOURCE / 'tests/kernels/test_build.py'}::test_what_this_cpu_has_is_usable_and_nothing_else"]
    seen = _Seen(failing)
    pytest.main(["-x", *OPTIONS, *(near or map(str, tests))], plugins=[seen])
    return seen.failed


_ALWAYS = ("test_decoder", "test_threads", "test_failing")


class _Seen:
    """A plugin of pytest that leaves out tests that fail anyway, and keeps the first that fails."""

    def __init__(self, failing: set[str]) -> None:
        self._failing, self.failed = failing, ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._failing]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


class _Builder:
    """Compiles each source once, and those of mutants again."""

    def __init__(self, folder: Path) -> None:
        from alignedserve.kernels import build

        self._build, self._folder, self._compiler = build, folder, build.find_compiler()
        self._isa = build.used_here(self._compiler, list(build.X86))[-1]
        (folder / "built_for.h").write_text(f"BUILT_FOR({self._isa})\n", encoding="utf-8")
        (folder / "built_from.h").write_text(f'#define BUILT_FROM "{build.sources()}"\n', encoding="utf-8")
        self._sources = Path(shutil.copytree(build.SOURCES, folder / "csrc"))
        sources = sorted(self._sources.glob("*.cpp"))
        assert all(self._compile(source, source.name) for source in sources), "the sources do not compile"
        self._objects = {source.name: folder / f"{source.name}.o" for source in sources}

    def _compile(self, source: Path, name: str) -> bool:
        isa = [] if source.name == self._build.ONCE else [*self._build.X86[self._isa], f"-DISA={self._isa}"]
        flags = [*self._build._FLAGS, "-O1", "-w", f"-I{self._folder}", *isa]
        command = [*self._compiler, *flags, "-c", str(source), "-o", str(self._folder / f"{name}.o")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def link(self, others: dict[str, Path]) -> Path:
        library = self._folder / f"{len(list(self._folder.glob('*.so')))}.so"
        objects = [str(others.get(name, made)) for name, made in self._objects.items()]
        subprocess.run([*self._compiler, "-shared", "-o", str(library), *objects, "-lm"], check=True)
        return library

    def restore(self) -> None:
        shutil.copytree(self._build.SOURCES, self._sources, dirs_exist_ok=True)

    def mutated(self, mutant: TextMutant) -> Path | None:
        """Return a library with the mutant, or None where it does not compile, or compiles to the same."""
        source = self._sources / mutant.file
        text = source.read_text(encoding="utf-8").splitlines()
        text[mutant.line] = mutant.new
        source.write_text("\n".join(text), encoding="utf-8")
        made = self._folder / f"mutant.{mutant.file}.o"
        if not self._compile(source, f"mutant.{mutant.file}"):
            return None
        is_same = made.read_bytes() == self._objects[mutant.file].read_bytes()
        return None if is_same else self.link({mutant.file: made})


def row_of(found: dict[TextMutant, Tried]) -> tuple[Row, list[str]]:
    """Count what became of the mutants, and name the survivors."""
    counted = {mutant: each for mutant, each in found.items() if mutant.name not in EQUIVALENT}
    verdicts = [each.verdict for each in counted.values()]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (SOURCE / FOLDER).glob("*"))
    killed, timed_out, survived = (verdicts.count(verdict) for verdict in (KILLED, TIMED_OUT, SURVIVED))
    row = Row(FOLDER, lines, len(found), killed, timed_out, survived, len(found) - len(counted), commit())
    alive = [mutant.name for mutant, each in counted.items() if each.verdict == SURVIVED]
    return row, [f"- `{name}`: passes the tests of its source" for name in alive]
