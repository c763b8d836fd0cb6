"""Tests of what stands around a run of the tests: times and budgets, flakes, and which tests are near a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count, groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import draws, flakes, rare, times
from tests.conftest import in_one_process
from tests.flakes import Flake, told, why_red
from tests.near import OF_FOLDERS, Deadline, by_turns, near, that_fit
from tests.processes import Processes
from tests.simulator.planted import lost_release, planted
from tests.times import ROOT, UNKNOWN_S, Timing, budgets_of, over

pytest_plugins = ("pytester",)

TIMINGS = [
    Timing("tests/engine/test_a.py::test_slow[1]", 30.0, 20.0),
    Timing("tests/engine/test_b.py::test_fast", 1.0, 1.0),
    Timing("tests/owner/test_c.py::test_c", 9.0, 0.5),
    Timing("tests/test_reference.py::test_d", 0.0, 0.0),
]


class TestTimes:
    def test_what_each_process_of_a_run_kept_is_read_and_no_other_run(self, tmp_path: Path) -> None:
        times.keep(TIMINGS[:1], "-gw0", tmp_path)
        times.begin(tmp_path)
        times.keep(TIMINGS[1:3], "-gw0", tmp_path)
        times.keep(TIMINGS[3:], "-gw1", tmp_path)
        assert times.last_run(tmp_path) == TIMINGS[1:]

    @pytest.mark.parametrize("some", ["tests/owner", "-k some", "-m slow", "--last-failed", "-x", "--deselect tests/a"])
    def test_a_run_of_some_tests_forgets_none_of_all(self, pytester: pytest.Pytester, some: str) -> None:
        pytester.makeini("[pytest]\ntestpaths = tests\naddopts = -p no:schemathesis")
        (pytester.path / "tests").mkdir()
        assert times.folder_of(pytester.parseconfig(*some.split())) == times.KEPT_OF_SOME
        assert times.folder_of(pytester.parseconfig("-q")) == times.KEPT

    def test_a_folder_beyond_its_budget_is_named_with_how_far(self) -> None:
        assert over(TIMINGS, {"engine": 20, "owner": 1}) == {"engine": pytest.approx(1.05)}
        assert over(TIMINGS, {"engine": 21}) == {}
        assert over(TIMINGS, budgets_of(TIMINGS)) == {}

    def test_a_slow_machine_is_no_folders_fault(self) -> None:
        budgets: dict[str, int] = dict.fromkeys("abcdefg", 20)
        slow = [Timing(f"tests/{folder}/test_x.py::test_y", 1.0, 40.0) for folder in budgets]
        assert over(slow, budgets) == {}
        one = Timing("tests/g/test_x.py::test_z", 1.0, 40.0)
        assert over([*slow, one], budgets) == {"g": pytest.approx(2.0)}

    def test_rare_tests_cost_no_budget(self) -> None:
        drawn = Timing("tests/owner/test_c.py::test_rare", 9.0, 90.0, is_rare=True)
        assert over([*TIMINGS, drawn], budgets_of(TIMINGS)) == {}
        assert budgets_of([*TIMINGS, drawn]) == budgets_of(TIMINGS)
        assert times.by_file([*TIMINGS, drawn]) == times.by_file(TIMINGS)
        assert "| rare tests | 1 | 1.5 |  | `test_rare` 90 |" in times.table([*TIMINGS, drawn], {})

    def test_the_table_has_the_slowest_folder_first_and_all_tests(self) -> None:
        rows = times.table(TIMINGS, {"engine": 60}).splitlines()
        assert rows[2] == "| engine | 2 | 0.3 | 1.0 | `test_slow[1]` 20 |"
        assert rows[5].startswith("| **all** | 4 | 0.4 |  |")

    def test_budgets_are_of_folders_that_exist(self) -> None:
        known = times.numbers()
        folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} | {"."}
        assert known["budgets_s"].keys() <= folders


def _commits(since: int | None) -> flakes.Age:
    return lambda _commit: since


def test_what_shares_a_model_or_a_deployment_runs_in_one_process() -> None:
    api, greedy, stop = (in_one_process(f"tests/end_to_end/test_{name}.py") for name in ("api", "greedy", "stop"))
    assert api == greedy != stop == "tests/end_to_end/test_stop.py"
    served, answers = (in_one_process(f"tests/real_models/test_{name}.py") for name in ("served", "answers"))
    assert served == answers != api
    assert in_one_process("tests/owner/test_owner.py") != in_one_process("tests/owner/test_culprits.py")


class TestFlakes:
    TEST = "tests/end_to_end/test_reuse.py::test_it"

    def test_the_first_time_is_yellow_and_the_second_within_twenty_commits_is_red(self) -> None:
        known = [Flake(self.TEST, "abc1234", "2026-11-20")]
        assert why_red(self.TEST, [], _commits(3)) == ""
        assert why_red(self.TEST, known, _commits(21)) == ""
        assert "abc1234, 20 commits ago" in why_red(self.TEST, known, _commits(20))
        assert "abc1234" in why_red(self.TEST, known, _commits(None)), "a shallow clone does not know"
        assert why_red("tests/end_to_end/test_reuse.py::test_other", known, _commits(0)) == ""

    def test_what_was_mended_counts_no_more(self) -> None:
        assert why_red(self.TEST, [Flake(self.TEST, "abc1234", "2026-11-20", "def5678")], _commits(1)) == ""

    @pytest.mark.parametrize("part", ["transport", "worker", "owner", "kvpool", "jobs"])
    def test_a_part_that_must_not_race_is_red_at_once(self, part: str) -> None:
        assert why_red(f"tests/{part}/step/test_a.py::test_b", [], _commits(None)) != ""

    def test_nor_may_transports_of_whole_deployments(self) -> None:
        assert why_red("tests/end_to_end/test_transports.py::test_b", [], _commits(None)) != ""

    def test_the_summary_has_its_history(self) -> None:
        known = [Flake(self.TEST, "abc1234", "2026-11-20")]
        assert told(self.TEST, known, _commits(50)) == f"YELLOW {self.TEST}: before: 2026-11-20 at abc1234"
        assert told(self.TEST, [], _commits(0)) == f"YELLOW {self.TEST}: before: never"
        assert told(self.TEST, known, _commits(5)).startswith(f"RED {self.TEST}: before: 2026-11-20 at abc1234; ")

    def test_the_kept_file_is_read(self) -> None:
        assert all(flake.test.startswith("tests/") for flake in flakes.read())


class TestRare:
    FILE = """
