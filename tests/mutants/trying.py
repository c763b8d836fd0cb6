"""Try mutants against the tests that run them: all mutants share one collection, and each gets a fork.

Some tests that may run the mutated functions (callers.py), or are near their files, run once as they are, which tells
what each costs and which functions it runs; more of them run for mutants that survive those. A mutant in a function is
planted into the fork by giving the function other code. One that runs when its module is imported gets a fork of a
process that has imported no product code yet, only what that imports of others.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, takewhile, zip_longest
from math import inf
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import IO, Any

import pytest

from tests.mutants.callers import Test
from tests.mutants.forked import IDLE_S, Crashed, TakesTooLong, forked, limit
from tests.mutants.nearest import near_files, ways_to
from tests.mutants.other_code import Function, function_of, give_code, probe
from tests.mutants.planted import SOURCE, Planted

NEAR_FILES = 24  # of each mutated file
# Tests run without mutants, the nearest first, until so many run each mutant's function, or so much processor time has
# gone for each mutant; then others, for those that survive, and more for those that survive these.
ENOUGH = 5
ROUNDS = ((ENOUGH, 0.8), (inf, 2.5), (inf, 8.0))
SLOW_S = 0.5  # tests that take longer come after those that take less
MUTANT_S = 8.0  # of processor time that the tests of a mutant take without it
# With it a test has ten times what it takes, and a start: what it shares with others is made again. All have MOST_S.
MOST_S, FACTOR, START_S = 60.0, 10.0, 20.0
IMPORTS_S = 60.0  # more for a process that imports and collects
SURVIVED, KILLED, TIMED_OUT = "survived", "killed", "timed out"
_PLANTING = Path(__file__).with_name("planting")
OPTIONS = ("-q", "--no-header", "--capture=no", "-p", "no:cacheprovider", "-p", "no:schemathesis")
Ways = Mapping[Planted, Mapping[Test, int]]  # how far the tests are that may run each mutant
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
    wall_s: float
    runs: frozenset[Function]


def environment(mutant: Planted, scratch: Path) -> dict[str, str]:
    """Return what lets each process that is started with it have the mutant."""
    source = scratch / "mutant.py"
    source.write_text(ast.unparse(mutant.tree()), encoding="utf-8")
    path = os.pathsep.join((str(_PLANTING), str(SOURCE), str(SOURCE / "tools")))
    return {"PYTHONPATH": path, "MUTANT_FILE": str(SOURCE / mutant.file), "MUTANT_SOURCE": str(source)}


def tried(mutants: Sequence[Planted], say: Callable[[str], None]) -> Iterator[tuple[Planted, Tried]]:
    """Yield what becomes of each mutant; they share one collection of tests."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not live on in a fork
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all that it imports
    sys.dont_write_bytecode = False
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does: here Triton is imported before that
    if not mutants:
        return
    ways = {mutant: ways_to(mutant) for mutant in mutants}
    near = {mutant: near_files(mutant, ways[mutant])[:NEAR_FILES] for mutant in mutants}
    found, imported = forked(lambda: _try_all(mutants, near, ways, say), inf, inf)
    _import(imported)
    for mutant, (verdict, test, num_tests, names) in zip(mutants, found, strict=True):
        before_s = _children_s()
        each = Tried(verdict, test, num_tests) if verdict else _verdict_of_process(mutant, names)
        if not verdict:
            say(_line(mutant, each, _children_s() - before_s))
        yield mutant, each


_Found = tuple[str, str, int, Sequence[str]]  # a verdict, or none and the tests that a process has to run


def after_round(before: _Found | None, now: _Found) -> _Found:
    """Return what is known of a mutant after a round. A round in which no further test runs the mutant adds nothing."""
    if before is None:
        return now
    verdict, test, num_tests, names = now
    return (verdict, test, num_tests + before[2] * bool(verdict), names) if num_tests else before


def _try_all(
    mutants: Sequence[Planted], near: Near, ways: Ways, say: Callable[[str], None]
) -> tuple[list[_Found], list[str]]:
    """Return what becomes of each mutant, and the modules of others that were imported."""
    with TemporaryDirectory(prefix="mutants-") as scratch:
        trying = _Trying(mutants, near, ways, Path(scratch), say)
        sys.settrace(trying.recorder)
        pytest.main([*OPTIONS, f"--basetemp={scratch}/tests", *trying.files], plugins=[trying])
        if len(trying.found) != len(mutants):
            raise RuntimeError(trying.error or f"tests cannot be collected: {' '.join(trying.files)}")
        return trying.found, _imported_of_others()


