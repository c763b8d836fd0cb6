"""Measures steps of a real engine at start-up, so that the cost model knows the device before the first request.

Sizes grow exponentially, so that few steps cover small and large sizes. First each size is measured once, the kinds of
steps in turn, so a profile that runs out of time has measured some steps of every kind. Each step runs three times, a
long one once.

Other work may share the machine meanwhile. So the time of a step is that of its quickest run, without the time that it
waited for a processor: what it takes on a quiet machine. Every step is thus a reference for its own later runs, and by
how much the runs took longer altogether is the profile's `slowdown`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import log as ln
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.core import StepPlan, WorkerLimits, units_for
from alignedserve.cost.fit import BUSY, Point
from alignedserve.cost.model import Kind, Link, Route, Shape
from alignedserve.cost.profile import MeasuredMemory, Profile, Subject, fingerprint, keep, known_profile, store
from alignedserve.cost.sums import added
from alignedserve.cost.trials import Bounds, Trial, trials
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import name_of
from alignedserve.engine.device.pinning import cudart_for, pin
from alignedserve.engine.engine import Engine
from alignedserve.errors import AlignedServeError
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.machine.resources import processor_name
from alignedserve.signs import NO_SIGNS, Signs, Stage

log = logging.getLogger("alignedserve.cost")

RUNS = 3
BUDGET_S = 20.0
_TOLERANCE = 0.25  # relative error that a cached profile may have
_LONG_S = 0.25  # a step at least this long runs once: it averages over disturbances by itself
_LONGER = 2.0  # a step that took this many times its guess runs again: it may be a short step that was stopped
_REMADE = 256  # tokens whose K and V are computed at once when projection is measured
_COPIED_PAGES = (1, 4, 16)
_MOST_FILLED = 512 << 20  # bytes of a CPU's device cache that are measured with
_CAUTION = 1.25  # factor by which a guessed time may be too low
_LARGEST_SHARE = 0.1  # largest share of the budget for one step
_FEWEST = 6  # trials that are measured whatever they take, two of each kind: with fewer, a profile predicts nothing
_CHECK_S = 10.0  # time limit of a check of three steps
_CHECK_RUNS = (RUNS, 6)  # runs of each: more where the fewer do not say that the profile holds on a quiet machine
_LEAST_SHARE = 0.01  # of a run's time that is its own: the clocks differ a little
_SCHEDULED = Path("/proc/thread-self/schedstat")
_SHARE_OF_STEPS = 0.85  # share of the budget for steps; the rest is for fitting


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run of a step: its seconds, and an estimate of those that it takes where nothing else runs."""

    seconds: float
    quiet_s: float


def waited_s() -> float:
    """Return how long this thread could have run and waited for a processor; 0 where the system does not say."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Meter:
    """Runs trials on an engine that serves no request yet."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
        waited: Callable[[], float] = waited_s,
    ) -> None:
        self.engine, self.clock, self._synchronize, self._waited = engine, clock, synchronize, waited
        self._random = random.Random(0)
        self._filled = 0  # blocks that have been written

    def run(self, trial: Trial) -> TimedRun:
        """Run the trial once."""
        plan = self._plan(trial)
        return self._timed(lambda: self.engine.step(plan))

    def quickest_of(self, work: Callable[[], object]) -> float:
        """Return the seconds of the quickest of `RUNS` runs, after a first run that does not count."""
        work()
        return min(self._timed(work).quiet_s for _ in range(RUNS))

    def _timed(self, work: Callable[[], object]) -> TimedRun:
        self._synchronize()
        start = self.clock()
        waited = self._waited()  # between the two looks at the clock: no wait counts that they have not seen
        work()
        self._synchronize()
        waited_s = self._waited() - waited
        seconds = self.clock() - start
        return TimedRun(seconds, max(_LEAST_SHARE * seconds, seconds - waited_s))

    def _plan(self, trial: Trial) -> StepPlan:
        block_size, vocabulary = self.engine.block_size, self.engine.config.vocab_size
        blocks = self._blocks(sum(trial.num_blocks(block_size)))
        return StepPlan(0, *trial.parts(blocks, block_size, lambda: self._random.randrange(vocabulary)))

    def blocks_for(self, tokens: int) -> tuple[int, ...]:
        """Return blocks for one request of `tokens` tokens."""
        return self._blocks(units_for(tokens, self.engine.block_size))

    def _blocks(self, count: int) -> tuple[int, ...]:
        self._fill(count)
        return tuple(range(count))

    def _fill(self, blocks: int) -> None:
        """Write the first `blocks` blocks: memory never written is one page of zeros, faster to read than any other."""
        if blocks > self._filled:
            self.engine.cache[:, 2 * self._filled : 2 * blocks] = 0.01
            self._filled = blocks


