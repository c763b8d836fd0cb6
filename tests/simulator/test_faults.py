"""Every accepted request ends with exactly its tokens, and nothing leaks, whatever dies, freezes, is lost or late."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.config.topology import Topology
from alignedserve.core import FinishReason, Role, WorkerLimits
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.simulator.machines.clock import Agenda, Priority
from alignedserve.lab.simulator.machines.fault_drawing import draw_faults
from alignedserve.lab.simulator.machines.faults import (
    DropFrames,
    Duplicate,
    Fault,
    Forge,
    Freeze,
    FullLink,
    HangLoop,
    HangStep,
    HungRay,
    Kill,
    LinkFault,
    LowMemory,
    MemberFault,
    Mute,
    NoFork,
    OneWay,
    Reorder,
    Resize,
    Skew,
    Slow,
    SlowWorker,
)
from alignedserve.lab.simulator.machines.process import Frame, ProcessClock
from alignedserve.lab.simulator.machines.trouble import Trouble
from alignedserve.lab.simulator.machines.world import World
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings, members_of
from alignedserve.protocol.membership import UNNUMBERED
from alignedserve.protocol.messages import (
    LAUNCHER,
    ROUTER,
    AskBatch,
    AskPrefix,
    AttemptLost,
    Batch,
    Commit,
    Died,
    Heartbeat,
    Life,
    Member,
    Members,
    Message,
    Output,
    Prefill,
    Prefix,
    Progress,
    Release,
    Retire,
    Started,
    Submit,
    Tokens,
)
from alignedserve.protocol.wire import Envelope, decode
from tests.conftest import SOAK, examples
from tests.rare import rarely, thinned
from tests.simulator.summary import Summary, simulate, summary_of

LIMITS = WorkerLimits(num_blocks=40, block_size=16, page_size=64, max_step_tokens=64, max_batch=4)
FROM_S, TO_S = 1.5, 4.0  # from before the first arrival until long after the last

generated = settings(
    max_examples=5_000 if SOAK else examples(25),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def deployment(seed: int, topology: str) -> Settings:
    workload = Workload(num_requests=15, rate=20.0, leaving_share=0.15)
    return Settings(seed, Topology.parse(topology), workload=workload, limits=LIMITS, num_pages=12, most_s=300.0)


@given(st.floats(0.0, 1e5), st.floats(-10.0, 10.0))
def test_a_timer_that_fires_finds_the_clock_of_its_machine_at_its_time(at: float, ahead_s: float) -> None:
    agenda = Agenda()
    clock = ProcessClock(agenda, ahead_s)
    agenda.now = clock.agenda_time(at)
    assert at <= clock.now() <= at + 1e-9


TOPOLOGIES = ("colocated", "1+1", "2+1", "1+2", "2+2")
topologies = st.sampled_from(TOPOLOGIES)
times = st.floats(FROM_S, TO_S)


def schedules(of: Settings) -> st.SearchStrategy[tuple[Fault, ...]]:
    names = st.sampled_from(list(members_of(of)))
    kill = st.builds(Kill, times, names, st.floats(0.05, 2.0), st.booleans())
    drop = st.builds(DropFrames, times, names, names, st.integers(1, 5))
    freeze = st.builds(Freeze, times, names, st.floats(0.05, 8.0))
    slow = st.builds(Slow, times, names, names, st.floats(0.001, 0.5), st.floats(0.1, 2.0))
    double = st.builds(Duplicate, times, names, names, st.integers(1, 20))
    reorder = st.builds(Reorder, times, names, st.floats(0.001, 0.2), st.floats(0.1, 2.0))
    mute = st.builds(Mute, times, names, st.floats(0.1, 8.0))
    slow_worker = st.builds(SlowWorker, times, names, st.floats(1.0, 100.0), st.floats(0.1, 3.0))
    low_memory = st.builds(LowMemory, times, names, st.integers(0, 50), st.floats(0.1, 2.0))
    skew = st.builds(Skew, st.one_of(st.just(0.0), times), names, st.floats(-10.0, 10.0))
    clocks = st.one_of(slow_worker, low_memory, skew)
    hang = st.one_of(*(st.builds(kind, times, names, st.floats(0.1, 8.0)) for kind in (HangLoop, HangStep)))
    one_way = st.builds(OneWay, times, names, st.booleans(), st.floats(0.1, 8.0))
    outage = st.one_of(one_way, *(st.builds(kind, times, st.floats(0.1, 8.0)) for kind in (NoFork, HungRay)))
    kinds = st.one_of(kill, drop, slow, freeze, double, reorder, mute, clocks, hang, outage)
    return st.lists(kinds, max_size=6).map(tuple)


def check(of: Settings) -> Summary:
    summary = simulate(of)
    assert summary.problems == (), of.faults
    assert summary.num_unfinished == 0
    return summary


class Sent(NamedTuple):
    at: float
    sender: str
    to: str
    message: Message


class Recording(World):
    """Record what is sent on numbered links."""

    sent: list[Sent]

    def transmit(self, sender: Member, to: str, link: Any, frame: Frame) -> None:
        assert isinstance(frame, bytes)
        self.sent.append(Sent(self.agenda.now, sender.name, to, decode(frame, len(frame)).message))
        super().transmit(sender, to, link, frame)


def sent_in(of: Settings) -> list[Sent]:
    world = Recording(of.seed, of.network)
    world.sent = []
    Simulation(of, world=world).run()
    return world.sent


@generated
@given(st.data(), st.integers(0, 1 << 30), topologies)
def test_any_schedule_of_faults(data: st.DataObject, seed: int, topology: str) -> None:
    without = deployment(seed, topology)
    check(replace(without, faults=data.draw(schedules(without))))


def with_faults(settings: Settings, count: int, start_at: float, end_at: float) -> Settings:
    """Return the settings with this many faults, drawn from their seed."""
    faults = draw_faults(settings.seed, list(members_of(settings)), count, start_at, end_at)
    return replace(settings, faults=faults)


@generated
@given(st.integers(0, 1 << 30), topologies, st.integers(1, 6))
def test_any_seed(seed: int, topology: str, count: int) -> None:
    check(with_faults(deployment(seed, topology), count, FROM_S, TO_S))


@pytest.mark.parametrize(
    ("member", "seen"),
    [
        *(("router", True), ("pool-0", False), ("prefill-0", True), ("decode-0", False), ("gateway-0", True)),
        *map(
            rarely,
            [("router", False), ("pool-0", True), ("prefill-0", False), ("decode-0", True), ("gateway-0", False)],
        ),
    ],
)
def test_each_member_may_die_amid_its_work(member: str, seen: bool) -> None:
    of = replace(deployment(1, "1+1"), workload=Workload(num_requests=15, rate=25.0))
    check(replace(of, faults=(Kill(2.3, member, 0.3, seen), Kill(4.5, member, 1.0, seen))))


def test_the_pool_may_die_at_any_moment_around_a_commit() -> None:
    """A commit that has left its prefill worker is nowhere if the pool dies before it tells the router."""
    of = replace(deployment(1, "1+1"), workload=Workload(num_requests=12, rate=200.0))
    commits = [sent.at for sent in sent_in(of) if isinstance(sent.message, Commit)]
    step_s, count, each = (1e-4, 1000, 1) if SOAK else (1.1e-2, 4, 4)
    window = [commits[0] + step * step_s for step in range(-1, count - 1)]
    assert sum(window[0] < at < window[-1] for at in commits) >= 3
    on_their_way = [at + of.network.least_s / 2 for at in commits]
    for at in [*window, *on_their_way[::each]]:
        summary = check(replace(of, faults=(Kill(at, "pool-0", 0.2),)))
        assert summary.duration_s < 4.0, f"what was lost at {at} was missed only after a long silence"


PARTS = 3
AT_ONCE_S = 0.1
# A loss is seen at once by the number of the next frame on the link. Who waits for what was lost may send no other:
# then somebody asks, after this silence.
MISSED_AFTER_S: dict[type, float] = {
    Submit: 10,
    Commit: 8,
    Batch: 8,
    AskPrefix: 5,
    Prefix: 10,  # the worker asks for nothing else meanwhile: the owner inquires, and the next round of members tells
    AskBatch: 4,
    Tokens: 4,
    Prefill: 3,
    Members: 3,
}


@pytest.mark.parametrize("part", thinned(range(PARTS), usual=1))
@pytest.mark.parametrize(
    ("topology", "are_last"),
    [
        *(("1+1", True), *map(rarely, [("1+1", False), ("colocated", True), ("colocated", False)])),
        *([("2+2", True)] if SOAK else []),
    ],
)
def test_any_one_frame_may_be_lost(topology: str, are_last: bool, part: int) -> None:
    """No token is lost with it, and no client waits for longer than it takes to miss it.

    The short form loses the last or the first frame of each kind on each link, a part of them at a time."""
    of = small(topology)
    sent = sorted(sent_in(of), key=lambda one: one[:3])
    assert {(one.sender, one.to) for one in sent} >= links_of(topology)
    firsts, lasts = ({(one[1:3], type(one.message)): one for one in order} for order in (sent[::-1], sent))
    # Where two workers share a kind, the frame that shows the gap may be about another request, and come late.
    kinds = () if topology == "2+2" else (Submit, Prefill, Tokens)
    followed = {one[:3] for one in firsts.values() if type(one.message) in kinds}
    undisturbed_s = check(of).duration_s
    for lost in (sent if SOAK else [*(lasts if are_last else firsts).values()])[part::PARTS]:
        missed_after_s = AT_ONCE_S if lost[:3] in followed else MISSED_AFTER_S.get(type(lost.message), AT_ONCE_S)
        late_s = check(replace(of, faults=(DropFrames(*lost[:3]),))).duration_s - undisturbed_s
        assert late_s < missed_after_s, lost


def test_a_batch_and_the_cancel_of_it_may_be_lost() -> None:
    """The router has dropped the request, the worker never saw it, and the pool believes that the worker has it."""
    of = replace(deployment(1, "1+1"), workload=Workload(num_requests=1))
    [batch] = [sent for sent in sent_in(of) if isinstance(sent.message, Batch)]
    lost = DropFrames(batch.at, batch.sender, batch.to, frames=2)
    check(replace(of, faults=(lost, Kill(batch.at + 0.1, "gateway-0", 0.5))))


def small(topology: str) -> Settings:
    return replace(deployment(1, topology), workload=Workload(num_requests=3, rate=50.0))


def links_of(topology: str) -> set[tuple[str, str]]:
    """Return the links on a request's path."""
    if topology == "colocated":
        road = {(ROUTER, "decode-0"), ("decode-0", "gateway-0"), ("gateway-0", "decode-0"), ("decode-0", ROUTER)}
    else:
        road = {(ROUTER, "prefill-0"), ("prefill-0", "gateway-0"), ("decode-0", "gateway-0"), ("pool-0", ROUTER)}
        road |= {("prefill-0", "pool-0"), ("pool-0", "prefill-0"), ("decode-0", "pool-0"), ("pool-0", "decode-0")}
    return {("gateway-0", ROUTER), *road}


