"""What a worker's shell does for its core: steps on the engine, copies between device and arena."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from alignedserve.core import CacheKind, Role, StepPlan, StepResult
from alignedserve.cost.profile import Profile, cache_directory, one_at_a_time
from alignedserve.cost.trials import Bounds
from alignedserve.engine.copying.aside import AsideCopies
from alignedserve.engine.copying.checkpoints import Checkpoints
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import finish
from alignedserve.engine.device.pace import Pace
from alignedserve.engine.device.pinning import Cudart, cudart_for, pin
from alignedserve.engine.device.ranks import Team, meet
from alignedserve.engine.engine import Engine
from alignedserve.engine.in_order import InOrder
from alignedserve.engine.profiling import Meter, start_profile, subject_of
from alignedserve.engine.sampling.reading import Begun
from alignedserve.errors import ArenaError
from alignedserve.executor.leading import LeadingEngine, Say, follow, nobody_hears, saying_to
from alignedserve.executor.loading import capture_decodes, device_for, load, with_pairs
from alignedserve.kernels.common.failing import loss, noticing_loss
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.kvpool.arena.shared_files import HolderLock
from alignedserve.machine.capacity import Capacity
from alignedserve.protocol.commands import (
    Command,
    CompressPage,
    CopyIn,
    CopyOut,
    CopySlots,
    ProjectKv,
    ReceiveKv,
    RunStep,
    SendKv,
)
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event, PageCompressed, Post, StepDone
from alignedserve.protocol.messages import Member, holder
from alignedserve.protocol.rank_orders import Copying, Meet, Order, PartFrom
from alignedserve.shell.part import DEVICE_LOST, OnStart, Part, Place, lock_name
from alignedserve.shell.turn import Core
from alignedserve.transport.choice import Chosen
from alignedserve.transport.opening import chosen_for, open_transport
from alignedserve.transport.transport import ThroughTheArena, Transport
from alignedserve.worker.core import WorkerSetup

log = logging.getLogger("alignedserve.engine")


class EngineHands:
    def __init__(
        self,
        engine: Engine,
        arena_path: Path,
        page_size: int,
        verify: bool,
        cudart: Cudart | None = None,
        transport: Transport | None = None,
        pace: Pace | None = None,
        num_places: int = 0,
        say: Say = nobody_hears,
        look_ahead: int = 0,
    ) -> None:
        """The arena is pinned where there is a `cudart`; the `pace` is that of all that is copied beside steps;
        `num_places` is of tokens that are checkpointed; what is done here is said to the other ranks with `say`. With
        `look_ahead` all work is done by a thread, and the core hears of what comes while a step runs."""
        self._engine, self._cudart, self._say = engine, cudart, say
        self._in_order = InOrder(engine.device) if look_ahead else None
        self._transport: Transport = transport or ThroughTheArena()
        self._pace = pace or Pace()
        self._aside = AsideCopies(page_size, self._pace, engine.device, partial(end_where_lost, engine.device))
        self._checkpoints = Checkpoints(engine.cache, num_places)
        self._unpin: Callable[[], None] = lambda: None
        self._arena_path = arena_path
        self._page_size, self._verify = page_size, verify
        self._copier: PageCopier | None = None  # to the arena of the pool that is there, if one is
        self._pool = ""  # its holder

    def close(self) -> None:
        """What is under way is finished, and nothing else begun."""
        if self._in_order is not None:
            self._in_order.close()

    def meet(self, member: Member) -> None:
        """A pool: map its arena. A worker: KV may go to it, or come from it. What was ordered before is done before."""
        self._meanwhile(partial(self._meet, member))

    def part_from(self, member: Member) -> None:
        """A pool: its arena's memory is free once nobody maps it, and the next pool may need it."""
        self._meanwhile(partial(self._part_from, member))

    def _meanwhile(self, work: Callable[[], None]) -> None:
        if self._in_order is not None:
            self._in_order.meanwhile(work)
        else:
            work()

    def _meet(self, member: Member) -> None:
        if member.role is Role.POOL or member.transport:
            self._say(Meet(member))
        self._transport.meet(member)
        if member.role is not Role.POOL:
            return
        try:
            arena = Arena.attach(self._arena_path, incarnation=member.incarnation)
            self._copier, self._pool = self._copier_of(arena), member.holder
            self._aside.attach(self._copier_of(arena), self._pool)
            if self._cudart is not None:
                self._unpin = pin(arena, self._cudart, self._engine.device)
        except ArenaError as error:
            log.warning("%s", error)  # the pool has gone again; its successor will be met

    def _part_from(self, member: Member) -> None:
        if member.role is Role.POOL or member.transport:
            self._say(PartFrom(member))
        self._transport.part_from(member)
        if member.role is Role.POOL and self._copier is not None:
            self._aside.detach()
            self._unpin()
            self._copier.close()
            self._copier = None

    def perform_aside(self, command: Command, post: Post) -> bool:
        if self._in_order is None:
            return self._begin_aside(command, post)
        if isinstance(command, RunStep):
            self._in_order.step(command.plan, self._begin_step, post)
        else:
            self._in_order.do(partial(self._begin_aside, command, post), partial(self._do, command, post), post)
        return True

    def _do(self, command: Command, post: Post) -> None:
        if (done := self.perform(command)) is not None:
            post(done)

    def _begin_step(self, plan: StepPlan) -> Begun:
        with noticing_loss(self._engine.device), self._pace.step():
            begun = self._engine.begin(plan)
        if begun.has_failed:
            self._warn(plan, begun.result())
        return begun

    def _begin_aside(self, command: Command, post: Post) -> bool:
        match command:
            case SendKv() | ReceiveKv():
                self._say(command)
                self._transport.start(command, post)
                return True
            case _ if self._engine.ranks.size > 1:
                return False  # the ranks do the same in the same order
            case CopyIn(aside=True) if self._is_projected(command):
                return False  # the model computes one thing at a time
            case CopyIn(aside=True) | CopyOut(aside=True):
                self._aside.add(command, post)
                return True
        return False

    def perform(self, command: Command) -> Event | None:
        with noticing_loss(self._engine.device):
            return self._perform(command)

    def _perform(self, command: Command) -> Event | None:
        match command:
            case RunStep(plan):
                began = perf_counter()
                with self._pace.step():
                    result = self._engine.step(plan)
                self._warn(plan, result)
                return StepDone(result, perf_counter() - began)
            case CopyOut() | CopySlots() | ProjectKv() | CopyIn() | CompressPage():
                self._say(command)
                return self._copy(command)
        raise TypeError(f"a worker cannot perform {command}")

    @staticmethod
    def _warn(plan: StepPlan, result: StepResult) -> None:
        if result.failure is not None:
            why, tokens = result.failure.why, plan.num_tokens
            log.warning("too little memory for step %d of %d tokens: %s", plan.number, tokens, why)

    def follow(self, order: Order) -> None:
        """What rank 0 does, as another rank."""
        with noticing_loss(self._engine.device):
            match order:
                case RunStep(plan):
                    with self._pace.step():
                        self._engine.step(plan)
                case SendKv() | ReceiveKv():
                    self._transport.start(order, lambda _: None)  # rank 0 is told of its end
                case Meet(member):
                    self.meet(member)
                case PartFrom(member):
                    self.part_from(member)
                case _:
                    self._copy(order)

    def _copy(self, command: Copying) -> Event | None:
        """What is read counts where every rank could read its own."""
        agree = self._engine.ranks.agree
        match command:
            case CopyOut(number):
                self._copy_out(command)
                return CopiedOut(number)
            case CopySlots():
                self._checkpoints.copy(command)
                return None
            case ProjectKv(request, blocks, pairs, num_tokens):
                self._engine.project(request, blocks, pairs, num_tokens)
                return None
            case CopyIn(number):
                return CopiedIn(number, agree(self._copy_in(command)))
            case CompressPage(number, pool, page, into):
                began, copier = perf_counter(), self._copier_to(pool)
                done = copier is not None and copier.compress(page, into)
                return PageCompressed(pool, number, agree(done), perf_counter() - began)

    def _is_projected(self, command: CopyIn) -> bool:
        """Whether K and V are to be made of what is in the pages."""
        is_hidden = self._copier is not None and self._copier.is_hidden(command.pages)
        return is_hidden and command.kind is CacheKind.KV

    def _copier_of(self, arena: Arena) -> PageCopier:
        cache, hidden_size = self._engine.cache, hidden_size_of(self._engine)
        return PageCopier(cache, arena, self._page_size, self._verify, hidden_size)

    def _copy_out(self, command: CopyOut) -> None:
        if (copier := self._copier_to(command.pool)) is not None:
            saved = self._checkpoints.read([place for _, place in command.saved])
            vectors = {token: saved[:, :, number] for number, (token, _) in enumerate(command.saved)}
            args = (command.pairs, command.pages, command.tokens, command.start, command.from_right)
            copier.copy_out(*args, vectors)

    def _copy_in(self, command: CopyIn) -> bool:
        copier, pairs, tokens = self._copier_to(command.pool), command.pairs, command.tokens
        if copier is None or not copier.copy_in(command.pages, pairs, tokens, command.from_right, command.kind):
            return False
        if self._is_projected(command):
            halves = [2 * pair for pair in pairs]  # where the copier has put them
            self._engine.project(f"of copy {command.number}", halves, pairs, len(tokens))
        return True

    def _copier_to(self, pool: str) -> PageCopier | None:
        """None where that pool has gone: the same pages of its successor are somebody else's."""
        return self._copier if pool == self._pool else None


