"""Requests that may be what ends their workers: who is charged, who is acquitted, and who is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import SUSPECT_DEATHS, Rejection, Request, Role
from alignedserve.owner.core import MOST_PASSED, PASSED, OwnerCore
from alignedserve.protocol.commands import Command, Reject, Send
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Opened
from alignedserve.protocol.messages import (
    ROUTER,
    Acquit,
    AttemptLost,
    Cancel,
    Declare,
    Missed,
    Output,
    StepLate,
    Submit,
    Tokens,
)
from tests.samples import ROUTER_MEMBER, member, request, said

FIRST = replace(request(), max_tokens=10_000)
FEW = PASSED[0]


class Story:
    """An owner with one request, which lives through deaths and gets tokens."""

    def __init__(self) -> None:
        self.owner = OwnerCore(frozenset({Role.ROUTER, Role.DECODE}))
        self.current: Request = FIRST
        self.num_tokens = 0
        self._note(self.owner.handle(Opened(FIRST), 0.0))

    def _note(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Submit):
                self.current = command.message.request
        return commands

    def gets(self, count: int) -> list[Command]:
        output = Output("r", self.current.attempt, self.num_tokens, tuple(range(10, 10 + count)), None)
        self.num_tokens += count
        return self._note(self.owner.handle(said("decode-0", Tokens((output,))), 0.0))

    def loses(self, died: bool = True, alone: bool = False, silent: bool = False) -> list[Command]:
        lost = AttemptLost("r", self.current.attempt, died, alone, silent)
        return self._note(self.owner.handle(said(ROUTER, lost), 0.0))

    def loses_later(self, attempt: int) -> list[Command]:
        return self._note(self.owner.handle(said(ROUTER, AttemptLost("r", attempt, died=True, alone=True)), 0.0))


def test_a_request_at_which_the_owner_fails_is_given_up_and_no_other() -> None:
    story = Story()
    story.owner.handle(Opened(replace(FIRST, id="other")), 0.0)
    gone, given_up = (said("decode-0", Tokens((Output(name, 0, 0, (5,), None),))) for name in ("x", "r"))
    assert story.owner.give_up_on(gone) == [], "it is not open"
    new = replace(FIRST, id="new")
    assert story.owner.give_up_on(Opened(new)) == [
        Send(ROUTER, Cancel("new", 0)),
        Reject("new", Rejection.CULPRIT, "the server fails at this request: do not send it again", 0.0),
    ]
    cancelled, rejected = story.owner.give_up_on(given_up) or []
    assert cancelled == Send(ROUTER, Cancel("r", 0))
    assert isinstance(rejected, Reject)
    assert (rejected.request, rejected.reason, story.owner.num_open) == ("r", Rejection.CULPRIT, 1)
    several = said("decode-0", Tokens((Output("other", 0, 0, (5,), None), Output("x", 0, 0, (5,), None))))
    assert story.owner.give_up_on(several) is None, "whose fault that is, nobody knows"
    assert story.owner.num_open == 1


def test_a_router_hears_of_requests_with_a_death_one_by_one() -> None:
    story = Story()
    others = [replace(FIRST, id=f"{number}") for number in range(3)]
    for other in others:
        story.owner.handle(Opened(other), 0.0)
    story.loses()
    declares = [Declare((story.current,), is_last=False), Declare(tuple(others))]
    assert story.owner.handle(MemberJoined(ROUTER_MEMBER), 0.0) == [Send(ROUTER, declare) for declare in declares]


@pytest.mark.parametrize("each", [(0, 0, 0), (5, 0, 0), (5, 1, 1), (1, FEW, FEW)])
def test_the_third_death_at_about_one_place_ends_the_request_if_it_was_alone(each: Sequence[int]) -> None:
    """Whatever tokens come: a request that ends its workers while it decodes gets one token from each prompt."""
    story = Story()
    for count, num_deaths in zip(each, (1, 2), strict=False):
        story.gets(count)
        story.loses()
        assert story.current.deaths == num_deaths
    assert story.current.is_suspect
    story.gets(each[2])
    cancelled, rejected = story.loses(alone=True)
    assert cancelled == Send(ROUTER, Cancel("r", 2))
    assert isinstance(rejected, Reject)
    assert (rejected.reason, story.owner.num_open) == (Rejection.CULPRIT, 0)


@pytest.mark.parametrize("has_ended", [False, True])
def test_of_the_third_worker_that_falls_silent_it_waits_for_what_becomes_of_it(has_ended: bool) -> None:
    """Else a request that hangs its workers would hang one after the other before the first of them is ended."""
    story = Story()
    for num_deaths in (1, 2):
        story.loses(died=False, silent=True)
        assert story.current.deaths == num_deaths
        assert story.loses_later(num_deaths - 1) == [], "which was charged already"
    assert story.loses(died=False, alone=True, silent=True) == []
    told = story.loses(died=has_ended, alone=True)
    if has_ended:
        assert isinstance(told[-1], Reject)
        assert (told[-1].reason, story.owner.num_open) == (Rejection.CULPRIT, 0)
    else:
        assert told == [Send(ROUTER, Submit(story.current))]
        assert (story.current.attempt, story.current.deaths) == (3, 2)


def test_a_silence_that_was_a_cut_counts_for_nothing() -> None:
    story = Story()
    for attempt in range(4):
        story.loses(died=False, alone=True, silent=True)
        assert story.current.deaths == 1
        story.owner.handle(said(ROUTER, AttemptLost("r", attempt, alone=True)), 0.0)  # it lives
    story.loses(alone=True)
    assert (story.owner.num_open, story.current.deaths) == (1, 1)


def test_a_death_among_others_ends_no_request() -> None:
    story = Story()
    for num_deaths in range(1, 6):
        story.loses()
        assert story.current.deaths == num_deaths


def test_the_first_deaths_end_no_request_though_it_was_alone() -> None:
    story = Story()
    for _ in range(SUSPECT_DEATHS):
        story.loses(alone=True)
    assert story.owner.num_open == 1


def test_an_attempt_that_is_lost_otherwise_is_no_death() -> None:
    story = Story()
    for _ in range(5):
        story.loses(died=False)
    assert story.current.deaths == 0


def test_a_request_that_goes_on_between_two_deaths_is_charged_with_one() -> None:
    """It was unlucky: what ends a worker at some token does so in each attempt."""
    story = Story()
    for _ in range(6):
        story.loses(alone=True)
        story.gets(PASSED[-1] + 1)
    assert not story.current.is_suspect
    assert story.owner.num_open == 1


def test_a_suspect_that_passes_the_place_of_its_last_death_goes_on_among_others() -> None:
    story = Story()
    story.gets(3)
    story.loses()
    story.loses()
    assert story.current.is_suspect
    alone = story.current.attempt
    story.gets(FEW)
    assert (story.current.attempt, story.current.is_suspect) == (alone, True)
    story.gets(1)
    assert (story.current.attempt, story.current.deaths) == (alone + 1, 0)
    assert len(story.current.emitted) == story.num_tokens
    story.loses(alone=True)
    assert story.current.deaths == 1


def test_a_death_alone_at_another_place_than_the_last_proves_nothing() -> None:
    story = Story()
    story.loses()
    story.loses()
    story.gets(FEW + 1)
    story.loses(alone=True)
    assert story.owner.num_open == 1


def test_the_router_hears_that_a_request_has_passed_the_place_of_its_only_death() -> None:
    story = Story()
    assert story.gets(FEW + 1)[1:] == []
    story.loses()
    assert story.current.deaths == 1
    assert story.gets(FEW)[1:] == []
    passed = Send(ROUTER, Acquit("r", 1))
    assert story.gets(1)[1:] == [passed]
    assert story.gets(1)[1:] == [], "once"
    assert passed in story.owner.handle(said(ROUTER, Missed()), 0.0)
    assert passed in story.owner.handle(LinkGap(ROUTER), 0.0), "it may be what was lost"
    declared: list[Any] = story.owner.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    assert [of.deaths for send in declared for of in send.message.requests] == [0]


def test_a_worker_whose_step_is_late_does_not_count_as_ready() -> None:
    owner = OwnerCore(frozenset({Role.ROUTER, Role.DECODE}))
    for there in (ROUTER_MEMBER, member("decode-0"), member("decode-1")):
        owner.handle(MemberJoined(there), 1.0)
    owner.handle(said(ROUTER, StepLate("decode-0", 6.0)), 2.0)
    assert owner.ready
    assert owner.late == {"decode-0": 6.0}
    owner.handle(said(ROUTER, StepLate("decode-1", 7.0)), 3.0)
    assert not owner.ready
    assert owner.lacks_s(5.0) == 2.0
    owner.handle(said(ROUTER, StepLate("decode-1", 0.0)), 6.0)
    assert owner.ready
    owner.handle(MemberLost(member("decode-0")), 7.0)
    assert owner.late == {}


def test_lateness_that_the_next_router_does_not_know_is_forgotten() -> None:
    for forgotten in (MemberLost(ROUTER_MEMBER), LinkGap(ROUTER)):
        owner = OwnerCore(frozenset({Role.DECODE}))
        for there in (ROUTER_MEMBER, member("decode-0")):
            owner.handle(MemberJoined(there), 1.0)
        owner.handle(said(ROUTER, StepLate("decode-0", 6.0)), 2.0)
        assert not owner.ready
        owner.handle(forgotten, 3.0)
        assert owner.ready


def test_a_death_that_is_known_late_counts_once_and_lets_the_request_run_alone() -> None:
    """Silent workers are given up first, and the next attempts begin; then the launcher says that they ended."""
    story = Story()
    for _ in range(SUSPECT_DEATHS):
        lost = story.current.attempt
        story.loses(died=False)
        assert story.current.attempt == lost + 1
        for _ in range(2):
            story._note(story.owner.handle(said(ROUTER, AttemptLost("r", lost, died=True)), 0.0))
    assert story.current.is_suspect
    lost = story.current.attempt
    story.loses(died=False)
    commands = story.owner.handle(said(ROUTER, AttemptLost("r", lost, died=True, alone=True)), 0.0)
    assert [command.reason for command in commands if isinstance(command, Reject)] == [Rejection.CULPRIT]


@pytest.mark.parametrize(("tokens", "most"), [(16, 3), (32, 3), (33, 4), (128, 4), (500, 5), (600, MOST_PASSED + 1)])
def test_one_that_ends_workers_some_tokens_after_each_start_is_found_too(tokens: int, most: int) -> None:
    """It passes the place of its last death each time, so with each death it has further to go."""
    story = Story()
    deaths, told = 0, list[Command]()
    while story.owner.num_open:
        story.gets(tokens)
        told = story.loses(alone=story.current.is_suspect)
        deaths += 1
    assert deaths == most
    assert [command.reason for command in told if isinstance(command, Reject)] == [Rejection.CULPRIT]


def present_at_ten_deaths() -> Story:
    """One that others' culprits have charged ten times, each time further on."""
    story = Story()
    for _ in range(MOST_PASSED):
        assert not story.current.is_suspect
        story.gets(PASSED[-1] + 1)
        story.loses()
    return story


def test_one_that_is_present_at_ten_deaths_runs_alone_and_is_no_culprit() -> None:
    story = present_at_ten_deaths()
    for _ in range(3):
        assert story.current.is_suspect
        story.gets(FEW + 1)
        story.loses()
    assert (story.current.is_suspect, story.owner.num_open) == (True, 1)


def test_the_next_death_after_ten_convicts_one_that_is_alone() -> None:
    story = present_at_ten_deaths()
    story.gets(FEW + 1)
    told = story.loses(alone=True)
    assert [command.reason for command in told if isinstance(command, Reject)] == [Rejection.CULPRIT]


def test_one_that_runs_alone_to_its_end_lets_the_other_suspects_take_turns() -> None:
    """A new attempt goes behind the suspects that wait."""
    story = present_at_ten_deaths()
    alone = story.current.attempt
    story.gets(PASSED[-1])
    assert story.current.attempt == alone
    story.gets(1)
    assert (story.current.attempt, story.current.is_suspect) == (alone + 1, True)
    story.gets(PASSED[-1])
    assert story.current.attempt == alone + 1
