"""The turn loop that real and simulated processes share, without sockets, threads or an agenda."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.core import Role, StepPlan
from alignedserve.protocol.commands import Command, End, RunStep, Send, SetTimer
from alignedserve.protocol.events import Closed, Event, MemberJoined, MemberLost, Received, TimerFired
from alignedserve.protocol.membership import membership_of
from alignedserve.protocol.messages import ROUTER, AskPages, Heartbeat, Life, Member, Members, Message
from alignedserve.shell.turn import NoHands, TurnLoop

ME, OTHER = (Member(name, Role.DECODE, "local", 1, f"{name}#1") for name in ("decode-0", "decode-1"))


class StoppedClock:
    at = 0.0

    def now(self) -> float:
        return self.at

    def until(self, at: float) -> float:
        return at - self.at


class Loop(TurnLoop):
    """Record what the core hears and what the loop does, in order; the core answers as the test says."""

    def __init__(
        self, answer: Callable[[Event], list[Command]] = lambda _: [], me: str = ME.name, lives: Sequence[Life] = ()
    ) -> None:
        self.clock, self.noted = StoppedClock(), list[object]()
        self._answer = answer
        super().__init__(self, NoHands(), membership_of(me, ME.incarnation, lives), self.clock)

    def handle(self, event: Event, now: float) -> list[Command]:
        self.noted.append(event)
        return self._answer(event)

    def _connect(self, member: Member) -> None:
        self.noted.append(f"link to {member.name}")

    def _disconnect(self, name: str) -> None:
        self.noted.append(f"no link to {name}")

    def _send(self, to: str, message: Message) -> None:
        self.noted.append((to, message))

    def _begin(self, work: Command) -> None:
        self.noted.append(work)

    def _end(self) -> None:
        self.alive = False

    def _wake_at(self, at: float) -> float:
        return at


def announced(*members: Member) -> Received:
    return Received(ROUTER, Members(members), 1)


def test_a_turn_hears_all_events_then_fires_timers_then_begins_one_piece_of_work() -> None:
    loop = Loop()
    first, second = RunStep(StepPlan(1)), RunStep(StepPlan(2))
    loop.perform([first, SetTimer("late", 2.0), SetTimer("now", 0.0), second])
    loop.turn([Closed("a"), Closed("b")])
    assert loop.noted == [Closed("a"), Closed("b"), TimerFired("now"), first]
    loop.turn([])
    assert loop.noted[4:] == [second]
    loop.clock.at = 2.0
    loop.turn([])
    assert loop.noted[5:] == [TimerFired("late")]


def test_timers_fire_in_the_order_of_their_times_and_a_later_timer_replaces_its_namesake() -> None:
    loop = Loop()
    loop.perform([SetTimer("b", 2.0), SetTimer("a", 1.0), SetTimer("c", 0.5), SetTimer("c", 9.0)])
    loop.clock.at = 3.0
    loop.turn([])
    assert loop.noted == [TimerFired("a"), TimerFired("b")]


def test_a_member_is_linked_before_the_core_hears_of_it_and_its_early_frames_follow() -> None:
    loop, early = Loop(), Received(OTHER.name, AskPages(1), 1)
    loop.turn([early, announced(ME, OTHER), announced(ME)])
    assert loop.noted == [
        *(f"link to {ME.name}", MemberJoined(ME)),
        *(f"link to {OTHER.name}", MemberJoined(OTHER), early),
        *(f"no link to {OTHER.name}", MemberLost(OTHER)),
    ]


def test_a_heartbeat_makes_a_link() -> None:
    beat = Received(OTHER.name, Heartbeat(OTHER), 1)
    loop = Loop(me=ROUTER, lives=[Life(OTHER.name, OTHER.role, OTHER.incarnation)])
    loop.turn([beat])
    assert loop.noted == [f"link to {OTHER.name}", beat]


def test_a_process_that_ends_hears_and_does_nothing_more() -> None:
    last = AskPages(1)
    loop = Loop(lambda _: [Send(ROUTER, last), End(), Send(ROUTER, AskPages(2))])
    loop.perform([SetTimer("now", 0.0), RunStep(StepPlan(1))])
    loop.turn([Closed("a"), Closed("b")])
    assert loop.noted == [Closed("a"), (ROUTER, last)]
