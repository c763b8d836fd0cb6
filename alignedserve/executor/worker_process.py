"""A worker's ranks as processes: rank 0 with its core, its shell and its engine; the others do what rank 0 does."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from alignedserve.architectures.model_source import cache_directory
from alignedserve.core import FREE_COPIES
from alignedserve.cost.profile import Profile, keep, known_profile
from alignedserve.cost.promising import LearntPromise
from alignedserve.engine.device.devices import finish, gpu_uuid
from alignedserve.engine.engine import Engine
from alignedserve.engine.profiling import Meter, bounds_of, start_profile, subject_of
from alignedserve.executor.building import build_rank
from alignedserve.executor.leading import LeadingEngine, follow, say_nothing, saying_to
from alignedserve.executor.loading import capture_steps, steps_ahead
from alignedserve.executor.work_watch import LEAST_S, ON_GPU_S, UNKNOWN_S, WorkWatch
from alignedserve.machine.energy import EnergyMeter, counter_of, meters
from alignedserve.machine.whole_file import one_at_a_time
from alignedserve.protocol.messages import Attempt
from alignedserve.shell.part import OnStart, Part, Place
from alignedserve.shell.turn import Core
from alignedserve.signs import Stage
from alignedserve.sizing.capacity import Capacity
from alignedserve.worker.setup import WorkerSetup

log = logging.getLogger("alignedserve.engine")

_MOST_ORDER_BYTES = 1 << 30  # to a rank: a step of 1,024 requests of a million tokens each takes a fifth


class WorkerCore(Core, Protocol):
    @property
    def copying(self) -> tuple[Attempt, ...]:
        """Return the attempts to whose blocks copies from the pool are under way."""


def run_worker(part: Part, on_start: OnStart, make: Callable[[WorkerSetup], WorkerCore]) -> None:
    """Build the engine and the core that `make` returns, and run them until the part is stopped."""
    config = part.config
    look_ahead = steps_ahead(part)
    with build_rank(part, LeadingEngine) as built:
        engine, capacity, transport = built.engine, built.capacity, built.transport
        say = saying_to(built.team) if built.team is not None else say_nothing
        engine.say = say
        if engine.has_graphs:
            capture_steps(engine, config, part.spec.acts_as)
        part.member = replace(part.member, transport=transport.address)
        profile = _known_profile(part, engine, capacity)
        on_gpu = engine.device.type != "cpu"
        watch = WorkWatch(
            least_s=UNKNOWN_S if not profile else ON_GPU_S if on_gpu else LEAST_S,
            first_s=UNKNOWN_S if on_gpu or not profile else LEAST_S,
            still_s=max(LEAST_S, 2 * config.wire.death_s),
            copying=profile.copying if profile else FREE_COPIES,
        )
        meters(energy := EnergyMeter(counter_of(gpu_uuid(engine.device)), engine.ranks.size))
        pauses = engine.pauses(capacity.limits.max_step_tokens)
        hands = built.hands(say, look_ahead, watch, energy, pauses)
        promise = LearntPromise(capacity.limits, capacity.max_model_len)
        setup = WorkerSetup(
            capacity.limits,
            part.policy,
            profile.online() if profile else None,
            profile.copying if profile else FREE_COPIES,
            f"{part.folder} {capacity.dtype} {capacity.kv_dtype.value} {capacity.limits.page_size} ".encode(),
            direct=bool(transport.address),
            look_ahead=look_ahead,
            copies_beside=built.copies_beside,
            energy_source=energy.source,
            promise=promise if profile and engine.config.generates else None,
            layers=0 if pauses is None else engine.config.num_layers,
            looks_first=True,
        )
        core = make(setup)
        part.at_work.under_way = lambda: core.copying  # a copy that ends this process ends it amid other events
        shell = part.shell(core, hands, hands.begin_aside)
        on_start(shell)
        try:
            part.run(shell, late_s=watch.late_s, is_busy=lambda: watch.is_busy)
        finally:
            faulthandler.cancel_dump_traceback_later()
            hands.close()
            if profile and setup.cost:
                keep(cache_directory(config.cache_directory), profile.refined(setup.cost))


def _known_profile(part: Part, engine: Engine, room: Capacity) -> Profile | None:
    """Return what steps and copies take on this device, measured at the first start. The workers of a node measure
    one after the other."""
    profile_s, given = part.config.engine.profile_s, part.config.cache_directory
    if not profile_s:
        log.info("the durations of steps are unknown until some have run, because engine.profile_s is 0")
        return None
    folder, subject = cache_directory(given), subject_of(engine, part.folder)
    bounds = bounds_of(engine, room.limits, room.max_model_len)
    if (known := known_profile(folder, subject, bounds.limits)) is not None:
        return known
    meter = Meter(engine, synchronize=lambda: finish(engine.device))
    part.signs.stage(Stage.TURN)
    with one_at_a_time(folder, part.signs.advance):  # two would disturb each other
        part.signs.stage(Stage.STEPS)
        return start_profile(meter, bounds, subject, part.shared_memory, folder, profile_s)


def run_rank(place: Place) -> None:
    """Follow rank 0 for as long as it lives; RankLost when it has gone."""
    with build_rank(place, Engine) as built:
        assert built.team is not None, "a worker's only rank is rank 0"
        if built.engine.has_graphs:
            capture_steps(built.engine, place.config, place.spec.acts_as)
        with closing(built.hands()) as hands:
            place.signs.stage(Stage.RUNS)
            place.watch.begin()
            follow(built.team, hands.follow, _MOST_ORDER_BYTES)