import pytest
from tests.rare import rare, thinned

@pytest.mark.parametrize("number", thinned(range(40), usual=2))
def test_numbers(number): pass

@pytest.mark.parametrize(("name", "number"), thinned([("a", 1), ("b", 2)], usual=1))
def test_pairs(name, number): pass

@rare
def test_slow(): pass
"""

    def run(self, pytester: pytest.Pytester, *options: str) -> set[str]:
        pytester.makepyfile(test_it=self.FILE)
        pytester.makeini("[pytest]\nmarkers = rare\naddopts = -p no:schemathesis")
        ran = pytester.inline_run(*options, plugins=[rare.Plugin()]).listoutcomes()[0]
        return {report.nodeid.partition("::")[2] for report in ran}

    def test_a_run_has_the_usual_cases_a_share_of_the_rare_and_any_that_is_named(
        self, pytester: pytest.Pytester
    ) -> None:
        usual = {"test_numbers[0]", "test_numbers[20]", "test_pairs[a-1]"}
        assert self.run(pytester) == usual
        assert self.run(pytester, "test_it.py::test_slow") == {"test_slow"}
        assert self.run(pytester, "test_it.py::test_numbers[7]") == {"test_numbers[7]"}
        everything = self.run(pytester, "--rare", "1")
        assert len(everything) == 43
        some = [self.run(pytester, "--rare", "0.3", "--rare-seed", seed) for seed in "112"]
        assert some[0] == some[1] != some[2]
        assert all(usual < ran < everything for ran in some)


def by_file(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    return [list(of) for _, of in groupby(items, lambda item: item.path)]


class TestProcesses:
    FILE = """
import os, signal, pytest

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    yield os.getpid()
    open({ended!r}, "a").write(f"{{os.getpid()}} ")

def test_a(shared): print("said by a")
def test_b(shared): assert shared != {parent}
def test_wrong(shared): print("said by wrong"); assert shared == 0
def test_ends(shared):
    {then}
