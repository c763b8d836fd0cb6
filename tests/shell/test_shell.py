"""The shell: events to the core, commands from it, and a part that goes on whatever arrives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest

from alignedserve.core import Role, StepPlan, StepResult
from alignedserve.errors import CastOut
from alignedserve.protocol.commands import Command, CopyOut, Deliver, RunStep, Send, SendKv, SetTimer
from alignedserve.protocol.events import (
    AtWork,
    Closed,
    CopiedOut,
    Event,
    KvSent,
    LinkGap,
    MemberJoined,
    MemberLost,
    Received,
    StepDone,
    TimerFired,
    Unsent,
)
from alignedserve.protocol.figures import ProcessFigures
from alignedserve.protocol.messages import (
    LAUNCHER,
    ROUTER,
    AskPages,
    Attempt,
    Cancel,
    Died,
    Figures,
    Heartbeat,
    Holding,
    Life,
    Member,
    Members,
    Missed,
    Prefill,
    Progress,
    Retire,
    Started,
    Submit,
)
from alignedserve.shell.clock import Clock, ClockOrigin
from alignedserve.shell.links import Links, Pulse
from alignedserve.shell.shell import BeginAside, Shell
from alignedserve.shell.turn import Hands, NoHands
from tests.samples import request
from tests.shell.conftest import DEADLINE_S, OURS, Start, beat_of, wait_for

Answer = Callable[[Event], list[Command]]
END = TimerFired("end")
AT_ONCE = SetTimer("end", 0.0)


def silent(_: Event) -> list[Command]:
    return []


class Bench:
    """Run a shell on real links, whose core answers as the test says and ends with the last expected event."""

    def __init__(
        self,
        links: Links,
        last: Event = END,
        answer: Answer = silent,
        hands: Hands | None = None,
        begin_aside: BeginAside | None = None,
        lives: Sequence[Life] = (),
        give_up_on: Callable[[Event], list[Command] | None] = lambda _: None,
        at_work: AtWork | None = None,
    ) -> None:
        self.happened: list[object] = []
        clock = Clock(ClockOrigin.read())
        self.shell = Shell(self, links, clock, hands, begin_aside, lives, give_up_on=give_up_on, at_work=at_work)
        self._last, self._answer = last, answer

    def handle(self, event: Event, now: float) -> list[Command]:
        self.happened.append(event)
        if event == self._last:
            self.shell.stop()
        return self._answer(event)

    def run(self, first: Iterable[Command] = ()) -> list[object]:
        """Run the shell, and return what happened in it."""
        watchdog = threading.Timer(DEADLINE_S, self.shell.stop)
        watchdog.start()
        try:
            self.shell.run(first)
        finally:
            watchdog.cancel()
        assert self._last in self.happened, f"only {self.happened} happened"
        return self.happened


def member(links: Links) -> Member:
    return Member(links.name, Role(links.name.partition("-")[0]), "local", links.incarnation, links.address)


def roll(*links: Links) -> Members:
    return Members(tuple(map(member, links)))


@pytest.fixture
def router(start: Start) -> Links:
    return start(ROUTER)


@pytest.fixture
def worker(start: Start, router: Links) -> Links:
    worker = start("decode-0", 5)
    router.connect(worker.name, worker.address, worker.incarnation)
    return worker


# --- Messages that cannot be sent


def test_a_message_that_no_frame_can_hold_is_logged_and_the_shell_goes_on(
    router: Links, worker: Links, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("alignedserve").propagate = True
    happened = Bench(worker).run([Send(ROUTER, AskPages(2**64)), Send(ROUTER, AskPages(1)), AT_ONCE])
    told = happened[0]
    assert isinstance(told, Unsent), "the core hears of it"
    assert (told.to, told.message) == (ROUTER, AskPages(2**64))
    assert wait_for(router, 2) == [LinkGap("decode-0"), Received("decode-0", AskPages(1), 5)]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["a AskPages cannot be sent"]


def test_a_link_that_is_full_is_logged_and_the_shell_goes_on(
    start: Start, router: Links, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("alignedserve").propagate = True
    monkeypatch.setattr("alignedserve.shell.links.MOST_QUEUED", 5)
    worker = start("decode-0", 5)
    router.close()
    Bench(worker).run([*[Send(ROUTER, AskPages(1))] * 7, AT_ONCE])
    assert caplog.messages == ["router takes no more frames: 5 are queued"] * 2


# --- Events at which the core fails


class CoreFault(Exception):
    """What a core raises in these tests."""


class Panic(BaseException):
    """What a library in Rust raises where it panics."""


def failing_at(event: Event, fault: type[BaseException] = CoreFault) -> Answer:
    def answer(heard: Event) -> list[Command]:
        if heard == event:
            raise fault
        return []

    return answer


@pytest.mark.parametrize("fault", [CoreFault, Panic])
def test_a_part_whose_core_fails_ends_and_says_which_request_it_was(
    router: Links, worker: Links, fault: type[BaseException]
) -> None:
    router.send(worker.name, roll(worker))
    router.send(worker.name, Prefill(request()))
    with pytest.raises(fault):
        Bench(worker, answer=failing_at(Received(ROUTER, Prefill(request()), 1), fault)).run()
    assert wait_for(router, 1) == [Received("decode-0", Progress(felled=(("r", 0),)), 5)]


def test_what_a_core_is_working_on_is_noted_until_its_commands_are_done(router: Links, worker: Links) -> None:
    at_work, noted = AtWork(), list[tuple[Attempt, ...]]()

    def answer(event: Event) -> list[Command]:
        noted.append(at_work.attempts)
        return [Deliver("r", (5,), None), AT_ONCE] if isinstance(event, Received) else []

    class Noting(NoHands):
        def perform(self, command: Command) -> Event | None:
            noted.append(at_work.attempts)
            return None

    router.send(worker.name, roll(worker))
    router.send(worker.name, Prefill(request()))
    Bench(worker, answer=answer, hands=Noting(), at_work=at_work).run()
    of_request = (("r", 0),)
    assert noted[-3:] == [of_request, of_request, ()]
    assert at_work.attempts == ()


def test_a_part_says_at_which_attempts_its_earlier_life_ended(router: Links, worker: Links) -> None:
    at_work = AtWork()
    at_work.left = (("r", 0),)
    router.send(worker.name, roll(router, worker))
    Bench(worker, answer=lambda _: [AT_ONCE], at_work=at_work).run()
    assert wait_for(router, 1) == [Received("decode-0", Progress(felled=(("r", 0),)), 5)]


def test_a_core_that_gives_a_request_up_goes_on(router: Links, worker: Links) -> None:
    failed = Received(ROUTER, Prefill(request()), 1)
    router.send(worker.name, roll(worker))
    router.send(worker.name, failed.message)
    gives_up: list[Command] = [Send(ROUTER, Cancel("r", 0)), AT_ONCE]
    bench = Bench(worker, answer=failing_at(failed), give_up_on=lambda event: gives_up if event == failed else None)
    assert bench.run()[-2:] == [failed, END]
    assert wait_for(router, 1) == [Received("decode-0", Cancel("r", 0), 5)]


# --- Members


class Met(NoHands):
    """Record the members that the shell meets, among what the core hears."""

    happened: list[object]

    def meet(self, member: Member) -> None:
        self.happened.append(("meet", member))

    def part_from(self, member: Member) -> None:
        self.happened.append(("part from", member))


def test_the_hands_meet_and_part_from_members_before_the_core_hears(start: Start, router: Links, worker: Links) -> None:
    pool, hands = start("pool-0", 7), Met()
    bench = Bench(worker, last=MemberLost(member(pool)), hands=hands)
    hands.happened = bench.happened
    for members in (roll(worker), roll(worker, pool), roll(worker)):
        router.send(worker.name, members)
    assert bench.run() == [
        *(("meet", member(worker)), MemberJoined(member(worker))),
        *(("meet", member(pool)), MemberJoined(member(pool))),
        *(("part from", member(pool)), MemberLost(member(pool))),
    ]


def test_a_member_that_is_not_announced_any_more_was_cast_out_and_ends(
    start: Start, router: Links, worker: Links
) -> None:
    pool = start("pool-0", 7)
    bench = Bench(worker)
    router.send(worker.name, roll(worker, pool))
    router.send(worker.name, roll(pool))
    with pytest.raises(CastOut):
        bench.run()
    assert bench.happened == [MemberJoined(member(worker)), MemberJoined(member(pool))]


def test_a_later_life_is_not_the_announced_member(router: Links, worker: Links) -> None:
    earlier = Member(worker.name, Role.DECODE, "local", worker.incarnation - 1, worker.address)
    router.send(worker.name, Members((earlier,)))
    with pytest.raises(CastOut):
        Bench(worker).run()


# --- What the router hears


def life_of(links: Links, incarnation: int | None = None) -> Life:
    return Life(links.name, member(links).role, links.incarnation if incarnation is None else incarnation)


def test_a_late_heartbeat_of_an_earlier_life_is_not_heard_and_does_not_redirect_the_link(
    start: Start, router: Links
) -> None:
    old, new = start("decode-0", 5), start("decode-0", 6)
    last = Received(new.name, Holding(()), 6)
    bench = Bench(
        router, last, lambda event: [Send("decode-0", Missed())] if event == last else [], lives=[life_of(new)]
    )
    for message in (Heartbeat(member(new)), Heartbeat(member(old)), Holding(())):
        new.send(ROUTER, message)
    assert bench.run() == [Received(new.name, Heartbeat(member(new)), 6), last]
    assert wait_for(new, 1) == [Received(ROUTER, Missed(), 1)]


def test_who_was_not_started_cannot_register_and_only_the_launcher_declares_deaths(
    start: Start, router: Links, worker: Links, caplog: pytest.LogCaptureFixture
) -> None:
    """A process with the keys of the parts, and the launcher itself where it is wrong."""
    logging.getLogger("alignedserve").propagate = True
    stranger, impostor = start("prefill-9", 1), start("decode-0", 2**62)
    as_launcher = start(LAUNCHER, 1)
    last = Received(LAUNCHER, Died("decode-0", 5))
    bench = Bench(router, last, lives=[life_of(worker), Life(ROUTER, Role.ROUTER, 1)])
    for links in (stranger, impostor, worker):
        links.send(ROUTER, Heartbeat(member(links)))
        links.send(ROUTER, Died("decode-0", 5))
        links.send(ROUTER, Holding(()))
    as_launcher.send(ROUTER, Died("decode-0", 5))
    heard: list[Event] = []
    # Then all that a process said which is not the launcher has been read, whichever link was read first.
    while Received("decode-0", Holding(()), 5) not in heard or "'launcher'" not in caplog.text:
        heard += bench.shell._arrived(0.1)
    launcher = Pulse(LAUNCHER, 0, Started((Life("decode-0", Role.DECODE, 4),)), router.address, 3600.0, OURS.launcher)
    for said in (
        Retire("decode-0", 2**62),
        Died("decode-0", 2**62),
        Died("prefill-9", 1),
        Submit(request("a")),
        last.message,
    ):
        launcher.say(said)
    try:
        bench.shell.turn(heard)
        bench.run()
    finally:
        launcher.stop()
    beat, holding = Received("decode-0", Heartbeat(member(worker)), 5), Received("decode-0", Holding(()), 5)
    assert bench.happened == [beat, holding, last]
    dropped = [record.getMessage() for record in caplog.records if "may not say" in record.getMessage()]
    assert sorted(line.split("'")[1] for line in dropped) == ["decode-0", "launcher", "launcher", "prefill-9"]


def test_the_router_hears_a_life_as_soon_as_the_launcher_has_started_it(start: Start, router: Links) -> None:
    worker = start("decode-0", 2)
    beat = Received(worker.name, Heartbeat(member(worker)), 2)
    bench = Bench(router, beat, lives=[life_of(worker, 1)])
    launcher = Pulse(LAUNCHER, 0, Started((life_of(worker),)), router.address, 3600.0, OURS.launcher)
    pulse = beat_of(member(worker), router.address)
    try:
        assert bench.run() == [beat]
    finally:
        launcher.stop()
        pulse.stop()


def test_a_member_may_say_only_what_its_role_says(start: Start, router: Links, worker: Links) -> None:
    pool, joined = start("pool-0", 7), roll(worker, start("gateway-0", 1))
    bench = Bench(worker, last=Received("pool-0", Missed(), 7))
    router.send(worker.name, roll(worker, pool))
    pool.connect(worker.name, worker.address)
    for message in (joined, Died("decode-0", 5), Heartbeat(member(worker)), Retire("decode-0", 5), Missed()):
        pool.send(worker.name, message)
    assert bench.run()[-1] == Received("pool-0", Missed(), 7)
    assert set(map(type, bench.happened)) == {MemberJoined, Received}
    assert [event for event in bench.happened if isinstance(event, Received)] == bench.happened[-1:]


# --- Timers, work, and other threads


def test_timers_fire_in_the_order_of_their_times_and_a_later_timer_replaces_its_namesake(worker: Links) -> None:
    now = Clock(ClockOrigin.read()).now()
    timers = [SetTimer("end", now + 0.02), SetTimer("a", now + 0.01), SetTimer("b", now), SetTimer("b", now + 3600)]
    assert Bench(worker).run(timers) == [TimerFired("a"), END]


def test_no_timer_fires_early(worker: Links) -> None:
    clock = Clock(ClockOrigin.read())
    due = clock.now() + 0.005
    Bench(worker).run([SetTimer("end", due)])
    assert clock.now() >= due


class Steps(NoHands):
    """Run steps, and do something else during the first."""

    def __init__(self) -> None:
        self.during_the_first: Callable[[], None] = lambda: None

    def perform(self, command: Command) -> Event | None:
        assert isinstance(command, RunStep)
        if command.plan.number == 1:
            self.during_the_first()
        return StepDone(StepResult(command.plan.number, ()))


def test_what_has_happened_during_a_piece_of_work_is_known_when_the_next_is_decided(worker: Links) -> None:
    hands = Steps()
    last = StepDone(StepResult(2, ()))
    bench = Bench(worker, last, hands=hands)
    hands.during_the_first = lambda: bench.shell.post(Closed("r"))
    assert bench.run([RunStep(StepPlan(1)), RunStep(StepPlan(2))]) == [Closed("r"), StepDone(StepResult(1, ())), last]


def test_another_thread_may_post_and_stop(worker: Links) -> None:
    """The shell sleeps: nothing but the post wakes it."""
    bench = Bench(worker, last=Closed("r"))
    poster = threading.Timer(0.01, bench.shell.post, [Closed("r")])
    poster.start()
    assert bench.run() == [Closed("r")]
    poster.join()


class Beside(NoHands):
    """Perform sends at any time, and copies between two steps only."""

    def perform(self, command: Command) -> Event | None:
        assert isinstance(command, CopyOut)
        return CopiedOut(command.number)

    def begin_aside(self, command: Command, post: Callable[[Event], None]) -> bool:
        if not isinstance(command, SendKv):
            return False
        threading.Thread(target=post, args=(KvSent(command.number, command.to, ok=True),)).start()
        return True


def test_what_goes_on_aside_is_told_when_it_has_ended_and_what_cannot_is_performed(worker: Links) -> None:
    sent = KvSent(1, "decode-1.1", ok=True)

    def answer(event: Event) -> list[Command]:
        return [CopyOut(2, "pool-0.1", (), (), (), aside=True)] if event == sent else []

    hands = Beside()
    bench = Bench(worker, CopiedOut(2), answer, hands, hands.begin_aside)
    assert bench.run([SendKv(1, "decode-1.1", (), ())]) == [sent, CopiedOut(2)]


def test_a_part_without_hands_performs_nothing(worker: Links) -> None:
    with pytest.raises(TypeError, match="cannot perform RunStep"):
        Bench(worker).run([RunStep(StepPlan(1))])


def test_figures_say_what_process_they_come_from_unless_they_are_handed_on(router: Links, worker: Links) -> None:
    another = ProcessFigures(1.5, 1 << 20, 8, 1.7e9)
    told = [Send(ROUTER, Figures(num_refused=1)), Send(ROUTER, Figures(process=another, member="decode-1"))]
    Bench(worker).run([*told, AT_ONCE])
    own, handed_on = [event.message for event in wait_for(router, 2) if isinstance(event, Received)]
    assert handed_on == told[1].message
    assert isinstance(own, Figures)
    found = own.process
    assert found is not None
    assert own == Figures(num_refused=1, process=found)
    assert 0 < found.cpu_s <= time.process_time() + 0.02, "the kernel counts in hundredths of a second"
    assert found.resident_bytes > 1 << 20
    assert found.num_files > 2
    assert 0 < time.time() - found.started_at < 86_400


class InTwo(Bench):
    """A core that sends what a step brought, and then orders the next."""

    def hear(self, event: Event, now: float) -> list[Command]:
        return [Send(ROUTER, AskPages(7))]

    def act(self, now: float) -> list[Command]:
        self.sent_before = [event for event in wait_for(self.to, 1) if isinstance(event, Received)]
        return [AT_ONCE]

    to: Links


def test_what_a_step_brought_is_sent_before_the_next_step_is_planned(router: Links, worker: Links) -> None:
    bench = InTwo(worker, END)
    bench.to = router
    bench.shell.post(StepDone(StepResult(1, ())))
    assert bench.run() == [END]
    assert [event.message for event in bench.sent_before] == [AskPages(7)]


def test_a_core_that_fails_as_a_step_ends_plans_no_other(worker: Links) -> None:
    class Fails(InTwo):
        def hear(self, event: Event, now: float) -> list[Command]:
            raise KeyError("a bug")

        def act(self, now: float) -> list[Command]:
            pytest.fail("this core has failed")

    bench = Fails(worker, give_up_on=lambda _: [AT_ONCE])
    bench.shell.post(StepDone(StepResult(1, ())))
    assert bench.run() == [END]
