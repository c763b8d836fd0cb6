"""The parts of a core are asked one after the other, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import MemberJoined, MemberLost
from alignedserve.protocol.messages import Missed, Release
from alignedserve.worker.part import CorePart
from alignedserve.worker.pool import PageWriter, PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER
from tests.worker.cores import MakeCore


@dataclass
class Talking(CorePart):
    """Part that answers every verb with its name."""

    name: str

    def _say(self) -> Command:
        return Send(self.name, Missed())

    def drop(self, request: str, attempt: int) -> list[Command]:
        return [self._say()]

    def repeat(self, to: str) -> list[Command]:
        return [self._say()]

    @property
    def awaits_answer(self) -> bool:
        return True


BOTH = [Send("a", Missed()), Send("b", Missed())]


@pytest.fixture
def here() -> Requests:
    made = Requests()
    made.enlist(Talking("a"), CorePart(), Talking("b"))
    return made


def test_all_parts_are_asked_in_their_order(here: Requests) -> None:
    assert here.drop("request", 0) == BOTH
    assert here.repeat("router") == BOTH
    assert here.awaits_answer


def test_a_part_has_no_say_unless_it_says_so() -> None:
    here = Requests()
    here.enlist(CorePart())
    here.ask_again()
    assert here.drop("request", 0) == here.repeat("router") == []
    assert here.attempts() == []
    assert here.occupants() == []
    assert not here.awaits_answer


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
