"""The parts of a core are asked one after the other, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, MemberLost, TimerFired
from alignedserve.protocol.messages import Attempt, Missed, Release
from alignedserve.worker.parts.part import CorePart, Roster
from alignedserve.worker.parts.pool_link import PoolLink
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER


@dataclass
class Talking(CorePart):
    """Part that answers every event with its name."""

    name: str

    def _say(self) -> Command:
        return Send(self.name, Missed())

    def hear(self, event: Event, now: float) -> list[Command]:
        return [self._say()]

    def drop(self, request: str, attempt: int) -> list[Command]:
        return [self._say()]

    def repeat(self, to: str) -> list[Command]:
        return [self._say()]

    def attempts(self) -> list[Attempt]:
        return [(self.name, 0)]

    @property
    def awaits_answer(self) -> bool:
        return True


BOTH = [Send("a", Missed()), Send("b", Missed())]


@pytest.fixture
def roster() -> Roster:
    made = Roster()
    made.enlist(Talking("a"), CorePart(), Talking("b"))
    return made


def test_all_parts_are_asked_in_their_order(roster: Roster) -> None:
    assert roster.hear(TimerFired("any"), 0.0) == BOTH
    assert roster.drop("request", 0) == BOTH
    assert roster.repeat("router") == BOTH
    assert roster.attempts() == [("a", 0), ("b", 0)]
    assert roster.awaits_answer


def test_a_part_has_no_say_unless_it_says_so() -> None:
    roster = Roster()
    roster.enlist(CorePart())
    roster.ask_again()
    assert roster.hear(TimerFired("any"), 0.0) == roster.drop("request", 0) == roster.repeat("router") == []
    assert roster.attempts() == []
    assert roster.occupants() == []
    assert not roster.awaits_answer


def test_the_pool_is_forgotten_when_it_is_lost() -> None:
    link = PoolLink()
    assert link.send(Release("a", 0)) == []
    link.hear(MemberJoined(POOL_MEMBER), 0.0)
    assert link.send(Release("a", 0)) == [Send("pool-0", Release("a", 0))]
    link.hear(MemberLost(POOL_MEMBER), 0.0)
    assert link.member is None


@pytest.mark.parametrize("core", [PrefillCore, DecodeCore])
def test_the_link_to_the_pool_hears_last(core: type[PrefillCore] | type[DecodeCore]) -> None:
    """The other parts compare a lost member with the pool that they knew before."""
    assert isinstance(core(WorkerSetup(LIMITS)).parts[-1], PoolLink)