def _imported_of_others() -> list[str]:
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [name for name, file in files.items() if file and "site-packages" in file]


def _import(names: Sequence[str]) -> None:
    for name in names:
        with suppress(Exception):  # a part of a package that is not imported by itself
            import_module(name)


def _verdict_of_process(mutant: Planted, tests: Sequence[str]) -> Tried:
    """Run tests where the mutant's module is not imported yet."""
    with TemporaryDirectory(prefix="mutants-") as scratch:
        try:
            failed = forked(lambda: _first_failing_of(tests, Path(scratch), mutant), MOST_S + IMPORTS_S)
        except TakesTooLong:
            return Tried(TIMED_OUT, num_tests=len(tests))
        except Crashed:
            return Tried(KILLED, "the process ended", len(tests))
        if not failed or _pass([failed] if failed in tests else tests):
            return Tried(KILLED if failed else SURVIVED, failed, len(tests))
        if failed not in tests:
            return Tried(SURVIVED)
    others = [test for test in tests if test != failed]  # since that one fails anyway
    return _verdict_of_process(mutant, others) if others else Tried(SURVIVED)


def _pass(tests: Sequence[str]) -> bool:
    with TemporaryDirectory(prefix="mutants-") as scratch, suppress(TakesTooLong, Crashed):
        return not forked(lambda: _first_failing_of(tests, Path(scratch)), MOST_S + IMPORTS_S)
    return False


def _first_failing_of(tests: Sequence[str], scratch: Path, mutant: Planted | None = None) -> str:
    if mutant:
        os.environ |= environment(mutant, scratch)
        sys.path.insert(0, str(_PLANTING))
        sys.modules.pop("sitecustomize", None)  # some systems have one
        import_module("sitecustomize")
    chosen = _Chosen(tests)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    status = pytest.main(["-x", *OPTIONS, f"--basetemp={scratch}/tests", *files], plugins=[chosen])
    return chosen.failed or ("the tests cannot be collected" if status else "")