def end_where_lost(device: torch.device) -> None:
    """For a thread that has failed: where the device has, nothing that the process could do is of any use."""
    if why := loss(device):
        log.error("%s computes nothing any more (%s): this process ends, and is started anew", device, why)
        os._exit(DEVICE_LOST)


def hidden_size_of(engine: Engine) -> int | None:
    """Where the model's requests may be kept as hidden vectors."""
    return engine.config.hidden_size if engine.config.why_not_hidden is None else None


def hold_leases(place: Place) -> HolderLock:
    """The lock by which others see that this process lives, and may still write to its leased pages."""
    spec = place.spec
    name = lock_name(spec.deployment, holder(spec.worker, place.incarnation), spec.rank)
    return HolderLock(place.shared_memory, name)


def transport_of(place: Place, chosen: Chosen, engine: Engine, pace: Pace, team: Team | None) -> Transport:
    """The engine's device cache may lie elsewhere from now on."""
    lost = partial(end_where_lost, engine.device)
    transport, engine.cache = open_transport(place, chosen, engine.cache, hidden_size_of(engine), pace, team, lost)
    return transport


def pace_on(device: torch.device) -> Pace:
    """A GPU copies beside its steps by itself: nothing is held back there."""
    return Pace(threads=torch.get_num_threads()) if device.type == "cpu" else Pace(share=1.0)


