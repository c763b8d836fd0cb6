"""Measures steps of a real engine at start-up, so that the cost model knows the device before the first request.

Sizes grow exponentially: few steps tell small ones from large ones. First all sizes are measured once, each kind in its
turn, so a profile that runs out of time has seen something of everything. What a step takes is the median of three
runs of it (the first of them may be slow, the median is not); a long step runs once.
"""

from __future__ import annotations

import logging
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import log as ln
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from alignedserve.core import Chunk, Decode, Sampling, StepPlan, half_blocks, units_for
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Kind, Link, Route, Shape, Transfers
from alignedserve.cost.profile import MeasuredMemory, Profile, Subject, cached, fingerprint, store
from alignedserve.cost.trials import Bounds, Trial, trials
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import name_of
from alignedserve.engine.device.pinning import cudart_for, pin
from alignedserve.engine.engine import Engine
from alignedserve.errors import AlignedServeError
from alignedserve.kvpool.arena.arena import Arena

log = logging.getLogger("alignedserve.cost")

RUNS = 3
BUDGET_S = 20.0
_TOLERANCE = 0.25  # what a cached profile may be off by
_LONG_S = 0.25  # a step that takes so long runs once: it is an average by itself
_GREEDY = Sampling()
_PROJECTED = 256  # tokens whose K and V are made at once to measure that
_COPIED_PAGES = (1, 4, 16)
_CAUTION = 1.25  # a guess may be too low by so much
_MOST_FOR_ONE = 0.1  # of the budget
_CHECK_S = 10.0  # at most, for the three steps of a check
_FOR_STEPS = 0.85  # of the budget; the rest is for fitting


class Meter:
    """Runs trials on an engine that serves nobody yet."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.clock, self._synchronize = engine, clock, synchronize
        self._random = random.Random(0)
        self._filled = 0  # block pairs that hold something

    def run(self, trial: Trial) -> float:
        """Seconds of one run."""
        plan = self._plan(trial)
        return self._once(lambda: self.engine.step(plan))

    def median_of(self, work: Callable[[], object]) -> float:
        work()
        return median(self._once(work) for _ in range(RUNS))

    def _once(self, work: Callable[[], object]) -> float:
        self._synchronize()
        start = self.clock()
        work()
        self._synchronize()
        return self.clock() - start

    def _plan(self, trial: Trial) -> StepPlan:
        pairs = iter(self._pairs(trial.ends))
        vocabulary = self.engine.config.vocab_size
        chunks = tuple(
            Chunk(f"c{number}", tuple(self._random.choices(range(vocabulary), k=length)), cached, next(pairs), _GREEDY)
            for number, (length, cached) in enumerate(trial.chunks)
        )
        decodes = tuple(
            Decode(f"d{number}", self._random.randrange(vocabulary), prefix, next(pairs), _GREEDY, 0)
            for number, prefix in enumerate(trial.prefixes)
        )
        return StepPlan(0, chunks, decodes)

    def pairs_for(self, tokens: int) -> tuple[int, ...]:
        return next(self._pairs((tokens,)))

    def _pairs(self, ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Each request's own, one after the other."""
        first = 0
        for end in ends:
            count = units_for(end, self.engine.block_size)
            yield tuple(range(first, first + count))
            first += count
            self._fill(first)

    def _fill(self, pairs: int) -> None:
        """MeasuredMemory that was never written is one page of zeros, and faster to read than any other."""
        if pairs > self._filled:
            self.engine.cache[:, 2 * self._filled : 2 * pairs] = 0.01
            self._filled = pairs


# --- Measuring it