class _Chosen:
    """A plugin of pytest that runs these tests, in their order, and keeps the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _children_s() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _line(mutant: Planted, found: Tried, cpu_s: float) -> str:
    return f"  {found.verdict} by {found.test or f'none of {found.num_tests}'} in {cpu_s:.1f} s: {mutant.name}"


class _Trying:
    """A plugin of pytest that runs the tests it has collected once for each mutant."""

    def __init__(
        self, mutants: Sequence[Planted], near: Near, ways: Ways, scratch: Path, say: Callable[[str], None]
    ) -> None:
        self._mutants, self._scratch, self._say = mutants, scratch, say
        self._near, self._ways = near, ways
        ranks = [(rank, test) for mutant in mutants for rank, test in enumerate(near[mutant])]
        ranks.sort()
        self.files = list(dict.fromkeys(test for _, test in ranks))
        self._imported: dict[int, CodeType] = {}  # what ran while tests were collected
        self._ran: set[Function] = set()
        self._failed: list[str] = []
        self._tests: list[_Test] = []
        self._unrun: Sequence[pytest.Item] = ()
        self._shared: dict[tuple[str, str], set[Function]] = {}  # what fixtures run, by where and how they are named
        self.found: list[_Found] = []
        self.error = ""

    def recorder(self, frame: FrameType, _event: str, _argument: object) -> None:
        self._imported[id(frame.f_code)] = frame.f_code

    def pytest_internalerror(self, excrepr: object) -> None:
        self.error = str(excrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.settrace(None)
        at_import = set(map(function_of, self._imported.values()))
        items = _in_turns(session.items, {near[0] for near in self._near.values() if near})
        self._unrun = items
        found = dict[Planted, _Found]()
        self._say(f"{len(items)} tests collected in {time.process_time():.0f} s")
        alive = list(self._mutants)
        for enough, most_s in ROUNDS:
            before_s, known = _children_s(), {test.item.nodeid for test in self._tests}
            self._learn(alive, enough, most_s * len(alive))
            self._say(f"{len(self._tests)} run in {_children_s() - before_s:.0f} s for {len(alive)} mutants")
            for mutant in alive:
                before_s = _children_s()
                now = self._try(mutant, at_import, known)
                found[mutant] = after_round(found.get(mutant), now)
                if now[0]:
                    self._say(_line(mutant, Tried(*found[mutant][:3]), _children_s() - before_s))
            alive = [mutant for mutant in alive if found[mutant][0] in (SURVIVED, "")]
            if not alive:
                break
        self.found = [found[mutant] for mutant in self._mutants]
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

    def _learn(self, mutants: Sequence[Planted], enough: float, most_s: float) -> None:
        """Run tests without a mutant, and note what each that passes costs, and which functions of ours it runs."""
        log, names = self._scratch / "first", {item.nodeid: item for item in self._unrun}
        used_s, imported = 0.0, None
        while imported is None:
            log.write_text("", encoding="utf-8")
            try:
                imported = forked(lambda: self._first_run(mutants, enough, most_s - used_s, log), inf, inf)  # noqa: B023
            except Crashed:
                if not log.stat().st_size:  # otherwise a test has ended the process: it is left out
                    raise
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
            began = {line for line in lines if isinstance(line, str)}
            for name, cpu_s, wall_s, runs, passes in [line for line in lines if not isinstance(line, str)]:
                used_s += cpu_s
                if passes:
                    self._tests.append(_Test(names[name], cpu_s, wall_s, frozenset(tuple(each) for each in runs)))
            self._unrun = [item for item in self._unrun if item.nodeid not in began]
        _import(imported)  # or each fork imports it again

    def _first_run(self, mutants: Sequence[Planted], enough: float, most_s: float, log: Path) -> list[str]:
        """Run tests until each mutant has enough of them: in turns those that may run it, then all of the files near
        it, of which none takes more than its share before all have theirs."""
        self._ran = probe({mutant.file for mutant in self._mutants})
        spent = dict.fromkeys(self.files, 0.0)
        ranks = dict[str, int]()
        for mutant in mutants:
            ranks |= {file: min(rank, ranks.get(file, rank)) for rank, file in enumerate(self._near[mutant])}
        waiting, share = deque(self._unrun), most_s / len(mutants)
        if enough == inf:  # further cases of tests that run a mutant come first, then all of the nearest files
            run = [test for test in self._tests if any(_is_run(mutant, test.runs) for mutant in mutants)]
            hot = {test.item.nodeid.partition("[")[0] for test in run}
            names = {item: item.nodeid.partition("::")[0] for item in self._unrun}
            turns = {item: (item.nodeid.partition("[")[0] not in hot, ranks.get(names[item], inf)) for item in names}
            waiting, share = deque(sorted(self._unrun, key=turns.__getitem__)), 2 * share
        put_off: list[pytest.Item] = []
        lacking = {mutant: sum(_is_run(mutant, test.runs) for test in self._tests) for mutant in mutants}
        done = set[pytest.Item]()
        with log.open("w", encoding="utf-8") as lines:
            for mutant, item in _in_turns_of(self._by_ways(mutants)):
                if lacking[mutant] < ENOUGH and item not in done and sum(spent.values()) < most_s:
                    done.add(item)
                    self._run_once(item, spent, lacking, lines)
            while sum(spent.values()) < most_s and (waiting or put_off):
                if not waiting:
                    waiting, put_off, share = deque(put_off), [], most_s
                item = waiting.popleft()
                file = item.nodeid.partition("::")[0]
                is_near = any(number < enough and file in self._near[mutant] for mutant, number in lacking.items())
                if item in done or not is_near:
                    continue
                if spent[file] > share:
                    put_off.append(item)
                    continue
                self._run_once(item, spent, lacking, lines)
        return _imported_of_others()

    def _by_ways(self, mutants: Sequence[Planted]) -> Mapping[Planted, list[pytest.Item]]:
        """Return for each mutant the tests that may run it and have not run, the nearest first, one case of each."""
        cases = {_test_of(item): item for item in reversed(self._unrun)}
        found = {}
        for mutant in mutants:
            ranks = {file: rank for rank, file in enumerate(self._near[mutant])}
            ways = {test: (steps, ranks.get(test[0], inf)) for test, steps in self._ways[mutant].items()}
            found[mutant] = [cases[test] for test in sorted(ways, key=ways.__getitem__) if test in cases]
        return found

    def _run_once(
        self, item: pytest.Item, spent: dict[str, float], lacking: dict[Planted, int], lines: IO[str]
    ) -> None:
        """Run a test without mutants, and say what it cost and which functions it ran."""
        print(json.dumps(item.nodeid), file=lines, flush=True)
        before_s, began_at = time.process_time(), time.monotonic()
        self._failed = []
        self._ran.clear()
        _run(item)
        cpu_s = time.process_time() - before_s
        spent[item.nodeid.partition("::")[0]] += cpu_s
        runs = self._ran.union(*self._shared_by(item))
        took = [item.nodeid, cpu_s, time.monotonic() - began_at, list(runs), not self._failed]
        print(json.dumps(took), file=lines, flush=True)
        for mutant in lacking:
            lacking[mutant] += not self._failed and _is_run(mutant, runs)

    def _shared_by(self, item: pytest.Item) -> list[set[Function]]:
        used = set(getattr(item, "fixturenames", ()))
        return [runs for (where, name), runs in self._shared.items() if name in used and item.nodeid.startswith(where)]

    def _try(self, mutant: Planted, at_import: set[Function], known: set[str]) -> _Found:
        """Try those tests that are not known yet; name all where a process has to run them."""
        is_in_a_function = _function(mutant) is not None and _function(mutant) not in at_import
        tests = self._chosen(mutant, known if is_in_a_function else set())
        if not tests:
            return (SURVIVED, "", 0, ())
        if is_in_a_function and (found := self._verdict(mutant, tests)) is not None:
            return found
        tests = self._chosen(mutant, set())
        return ("", "", len(tests), [test.item.nodeid for test in tests])

    def _verdict(self, mutant: Planted, tests: list[_Test]) -> _Found | None:
        """Run the tests with a mutant; None where it could not be planted."""
        try:
            idle_s = IDLE_S + sum(test.wall_s for test in tests)
            failed = forked(lambda: self._in_a_fork(mutant, tests), MOST_S, idle_s)
        except TakesTooLong:
            return (TIMED_OUT, "", len(tests), ())
        except Crashed:
            return (KILLED, "the process ended", len(tests), ())
        if failed is None:
            return None
        again = [test for test in tests if test.item.nodeid == failed]
        if again and self._fails_anyway(again):
            return self._verdict(mutant, [test for test in tests if test not in again])
        return (KILLED if failed else SURVIVED, failed, len(tests), ())

    def _fails_anyway(self, tests: list[_Test]) -> bool:
        try:
            return bool(forked(lambda: self._first_failing(tests), MOST_S))
        except (TakesTooLong, Crashed):
            return True

    def _chosen(self, mutant: Planted, known: Set[str]) -> list[_Test]:
        """Return the tests beside the `known` that run the function, or any of the file where it runs at import, the
        nearest first."""
        near = {file: rank for rank, file in enumerate(self._near[mutant])}

        def distance(test: _Test) -> tuple[bool, bool, int]:
            is_blind = not any(file == mutant.file for file, _, _ in test.runs)
            return is_blind, test.cpu_s > SLOW_S, near.get(test.item.nodeid.partition("::")[0], len(near))

        function = _function(mutant)
        unknown = [test for test in self._tests if test.item.nodeid not in known]
        tests = [test for test in unknown if function is None or function in test.runs]
        tests = [test for test in tests if function or not distance(test)[0] or distance(test)[2] < len(near)]
        tests.sort(key=distance)
        costs = accumulate(test.cpu_s for test in tests)
        fitting = [test for test, _ in takewhile(lambda pair: pair[1] < MUTANT_S, zip(tests, costs, strict=True))]
        return fitting or tests[:1]

    def _in_a_fork(self, mutant: Planted, tests: list[_Test]) -> str | None:
        os.environ |= environment(mutant, self._scratch)
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


def _function(mutant: Planted) -> Function | None:
    """Return the function that a mutant is in; None where all that imports or reads its file runs it."""
    place, is_read_as_text = mutant.place, mutant.file.startswith("kernels/triton/")
    return None if is_read_as_text or not place.line else (mutant.file, place.line, place.name)


def _is_run(mutant: Planted, runs: Set[Function]) -> bool:
    function = _function(mutant)
    return function in runs if function else any(file == mutant.file for file, _, _ in runs)


def _in_turns_of(lists: Mapping[Planted, Sequence[pytest.Item]]) -> Iterator[tuple[Planted, pytest.Item]]:
    """Yield the first of each list, then the second of each, and so on."""
    for turn in zip_longest(*lists.values()):
        yield from ((mutant, item) for mutant, item in zip(lists, turn, strict=True) if item is not None)


def _test_of(item: pytest.Item) -> Test:
    file, _, name = item.nodeid.partition("[")[0].partition("::")
    return file, name.rpartition("::")[2]


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