class TestFreeze:
    """A frozen process does not know that it stood still: it goes on with requests that others now have."""

    @pytest.mark.parametrize("member", thinned(["pool-0", "prefill-0", "decode-0", "gateway-0"], usual=2))
    def test_longer_than_a_silence_that_means_death(self, member: str) -> None:
        assert self.lives_after(Freeze(2.2, member, 6.0), member) == {2}

    @pytest.mark.parametrize("member", thinned(["decode-0", "pool-0", "prefill-0", "gateway-0"], usual=2))
    def test_shorter(self, member: str) -> None:
        assert self.lives_after(Freeze(2.2, member, 2.0), member) == {1}

    @pytest.mark.parametrize("for_s", [2.0, 6.0])
    def test_of_the_router_kills_nobody(self, for_s: float) -> None:
        assert self.lives_after(Freeze(2.2, ROUTER, for_s), "pool-0", "decode-0", ROUTER) == {1}

    def lives_after(self, fault: Fault, *members: str) -> set[int]:
        of = replace(deployment(1, "1+1"), workload=Workload(num_requests=15, rate=25.0), faults=(fault,))
        simulation = Simulation(of)
        assert summary_of(simulation).problems == ()
        found = [simulation.world.alive(member) for member in members]
        return {process.member.incarnation for process in found if process is not None}

    def test_while_the_router_that_saw_the_death_dies_too(self) -> None:
        """The next router takes the frozen worker for a worker that never left."""
        of = replace(deployment(1, "1+1"), workload=Workload(num_requests=8, rate=50.0, leaving_share=0.2))
        check(replace(of, faults=(Freeze(1.98, "decode-0", 4.0), Kill(2.48, ROUTER, 0.3))))