# --- Measuring steps, projections and copies


@dataclass(frozen=True)
class Measured:
    """Trials with their runs."""

    runs: Mapping[Trial, Sequence[TimedRun]]

    @property
    def points(self) -> tuple[Point, ...]:
        """Return what the trials take on a quiet machine."""
        return tuple(Point(trial.shape, _quickest(runs)) for trial, runs in self.runs.items())

    @property
    def slowdown(self) -> float:
        """Return how many times as long as on a quiet machine the runs took. First runs are slow, and do not count."""
        later = [(run.seconds, _quickest(runs)) for runs in self.runs.values() for run in runs[1:] or runs]
        return max(1.0, added(took for took, _ in later) / added(quiet for _, quiet in later)) if later else 1.0


def _quickest(runs: Sequence[TimedRun]) -> float:
    return min(run.quiet_s for run in runs)


def measure(
    meter: Meter, wanted: Sequence[Trial], budget_s: float, num_runs: int = RUNS, signs: Signs = NO_SIGNS
) -> Measured:
    """Measure as many trials as fit in the budget; `signs` hears of each run.

    A trial that would take much of the budget is left out, but for the first few: many small trials tell more. The runs
    of a trial are far apart, so a disturbance of a second hits one run each of many trials.
    """
    end = meter.clock() + budget_s
    signs.stage(Stage.STEPS, num_runs * len(wanted))
    times: dict[Trial, list[TimedRun]] = {}
    again = set[Trial]()  # that run more than once
    later = 0.0  # seconds of the runs that are still to come
    for trial in wanted:
        guess = _CAUTION * _guess(times, trial.shape)
        takes = guess * (num_runs if guess <= _LONG_S else 1)
        if len(times) < _FEWEST or takes <= min(end - meter.clock() - later, _LARGEST_SHARE * budget_s):
            run = meter.run(trial)
            if run.quiet_s <= _LONG_S or 0.0 < _LONGER * guess < run.quiet_s:
                again.add(trial)
                later += (num_runs - 1) * min(run.seconds, _LONGER * guess or run.seconds)
            times[trial] = [run]
        signs.advance()
    for _ in range(num_runs - 1):
        for trial, runs in times.items():
            if trial in again and meter.clock() < end:
                runs.append(meter.run(trial))
            signs.advance()
    return Measured(times)


def _guess(times: Mapping[Trial, Sequence[TimedRun]], shape: Shape) -> float:
    """Guess the seconds of a step from the measured step that is closest in size."""
    if not times:
        return 0.0
    size = _size(shape)
    closest = min(times, key=lambda trial: abs(ln(_size(trial.shape) / size)))
    return times[closest][0].quiet_s * max(1.0, size / _size(closest.shape))


def _size(shape: Shape) -> float:
    """Return a size about in proportion to a step's time: tokens attended to cost little against tokens that run."""
    return 1 + shape.tokens + (shape.work / 8 + shape.cached + shape.prefixes) / 256


