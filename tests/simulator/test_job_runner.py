"""The real job runner in a simulated deployment: whatever dies, every line is answered once, and nothing is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from alignedserve.jobs.actor import JobRunner
from alignedserve.jobs.state import RunnerCore
from alignedserve.lab.fuzzing.fuzz import attempt, prepared
from alignedserve.lab.fuzzing.invariants import Failure, Rule
from alignedserve.lab.fuzzing.scenario import Scenario
from alignedserve.lab.fuzzing.scenario_drawing import draw_scenario
from alignedserve.lab.fuzzing.shrink import shrink
from alignedserve.lab.simulator.job_runner import JobRunnerSimulation
from alignedserve.lab.simulator.machines import event_loop
from alignedserve.lab.simulator.machines.clock import Agenda
from alignedserve.lab.simulator.machines.event_loop import VirtualLoop
from alignedserve.lab.simulator.machines.faults import JOBS, Fault, Freeze, Kill, SlowDisk, StoreAway, TornWrite
from alignedserve.scheduling.policy import Predictor
from alignedserve.store.job import JobStatus
from tests.rare import rarely
from tests.simulator.planted import Plant

_JOBS_AT = 2.0


@cache
def first_with_jobs() -> Scenario:
    return next(drawn for drawn in map(draw_scenario, range(200)) if drawn.jobs and len(drawn.asks) < 5)


def with_jobs(*faults: Fault, lines: int = 12, cancel_after_s: float | None = None) -> Scenario:
    """Return a small scenario with a single job and these faults."""
    drawn = first_with_jobs()
    job = max(drawn.jobs, key=lambda job: len(job.lines))
    again = (job.lines * lines)[:lines]
    job = replace(job, at=_JOBS_AT, lines=again, window_s=86_400, cancel_after_s=cancel_after_s)
    policy = replace(drawn.policy, predictor=Predictor.OFF)  # the others take longer to make than the run takes
    return replace(drawn, policy=policy, asks=drawn.asks[:1], jobs=(job,), faults=faults, most_open_lines=2)


def failure_of(scenario: Scenario) -> Failure | None:
    return attempt(scenario).failure


def test_its_store_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert attempt(with_jobs()).failure is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("member", [JOBS, "router", "gateway-0", "decode-0"])
def test_whatever_dies_every_line_is_answered_once(member: str) -> None:
    deaths = (Kill(_JOBS_AT + 0.4 * at, member, 0.2) for at in range(4))
    assert failure_of(with_jobs(*deaths)) is None


@pytest.mark.parametrize("for_s", [9.0, rarely(0.3)])
@pytest.mark.parametrize(("hangs", "applies"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("after_s", [0.2, rarely(0.0), rarely(0.4)])
def test_a_store_that_is_away(after_s: float, for_s: float, hangs: bool, applies: bool) -> None:
    assert failure_of(with_jobs(StoreAway(_JOBS_AT + after_s, for_s, hangs, applies))) is None


@pytest.mark.parametrize("use_s", [3.0, rarely(0.3)])
def test_a_slow_disk_and_a_runner_that_dies_as_it_writes(use_s: float) -> None:
    deaths = (Kill(_JOBS_AT + at, JOBS, 0.2) for at in (1.0, 4.0, 7.5))
    scenario = with_jobs(SlowDisk(_JOBS_AT, use_s, 9.0), *deaths)
    assert failure_of(scenario) is None
    assert statuses(scenario) == {JobStatus.COMPLETED}


@pytest.mark.parametrize("applies", [False, True])
def test_a_runner_that_dies_amid_a_write(applies: bool) -> None:
    """Each line is answered once, whether its result is in the store or not."""
    scenario = with_jobs(*(TornWrite(_JOBS_AT + 0.3 * at, applies, 0.2) for at in range(12)))
    simulation = prepared(scenario)
    assert isinstance(simulation, JobRunnerSimulation)
    simulation.run()
    (life,) = (life for life in simulation.world.lives if life.name == JOBS)
    assert life.incarnation > 6, "it died amid many"
    assert failure_of(scenario) is None
    assert statuses(scenario) == {JobStatus.COMPLETED}


def test_what_was_begun_under_a_lease_that_was_lost_answers_nothing_under_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file is read so slowly that the lease is lost and taken again meanwhile: no line runs a second time."""
    monkeypatch.setattr(event_loop, "_WORK_S", (2e-3, 2e-3, 2e-3, 2.0))
    away = (StoreAway(at, 0.3) for at in (2.6, 4.4, 6.0, 7.5, 9.0))
    assert failure_of(replace(with_jobs(*away), seed=19)) is None