def known_profile(part: Part, engine: Engine, room: Capacity) -> Profile | None:
    """What steps and copies take on this device, measured at the first start; workers of a node measure in turn."""
    config = part.config.engine
    if not config.profile_s:
        log.info("nothing is known of what steps take until some have run: engine.profile_s is 0")
        return None
    folder = Path(config.profile_cache) if config.profile_cache else cache_directory()
    subject, bounds = subject_of(engine, part.folder), Bounds(room.limits, room.max_model_len)
    meter = Meter(engine, synchronize=lambda: finish(engine.device))
    with one_at_a_time(folder):
        return start_profile(meter, bounds, subject, part.shared_memory, folder, config.profile_s)


def run_worker(part: Part, on_start: OnStart, make: Callable[[WorkerSetup], Core]) -> None:
    """A worker as a process: its core and the engine."""
    config, (_, capacity) = part.config, part.capacity()
    chosen = chosen_for(part, device_for(part))
    lock, team = hold_leases(part), meet_ranks(part)
    say = saying_to(team) if team is not None else nobody_hears
    transport: Transport = ThroughTheArena()
    try:
        engine = load(part, LeadingEngine, team)
        engine.say = say
        capacity = with_pairs(capacity, engine)
        limits = capacity.limits
        pace = pace_on(engine.device)
        transport = transport_of(part, chosen, engine, pace, team)
        if engine.has_graphs:
            capture_decodes(engine, config)
        part.member = replace(part.member, transport=transport.address)
        profile = known_profile(part, engine, capacity)
        cost, copy_token_s = (profile.online(), profile.copy_token_s) if profile else (None, 0.0)
        look_ahead = config.engine.steps_ahead(config.policy) if part.spec.role is Role.DECODE else 0
        hands = hands_of(part, engine, capacity, say=say, transport=transport, pace=pace, look_ahead=look_ahead)
        root = f"{part.folder} {capacity.dtype} {limits.page_size} ".encode()
        setup = WorkerSetup(
            limits,
            config.policy,
            cost,
            copy_token_s,
            root,
            direct=bool(transport.address),
            look_ahead=look_ahead,
        )
        shell = part.shell(make(setup), hands, hands.perform_aside)
        on_start(shell)
        try:
            part.run(shell)
        finally:
            hands.close()
    finally:
        transport.close()
        lock.release()


def run_rank(place: Place) -> None:
    """Another rank of a worker as a process: it does what rank 0 says, as long as that lives."""
    _, capacity = place.capacity()
    chosen = chosen_for(place, device_for(place))
    lock, team = hold_leases(place), meet_ranks(place)
    assert team is not None, "rank 0 alone can be the only one"
    transport: Transport = ThroughTheArena()
    try:
        engine = load(place, Engine, team)
        pace = pace_on(engine.device)
        transport = transport_of(place, chosen, engine, pace, team)
        hands = hands_of(place, engine, with_pairs(capacity, engine), transport=transport, pace=pace)
        follow(team, hands, place.config.wire.max_frame_mb << 20)
    finally:
        transport.close()
        lock.release()


def hands_of(
    place: Place,
    engine: Engine,
    capacity: Capacity,
    *,
    say: Say = nobody_hears,
    transport: Transport | None = None,
    pace: Pace | None = None,
    look_ahead: int = 0,
) -> EngineHands:
    config, limits = place.config, capacity.limits
    num_slots = limits.num_pairs * limits.block_size if place.spec.role is Role.DECODE else 0
    return EngineHands(
        *(engine, place.arena_path(place.spec.rank), limits.page_size, config.kvpool.verify_pages),
        *(cudart_for(engine.cache.device), transport, pace),
        num_places=config.policy.num_places(num_slots),
        say=say,
        look_ahead=look_ahead,
    )


def meet_ranks(place: Place) -> Team | None:
    """The other ranks of this worker's life, each with its lock; None where there are none."""
    size = place.config.engine.tensor_parallel_size
    if size == 1:
        return None
    return meet(place.spec.ranks_at, str(place.incarnation), place.spec.rank, size, device_for(place))