def measure_remaking(meter: Meter) -> float:
    """Return the seconds per token to make K and V again from another form; 0 without such a form."""
    engine = meter.engine
    if engine.form.why_not is not None:
        return 0.0
    tokens = min(_REMADE, engine.config.max_positions, engine.cache.shape[1] // 2 * engine.block_size)
    blocks = meter.blocks_for(tokens)
    return meter.quickest_of(partial(engine.form.remake, blocks, tokens, engine.cache)) / tokens


def measure_copies(meter: Meter, page_size: int, shared_memory: Path) -> dict[Route, Link]:
    """Measure copies between the device and a temporary arena."""
    cache, block_size = meter.engine.cache, meter.engine.block_size
    page_bytes = page_size * _kv_bytes(meter.engine)
    room = cache.shape[1] // 2 * block_size // page_size
    counts = [count for count in _COPIED_PAGES if count <= room]
    if not counts:
        return {}
    with TemporaryDirectory(dir=shared_memory, prefix="alignedserve-profile-") as folder:
        path = Path(folder) / "arena"
        arena = Arena.create(path, pages=counts[-1], payload_bytes=page_bytes, page_size=page_size, incarnation=1)
        copier, cudart = PageCopier(cache, arena, page_size, verify=False), cudart_for(cache.device)
        unpin = pin(arena, cudart, cache.device) if cudart is not None else None  # the pool's arena is pinned too
        try:
            return _measured_copies(meter, copier, counts, page_size, page_bytes)
        finally:
            if unpin is not None:
                unpin()
            copier.close()


def _measured_copies(
    meter: Meter, copier: PageCopier, counts: Sequence[int], page_size: int, page_bytes: int
) -> dict[Route, Link]:
    outs, ins = [], []
    for count in counts:
        pages, tokens = range(count), [1] * (count * page_size)
        blocks = range(units_for(len(tokens), meter.engine.block_size))
        copy_out = partial(copier.copy_out, blocks, pages, tokens)
        copy_in = partial(copier.copy_in, pages, blocks, tokens)
        outs.append((count * page_bytes, meter.quickest_of(copy_out)))
        ins.append((count * page_bytes, meter.quickest_of(copy_in)))
    return {Route.DEVICE_TO_ARENA: _link(outs), Route.ARENA_TO_DEVICE: _link(ins)}


def _link(times: Sequence[tuple[int, float]]) -> Link:
    """Return the link whose line goes through the smallest and the largest copy; `times` are (bytes, seconds)."""
    (few_bytes, short_s), (many_bytes, long_s) = times[0], times[-1]
    if many_bytes == few_bytes or long_s <= short_s:
        return Link(many_bytes / long_s)
    bandwidth = (many_bytes - few_bytes) / (long_s - short_s)
    return Link(bandwidth, max(0.0, short_s - few_bytes / bandwidth))


# --- The profile of a worker


def subject_of(engine: Engine, folder: Path) -> Subject:
    """Return the model, device and software that a profile of this engine is valid for."""
    threads = torch.get_num_threads()
    captured = f", captured: {engine.captured}" if engine.captured else ""
    over = "NCCL" + " and memory" * engine.sums_through_memory if engine.device.type == "cuda" else "sockets"
    talk = "" if engine.ranks.size == 1 else f", ranks over {over}"
    return Subject(
        model=fingerprint(folder),
        device=name_of(engine.device) or f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}",
        dtype=engine.numbers_as,
        tensor_parallel=engine.ranks.size,
        version=_version(),
        kernels=engine.kernels + captured + talk,
    )


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("alignedserve")
    return "uninstalled"


