"""Runs a workload through a whole deployment in virtual time: `Simulation(settings).run()`.

arrivals ─▶ Clients ─▶ gateway's owner core ─▶ router core ─▶ workers' cores, pool core
               ▲                                                     │
               └──────────────── Deliver, checked ◀──────────────────┘
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from alignedserve.core import Role, Usage
from alignedserve.cost.promising import LearntPromise
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.kvpool.state import PoolCore
from alignedserve.lab.loads.records.records import RequestRecord, RunRecord
from alignedserve.lab.loads.workload import Arrival, Load
from alignedserve.lab.simulator.clients import Clients, GivenLoad
from alignedserve.lab.simulator.launching import WORKERS, SimulatedLauncher
from alignedserve.lab.simulator.machines.engine import CheckedHands, ModelledHands, TaggedArena
from alignedserve.lab.simulator.machines.faults import calm_at
from alignedserve.lab.simulator.machines.process import ProcessSetup, WorkHands
from alignedserve.lab.simulator.machines.world import World
from alignedserve.lab.simulator.recorder import RecordedHands, Recorder
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings, gateways_of, members_of, node_of
from alignedserve.owner.core import OwnerCore
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Charge, Command, Deliver, Reject, Scale, Show, TellPlace, WatchHolder
from alignedserve.protocol.events import Event, HolderGone
from alignedserve.protocol.messages import Figures, Member
from alignedserve.router.lengths import OutputLengths
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.shell.turn import NoHands
from alignedserve.worker.setup import WorkerSetup

_MANY_OBJECTS = 50_000  # new objects after which Python looks for cycles
_QUIET_S = 30.0  # after the last request: by then deaths are noticed, locks are free, and late frames have arrived


class Simulation:
    """A deployment in virtual time, with its clients."""

    def __init__(
        self,
        settings: Settings,
        asked: Iterable[Arrival] | None = None,
        world: World | None = None,
        taught: Callable[[], OutputLengths] = OutputLengths,
    ) -> None:
        """Draw requests from the workload unless they are `asked`; `taught` makes what a
        router knows of lengths at its start."""
        self.settings = settings
        self.world = world or World(settings.seed, settings.network, settings.checked)
        self.problems: list[str] = []
        self._taught = taught
        load = Load(settings.workload, gateways_of(settings), settings.seed) if asked is None else GivenLoad(asked)
        self.clients = Clients(self.world, settings, load, self.problems)
        self._arenas: dict[str, TaggedArena] = {}  # holder of the pool -> its arena
        self._recorder = Recorder(settings.limits.max_step_tokens) if settings.record else None
        self._pool: list[Usage] = []  # as the pool has reported it
        self._ended_at = 0.0  # when the last request ended, or the time limit was reached
        self.on_figures: Callable[[Figures], None] = lambda _: None  # for a film of the run
        self.on_reject: Callable[[Reject], None] = lambda _: None  # likewise; before the client hears of it
        node = partial(node_of, settings=settings)
        members = members_of(settings)
        self.launcher = SimulatedLauncher(
            self.world, members, node, self._start_member, settings.start_s, settings.drain_s
        )
        self.world.on_resize = lambda wanted: self.launcher.scale(wanted.prefill, wanted.decode)

    def run(self) -> None:
        with _rare_collections():
            agenda = self.world.agenda
            self._begin()
            agenda.run(self.settings.most_s, ended=lambda: self.clients.num_open == 0)
            self._ended_at = agenda.now
            agenda.run(max(agenda.now, calm_at(self.settings.faults)) + _QUIET_S)
            self._check()

    def run_until(self, at: float) -> None:
        """Run from the start to this instant, to look at the deployment as it is then."""
        with _rare_collections():
            self._begin()
            self.world.agenda.run(at)

    def _begin(self) -> None:
        self.world.plan(self.settings.faults)
        for name, role in members_of(self.settings).items():
            self._start_member(name, role)
        self.clients.start()
        self.world.on_death = self._died

    def _start_member(self, name: str, role: Role) -> None:
        transport = name if self.settings.direct and role in WORKERS else ""
        node, lends = node_of(name, role, self.settings), role is Role.PREFILL and self.settings.lends
        acting = Role.DECODE if lends else role
        self.world.start(name, acting, self.lives[acting], node, transport, lends)

    def _died(self, name: str) -> None:
        self.clients.died(name)

    # --- What gateways tell clients

    @property
    def deliver(self) -> Callable[[Deliver], None]:
        """Return what hears of tokens: a gateway asks once, since there is a command for each token."""
        return self.clients.deliver

    def reject(self, command: Reject) -> None:
        self.on_reject(command)
        self.clients.reject(command)

    def show(self, figures: Figures) -> None:
        self.on_figures(figures)
        if figures.usage is not None:
            self._pool.append(figures.usage)

    # --- What each kind of process starts with

    @property
    def lives(self) -> Mapping[Role, Callable[[World, Member], ProcessSetup]]:
        """Return for each role what a new life of a process begins with."""
        return {
            Role.ROUTER: self.router,
            Role.GATEWAY: self.gateway,
            Role.POOL: self.pool,
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
        }

    def router(self, world: World, member: Member) -> ProcessSetup:
        settings = self.settings
        limits = RouterLimits(
            settings.most_open,
            settings.network.heartbeat_s,
            settings.death_s,
            self.settings.policy,
            settings.limits.block_size,
            settings.limits.num_tokens,
            settings.queues,
            settings.sizes,
            settings.topology.prompts_on,
            settings.limits.retention,
            settings.lends,
        )
        core = RouterCore(member, limits, world.now_of(member.name), lengths=self._taught())
        return ProcessSetup(core, _RouterHands(self.launcher), core.start())

    def post_to(self, member: Member, event: Event) -> None:
        """Give the event to this life of the member, if it is still alive."""
        process = self.world.alive(member.name)
        if process is not None and process.member == member:
            process.post(event)

    def gateway(self, world: World, member: Member) -> ProcessSetup:
        needed = {Role.ROUTER, Role.DECODE}
        if not self.settings.topology.colocated:
            needed |= {Role.POOL} if self.settings.lends else {Role.PREFILL, Role.POOL}
        return ProcessSetup(OwnerCore(frozenset(needed)), _ClientHands(self), [])

    def pool(self, world: World, member: Member) -> ProcessSetup:
        extents = self.settings.pool_extents
        earlier = [holder for holder in self._arenas if holder.rpartition(".")[0] == member.name]
        for holder in earlier:
            del self._arenas[holder]
        self._arenas[member.holder] = TaggedArena(self.settings.limits.page_size, extents)
        core = PoolCore(extents, self.settings.limits.block_size, self.settings.policy)
        return ProcessSetup(core, _SimulatedPoolHands(world, member.name), [])

    def prefill(self, world: World, member: Member) -> ProcessSetup:
        return self._worker_setup(self._worker(PrefillCore), member)

    def decode(self, world: World, member: Member) -> ProcessSetup:
        return self._worker_setup(self._worker(decode_core), member)

    def _worker(self, make: Callable[[WorkerSetup], DecodeCore]) -> DecodeCore:
        settings = self.settings
        setup = WorkerSetup(
            settings.limits,
            self.settings.policy,
            settings.belief() if settings.belief is not None else None,
            settings.copying,
            direct=settings.direct,
            look_ahead=settings.look_ahead,
            copies_beside=settings.copies_beside,
            promise=None if settings.belief is None else LearntPromise(settings.limits, settings.limits.num_tokens),
            layers=settings.layers,
        )
        return make(setup)

    def _worker_setup(self, core: DecodeCore, member: Member) -> ProcessSetup:
        hands = self._engine()
        if self._recorder is not None:
            hands = RecordedHands(hands, member.name, self.world.agenda, lambda: core.memory.free_share, self._recorder)
        layers, hears_while_busy = self.settings.layers, bool(self.settings.look_ahead or self.settings.layers)
        return ProcessSetup(core, hands, [], hands, hears_while_busy=hears_while_busy, layers=layers)

    def _engine(self) -> WorkHands:
        limits, timing = self.settings.limits, self.settings.timing
        if self.settings.checked:
            return CheckedHands(self.clients.stories, timing, limits, lambda pool: self._arenas.get(pool.holder))
        return ModelledHands(self.clients.stories, timing)

    # --- The end

    def _check(self) -> None:
        self.clients.check()
        num_leased, num_lent = 0, 0
        for name in self.launcher.members:
            process = self.world.alive(name)
            if process is None:
                self.problems.append(f"{name} is not back")
                continue
            core = process.core
            assert isinstance(core, RouterCore | OwnerCore | PoolCore | DecodeCore)
            self.problems += [f"{name} still has {count} {what}" for what, count in core.held.items() if count]
            if isinstance(core, DecodeCore):
                num_leased += len(core.leased_pages)
            if isinstance(core, PoolCore):
                num_lent += core.num_lent_pages
        if num_leased != num_lent:
            self.problems.append(f"the pool has lent {num_lent} pages, the workers have {num_leased}")

    def record(self, wall_s: float) -> RunRecord:
        """Return the record of a run that has ended. The caller measures `wall_s`: the simulation has no real clock."""
        recorder, requests = self._recorder, self._records()
        return RunRecord(
            began_at=min((request.arrival_at for request in requests), default=FIRST_ARRIVAL_AT),
            ended_at=self._ended_at,
            wall_s=wall_s,
            workers=self.launcher.workers,
            requests=requests,
            steps=recorder.steps if recorder else [],
            copies=recorder.copies() if recorder else [],
            received=recorder.received if recorder else [],
            pool=self._pool,
            problems=tuple(self.problems),
            notes=self.clients.load.notes,
        )

    def _records(self) -> list[RequestRecord]:
        """Return the records of all requests in the order of arrival."""
        records = list(self.clients.records())
        if self._recorder is not None:
            for record in records:
                record.num_preempted = self._recorder.num_recomputed[record.id]
        return sorted(records, key=lambda record: (record.arrival_at, record.id))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles of garbage less often while a run lasts.

    A run leaves hardly any garbage in cycles. It makes a few hundred objects in each step, which die with the step:
    with Python's own threshold, looking through them takes one twentieth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _RouterHands(NoHands):
    """The hands of the router: the launcher."""

    def __init__(self, launcher: SimulatedLauncher) -> None:
        self._launcher = launcher

    def perform(self, command: Command) -> None:
        match command:
            case Scale(prefill, decode, _):
                self._launcher.scale(prefill, decode)
            case _:
                super().perform(command)


class _ClientHands(NoHands):
    """The hands of a gateway, which give its output to the simulated clients."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._deliver = simulation.deliver

    def perform(self, command: Command) -> None:
        match command:
            case Deliver():
                self._deliver(command)
            case Reject():
                self._simulation.reject(command)
            case Charge() | TellPlace():
                pass
            case Show(figures):
                self._simulation.show(figures)
            case _:
                super().perform(command)


class _SimulatedPoolHands(NoHands):
    """The hands of a pool, which watch the holders of its leases."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def perform(self, command: Command) -> None:
        match command:
            case WatchHolder(holder):
                pool = self._world.alive(self._name)
                assert pool is not None
                self._world.watch(holder, partial(pool.post, HolderGone(holder)))
            case _:
                super().perform(command)
