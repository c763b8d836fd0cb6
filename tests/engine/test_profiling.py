"""Tests of profiles of a real engine, under a fake clock: no test here depends on how fast the machine is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
import torch

from alignedserve.cli.main import main
from alignedserve.core import StepPlan, StepResult, WorkerLimits
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Kind, Route
from alignedserve.cost.profile import Subject, cached, keep, load
from alignedserve.cost.trials import Bounds, Trial, random_trials, trials
from alignedserve.engine import profiling
from alignedserve.engine.device.ranks import RankLinks
from alignedserve.engine.engine import Engine
from alignedserve.engine.profiling import (
    Meter,
    TimedRun,
    bounds_of,
    measure,
    measure_remaking,
    start_profile,
    subject_of,
)
from alignedserve.kernels.common.reference import Reference
from tests.engine.driver import PLENTY, Replays
from tests.models import MAX_POSITIONS
from tests.pooled_folders import encoder_config, encoder_folder

LIMITS = WorkerLimits(num_blocks=120, block_size=4, page_size=8, max_step_tokens=64, max_batch=8)
BOUNDS = Bounds(LIMITS, MAX_POSITIONS)
LARGE = Bounds(WorkerLimits(10_000, 16, 64, 512, 64), 2048)
SUBJECT = Subject("tiny", "no cpu", "float32", 1, "0", "none")


def test_most_of_a_large_device_cache_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to be written first, which takes seconds, and its memory."""
    assert bounds_of(engine, LIMITS, MAX_POSITIONS) == BOUNDS
    monkeypatch.setattr(profiling, "_MOST_FILLED", 1)
    few = bounds_of(engine, LIMITS, MAX_POSITIONS)
    assert few == Bounds(replace(LIMITS, num_blocks=16), MAX_POSITIONS), "a step of most tokens still fits"
    assert {trial.shape.kind for trial in trials(few)} == {*Kind}