def bounds_of(engine: Engine, limits: WorkerLimits, longest: int) -> Bounds:
    """Return the bounds of the steps that are measured on this engine. On a CPU they leave most of a large device cache
    out: to write all of it first would take seconds, and what a token of KV costs is known from less."""
    num_blocks = limits.num_blocks
    if engine.device.type == "cpu":
        enough = units_for(limits.max_step_tokens, limits.block_size)
        num_blocks = min(num_blocks, max(enough, _MOST_FILLED // (_kv_bytes(engine) * limits.block_size)))
    return Bounds(replace(limits, num_blocks=num_blocks), longest, isinstance(engine.config, EncoderConfig))


def start_profile(
    meter: Meter,
    bounds: Bounds,
    subject: Subject,
    shared_memory: Path,
    directory: Path | None = None,
    budget_s: float = BUDGET_S,
    is_checked: bool = False,
) -> Profile:
    """Return the cached profile, or measure one and cache it for the next start.

    A worker serves by it at once, and learns from its steps what has changed. Where nothing runs afterwards it is to be
    `checked` first."""
    profile = known_profile(directory, subject, bounds.limits) if directory else None
    if profile is not None and not is_checked:
        return profile
    with own_cache(meter.engine):
        if profile is not None and (profile := checked(profile, meter, bounds)) is not None:
            return profile
        log.info("measuring what steps take on %s, for at most %g s", subject.device, budget_s)
        profile = measure_profile(meter, bounds, subject, shared_memory, budget_s)
    if directory:  # a profile that was checked in vain is not worth keeping
        (store if is_checked else keep)(directory, profile)
    if profile.is_busy:
        log.warning(
            "steps of the profile took %.1f times as long as the quickest: other work runs on this machine. Promises"
            " are made with that in mind, and it is measured again when the worker is idle",
            profile.slowdown,
        )
    return profile


def measure_profile(
    meter: Meter, bounds: Bounds, subject: Subject, shared_memory: Path, budget_s: float = BUDGET_S
) -> Profile:
    """Measure projection, copies and steps within the budget, and fit a profile to them."""
    start = meter.clock()
    remade_token_s = measure_remaking(meter)
    try:
        links = measure_copies(meter, bounds.limits.page_size, shared_memory)
    except (OSError, AlignedServeError) as error:
        log.warning("copies to shared memory are not measured: %s", error)
        links = {}
    budget_s = budget_s * _SHARE_OF_STEPS - (meter.clock() - start)
    steps = measure(meter, trials(bounds), budget_s, signs=meter.engine.signs)
    memory = MeasuredMemory(bounds.limits, _kv_bytes(meter.engine))
    profile = Profile.fitted(subject, memory, steps.points, remade_token_s, links, steps.slowdown, time.time())
    took_s, num = meter.clock() - start, len(profile.points)
    log.info("cost profile of %s: %d steps measured in %.1f s, %s", subject.device, num, took_s, profile.quietness)
    return profile


def _kv_bytes(engine: Engine) -> int:
    layers, width = engine.cache.shape[0], engine.cache.shape[-1]
    return 2 * layers * width * engine.cache.itemsize


def checked(profile: Profile, meter: Meter, bounds: Bounds) -> Profile | None:
    """Return the cached profile with the slowdown of now, or None if it is not right any more.

    The middle step of each kind is measured again. Other work on the machine makes steps slower, and never faster: a
    profile that was measured while there was less of it is better than what could be measured now.
    """
    known = {point.shape: point.seconds for point in profile.points}
    all_trials = trials(bounds)
    wanted = sorted((trial for trial in all_trials if trial.shape in known), key=lambda trial: known[trial.shape])
    by_kind = [[trial for trial in wanted if trial.shape.kind is kind] for kind in Kind]
    again = [of_kind[len(of_kind) // 2] for of_kind in by_kind if of_kind]
    if len(again) < len({trial.shape.kind for trial in all_trials}):
        log.info("the cached cost profile has other steps than are to be checked: it is measured again")
        return None
    for num_runs in _CHECK_RUNS:
        now = measure(meter, again, _CHECK_S, num_runs, meter.engine.signs)
        off = median(point.seconds / known[point.shape] for point in now.points) - 1
        wrong = _why_wrong(profile, off, now.slowdown >= BUSY)
        if not wrong and now.slowdown < BUSY:
            break
    if wrong:
        log.info("the cached cost profile %s: it is measured again", wrong)
        return None
    return replace(profile, slowdown=now.slowdown * max(1.0, 1 + off))


def _why_wrong(profile: Profile, off: float, is_busy: bool) -> str:
    """Return why the profile is worth measuring again, or an empty text."""
    if off < -_TOLERANCE or (off > _TOLERANCE and not is_busy):
        return f"is off by {100 * abs(off):.0f} %"
    return "was taken on a busy machine" if profile.is_busy and not is_busy else ""


@contextmanager
def own_cache(engine: Engine) -> Iterator[None]:
    """Give the engine a temporary device cache while it is measured: on a CPU, memory once written stays taken."""
    kept = engine.cache
    if kept.device.type == "cpu":
        engine.cache = engine.new_cache(kept.shape[1] // 2)
    try:
        yield
    finally:
        engine.cache = kept
