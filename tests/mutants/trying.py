"""Try mutants against the tests that run them: the tests are collected once, and each mutant gets a fork.

The tests near the mutated files run once as they are, which tells what each costs and which functions it runs. A
mutant in a function is planted into the fork by giving the function other code. One that runs when its module is
imported gets a process of its own, where the import brings it.
"""

from __future__ import annotations

import ast
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutants.forked import Crashed, TakesTooLong, forked, limit
from tests.mutants.nearest import folder_of_tests, near_tests
from tests.mutants.other_code import Function, function_of, give_code, probe
from tests.mutants.planted import SOURCE, Planted

NEAR_FILES = 24  # of each mutated file
FIRST_RUN_S, MORE_S = 4.0, 2.0  # of processor time, for tests without mutants: the nearest come first; more a mutant
SLOW_S = 0.5  # tests that take longer come after those that take less
MUTANT_S = 15.0  # of processor time that the tests of a mutant take without it
MOST_S, FACTOR, START_S = 40.0, 10.0, 3.0  # with it a test has ten times what it takes, and a start; all have MOST_S
IMPORTS_S = 60.0  # more for a process that imports and collects
SURVIVED, KILLED, TIMED_OUT = "survived", "killed", "timed out"
_PLANTING = str(Path(__file__).with_name("planting"))
_OPTIONS = ("-q", "--no-header", "--capture=no", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:xdist")
Near = Mapping[Planted, Sequence[str]]  # the files of tests that are near each mutant


@dataclass(frozen=True)
class Tried:
    """What became of a mutant: the first test that failed, or how many ran it and passed."""

    verdict: str
    test: str = ""
    num_tests: int = 0

    @property
    def is_found(self) -> bool:
        return self.verdict in (KILLED, TIMED_OUT)


@dataclass(frozen=True)
class _Test:
    item: pytest.Item
    cpu_s: float
    runs: frozenset[Function]


def environment(mutant: Planted, scratch: Path) -> dict[str, str]:
    """Return what lets each process that is started with it have the mutant."""
    source = scratch / "mutant.py"
    source.write_text(ast.unparse(mutant.tree()), encoding="utf-8")
    path = os.pathsep.join((_PLANTING, str(SOURCE), str(SOURCE / "tools")))
    return {"PYTHONPATH": path, "MUTANT_FILE": str(SOURCE / mutant.file), "MUTANT_SOURCE": str(source)}


def tried(mutants: Sequence[Planted], say: Callable[[str], None]) -> Iterator[tuple[Planted, Tried]]:
    """Yield what becomes of each mutant, folder by folder."""
    near = {mutant: near_tests(mutant.file, mutant.imported_name)[:NEAR_FILES] for mutant in mutants}
    for folder in dict.fromkeys(mutant.folder for mutant in mutants):
        chosen = [mutant for mutant in mutants if mutant.folder == folder]
        found = forked(lambda chosen=chosen: _try_folder(chosen, near, say), inf, inf)  # type: ignore[misc]
        yield from zip(chosen, (Tried(*each) for each in found), strict=True)


def _try_folder(mutants: Sequence[Planted], near: Near, say: Callable[[str], None]) -> list[tuple[str, str, int]]:
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not live on in a fork
    with TemporaryDirectory(prefix="mutants-") as scratch:
        trying = _Trying(mutants, near, Path(scratch), say)
        sys.setprofile(trying.recorder)
        pytest.main([*_OPTIONS, f"--basetemp={scratch}/tests", *trying.files], plugins=[trying])
        if len(trying.found) != len(mutants):
            raise RuntimeError(f"tests cannot be collected: {' '.join(trying.files)}")
        return [(found.verdict, found.test, found.num_tests) for found in trying.found]


class _Trying:
    """A plugin of pytest that runs the tests it has collected once for each mutant."""

    def __init__(self, mutants: Sequence[Planted], near: Near, scratch: Path, say: Callable[[str], None]) -> None:
        self._mutants, self._scratch, self._say = mutants, scratch, say
        self._near = near
        ranks = [(rank, test) for mutant in mutants for rank, test in enumerate(near[mutant])]
        own_folder = f"{folder_of_tests(mutants[0].file)}/"
        ranks.sort(key=lambda ranked: (not ranked[1].startswith(own_folder), *ranked))
        self.files = list(dict.fromkeys(test for _, test in ranks))
        self._imported: dict[int, CodeType] = {}  # what ran while tests were collected
        self._ran: set[Function] = set()
        self._failed: list[str] = []
        self._tests: list[_Test] = []
        self._shared: dict[tuple[str, str], set[Function]] = {}  # what fixtures run, by where and how they are named
        self.found: list[Tried] = []

    def recorder(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            self._imported[id(code)] = code

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.setprofile(None)
        at_import = set(map(function_of, self._imported.values()))
        items = _in_turns(session.items, {near[0] for near in self._near.values() if near})
        names = {item.nodeid: item for item in items}
        began = time.monotonic()
        first = forked(lambda: self._first_run(items), inf)
        self._tests = [
            _Test(names[name], cpu_s, frozenset((file, line, function) for file, line, function in runs))
            for name, cpu_s, runs in first
        ]
        folder = self._mutants[0].folder
        self._say(f"{folder}: {len(first)} of {len(items)} tests in {time.monotonic() - began:.0f} s")
        for mutant in self._mutants:
            self.found.append(self._try(mutant, at_import))
            last = self.found[-1]
            self._say(f"  {last.verdict} by {last.test or f'none of {last.num_tests}'}: {mutant.name}")
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Note what a fixture runs that tests share, since each of them depends on it."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._ran.copy()
        self._ran.clear()
        try:
            return (yield)
        finally:
            self._shared[fixturedef.baseid, fixturedef.argname] = self._ran.copy()
            self._ran.update(before)

    def _first_run(self, items: Sequence[pytest.Item]) -> list[tuple[str, float, list[Function]]]:
        """Run tests without a mutant; return what each that passes costs, and which functions of ours it runs.

        No file takes more than its share of the time before all have had theirs.
        """
        self._ran = probe({mutant.file for mutant in self._mutants})
        found, spent, most_s = [], dict.fromkeys(self.files, 0.0), FIRST_RUN_S + MORE_S * len(self._mutants)
        waiting, share = deque(items), 2 * most_s / len(self.files)
        put_off: list[pytest.Item] = []
        while sum(spent.values()) < most_s and (waiting or put_off):
            if not waiting:
                waiting, put_off, share = deque(put_off), [], most_s
            item = waiting.popleft()
            name, before = item.nodeid.partition("::")[0], time.process_time()
            if spent[name] > share:
                put_off.append(item)
                continue
            self._failed = []
            self._ran.clear()
            _run(item)
            cost = time.process_time() - before
            spent[name] += cost
            if not self._failed:
                found.append((item.nodeid, cost, list(self._ran.union(*self._shared_by(item)))))
        return found

    def _shared_by(self, item: pytest.Item) -> list[set[Function]]:
        used = set(getattr(item, "fixturenames", ()))
        return [runs for (where, name), runs in self._shared.items() if name in used and item.nodeid.startswith(where)]

    def _try(self, mutant: Planted, at_import: set[Function]) -> Tried:
        place = mutant.place
        function = (mutant.file, place.line, place.name)
        is_read_as_text = mutant.file.startswith("kernels/triton/")
        is_in_a_function = bool(place.line) and function not in at_import and not is_read_as_text
        tests = self._chosen(mutant, function if place.line and not is_read_as_text else None)
        if not tests:
            return Tried(SURVIVED)
        if is_in_a_function:
            found = self._verdict(tests, 0.0, lambda: self._in_a_fork(mutant, tests))
            if found is not None:
                return found
        found = self._verdict(tests, IMPORTS_S, lambda: self._in_a_process(mutant, tests))
        assert found is not None
        return found

    def _verdict(self, tests: list[_Test], more_s: float, run: Callable[[], str | None]) -> Tried | None:
        """Run the tests with a mutant; None where it could not be planted."""
        try:
            failed = forked(run, MOST_S + more_s)
        except TakesTooLong:
            return Tried(TIMED_OUT, num_tests=len(tests))
        except Crashed:
            return Tried(KILLED, "the process ended", len(tests))
        if failed is None:
            return None
        again = [test for test in tests if test.item.nodeid == failed]
        if again and self._fails_anyway(again):
            return self._verdict([test for test in tests if test not in again], more_s, run)
        return Tried(KILLED if failed else SURVIVED, failed, len(tests))

    def _fails_anyway(self, tests: list[_Test]) -> bool:
        try:
            return bool(forked(lambda: self._first_failing(tests), MOST_S))
        except (TakesTooLong, Crashed):
            return True

    def _chosen(self, mutant: Planted, function: Function | None) -> list[_Test]:
        """Return the tests that run the function, or any of the file where it runs at import, the nearest first."""
        near = {file: rank for rank, file in enumerate(self._near[mutant])}

        def distance(test: _Test) -> tuple[bool, bool, int]:
            is_blind = not any(file == mutant.file for file, _, _ in test.runs)
            return is_blind, test.cpu_s > SLOW_S, near.get(test.item.nodeid.partition("::")[0], len(near))

        tests = [test for test in self._tests if function is None or function in test.runs]
        tests = [test for test in tests if function or not distance(test)[0] or distance(test)[2] < len(near)]
        tests.sort(key=distance)
        costs = accumulate(test.cpu_s for test in tests)
        fitting = [test for test, _ in takewhile(lambda pair: pair[1] < MUTANT_S, zip(tests, costs, strict=True))]
        return fitting or tests[:1]

    def _in_a_fork(self, mutant: Planted, tests: list[_Test]) -> str | None:
        self._set_environment(mutant)
        given = give_code({mutant.file: mutant.tree()})
        return self._first_failing(tests) if (mutant.file, mutant.place.line, mutant.place.name) in given else None

    def _first_failing(self, tests: list[_Test]) -> str:
        self._failed = []
        for test in tests:
            limit(START_S + FACTOR * test.cpu_s)
            _run(test.item)
            if self._failed:
                break
        tests[0].item.session._setupstate.teardown_exact(None)
        return self._failed[0] if self._failed else ""

    def _in_a_process(self, mutant: Planted, tests: list[_Test]) -> str:
        self._set_environment(mutant)
        chosen, failed = self._scratch / "chosen", self._scratch / "failed"
        chosen.write_text("\n".join(test.item.nodeid for test in tests), encoding="utf-8")
        failed.unlink(missing_ok=True)
        os.environ |= {"CHOSEN_TESTS": str(chosen), "FAILED_TEST": str(failed)}
        files = dict.fromkeys(test.item.nodeid.partition("::")[0] for test in tests)
        command = [sys.executable, "-m", "pytest", "-x", *_OPTIONS, "-p", "chosen_tests", *files]
        status = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn(sys.executable, command, os.environ), 0)[1])
        if failed.exists():
            return failed.read_text(encoding="utf-8")
        return "the tests cannot be collected" if status else ""

    def _set_environment(self, mutant: Planted) -> None:
        os.environ |= environment(mutant, self._scratch)


def _in_turns(items: Sequence[pytest.Item], nearest: set[str]) -> list[pytest.Item]:
    """Order tests of which only the first may have the time to run: before further cases of a test come all others.

    Of the nearest files all cases come first.
    """
    first, further, seen = list[pytest.Item](), list[pytest.Item](), set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        (further if name in seen and item.nodeid.partition("::")[0] not in nearest else first).append(item)
        seen.add(name)
    return [*first, *further]


def _run(item: pytest.Item) -> None:
    """Run a test, and leave up what others of its file share with it: which is the next is not known yet."""
    item.session._setupstate.teardown_exact(item)
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=item.parent)