class Ticks:
    """A clock that moves one tick at each reading."""

    def __init__(self, tick: float = 0.001) -> None:
        self.tick, self.now, self.waits = tick, 0.0, 0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def engine(
    folder_of: Callable[[str], Path], engine_of: Callable[[Path, int], Engine], monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """Return an engine whose profile has a fifth of the usual trials: each test takes some profiles."""
    monkeypatch.setattr("alignedserve.cost.trials._TRIALS_PER_KIND", 12)
    return engine_of(folder_of("gqa-untied"), LIMITS.block_size)


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of requests of each step from here on."""
    steps: list[int] = []
    run = engine.step

    def step(plan: StepPlan) -> StepResult:
        steps.append(len(plan.chunks) + len(plan.decodes))
        return run(plan)

    monkeypatch.setattr(engine, "step", step)
    return steps


# --- The steps that are measured


@pytest.mark.parametrize("bounds", [BOUNDS, LARGE, Bounds(replace(LIMITS, max_batch=1, max_step_tokens=1), 8)])
def test_every_trial_is_allowed_and_there_only_once(bounds: Bounds) -> None:
    found = trials(bounds)
    assert found
    assert all(bounds.allow(trial) for trial in found)
    assert len(set(found)) == len(found)


def test_trials_reach_the_ends_of_what_is_allowed() -> None:
    shapes = [trial.shape for trial in trials(LARGE)]
    assert max(shape.tokens for shape in shapes) == LARGE.limits.max_step_tokens
    assert max(shape.decodes for shape in shapes) == LARGE.limits.max_batch
    assert max(shape.longest for shape in shapes) >= LARGE.longest - 2
    assert any(shape.decodes * shape.longest > shape.prefixes for shape in shapes)  # the batch has a bubble
    assert {shape.kind for shape in shapes[:3]} == set(Kind)  # the kinds come in turn


def test_random_trials_are_of_all_kinds_and_the_same_each_time() -> None:
    found = random_trials(LARGE, 10, seed=5)
    assert [sum(trial.shape.kind is kind for trial in found) for kind in Kind] == [10, 10, 10]
    assert all(LARGE.allow(trial) for trial in found)
    assert random_trials(LARGE, 10, seed=5) == found


# --- Measuring


def test_a_run_leaves_out_what_its_thread_waited_for_a_processor(engine: Engine) -> None:
    ticks, waits = Ticks(0.01), Ticks(0.008)
    run = Meter(engine, ticks, ticks.synchronize, waits).run(Trial(((8, 0),), (5, 9)))
    assert run.seconds == pytest.approx(0.01)
    assert run.quiet_s == pytest.approx(0.002)
    assert ticks.waits == 2, "for the device, before and after"


def test_a_wait_beside_a_run_is_not_taken_from_it(engine: Engine) -> None:
    """A thread may wait before it looks at the clock, too: then a step seemed to take next to nothing."""
    asked = list[str]()

    def clock() -> float:
        asked.append("clock")
        return float(len(asked))

    def waited() -> float:
        asked.append("waited")
        return 0.0

    Meter(engine, clock, waited=waited).run(Trial(((8, 0),)))
    assert asked == ["clock", "waited", "waited", "clock"]


class MeterOfRuns(Meter):
    """A meter whose runs take what a test says."""

    def __init__(self, *runs: TimedRun) -> None:
        self.clock, self._runs = Ticks(), iter(runs)

    def run(self, trial: Trial) -> TimedRun:
        return next(self._runs)


def test_a_step_takes_the_time_of_its_quickest_run() -> None:
    trial = Trial(((8, 0),), (5, 9))
    measured = measure(MeterOfRuns(TimedRun(0.09, 0.09), TimedRun(0.01, 0.01), TimedRun(0.03, 0.02)), [trial], 20.0)
    (point,) = measured.points
    assert (point.shape, point.seconds) == (trial.shape, 0.01)
    assert measured.slowdown == pytest.approx((0.01 + 0.03) / 0.02), "the first run may be slow"


def test_a_long_step_that_runs_once_tells_of_the_machine_too() -> None:
    measured = measure(MeterOfRuns(TimedRun(0.9, 0.3)), [Trial(((8, 0),))], 20.0)
    assert measured.points[0].seconds == 0.3
    assert measured.slowdown == pytest.approx(3.0)


def test_a_short_step_that_was_stopped_runs_again() -> None:
    """The machine stood still for half a second: the step looks like a long one, of which one run would be enough."""
    small, next_one = Trial(((8, 0),)), Trial(((9, 0),))
    quick, stopped = TimedRun(0.01, 0.01), TimedRun(0.5, 0.5)
    measured = measure(MeterOfRuns(quick, stopped, quick, quick, quick, quick), [small, next_one], 20.0)
    assert [point.seconds for point in measured.points] == [0.01, 0.01]


def test_a_first_step_that_takes_long_leaves_some_of_each_kind() -> None:
    """A worker that knew one step only predicted that others take no time."""

    class Cold(FakeMeter):
        def run(self, trial: Trial) -> TimedRun:
            self.ticks.now += 5.0 if self.ticks.now == 0 else 0.0
            return super().run(trial)

    measured = measure(Cold(1e-3), trials(LARGE), 2.0)
    assert {point.shape.kind for point in measured.points} == set(Kind)


class FakeMeter(Meter):
    """A meter whose steps take what a formula says, without running."""

    def __init__(self, token_s: float) -> None:
        self.clock = self.ticks = Ticks(0.0)
        self._token_s = token_s

    def run(self, trial: Trial) -> TimedRun:
        took = 0.001 + self._token_s * trial.shape.tokens
        self.ticks.now += took
        return TimedRun(took, took)


@pytest.mark.parametrize("token_s", [1e-6, 1e-4, 1e-3, 1e-2])
def test_measuring_ends_in_time(token_s: float) -> None:
    meter = FakeMeter(token_s)
    points = measure(meter, trials(LARGE), 20.0).points
    assert meter.clock() <= 22.0  # the time of one trial may be guessed too low
    assert {point.shape.kind for point in points} == set(Kind)
    if token_s <= 1e-4:
        assert len(points) == len(trials(LARGE))


# --- The profile of a worker


@pytest.mark.parametrize(("name", "keeps_hidden"), [("mha-tied", True), ("gqa-untied", False)])
def test_what_projecting_takes_is_measured_where_it_can_be(
    name: str, keeps_hidden: bool, folder_of: Callable[[str], Path], engine_of: Callable[[Path, int], Engine]
) -> None:
    clock = Ticks(0.001)
    seconds = measure_remaking(
        Meter(engine_of(folder_of(name), LIMITS.block_size), clock, clock.synchronize, lambda: 0.0)
    )
    assert (seconds > 0) is keeps_hidden


def test_an_encoder_makes_no_k_and_v_again(tmp_path: Path, engine_of: Callable[[Path, int], Engine]) -> None:
    engine = engine_of(encoder_folder(tmp_path, encoder_config("bert")), LIMITS.block_size)
    assert measure_remaking(Meter(engine)) == 0
    assert engine.form.why_not is not None


class BusyTicks(Ticks):
    """The clock of a machine that does other work too: half of the steps take three times as long."""

    def __init__(self, tick: float) -> None:
        super().__init__(tick)
        self._random = Random(0)

    def __call__(self) -> float:
        self.now += 2 * self.tick * self._random.randrange(2)
        return super().__call__()


def profiled(
    engine: Engine,
    directory: Path | None,
    shared_memory: Path,
    tick: float = 0.001,
    subject: Subject = SUBJECT,
    clock: Ticks | None = None,
    is_checked: bool = False,
    bounds: Bounds = BOUNDS,
) -> tuple[Point, ...]:
    clock = clock or Ticks(tick)
    meter = Meter(engine, clock, clock.synchronize, lambda: 0.0)
    profile = start_profile(meter, bounds, subject, shared_memory, directory, 1000.0, is_checked)
    assert set(profile.links) == {Route.ARENA_TO_DEVICE, Route.DEVICE_TO_ARENA}
    assert all(link.bandwidth > 0 for link in profile.links.values())
    assert (profile.remade_token_s > 0) is (engine.config.why_not_hidden is None)
    return profile.points


def test_a_profile_leaves_the_engine_and_shared_memory_as_they_were(engine: Engine, tmp_path: Path) -> None:
    cache, before = engine.cache, engine.cache.clone()
    points = profiled(engine, None, tmp_path)
    assert len(points) == len(trials(BOUNDS))
    assert engine.cache is cache
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    assert list(tmp_path.iterdir()) == []


def test_a_cached_profile_is_taken_without_a_step(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the machine is busy by now, or another one: the worker learns that while it serves."""
    first = profiled(engine, tmp_path / "cache", tmp_path)
    steps = counted(engine, monkeypatch)
    for clock in (Ticks(0.001), Ticks(0.01), BusyTicks(0.001)):
        assert profiled(engine, tmp_path / "cache", tmp_path, clock=clock) == first
    assert not steps


def test_workers_of_other_limits_share_a_profile(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each overwrote the other's, and both measured at each start."""
    few, many = (
        Bounds(replace(LIMITS, max_step_tokens=of, max_batch=at), MAX_POSITIONS) for of, at in ((16, 8), (64, 2))
    )
    cache, steps = tmp_path / "cache", counted(engine, monkeypatch)
    profiled(engine, cache, tmp_path, bounds=few)
    profiled(engine, cache, tmp_path, bounds=many)
    measured = len(steps)
    for bounds in (few, many, BOUNDS):
        profiled(engine, cache, tmp_path, bounds=bounds)
    assert len(steps) == measured
    (path,) = cache.glob("*.json")
    both = load(path)
    assert {point.shape for point in both.points} == {trial.shape for of in (few, many) for trial in trials(of)}
    assert (both.memory.limits.max_step_tokens, both.memory.limits.max_batch) == (64, 8)


def test_a_worker_leaves_what_it_has_learned_to_the_next_start(engine: Engine, tmp_path: Path) -> None:
    """Its steps take half of what was measured, but for the kinds that did not run."""
    profiled(engine, tmp_path, tmp_path / "..")
    profile = cached(tmp_path, SUBJECT)
    assert profile is not None
    cost, before = profile.online(), {point.shape: point.seconds for point in profile.points}
    assert profile.refined(cost).points == profile.points, "it has learned nothing"
    for _ in range(200):
        for shape, seconds in before.items():
            if shape.kind is Kind.DECODE:
                cost.learn(shape, 0.5 * seconds)
    keep(tmp_path, profile.refined(cost))
    left = cached(tmp_path, SUBJECT)
    assert left is not None
    now = {kind: [point for point in left.points if point.shape.kind is kind] for kind in Kind}
    assert all(point.seconds == before[point.shape] for kind in (Kind.PREFILL, Kind.MIXED) for point in now[kind])
    predicted, again = cost.model, left.online().model
    for point in now[Kind.DECODE]:
        assert again.seconds(point.shape) == pytest.approx(predicted.seconds(point.shape), rel=0.1)
        assert again.seconds(point.shape) == pytest.approx(0.5 * before[point.shape], rel=0.1)


def test_a_profile_that_is_to_hold_now_is_checked(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = profiled(engine, tmp_path / "cache", tmp_path)
    steps = counted(engine, monkeypatch)
    assert profiled(engine, tmp_path / "cache", tmp_path, is_checked=True) == first
    assert len(steps) == len(Kind) * 3  # a step of each kind, three times


def test_a_profile_that_may_be_off_is_checked_again_by_more_runs(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = profiled(engine, tmp_path / "cache", tmp_path)
    steps = counted(engine, monkeypatch)
    assert profiled(engine, tmp_path / "cache", tmp_path, clock=BusyTicks(0.001), is_checked=True) == first
    assert len(steps) == len(Kind) * (3 + 6)


def test_a_checked_profile_that_is_off_is_measured_anew(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = profiled(engine, tmp_path / "cache", tmp_path)
    second = profiled(engine, tmp_path / "cache", tmp_path, tick=0.002, is_checked=True)
    assert second[0].seconds == pytest.approx(2 * first[0].seconds)
    assert "the cached cost profile is off by 100 %: it is measured again" in caplog.text
    assert profiled(engine, tmp_path / "cache", tmp_path, tick=0.002) == second


def test_a_checked_profile_outlives_other_work_on_the_machine(engine: Engine, tmp_path: Path) -> None:
    first = profiled(engine, tmp_path / "cache", tmp_path)
    assert profiled(engine, tmp_path / "cache", tmp_path, clock=BusyTicks(0.001), is_checked=True) == first
    assert profiled(engine, tmp_path / "cache", tmp_path, clock=BusyTicks(0.002), is_checked=True) == first


def test_a_checked_profile_of_a_busy_machine_is_measured_anew_when_it_is_quiet(engine: Engine, tmp_path: Path) -> None:
    profiled(engine, tmp_path / "cache", tmp_path, tick=0.003)
    quiet = profiled(engine, tmp_path / "cache", tmp_path, is_checked=True)
    assert quiet[0].seconds == pytest.approx(0.001)


class Neighbour:
    """Other work on the machine: where the test says so, a thread waits for a processor between two looks at this."""

    def __init__(self) -> None:
        self.clock, self.is_there, self._waited_s = Ticks(), True, 0.0

    def waited(self) -> float:
        if self.is_there:
            self.clock()
            self._waited_s += 2 * self.clock.tick
        return self._waited_s


def test_a_busy_machine_is_told_and_measured_anew_when_it_is_quiet(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    neighbour = Neighbour()
    meter = Meter(engine, neighbour.clock, waited=neighbour.waited)
    busy = start_profile(meter, BOUNDS, SUBJECT, tmp_path, tmp_path / "cache", budget_s=1000.0)
    assert busy.is_busy
    assert "other work runs on this machine. Promises are made with that in mind" in caplog.text
    again = start_profile(meter, BOUNDS, SUBJECT, tmp_path, tmp_path / "cache", budget_s=1000.0)
    assert again.points == busy.points
    assert "taken from the cache: measured at 2" in caplog.text
    assert "on a busy machine (slowdown 3" in caplog.text
    neighbour.is_there = False
    quiet = start_profile(meter, BOUNDS, SUBJECT, tmp_path, tmp_path / "cache", budget_s=1000.0, is_checked=True)
    assert "the cached cost profile was taken on a busy machine: it is measured again" in caplog.text
    assert not quiet.is_busy
    assert quiet.points[0].seconds == pytest.approx(busy.points[0].seconds)


def test_a_profile_of_something_else_is_not_taken(engine: Engine, tmp_path: Path) -> None:
    first = profiled(engine, tmp_path / "cache", tmp_path)
    of_bfloat16 = profiled(engine, tmp_path / "cache", tmp_path, tick=0.003, subject=replace(SUBJECT, dtype="bfloat16"))
    assert of_bfloat16[0].seconds == pytest.approx(3 * first[0].seconds)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_broken_profile_is_measured_anew(engine: Engine, tmp_path: Path) -> None:
    first = profiled(engine, tmp_path / "cache", tmp_path)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text("{}")
    assert [sample.shape for sample in profiled(engine, tmp_path / "cache", tmp_path)] == [
        sample.shape for sample in first
    ]
    assert len(load(path).points) == len(first)


def test_the_subject_names_over_what_ranks_talk(
    engine: Engine, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of two ranks take other times over another library."""
    two = RankLinks()
    two.size = 2
    monkeypatch.setattr(engine, "ranks", two)
    subject = subject_of(engine, folder_of("gqa-untied"))
    assert (subject.tensor_parallel, subject.kernels) == (2, f"{engine.kernels}, ranks over sockets")


def test_a_worker_that_captures_other_steps_has_a_profile_of_its_own(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """On GPUs, a prefill worker that does not decode captures no decodes: those that it measures take longer, and its
    profile would mislead the decode workers, and theirs would be measured again by it."""
    folder, cache, subjects = folder_of("gqa-untied"), tmp_path / "cache", list[Subject]()
    for tick, only_prompts in ((0.001, False), (0.003, True)):
        engine = Engine(folder, num_blocks=120, block_size=4, dtype="float32", has_graphs=True)
        engine.capture(2, Replays(), lambda: PLENTY, 0, most_tokens=16, only_prompts=only_prompts)
        subjects.append(subject_of(engine, folder))
        profiled(engine, cache, tmp_path, tick=tick, subject=subjects[-1])
    both, prompts = (cached(cache, subject) for subject in subjects)
    assert both is not None
    assert prompts is not None
    assert prompts.points[0].seconds == pytest.approx(3 * both.points[0].seconds)


def test_the_subject_names_model_device_and_type(engine: Engine, folder_of: Callable[[str], Path]) -> None:
    subject = subject_of(engine, folder_of("gqa-untied"))
    assert subject.dtype == "float32"
    assert subject.device.endswith("1 thread")
    assert (
        subject.kernels == engine.kernels != Engine(folder_of("gqa-untied"), num_blocks=8, kernels=Reference()).kernels
    )
    assert subject.model != subject_of(engine, folder_of("mha-tied")).model


# --- The command


def test_the_command_writes_a_profile_and_a_plot(
    folder_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is enough for all measurements on any machine: the command ends when they are done."""
    out = tmp_path / "profile.json"
    limits = ["--kv-memory-mb", "1", "--max-step-tokens", "16", "--max-batch", "2", "--threads", "1"]
    assert main(["profile", str(folder_of("gqa-untied")), "--out", str(out), "--budget", "600", *limits]) == 0
    profile = load(out)
    dots = list(ElementTree.parse(f"{out}.svg").iter("{http://www.w3.org/2000/svg}use"))
    printed = capsys.readouterr().out
    assert len(profile.points) > 8
    assert dots
    assert [line.split()[0] for line in printed.splitlines()[4:7]] == [kind.value for kind in Kind]
    assert f"{out}.svg: predicted against measured" in printed


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--out", "/nowhere/profile.json"], "/nowhere/profile.json cannot be written: /nowhere is not a folder"),
        (["--out", "/"], "/ is a folder: name a file"),
        (["--out", "x.json", "--budget", "0.1"], "--budget 0.1 is too short: give it 2 s at least"),
        (["/nowhere/model", "--out", "x.json"], "/nowhere/model is neither a folder"),
        (["--out", "x.json", "--dtype", "int3"], "--dtype"),
        ([], "--out"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    said = capsys.readouterr().err
    assert wrong in said
    assert said.count("\n") == 1