class TestHangs:
    """A process whose heartbeats go on is nobody's to replace, until its own watch ends it, here after 6 s."""

    @pytest.mark.parametrize("kind", [HangLoop, HangStep])
    @pytest.mark.parametrize("member", ["decode-0", "prefill-0"])
    def test_requests_of_a_worker_go_on_once_it_has_ended(self, kind: type[HangLoop | HangStep], member: str) -> None:
        tries = (kind(2.2 + 0.002 * number, member, 6.0) for number in range(50))  # some find it in a step
        assert self.lives(member, *tries) == (1, 2)

    @pytest.mark.parametrize("member", ["pool-0", "gateway-0", ROUTER])
    def test_so_do_those_of_others(self, member: str) -> None:
        assert self.lives(member, HangLoop(2.2, member, 6.0)) == (1, 2)

    def test_no_step_of_an_idle_worker_hangs(self) -> None:
        assert self.lives("decode-0", HangStep(1.0, "decode-0", 6.0)) == (1, 1), "nobody has come by then"

    def lives(self, member: str, *faults: Fault) -> tuple[int, int]:
        return lives_of(member, 8.1, *faults)


def lives_of(member: str, at: float, *faults: Fault) -> tuple[int, int]:
    """Return which life a member has at this time, 0 without one, and which at the end of a run in which all holds."""
    of = replace(deployment(1, "1+1"), workload=Workload(num_requests=15, rate=25.0), faults=faults)
    simulation, lives = Simulation(of), list[int]()

    def look() -> None:
        process = simulation.world.alive(member)
        lives.append(0 if process is None else process.member.incarnation)

    simulation.world.agenda.at(at, Priority.TIMER, look)
    summary = summary_of(simulation)
    assert (summary.problems, summary.num_unfinished) == ((), 0)
    look()
    return lives[0], lives[-1]


