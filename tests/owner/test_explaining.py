"""The owner asks all parts about a request, and tells the story of those that answer in time."""

from __future__ import annotations

import pytest

from alignedserve.core import Role
from alignedserve.explain.decisions import DecisionRing, Findings, Kind
from alignedserve.explain.story import Story
from alignedserve.owner.core import OwnerCore
from alignedserve.owner.explaining import ANSWER_S
from alignedserve.protocol.commands import Command, Send, SetTimer, TellStory
from alignedserve.protocol.events import MemberJoined, MemberLost, StoryAsked, TimerFired
from alignedserve.protocol.messages import ROUTER, AskDecisions, Decisions
from tests.samples import GATEWAY_MEMBER, POOL_MEMBER, ROUTER_MEMBER, member, request, said

DEADLINE = TimerFired("story 1")


@pytest.fixture
def owner() -> OwnerCore:
    core = OwnerCore(frozenset({Role.ROUTER, Role.DECODE}))
    for joined in (ROUTER_MEMBER, POOL_MEMBER, GATEWAY_MEMBER, member("prefill-0"), member("decode-0")):
        core.handle(MemberJoined(joined), 0.0)
    return core


def asks(owner: OwnerCore, number: int = 1, now: float = 10.0) -> list[Command]:
    return owner.handle(StoryAsked(number, "r"), now)


def findings(kind: Kind, at: float) -> Findings:
    ring = DecisionRing()
    ring.now = at
    ring.note(kind, request())
    return ring.about("r")


def answers(owner: OwnerCore, part: str, number: int = 1, now: float = 10.1, clock: float = 10.05) -> list[Command]:
    kind = Kind.ARRIVED if part == ROUTER else Kind.QUEUED
    return owner.handle(said(part, Decisions(number, clock, findings(kind, clock - 1))), now)


def story(commands: list[Command]) -> Story:
    (told,) = commands
    assert isinstance(told, TellStory)
    return told.story


def test_the_router_and_all_workers_are_asked(owner: OwnerCore) -> None:
    question = AskDecisions(1, "r")
    asked = [Send(name, question) for name in (ROUTER, "prefill-0", "decode-0")]
    assert asks(owner) == [*asked, SetTimer("story 1", 10.0 + ANSWER_S)]


def test_the_story_is_told_when_the_last_has_answered(owner: OwnerCore) -> None:
    asks(owner)
    assert answers(owner, ROUTER) == answers(owner, "prefill-0") == []
    told = story(answers(owner, "decode-0"))
    assert [moment.part for moment in told.moments] == [ROUTER, "prefill-0", "decode-0"]
    assert told.silent == ()
    assert owner.handle(DEADLINE, 12.0) == []


def test_a_part_that_does_not_answer_in_time_is_named(owner: OwnerCore) -> None:
    asks(owner)
    answers(owner, ROUTER)
    told = story(owner.handle(DEADLINE, 12.0))
    assert told.silent == ("decode-0", "prefill-0")
    assert answers(owner, "decode-0", now=13.0) == [], "too late"


def test_a_router_that_is_gone_is_named_too(owner: OwnerCore) -> None:
    owner.handle(MemberLost(ROUTER_MEMBER), 1.0)
    asks(owner)
    answers(owner, "prefill-0")
    answers(owner, "decode-0")
    assert story(owner.handle(DEADLINE, 12.0)).silent == (ROUTER,)


def test_an_answer_counts_once_and_for_its_question(owner: OwnerCore) -> None:
    asks(owner)
    asks(owner, number=2)
    answers(owner, ROUTER)
    answers(owner, ROUTER)
    assert story(owner.handle(DEADLINE, 12.0)).silent == ("decode-0", "prefill-0")
    assert story(owner.handle(TimerFired("story 2"), 12.0)).silent == ("decode-0", "prefill-0", ROUTER)


def test_a_part_whose_clock_is_another_tells_by_ours(owner: OwnerCore) -> None:
    asks(owner, now=10.0)
    answers(owner, ROUTER, clock=500.0, now=10.4)
    answers(owner, "prefill-0")
    told = story(answers(owner, "decode-0"))
    at = {moment.part: moment.decision.at for moment in told.moments}
    assert at[ROUTER] == pytest.approx(9.4)