def measure(meter: Meter, wanted: Sequence[Trial], budget_s: float) -> list[Point]:
    """As many of them as there is time for. One that would take much of it is left out: many small ones tell more.

    The runs of a step are far apart: whatever disturbs the machine for a second disturbs one run of many steps.
    """
    end = meter.clock() + budget_s
    times: dict[Trial, list[float]] = {}
    later = 0.0  # seconds of the runs that are still to come
    for trial in wanted:
        guess = _CAUTION * _guess(times, trial.shape)
        takes = guess * (RUNS if guess <= _LONG_S else 1)
        if takes <= min(end - meter.clock() - later, _MOST_FOR_ONE * budget_s):
            times[trial] = [meter.run(trial)]
            later += (RUNS - 1) * times[trial][0] if times[trial][0] <= _LONG_S else 0.0
    for _ in range(RUNS - 1):
        for trial, runs in times.items():
            if runs[0] <= _LONG_S:
                runs.append(meter.run(trial))
    return [Point(trial.shape, median(runs)) for trial, runs in times.items()]


def _guess(times: Mapping[Trial, Sequence[float]], shape: Shape) -> float:
    """From the step that was most like it."""
    if not times:
        return 0.0
    size = _size(shape)
    like = min(times, key=lambda trial: abs(ln(_size(trial.shape) / size)))
    return times[like][0] * max(1.0, size / _size(like.shape))


def _size(shape: Shape) -> float:
    """Roughly in proportion to what it takes: a token that is attended to counts little against one that runs."""
    return 1 + shape.tokens + (shape.work / 8 + shape.cached + shape.prefixes) / 256


def measure_projection(meter: Meter) -> float:
    """Seconds to make K and V of one token from its hidden vectors, in all layers; 0 where the model keeps none."""
    engine = meter.engine
    if engine.config.why_not_hidden is not None:
        return 0.0
    tokens = min(_PROJECTED, engine.config.max_positions, engine.cache.shape[1] // 2 * engine.block_size)
    pairs = meter.pairs_for(tokens)
    return meter.median_of(partial(engine.project, "p", half_blocks(pairs), pairs, tokens)) / tokens


def measure_copies(meter: Meter, page_size: int, shared_memory: Path) -> Transfers:
    """Between the device and an arena of its own."""
    cache, block_size = meter.engine.cache, meter.engine.block_size
    page_bytes = page_size * _kv_bytes(meter.engine)
    room = cache.shape[1] // 2 * block_size // page_size
    counts = [count for count in _COPIED_PAGES if count <= room]
    if not counts:
        return Transfers()
    with TemporaryDirectory(dir=shared_memory, prefix="alignedserve-profile-") as folder:
        path = Path(folder) / "arena"
        arena = Arena.create(path, pages=counts[-1], payload_bytes=page_bytes, page_size=page_size, incarnation=1)
        copier, cudart = PageCopier(cache, arena, page_size, verify=False), cudart_for(cache.device)
        unpin = pin(arena, cudart, cache.device) if cudart is not None else None  # as the pool's is
        try:
            return _copies(meter, copier, counts, page_size, page_bytes)
        finally:
            if unpin is not None:
                unpin()
            copier.close()


def _copies(meter: Meter, copier: PageCopier, counts: Sequence[int], page_size: int, page_bytes: int) -> Transfers:
    outs, ins = [], []
    for count in counts:
        pages, tokens = range(count), [1] * (count * page_size)
        pairs = range(units_for(len(tokens), meter.engine.block_size))
        out, back = partial(copier.copy_out, pairs, pages, tokens), partial(copier.copy_in, pages, pairs, tokens)
        outs.append((count * page_bytes, meter.median_of(out)))
        ins.append((count * page_bytes, meter.median_of(back)))
    return Transfers({Route.DEVICE_TO_ARENA: _link(outs), Route.ARENA_TO_DEVICE: _link(ins)})


def _link(times: Sequence[tuple[int, float]]) -> Link:
    """Through the smallest and the largest copy."""
    (few, short), (many, long) = times[0], times[-1]
    if many == few or long <= short:
        return Link(many / long)
    bandwidth = (many - few) / (long - short)
    return Link(bandwidth, max(0.0, short - few / bandwidth))


# --- The profile of a worker


def subject_of(engine: Engine, folder: Path) -> Subject:
    threads = torch.get_num_threads()
    return Subject(
        model=fingerprint(folder),
        device=name_of(engine.device) or f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}",
        dtype=str(engine.dtype).removeprefix("torch."),
        tensor_parallel=engine.ranks.size,
        version=_version(),
        kernels=engine.kernels,
    )


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("alignedserve")
    return "uninstalled"