class TestLongOutages:
    """What lasts longer than the router waits for a silent member, 3 s."""

    @pytest.mark.parametrize("member", ["decode-0", "pool-0", *map(rarely, ("prefill-0", "gateway-0"))])
    def test_a_member_that_is_not_heard_but_hears_ends_and_comes_back(self, member: str) -> None:
        assert lives_of(member, 5.0, OneWay(2.2, member, leaves=True, for_s=6.0)) == (1, 2)

    @pytest.mark.parametrize("member", ["decode-0", "pool-0", *map(rarely, ("prefill-0", "gateway-0"))])
    def test_one_that_is_heard_but_hears_nothing_goes_on_afterwards(self, member: str) -> None:
        assert lives_of(member, 5.0, OneWay(2.2, member, leaves=False, for_s=6.0)) == (1, 1)

    @pytest.mark.parametrize("leaves", [False, True])
    def test_one_way_of_the_router(self, leaves: bool) -> None:
        check(replace(deployment(1, "1+1"), faults=(OneWay(2.2, ROUTER, leaves, 6.0),)))

    @pytest.mark.parametrize("kind", [NoFork, HungRay])
    @pytest.mark.parametrize("member", ["decode-0", "pool-0", ROUTER, *map(rarely, ("prefill-0", "gateway-0"))])
    def test_what_ends_comes_back_when_processes_can_begin(self, kind: type[NoFork | HungRay], member: str) -> None:
        faults = kind(2.1, 6.0), Kill(2.2, member, 0.3)
        assert lives_of(member, 8.0, *faults) == (0, 2)
        assert lives_of(member, 8.2, *faults) == (2, 2)

    def test_the_router_hears_of_an_end_once_ray_answers(self) -> None:
        of = replace(deployment(1, "2+1"), faults=(HungRay(2.1, 2.0), Kill(2.2, "prefill-0", 9.0)))
        without = [
            sent.at
            for sent in sent_in(of)
            if isinstance(sent.message, Members) and "prefill-0" not in {each.name for each in sent.message.members}
        ]
        assert 4.1 < min(at for at in without if at > 2.2) < 4.2


