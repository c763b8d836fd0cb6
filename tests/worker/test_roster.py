"""The parts of a core are asked one after the other, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, TimerFired
from alignedserve.protocol.messages import ROUTER, Cancel, Missed, Prefill, Release
from alignedserve.worker.part import REFRESH, REFRESH_S, CorePart, Repeats
from alignedserve.worker.pool import PageWriter, PoolLink
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, request, said
from tests.worker.cores import MakeCore


@dataclass
class Talking(CorePart):
    """Part that answers every verb with its name."""

    name: str

    def _say(self) -> Command:
        return Send(self.name, Missed())

    def repeat(self, to: str) -> list[Command]:
        return [self._say()]

    @property
    def awaits_answer(self) -> bool:
        return True


BOTH = [Send("a", Missed()), Send("b", Missed())]


def test_all_parts_are_asked_in_their_order() -> None:
    repeats = Repeats(PoolLink(PageWriter(16, 4)), Talking("a"), CorePart(), Talking("b"))
    assert repeats.link_gap(LinkGap("router"), 0.0)[1:] == BOTH
    assert repeats.set_timer(0.0) == [SetTimer(REFRESH, REFRESH_S)]
    assert repeats.set_timer(1.0) == [], "it is set"


def test_a_part_has_no_say_unless_it_says_so() -> None:
    repeats = Repeats(PoolLink(PageWriter(16, 4)), CorePart())
    repeats.timer_fired(TimerFired(REFRESH), 0.0)
    assert repeats.link_gap(LinkGap("router"), 0.0) == [Send("router", Missed())]
    assert repeats.set_timer(0.0) == []


@pytest.mark.parametrize("core", [PrefillCore, decode_core])
def test_a_request_is_dropped_up_to_an_attempt(core: MakeCore) -> None:
    worker = core(WorkerSetup(LIMITS))
    worker.handle(said(ROUTER, Prefill(request("a", attempt=1))), 0.0)
    worker.handle(said(ROUTER, Cancel("a", 0)), 0.0)
    assert worker.here.attempts() == [("a", 1)]
    worker.handle(said(ROUTER, Cancel("a", 1)), 0.0)
    assert worker.here.attempts() == []


def test_the_pool_is_forgotten_when_it_is_lost() -> None:
    link = PoolLink(PageWriter(16, 4))
    assert link.send(Release("a", 0)) == []
    link.joined(MemberJoined(POOL_MEMBER), 0.0)
    assert link.send(Release("a", 0)) == [Send("pool-0", Release("a", 0))]
    link.lost(MemberLost(POOL_MEMBER), 0.0)
    assert link.member is None


@pytest.mark.parametrize("core", [PrefillCore, decode_core])
def test_only_the_pool_that_a_worker_has_can_be_lost(core: MakeCore) -> None:
    worker = core(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    worker.handle(MemberLost(replace(POOL_MEMBER, incarnation=POOL_MEMBER.incarnation + 1)), 0.0)
    assert worker.pool_link.member == POOL_MEMBER
    worker.handle(MemberLost(POOL_MEMBER), 0.0)
    assert worker.pool_link.member is None
