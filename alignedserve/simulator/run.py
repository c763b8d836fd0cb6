"""`simulate(settings) -> Summary`: a workload through a whole deployment, in virtual time.

arrivals ─▶ Clients ─▶ gateway's owner core ─▶ router core ─▶ workers' cores, pool core
               ▲                                                     │
               └──────────────── Deliver, checked ◀──────────────────┘
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from alignedserve.commands import Command, Deliver, Reject, Scale, Show, WatchHolder
from alignedserve.core import FinishReason, Request, Role, Usage
from alignedserve.cost_fit import OnlineCost
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.events import Closed, Event, HolderGone, Opened
from alignedserve.kvpool.extents import Extents
from alignedserve.kvpool.state import PoolCore
from alignedserve.messages import ROUTER, Figures, Member
from alignedserve.owner import OwnerCore
from alignedserve.policy import Policy, Predictor
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.router.admission import Queues
from alignedserve.router.sizing import Sizes
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.running import WorkerLimits
from alignedserve.simulator.clock import Priority
from alignedserve.simulator.distribution import percentile
from alignedserve.simulator.engine import Arena, CheckedHands, Costs, EngineHands, Story, Timing, logprob_of, tell
from alignedserve.simulator.faults import Fault, calm_at, draw_faults
from alignedserve.simulator.launching import WORKERS, Launcher
from alignedserve.simulator.predicting import Kept, Knowledge, PredictorHands, knowledge_of, known
from alignedserve.simulator.recorder import RecordedHands, Recorder
from alignedserve.simulator.records import Outcome, RequestRecord, RunRecord
from alignedserve.simulator.workload import Arrival, Load, Mixture, Workload
from alignedserve.simulator.world import Hands, Life, Network, NoHands, World
from alignedserve.topology import Topology
from alignedserve.worker import WorkerSetup

FIRST_ARRIVAL_AT = 2.0  # by then all members know each other
_KNOCK_S = 0.25  # between two tries of a client whose gateway is not ready
_MANY_OBJECTS = 50_000  # more than there were: then Python looks for cycles
_QUIET_S = 30.0  # after the last request: deaths are noticed, locks are free, what is late has arrived


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    topology: Topology = Topology()  # noqa: RUF009  (frozen)
    num_gateways: int = 1
    workload: Workload | Mixture = Workload()  # noqa: RUF009
    limits: WorkerLimits = WorkerLimits(num_pairs=256, block_size=16, page_size=64, max_step_tokens=512, max_batch=32)  # noqa: RUF009
    policy: Policy = Policy()  # noqa: RUF009
    num_pages: int = 256  # as requests are stored
    extents: Extents | None = None  # where there are pages of more than one kind
    most_open: int = 100_000
    queues: Queues = Queues()  # noqa: RUF009
    death_s: float = 3.0
    direct: bool = False  # whether prefill workers send KV to decode workers, or only by the pool
    nodes: int = (
        1  # with a pool and decode workers, in turn; the last prefill worker is on one without, if there are more
    )
    timing: Timing = Costs()  # noqa: RUF009
    belief: Callable[[], OnlineCost] | None = None  # what a worker knows of it when it starts
    copy_token_s: float = 0.0  # and of copies to its device
    gateway_s: float = 0.0  # from a client's request to its acceptance, besides the network
    checked: bool = True  # whether wrong KV is noticed, frames are bytes, and all of a request is kept after its end
    network: Network = Network()  # noqa: RUF009
    faults: tuple[Fault, ...] = ()
    most_s: float = 3600.0  # a request that has not ended by then has been forgotten
    record: bool = False  # steps and copies, for `Simulation.record`
    num_past: int = 0  # outputs that the length predictor knows from before
    look_ahead: int = 0  # of decode workers
    sizes: Sizes = Sizes()  # noqa: RUF009  as many workers as the load takes
    start_s: float = 1.0  # until a worker that is asked for is there
    drain_s: float = 10.0  # that one may take to go

    @property
    def pool_extents(self) -> Extents:
        return self.extents or Extents(self.num_pages)


@dataclass(frozen=True)
class Summary:
    num_requests: int
    num_finished: int
    num_refused: int
    num_left: int  # by clients that had no patience
    num_broken: int  # by the death of their gateway
    num_unfinished: int
    duration_s: float
    tokens_per_s: float
    ttft_s: Mapping[int, float]  # percentile -> seconds
    digest: str  # of all commands of all cores
    problems: tuple[str, ...]  # wrong tokens, requests that never ended, memory that is not free at the end


def members_of(settings: Settings) -> dict[str, Role]:
    topology = settings.topology
    names = {ROUTER: Role.ROUTER}
    names |= {} if topology.colocated else {f"pool-{number}": Role.POOL for number in range(settings.nodes)}
    names |= {f"prefill-{number}": Role.PREFILL for number in range(topology.prefill_workers)}
    names |= {f"decode-{number}": Role.DECODE for number in range(topology.decode_workers)}
    return names | dict.fromkeys(gateways_of(settings), Role.GATEWAY)


def node_of(name: str, role: Role, settings: Settings) -> str:
    number = int(name.rpartition("-")[2]) if role in (Role.POOL, Role.PREFILL, Role.DECODE) else 0
    if role is Role.PREFILL and settings.nodes > 1 and number == settings.topology.prefill_workers - 1:
        return "without a pool"
    return "local" if settings.nodes == 1 else f"node-{number % settings.nodes}"


def gateways_of(settings: Settings) -> tuple[str, ...]:
    return tuple(f"gateway-{number}" for number in range(settings.num_gateways))


def with_faults(settings: Settings, count: int, start_at: float, end_at: float) -> Settings:
    """The same with so many faults, drawn from its seed."""
    faults = draw_faults(settings.seed, list(members_of(settings)), count, start_at, end_at)
    return replace(settings, faults=faults)


def simulate(settings: Settings) -> Summary:
    return Simulation(settings).run()


@dataclass(slots=True)
class _Client:
    arrival: Arrival
    story: Story
    outcome: Outcome = Outcome.OPEN
    opened: bool = False
    got: list[int] = field(default_factory=list)
    token_at: array[float] = field(default_factory=lambda: array("d"))  # when each of those came
    ended_at: float = 0.0
    asks_logprobs: bool = field(init=False)  # most do not, and are not asked again at every token

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.asks_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None

    @property
    def request(self) -> Request:
        return self.arrival.request

    def record(self) -> RequestRecord:
        request = self.request
        return RequestRecord(
            id=request.id,
            service=request.service,
            slo=request.slo,
            arrival_at=request.arrival_at,
            num_prompt=len(request.prompt),
            token_at=self.token_at,
            outcome=self.outcome,
            ended_at=self.ended_at,
        )

    def problem(self) -> str | None:
        want, name = list(self.story.output), self.request.id
        if self.outcome is Outcome.OPEN:
            return f"{name} has {len(self.got)} of {len(want)} tokens and never ended"
        if self.outcome is Outcome.FINISHED and self.got != want:
            return f"{name} ended with {len(self.got)} tokens, not its {len(want)}"
        return None if self.got == want[: len(self.got)] else f"{name} got other tokens than its own"


class Asking(Protocol):
    """Where requests come from."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def expected(self) -> int | None: ...

    def start(self, now: float, /) -> list[Arrival]: ...

    def arrived(self, request: str, /) -> list[Arrival]: ...

    def ended(self, request: str, now: float, answer: tuple[int, ...] | None, /) -> list[Arrival]: ...