def test_the_owner_notices_a_last_frame_that_is_lost() -> None:
    """No later frame shows the loss. So many lost frames are several attempts, but too few for the owner to give up."""
    of = replace(deployment(1, "colocated"), workload=Workload(num_requests=1))
    check(replace(of, faults=(DropFrames(2.0, "decode-0", "gateway-0", frames=100),)))


def forgeries() -> list[tuple[str, Envelope]]:
    """Return frames that no part may say, and whom they are for."""
    worker, late = Member("decode-0", Role.DECODE, "local", 1, "decode-0#1"), 2**62
    unknown, gateway = replace(worker, name="decode-9"), "gateway-0"
    tokens = Tokens(tuple(Output(f"request-{n}", 0, 0, (7,) * 5, FinishReason.STOP) for n in range(15)))
    return [
        (ROUTER, Envelope(LAUNCHER, 0, UNNUMBERED, Died("decode-0", 1))),
        (ROUTER, Envelope(LAUNCHER, 0, UNNUMBERED, Started((Life("decode-0", Role.DECODE, late),)))),
        (ROUTER, Envelope("prefill-0", 1, UNNUMBERED, Died("decode-0", 1))),
        (ROUTER, Envelope("decode-0", late, 1, Progress(ended=(("request-0", 0),), lengths=(1,)))),
        (ROUTER, Envelope("decode-0", late, UNNUMBERED, Heartbeat(replace(worker, incarnation=late)))),
        (ROUTER, Envelope("decode-0", 1, UNNUMBERED, Heartbeat(replace(worker, role=Role.POOL)))),
        (ROUTER, Envelope("decode-9", 1, UNNUMBERED, Heartbeat(unknown))),
        *((gateway, Envelope(name, life, 1, tokens)) for name, life in (("decode-9", 1), ("decode-0", late))),
        *(
            (gateway, Envelope("pool-0", 1, UNNUMBERED, said))
            for said in (tokens, Members(()), AttemptLost("request-1", 0))
        ),
        ("decode-0", Envelope("prefill-0", 1, UNNUMBERED, Retire("decode-0", 1))),
        ("pool-0", Envelope("gateway-0", 1, UNNUMBERED, Release("request-2", 0))),
    ]


@pytest.mark.parametrize("topology", ["1+1", rarely("colocated")])
def test_every_forged_frame_is_dropped(topology: str) -> None:
    of = replace(deployment(1, topology), faults=(Kill(2.2, ROUTER, 0.3), Kill(2.6, "decode-0", 0.4)))
    of = replace(of, faults=(*of.faults, Skew(5.0, ROUTER, 0.0)))  # both runs end at the same time
    forged = [Forge(1.7 + number / 10, member) for number in range(30) for member in members_of(of)]
    faults = tuple(sorted((*of.faults, *forged), key=lambda fault: fault.at))
    assert simulate(replace(of, faults=faults)).digest == simulate(of).digest


