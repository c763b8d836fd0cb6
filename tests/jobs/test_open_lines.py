"""Tests that a line that ends the job runner is found and failed, and that no other line pays for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from alignedserve.jobs.messages import JobCommand, JobEvent, LeaseTaken, RunLine
from alignedserve.jobs.open_lines import OpenLines
from alignedserve.jobs.state import RunnerCore
from alignedserve.store.store import Holder
from tests.jobs.test_state import System, job

HOURS = 36_000.0
Line = tuple[str, int]


class Died(Exception):
    """A line has ended the job runner."""


@dataclass
class Mortal(System):
    """A system whose job runner dies when one of `killers` has run for a while, and starts again."""

    folder: Path = Path()
    killers: tuple[Line, ...] = ()
    life: int = 0
    num_deaths: int = 0
    given_up: list[Line] = field(default_factory=list)
    beside: list[set[Line]] = field(default_factory=list)  # the lines that were open at each death

    def start(self) -> None:
        self.life += 1
        self.open_lines = OpenLines(self.folder, Holder("runner", self.life))
        self.core = RunnerCore(most_open=64, retries=2)
        self.ends_at.clear()
        self.waiting.clear()
        self.timers.clear()
        self.told(LeaseTaken(self.open_lines.read()))

    def told(self, fact: JobEvent) -> None:
        orders = self.core.handle(fact, self.now, self.wall)
        self.open_lines.write(self.core.open_lines, self.core.blame)
        for order in orders:
            self.perform(order)

    def perform(self, order: JobCommand) -> None:
        super().perform(order)
        if isinstance(order, RunLine) and order.is_given_up:
            self.given_up.append((order.job.id, order.line))

    def ended(self, name: str, line: int) -> None:
        if (name, line) in self.killers and (name, line) not in self.given_up:
            raise Died
        super().ended(name, line)

    def step(self, seconds: float = 0.25) -> None:
        try:
            super().step(seconds)
        except Died:
            self.num_deaths += 1
            self.beside.append(set(self.core.open_lines))
            self.start()


def system(folder: Path, lines: dict[str, int], *killers: Line) -> Mortal:
    made = Mortal(lines, folder=folder, killers=killers)
    for name in lines:
        made.add(job(name))
    return made


def test_a_line_that_ends_the_job_runner_beside_others_is_failed_after_three_deaths(tmp_path: Path) -> None:
    run = system(tmp_path, {"bad": 20, "good": 200}, ("bad", 3))
    run.run(until=HOURS)
    assert set(run.statuses().values()) == {"completed"}
    assert (run.num_deaths, run.given_up) == (3, [("bad", 3)])
    assert len(run.beside[0]) > 1
    assert run.beside[-1] == {("bad", 3)}, "it ended the job runner alone"
    assert sorted(run.results["good"]) == list(range(1, 201))


def test_a_lone_line_that_ends_the_job_runner_is_failed_after_two_deaths(tmp_path: Path) -> None:
    run = system(tmp_path, {"bad": 1}, ("bad", 1))
    run.run(until=HOURS)
    assert (run.statuses(), run.num_deaths, run.given_up) == ({"bad": "completed"}, 2, [("bad", 1)])


def test_several_are_found_and_nothing_else_is_given_up(tmp_path: Path) -> None:
    killers = (("bad", 3), ("bad", 5), ("worse", 1))
    run = system(tmp_path, {"bad": 20, "worse": 1, "good": 300}, *killers)
    run.run(until=HOURS)
    assert set(run.statuses().values()) == {"completed"}
    assert sorted(run.given_up) == sorted(killers)
    assert run.num_deaths <= 3 * len(killers)


def test_a_death_that_no_line_caused_costs_nothing(tmp_path: Path) -> None:
    """The next life runs as many lines at once as before, and all lines end."""
    run = system(tmp_path, {"a": 400})
    for _ in range(20):
        run.step()
    most = run.most_open
    assert most > 8
    run.most_open = 0
    run.start()
    for _ in range(20):
        run.step()
    assert run.most_open == most
    run.run(until=HOURS)
    assert (run.statuses(), run.given_up) == ({"a": "completed"}, [])


@pytest.mark.parametrize("written", [b"", b"{", b"[]\n", b"\xff" * 100])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, written: bytes) -> None:
    notes = OpenLines(tmp_path, Holder("runner", 1))
    notes.write([("a", 1)], {})
    (path,) = tmp_path.iterdir()
    path.write_bytes(written)
    assert OpenLines(tmp_path, Holder("runner", 2)).read() == {}


def test_a_shorter_note_replaces_a_longer_one(tmp_path: Path) -> None:
    notes = OpenLines(tmp_path, Holder("runner", 1))
    notes.write([("a", line) for line in range(100)], {})
    notes.write([("a", 7)], {("a", 8): 1})
    assert OpenLines(tmp_path, Holder("runner", 2)).read() == {("a", 7): 2, ("a", 8): 1}
    assert OpenLines(tmp_path, Holder("runner", 1)).read() == {("a", 8): 1}, "this life has not died"


def test_lines_run_where_their_note_cannot_be_written(tmp_path: Path) -> None:
    run = system(tmp_path / "missing", {"a": 20})
    run.run(until=HOURS)
    assert run.statuses() == {"a": "completed"}