class _Given:
    """Requests that are written down, in place of a load that is drawn."""

    def __init__(self, asked: Iterable[Arrival] | None) -> None:
        self._asked = list(asked or ())

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def expected(self) -> int:
        return len(self._asked)

    def start(self, _now: float) -> list[Arrival]:
        return self._asked

    def arrived(self, _request: str) -> list[Arrival]:
        return []

    def ended(self, _request: str, _now: float, _answer: tuple[int, ...] | None) -> list[Arrival]:
        return []


class Simulation:
    def __init__(
        self, settings: Settings, asked: Iterable[Arrival] | None = None, knowledge: Knowledge | None = None
    ) -> None:
        """Requests as asked, or drawn from the workload; and what is known of their like, if it is not the usual."""
        self.settings = settings
        self.world = World(settings.seed, settings.network, settings.checked)
        self.problems: list[str] = []
        self._load: Asking = _Given(asked)
        if asked is None:
            self._load = Load(settings.workload, gateways_of(settings), settings.seed)
        self.clients: dict[str, _Client] = {}
        self._stories: dict[str, Story] = {}
        self._over: list[RequestRecord] = []  # of clients that are kept no longer
        self._num_open = 0  # of them, those still to come included
        self._arenas: dict[str, Arena] = {}  # holder of the pool -> its arena
        self._recorder = Recorder(settings.limits.max_step_tokens) if settings.record else None
        self._pool: list[Usage] = []  # what the pool has told
        self._ended_at = 0.0  # when the last request had ended, or there was no more time for it
        policy = settings.policy
        self._knowledge = knowledge or knowledge_of(policy.predictor, settings.num_past, settings.seed)
        self._kept_lengths = Kept(self._knowledge.past)
        self.on_progress: Callable[[int, int], None] = lambda _ended, _of: None
        node = partial(node_of, settings=settings)
        members = members_of(settings)
        self.launcher = Launcher(self.world, members, node, self._bring, settings.start_s, settings.drain_s)
        self.world.on_resize = lambda wanted: self.launcher.scale(wanted.prefill, wanted.decode)

    def run(self) -> Summary:
        with _rare_collections():
            return self._run()

    def _run(self) -> Summary:
        world, agenda = self.world, self.world.agenda
        world.plan(self.settings.faults)
        for name, role in members_of(self.settings).items():
            self._bring(name, role)
        self._expect(self._load.start(FIRST_ARRIVAL_AT))
        world.on_death = self._died
        agenda.run(self.settings.most_s, ended=lambda: self._num_open == 0)
        self._ended_at = agenda.now
        agenda.run(max(agenda.now, calm_at(self.settings.faults)) + _QUIET_S)
        self._check()
        return self._summary()

    def _bring(self, name: str, role: Role) -> None:
        transport = name if self.settings.direct and role in WORKERS else ""
        self.world.start(name, role, partial(_LIVES[role], self), node_of(name, role, self.settings), transport)

    # --- Clients

    def _expect(self, arrivals: Iterable[Arrival]) -> None:
        for one in arrivals:
            client = _Client(one, tell(one.request, one.length, tagged=self.settings.checked))
            self.clients[one.request.id], self._stories[one.request.id] = client, client.story
            self._num_open += 1
            self.world.agenda.at(one.request.arrival_at, Priority.CLIENT, partial(self._arrive, client))

    def _arrive(self, client: _Client) -> None:
        self._expect(self._load.arrived(client.request.id))
        if not self.settings.gateway_s:
            return self._knock(client)
        read_at = self.world.agenda.now + self.settings.gateway_s
        return self.world.agenda.at(read_at, Priority.CLIENT, partial(self._knock, client))

    def _knock(self, client: _Client) -> None:
        gateway = self.world.alive(client.request.owner)
        if gateway is None or not isinstance(gateway.core, OwnerCore) or not gateway.core.ready:
            again = self.world.agenda.now + _KNOCK_S
            return self.world.agenda.at(again, Priority.CLIENT, partial(self._knock, client))
        client.opened = True
        if client.arrival.leaves_after_s is not None:
            leaves_at = self.world.agenda.now + client.arrival.leaves_after_s
            self.world.agenda.at(leaves_at, Priority.CLIENT, partial(self._leave, client))
        accepted_at = client.request.arrival_at + self.world.trouble.ahead_s(client.request.owner)
        request = replace(client.request, arrival_at=accepted_at)
        if self.settings.policy.predictor is Predictor.ORACLE:
            request = replace(request, estimate=known(client.arrival.length, request))
        return gateway.post(Opened(request, self._knowledge.encode(request.prompt)))

    def _leave(self, client: _Client) -> None:
        gateway = self.world.alive(client.request.owner)
        if client.outcome is Outcome.OPEN and gateway is not None:
            self._end(client, Outcome.LEFT)
            gateway.post(Closed(client.request.id))

    def _died(self, name: str) -> None:
        for client in list(self.clients.values()):  # as one ends, others may come
            if client.request.owner == name and client.opened and client.outcome is Outcome.OPEN:
                self._end(client, Outcome.BROKEN)

    def deliver(self, command: Deliver) -> None:
        client = self.clients.get(command.request)
        if client is None:
            return
        if client.outcome is not Outcome.OPEN:
            if client.outcome is Outcome.LEFT:
                return
            self.problems.append(f"{command.request} got tokens after its end")
        if client.asks_logprobs or command.logprobs or command.prompt_logprobs:
            self._check_logprobs(client, command)
        client.got += command.tokens
        now, token_at = self.world.agenda.now, client.token_at
        if len(command.tokens) == 1:
            token_at.append(now)
        else:
            token_at.extend([now] * len(command.tokens))
        if command.finish is not None:
            self._check_finish(client, command.finish)
            self._end(client, Outcome.FINISHED)

    def _check_logprobs(self, client: _Client, command: Deliver) -> None:
        """Those of these tokens, where they are asked for, and with the first of them the prompt's."""
        sampling, start = client.request.sampling, len(client.got)
        places = range(start, start + len(command.tokens)) if sampling.logprobs is not None else ()
        of_prompt = sampling.prompt_logprobs is not None and not start
        prompt_places = range(1, len(client.request.prompt)) if of_prompt else ()
        expected = tuple(map(logprob_of, places)), tuple(map(logprob_of, prompt_places))
        if (command.logprobs, command.prompt_logprobs) != expected:
            self.problems.append(f"{command.request} got other log-probabilities at {start} than are its own")

    def _check_finish(self, client: _Client, finish: FinishReason) -> None:
        if finish is not client.request.finish(len(client.got) - 1, client.got[-1]):
            self.problems.append(f"{client.request.id} ended with {finish}")

    def show(self, figures: Figures) -> None:
        if figures.usage is not None:
            self._pool.append(figures.usage)

    def reject(self, command: Reject) -> None:
        client = self.clients[command.request]
        if client.outcome is Outcome.OPEN:
            self._end(client, Outcome.REFUSED)

    def _end(self, client: _Client, outcome: Outcome) -> None:
        client.outcome, client.ended_at = outcome, self.world.agenda.now
        self._num_open -= 1
        answer = tuple(client.got) if outcome is Outcome.FINISHED else None
        self._expect(self._load.ended(client.request.id, client.ended_at, answer))
        if outcome is Outcome.FINISHED and not self.settings.checked:
            self._let_go(client)
        self.on_progress(self._num_all - self._num_open, self._load.expected or self._num_all)

    def _let_go(self, client: _Client) -> None:
        """Its tokens would fill the memory in a long run."""
        self.problems += [problem] if (problem := client.problem()) else []
        self._over.append(client.record())
        del self.clients[client.request.id], self._stories[client.request.id]

    @property
    def _num_all(self) -> int:
        return len(self._over) + len(self.clients)

    # --- Lives

    def router(self, world: World, member: Member) -> Life:
        of = self.settings
        limits = RouterLimits(
            of.most_open,
            of.network.heartbeat_s,
            of.death_s,
            of.policy,
            of.limits.block_size,
            of.limits.num_tokens,
            of.queues,
            of.sizes,
        )
        core = RouterCore(member, limits, world.now_of(member.name))
        encoder, router = self._knowledge.encoder, member
        predictor = PredictorHands(
            world.agenda, encoder, self._kept_lengths, lambda event: self._to_life(router, event)
        )
        hands = RouterHands(predictor, self.launcher)
        return Life(core, hands, core.start())

    def _to_life(self, of: Member, event: Event) -> None:
        process = self.world.alive(of.name)
        if process is not None and process.member == of:
            process.post(event)

    def gateway(self, world: World, member: Member) -> Life:
        needed = {Role.ROUTER, Role.DECODE}
        if not self.settings.topology.colocated:
            needed |= {Role.PREFILL, Role.POOL}
        return Life(OwnerCore(frozenset(needed)), _ClientHands(self), [])

    def pool(self, world: World, member: Member) -> Life:
        extents = self.settings.pool_extents
        earlier = [holder for holder in self._arenas if holder.rpartition(".")[0] == member.name]
        for holder in earlier:
            del self._arenas[holder]
        self._arenas[member.holder] = Arena(self.settings.limits.page_size, extents)
        core = PoolCore(extents, self.settings.limits.block_size, self.settings.policy)
        return Life(core, _PoolHands(world, member.name), [])

    def prefill(self, world: World, member: Member) -> Life:
        return self._life(self._worker(PrefillCore), member)

    def decode(self, world: World, member: Member) -> Life:
        return self._life(self._worker(DecodeCore), member, hears_while_busy=self.settings.look_ahead > 0)

    def _worker(self, make: type[PrefillCore] | type[DecodeCore]) -> PrefillCore | DecodeCore:
        of = self.settings
        setup = WorkerSetup(
            of.limits, of.policy, self._belief(), of.copy_token_s, direct=of.direct, look_ahead=of.look_ahead
        )
        return make(setup)

    def _belief(self) -> OnlineCost | None:
        return self.settings.belief() if self.settings.belief is not None else None

    def _life(self, core: PrefillCore | DecodeCore, member: Member, hears_while_busy: bool = False) -> Life:
        hands = self._engine()
        if self._recorder is not None:
            hands = RecordedHands(hands, member.name, self.world.agenda, lambda: core.free_share, self._recorder)
        return Life(core, hands, [], hears_while_busy)

    def _engine(self) -> Hands:
        limits, timing = self.settings.limits, self.settings.timing
        if self.settings.checked:
            return CheckedHands(self._stories, timing, limits.num_pairs, limits.block_size, self._arena_of)
        return EngineHands(self._stories, timing)

    def _arena_of(self, pool: Member) -> Arena | None:
        return self._arenas.get(pool.holder)

    # --- The end

    def _check(self) -> None:
        self.problems += [problem for client in self.clients.values() if (problem := client.problem())]
        num_leased, num_lent = 0, 0
        for name in self.launcher.members:
            process = self.world.alive(name)
            if process is None:
                self.problems.append(f"{name} is not back")
                continue
            core = process.core
            assert isinstance(core, RouterCore | OwnerCore | PoolCore | PrefillCore | DecodeCore)
            self.problems += [f"{name} still has {count} {what}" for what, count in core.held.items() if count]
            if isinstance(core, PrefillCore | DecodeCore):
                num_leased += len(core.leased_pages)
            if isinstance(core, PoolCore):
                num_lent += core.num_lent_pages
        if num_leased != num_lent:
            self.problems.append(f"the pool has lent {num_lent} pages, the workers have {num_leased}")

    def record(self, wall_s: float) -> RunRecord:
        """Of a run that is over. Only the caller has a clock that shows how long it took."""
        recorder, requests = self._recorder, self._records()
        return RunRecord(
            began_at=min((request.arrival_at for request in requests), default=FIRST_ARRIVAL_AT),
            ended_at=self._ended_at,
            wall_s=wall_s,
            workers=self.launcher.workers,
            requests=requests,
            steps=recorder.steps if recorder else [],
            copies=recorder.copies() if recorder else [],
            pool=self._pool,
            problems=tuple(self.problems),
            notes=self._load.notes,
        )

    def _records(self) -> list[RequestRecord]:
        """In the order of arrival."""
        records = [*self._over, *(client.record() for client in self.clients.values())]
        if self._recorder is not None:
            for record in records:
                record.num_preempted = self._recorder.num_recomputed[record.id]
        return sorted(records, key=lambda one: (one.arrival_at, one.id))

    def _summary(self) -> Summary:
        requests = self._records()
        outcomes = Counter(one.outcome for one in requests)
        first = [one.token_at[0] - one.arrival_at for one in requests if one.token_at]
        duration_s = max((one.ended_at for one in requests), default=0.0) - FIRST_ARRIVAL_AT
        num_tokens = sum(len(one.token_at) for one in requests)
        return Summary(
            num_requests=len(requests),
            num_finished=outcomes[Outcome.FINISHED],
            num_refused=outcomes[Outcome.REFUSED],
            num_left=outcomes[Outcome.LEFT],
            num_broken=outcomes[Outcome.BROKEN],
            num_unfinished=outcomes[Outcome.OPEN],
            duration_s=duration_s,
            tokens_per_s=num_tokens / duration_s if duration_s > 0 else 0.0,
            ttft_s={percent: percentile(first, percent) for percent in (50, 90, 99)},
            digest=self.world.digest,
            problems=tuple(self.problems),
        )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run leaves hardly any garbage in cycles, and makes some hundred objects in a step, which live no longer than
    that: to look through them for cycles as often as Python does by itself takes one twentieth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(_MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_LIVES = {
    Role.ROUTER: Simulation.router,
    Role.GATEWAY: Simulation.gateway,
    Role.POOL: Simulation.pool,
    Role.PREFILL: Simulation.prefill,
    Role.DECODE: Simulation.decode,
}


class RouterHands(NoHands):
    def __init__(self, predictor: PredictorHands, launcher: Launcher) -> None:
        self.predictor, self._launcher = predictor, launcher

    def perform(self, command: Command) -> None:
        match command:
            case Scale(prefill, decode, _):
                self._launcher.scale(prefill, decode)
            case _:
                self.predictor.perform(command)


class _ClientHands(NoHands):
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def perform(self, command: Command) -> None:
        match command:
            case Deliver():
                self._simulation.deliver(command)
            case Reject():
                self._simulation.reject(command)
            case Show(figures):
                self._simulation.show(figures)
            case _:
                super().perform(command)


class _PoolHands(NoHands):
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