def test_after(shared): pass
"""

    def run(
        self, pytester: pytest.Pytester, *options: str, then: str = "pass", of: str = "abc"
    ) -> tuple[pytest.HookRecorder, Path]:
        ended = pytester.path / "ended"
        for name in "abc":
            code = self.FILE.format(ended=str(ended), parent=os.getpid(), then=then if name in of else "pass")
            pytester.makepyfile(**{f"test_{name}": code})
        pytester.makeini("[pytest]\naddopts = -p no:schemathesis")
        plugin = Processes(by_file, lambda _: None, lambda *_: None)
        return pytester.inline_run("--processes", "2", *options, plugins=[plugin]), ended

    def test_each_group_runs_in_one_of_them_and_all_is_told(self, pytester: pytest.Pytester) -> None:
        ran, ended = self.run(pytester)
        passed, _, failed = ran.listoutcomes()
        assert len(passed) == 12
        assert {report.nodeid for report in failed} == {f"test_{name}.py::test_wrong" for name in "abc"}
        assert {report.capstdout for report in failed} == {"said by wrong\n"}
        assert len(ended.read_text().split()) == 3, "each file's fixture was torn down once"

    def test_a_test_that_ends_its_process_has_failed_and_the_others_run(self, pytester: pytest.Pytester) -> None:
        passed, _, failed = self.run(pytester, then="os.kill(os.getpid(), signal.SIGKILL)", of="b")[0].listoutcomes()
        assert len(passed) == 11
        [ends] = [report for report in failed if report.nodeid == "test_b.py::test_ends"]
        assert "exit code -9" in str(ends.longrepr)

    def test_at_the_first_failure_all_end(self, pytester: pytest.Pytester) -> None:
        ran, ended = self.run(pytester, "-x", then="signal.pause()")
        assert ran.ret == pytest.ExitCode.TESTS_FAILED
        assert len({*ended.read_text().split()}) in (1, 2), "each process tears down what it has set up"


class TestNear:
    @rare.rare  # every source is parsed
    def test_the_files_own_tests_come_first(self) -> None:
        assert near("alignedserve/owner/core.py")[0].startswith("tests/owner/")
        assert near("router/lifecycle.py")[0] == "tests/router/test_lifecycle.py"
        assert near("tests/owner/test_owner.py") == ["tests/owner/test_owner.py"]
        assert near("docs/architecture.md")[0] == "tests/house/test_pages.py"
        assert "tests/router/test_lifecycle.py" in near("tests/samples.py")

    def test_tests_of_what_is_not_python_of_the_product_are_there(self) -> None:
        named = {test for tests in OF_FOLDERS.values() for test in tests}
        assert [test for test in named if not (ROOT / test).exists()] == []

    def test_files_take_turns(self) -> None:
        assert by_turns([["a", "b", "c"], ["d"], ["b", "e"]]) == ["a", "d", "b", "e", "c"]

    def test_what_fits_into_the_time_runs_and_the_nearest_always(self) -> None:
        known = {"a": 100.0, "b": 1.0, "c": 30.0}
        assert that_fit("abc", known, 60) == ["a"]
        assert that_fit("bac", known, 60) == ["b", "c"]
        assert that_fit("xyz", {}, 9 + 2 * UNKNOWN_S) == ["x", "y"]

    @pytest.mark.parametrize(("seconds", "num_run"), [(0.0, 1), (1e9, 3)])
    def test_a_run_ends_when_its_time_is_over(self, pytester: pytest.Pytester, seconds: float, num_run: int) -> None:
        pytester.makepyfile("import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): assert n < 2")
        deadline = Deadline(seconds)
        pytester.inline_run("-p", "no:cacheprovider", plugins=[deadline])
        assert (deadline.num_run, len(deadline.left_out)) == (num_run, 3 - num_run)
        assert len(deadline.failed) == (num_run == 3)


class TestDraws:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second passes at each look."""
        seconds = count()
        monkeypatch.setattr(draws, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    def test_a_seed_that_fails_is_printed_with_the_command_that_runs_it_again(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with planted(lost_release):
            assert draws.new_fuzz_seeds(155, until=2) == [156]
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("seed 156 fails: ")
        assert lines[1:] == ["    again: alignedserve fuzz --seed 156", "fuzz: 2 new seeds from 155, 1 failed"]

    def test_property_tests_come_in_an_order_that_the_seed_draws(self) -> None:
        first, second = draws.property_tests(1), draws.property_tests(2)
        assert first == draws.property_tests(1) != second
        assert sorted(first) == sorted(second)
        assert "tests/kvpool/test_pages.py" in first