def start_profile(
    meter: Meter,
    bounds: Bounds,
    subject: Subject,
    shared_memory: Path,
    directory: Path | None = None,
    budget_s: float = BUDGET_S,
) -> Profile:
    """From the cache where it still holds for this device, else measured, and kept there for the next start."""
    with own_cache(meter.engine):
        profile = cached(directory, subject) if directory else None
        if profile is not None and still_holds(profile, meter, bounds):
            log.info("cost profile of %s taken from the cache", subject.device)
            return profile
        log.info("measuring what steps take on %s, for at most %g s", subject.device, budget_s)
        profile = measure_profile(meter, bounds, subject, shared_memory, budget_s)
    if directory:
        store(directory, profile)
    return profile


def measure_profile(
    meter: Meter, bounds: Bounds, subject: Subject, shared_memory: Path, budget_s: float = BUDGET_S
) -> Profile:
    start = meter.clock()
    hidden_token_s = measure_projection(meter)
    try:
        transfers = measure_copies(meter, bounds.limits.page_size, shared_memory)
    except (OSError, AlignedServeError) as error:
        log.warning("copies to shared memory are not measured: %s", error)
        transfers = Transfers()
    points = measure(meter, trials(bounds), budget_s * _FOR_STEPS - (meter.clock() - start))
    memory = MeasuredMemory(bounds.limits, _kv_bytes(meter.engine))
    profile = Profile.fitted(subject, memory, tuple(points), hidden_token_s, transfers)
    log.info("cost profile of %s: %d steps measured in %.1f s", subject.device, len(points), meter.clock() - start)
    return profile


def _kv_bytes(engine: Engine) -> int:
    layers, width = engine.cache.shape[0], engine.cache.shape[-1]
    return 2 * layers * width * engine.cache.itemsize


def still_holds(profile: Profile, meter: Meter, bounds: Bounds) -> bool:
    """Three of its steps are measured again: of each kind the one in the middle."""
    measured, wanted_limits = profile.memory.limits, bounds.limits
    if measured.max_step_tokens < wanted_limits.max_step_tokens or measured.max_batch < wanted_limits.max_batch:
        log.info("the cached cost profile is of smaller steps than this worker's: it is measured anew")
        return False
    known = {point.shape: point.seconds for point in profile.points}
    wanted = sorted((trial for trial in trials(bounds) if trial.shape in known), key=lambda trial: known[trial.shape])
    of_kinds = [[trial for trial in wanted if trial.shape.kind is kind] for kind in Kind]
    again = [some[len(some) // 2] for some in of_kinds if some]
    if len(again) < len({trial.shape.kind for trial in trials(bounds)}):
        log.warning("the cached cost profile has other steps than this worker would measure: it is measured anew")
        return False
    points = measure(meter, again, _CHECK_S)
    off = median(abs(point.seconds / known[point.shape] - 1) for point in points)
    if off > _TOLERANCE:
        log.warning("the cached cost profile is off by %.0f %%: it is measured anew", 100 * off)
    return off <= _TOLERANCE


@contextmanager
def own_cache(engine: Engine) -> Iterator[None]:
    """On a CPU, memory of the device cache that is touched once stays taken: measure on another, and give it back."""
    kept = engine.cache
    if kept.device.type == "cpu":
        engine.cache = engine.new_cache(kept.shape[1] // 2)
    try:
        yield
    finally:
        engine.cache = kept