def test_a_runner_that_stands_still_goes_on() -> None:
    assert failure_of(with_jobs(Freeze(_JOBS_AT + 0.5, JOBS, 2.0), Freeze(_JOBS_AT + 3.0, JOBS, 5.0))) is None


def statuses(scenario: Scenario) -> set[JobStatus]:
    """Run the scenario and return the states in which its jobs ended."""
    simulation = prepared(scenario)
    assert isinstance(simulation, JobRunnerSimulation)
    simulation.run()
    return {job.status for job in simulation.users.ended.values()}


def test_a_run_is_the_same_again_wherever_its_tasks_lie_in_memory() -> None:
    """Lines of a job that is cancelled end in the order in which they began."""
    scenario = replace(with_jobs(lines=60, cancel_after_s=0.7), most_open_lines=20)
    lie_elsewhere, found = list[list[object]](), set[str]()
    for again in range(3):
        found.add(attempt(scenario).digest)
        lie_elsewhere.append([object() for _ in range(997 * again)])
    assert len(found) == 1


def test_jobs_complete_are_cancelled_and_expire() -> None:
    assert statuses(with_jobs()) == {JobStatus.COMPLETED}
    assert statuses(with_jobs(lines=1000, cancel_after_s=0.7)) == {JobStatus.CANCELLED}
    late = with_jobs(lines=1000)
    assert statuses(replace(late, jobs=(replace(late.jobs[0], window_s=1),))) == {JobStatus.EXPIRED}


def _forgets_the_first_lines(patch: pytest.MonkeyPatch) -> None:
    read = JobRunner._read_places
    patch.setattr(JobRunner, "_read_places", lambda runner, job, done: read(runner, job, range(1, len(done) + 2)))


def _drops_nothing(patch: pytest.MonkeyPatch) -> None:
    stop = RunnerCore._stop
    patch.setattr(RunnerCore, "_stop", lambda core, opened, status: stop(core, opened, status)[1:])


@pytest.mark.parametrize(
    ("plant", "faults", "cancel_after_s"),
    [rarely((_forgets_the_first_lines, (Kill(_JOBS_AT + 0.5, JOBS),), None)), (_drops_nothing, (), 0.7)],
)
def test_a_runner_that_is_wrong_is_found_and_the_scenario_shrunk(
    plant: Plant, faults: tuple[Fault, ...], cancel_after_s: float | None
) -> None:
    scenario = with_jobs(*faults, lines=24, cancel_after_s=cancel_after_s)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        failure = failure_of(scenario)
        assert failure is not None
        assert failure.rule is Rule.JOBS
        small = shrink(scenario, failure.rule, budget=6)
    assert len(small.jobs[0].lines) < len(scenario.jobs[0].lines)


class TestVirtualLoop:
    def test_coroutines_wait_in_virtual_time(self) -> None:
        agenda, said = Agenda(), list[float]()
        loop = VirtualLoop(agenda, "0")

        async def work() -> None:
            for _ in range(2):
                await asyncio.sleep(5.0)
                said.append(agenda.now)
            await asyncio.to_thread(said.append, 0.0)

        loop.begin(work())
        agenda.run(100.0)
        assert said == [5.0, 10.0, 0.0]
        loop.kill()

    def test_a_process_that_stands_still_runs_nothing_and_one_that_is_dead_nothing_any_more(self) -> None:
        agenda, said = Agenda(), list[float]()
        loop = VirtualLoop(agenda, "0", lambda: 7.5)

        async def work() -> None:
            while True:
                await asyncio.sleep(2.0)
                said.append(agenda.now)

        loop.begin(work())
        agenda.run(12.0)
        loop.kill()
        agenda.run(100.0)
        assert said == [9.5, 11.5]

    def test_an_error_that_ends_a_coroutine_ends_the_run(self) -> None:
        agenda = Agenda()
        loop = VirtualLoop(agenda, "0")

        async def work() -> None:
            raise ValueError("no")

        loop.begin(work())
        with pytest.raises(ValueError, match="no"):
            agenda.run(1.0)
        loop.kill()