@pytest.mark.parametrize("seed", thinned([1, 2], usual=1))
def test_forged_frames_change_nothing(seed: int) -> None:
    of = replace(deployment(seed, "1+1"), faults=(Kill(2.2, ROUTER, 0.3), Kill(2.6, "decode-0", 0.4)))
    forged = Simulation(of)
    for number in range(400):
        for to, envelope in forgeries():
            forged.world.agenda.at(1.7 + number / 100, Priority.FRAME, partial(forged.world.forge, to, envelope))
    assert summary_of(forged) == simulate(of)


def test_every_kind_of_fault_is_drawn_for_every_member_and_link() -> None:
    names = list(members_of(deployment(1, "1+1")))
    # A seed that draws LowMemory, Forge, FullLink (a third of seeds each), BreakTransfer (half), Resize, both hangs and
    # the long outages (a fifth each).
    faults = draw_faults(3690, names, 2000, FROM_S, TO_S)
    kinds = {*MemberFault.__subclasses__(), *LinkFault.__subclasses__(), Resize, NoFork, HungRay}
    assert {type(fault) for fault in faults} == kinds
    assert {(fault.sender, fault.to) for fault in faults if isinstance(fault, DropFrames)} == set(
        permutations(names, 2)
    )
    assert {fault.member for fault in faults if isinstance(fault, Freeze)} == set(names)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    of_router = [fault for fault in faults if isinstance(fault, MemberFault) and fault.member == ROUTER]
    deaths, mutes = ({fault.at for fault in of_router if isinstance(fault, kind)} for kind in (Kill, Mute))
    assert not deaths & mutes, "a new router does not hear another member"


def test_frames_of_a_full_link_wait_as_far_as_there_is_room_and_the_others_are_lost() -> None:
    trouble, link = Trouble(0), ("decode-0", "gateway-0")
    trouble.begin(FullLink(2.0, *link, frames=2, for_s=1.0))
    assert [trouble.drops(*link, 2.5) for _ in range(4)] == [False, False, True, True]
    assert trouble.waits_until(*link) == 3.0
    assert not trouble.drops(*link, 3.0)
    assert not trouble.drops("gateway-0", "decode-0", 2.5)


def test_frames_are_dropped_once_and_late_for_a_while() -> None:
    trouble, link = Trouble(0), ("decode-0", "gateway-0")
    trouble.begin(DropFrames(2.0, *link))
    trouble.begin(Slow(2.0, *link, extra_s=0.5, for_s=1.0))
    assert [trouble.drops(*link, 2.5) for _ in range(2)] == [True, False]
    assert [trouble.extra_s(*link, now) for now in (2.5, 3.0)] == [0.5, 0.0]


@pytest.mark.parametrize(
    ("topology", "frames"),
    [("colocated", 0), ("1+2", 0), ("2+1", 3), *map(rarely, [("1+1", 3), ("2+2", 0), ("2+2", 3)])],
)
def test_links_that_are_full_for_a_while(topology: str, frames: int) -> None:
    """Every link between two members is full, one after the other; what is lost is said again."""
    of = deployment(1, topology)
    links = enumerate(permutations(members_of(of), 2))
    check(replace(of, faults=tuple(FullLink(2.0 + 0.1 * at, *link, frames, 0.5) for at, link in links)))


def test_a_fault_is_replayed_from_its_seed() -> None:
    of = with_faults(deployment(5, "2+2"), 6, FROM_S, TO_S)
    assert with_faults(deployment(5, "2+2"), 6, FROM_S, TO_S) == of
    assert simulate(of).digest == simulate(of).digest
