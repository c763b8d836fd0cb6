"""The owner: every token once and in order, and a request that ends whatever is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import FinishReason, Logprob, Opening, Rejection, Role, Spent
from alignedserve.owner.accounts import MOST_SETTLING, Account, SettlingAccounts
from alignedserve.owner.core import MOST_DECLARED, MOST_FRUITLESS, RESEND_S, SILENCE_S, OwnerCore
from alignedserve.protocol.commands import Charge, Command, Deliver, Reject, Send, SetTimer, TellPlace
from alignedserve.protocol.events import (
    Closed,
    LinkGap,
    MemberJoined,
    MemberLost,
    Opened,
    Paused,
    Resumed,
    TimerFired,
    Unsent,
)
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    AttemptLost,
    Cancel,
    Declare,
    Infeasible,
    InLine,
    Inquire,
    Missed,
    Output,
    Place,
    Refused,
    RequestUse,
    Resend,
    Submit,
    Tokens,
    Used,
)
from tests.samples import ROUTER_MEMBER, member, next_attempt, request, said

FIRST = request()
SECOND = next_attempt(FIRST, (7, 8))


def test_a_chat_in_line_is_told_its_place_until_its_first_token(owner: OwnerCore) -> None:
    places = InLine((Place("r", 0, 3, 12.5), Place("r", 1, 2, 9.0), Place("gone", 0, 1, 2.0)))
    assert owner.handle(said(ROUTER, places), 1.0) == [TellPlace("r", 3, 12.5)]
    owner.handle(said("decode-0", Tokens((Output("r", 0, 0, (7,), None),))), 2.0)
    assert owner.handle(said(ROUTER, places), 3.0) == []


@pytest.fixture
def owner() -> OwnerCore:
    core = OwnerCore(frozenset({Role.ROUTER, Role.DECODE}))
    assert core.handle(Opened(FIRST), 0.0) == [Send(ROUTER, Submit(FIRST)), SetTimer("", SILENCE_S)]
    return core


def hears(
    owner: OwnerCore,
    index: int,
    tokens: Sequence[int],
    *,
    attempt: int = 0,
    finish: FinishReason | None = None,
    sender: str = "decode-0",
    now: float = 0.0,
) -> list[Command]:
    output = Output("r", attempt, index, tuple(tokens), finish)
    return owner.handle(said(sender, Tokens((output,))), now)


def test_tokens_are_delivered_once_and_in_order(owner: OwnerCore) -> None:
    assert hears(owner, 0, [7]) == [Deliver("r", (7,), None)]
    assert hears(owner, 0, [7]) == []
    assert hears(owner, 0, [7, 8, 9]) == [Deliver("r", (8, 9), None)]


def test_log_probabilities_are_delivered_with_their_tokens(owner: OwnerCore) -> None:
    """Log-probabilities come once and in order, those of the prompt first, despite a lost frame and a next attempt."""
    logprobs, of_prompt = tuple(Logprob(-float(index)) for index in range(5)), (Logprob(-9.0),)

    def hears(index: int, count: int, attempt: int = 0) -> list[Command]:
        tokens, prompt = tuple(range(10 + index, 10 + index + count)), None if index else Opening(of_prompt)
        output = Output("r", attempt, index, tokens, None, logprobs[index : index + count], prompt)
        return owner.handle(said("decode-0", Tokens((output,))), 0.0)

    assert hears(1, 1) == [Send("decode-0", Resend("r", 0, 0)), SetTimer("r", RESEND_S)]
    assert hears(0, 2) == [Deliver("r", (10, 11), None, logprobs[:2], Opening(of_prompt))]
    assert hears(0, 3) == [Deliver("r", (12,), None, logprobs[2:3])]
    owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0)
    assert hears(3, 2, attempt=1) == [Deliver("r", (13, 14), None, logprobs[3:])]


def test_what_the_pool_had_is_told_once_by_the_attempt_of_the_first_token(owner: OwnerCore) -> None:
    def hears(index: int, count: int, attempt: int, num_cached: int) -> list[Command]:
        output = Output("r", attempt, index, (7,) * count, None, opening=Opening(num_cached=num_cached))
        return owner.handle(said("decode-0", Tokens((output,))), 0.0)

    assert hears(0, 1, 0, 64) == [Deliver("r", (7,), None, opening=Opening(num_cached=64))]
    assert hears(0, 2, 0, 64) == [Deliver("r", (7,), None)]
    owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0)
    assert hears(2, 1, 1, 128) == [Deliver("r", (7,), None)]


def test_that_a_first_token_cannot_be_in_time_is_told_once_with_it(owner: OwnerCore) -> None:
    assert owner.handle(said(ROUTER, Infeasible("r", 0)), 0.0) == []
    assert hears(owner, 0, [7]) == [Deliver("r", (7,), None, is_infeasible=True)]
    assert hears(owner, 1, [8]) == [Deliver("r", (8,), None)]
    owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0)
    assert hears(owner, 2, [9], attempt=1) == [Deliver("r", (9,), None)]


def test_what_the_router_says_of_another_attempt_or_too_late_marks_no_delivery(owner: OwnerCore) -> None:
    owner.handle(said(ROUTER, Infeasible("r", 1)), 0.0)
    owner.handle(said(ROUTER, Infeasible("unknown", 0)), 0.0)
    assert hears(owner, 0, [7]) == [Deliver("r", (7,), None)]
    owner.handle(said(ROUTER, Infeasible("r", 0)), 0.0)
    assert hears(owner, 1, [8]) == [Deliver("r", (8,), None)]


def test_an_end_without_a_token_is_delivered_once_all_before_it_are(owner: OwnerCore) -> None:
    hears(owner, 0, [7])
    assert hears(owner, 2, [], finish=FinishReason.ERROR) == [
        Send("decode-0", Resend("r", 0, 1)),
        SetTimer("r", RESEND_S),
    ]
    assert hears(owner, 1, [8], finish=FinishReason.ERROR) == [
        Deliver("r", (8,), FinishReason.ERROR),
        Send("decode-0", Acknowledge(("r",))),
    ]
    assert hears(owner, 2, [], finish=FinishReason.ERROR) == [Send("decode-0", Acknowledge(("r",)))]


def test_after_an_end_in_doubt_the_next_attempt_starts_once_and_then_it_is_an_error(owner: OwnerCore) -> None:
    hears(owner, 0, [7])
    assert hears(owner, 1, [8], finish=FinishReason.DOUBT) == [
        Deliver("r", (8,), None),
        Send(ROUTER, Submit(replace(SECOND, emitted_at=0.0))),
    ]
    assert hears(owner, 2, [], finish=FinishReason.DOUBT) == [Send("decode-0", Cancel("r", 0))], "it comes again"
    assert hears(owner, 2, [9], attempt=1) == [Deliver("r", (9,), None)]
    assert hears(owner, 3, [], attempt=1, finish=FinishReason.DOUBT) == [
        Deliver("r", (), FinishReason.ERROR),
        Send("decode-0", Acknowledge(("r",))),
    ]


def test_an_end_in_doubt_waits_for_the_tokens_before_it(owner: OwnerCore) -> None:
    hears(owner, 0, [7])
    asked = [Send("decode-0", Resend("r", 0, 1)), SetTimer("r", RESEND_S)]
    assert hears(owner, 2, [], finish=FinishReason.DOUBT) == asked
    assert hears(owner, 1, [8], finish=FinishReason.DOUBT)[-1] == Send(ROUTER, Submit(replace(SECOND, emitted_at=0.0)))


def test_an_end_without_any_token_is_an_end(owner: OwnerCore) -> None:
    assert hears(owner, 0, [], finish=FinishReason.ERROR) == [
        Deliver("r", (), FinishReason.ERROR),
        Send("decode-0", Acknowledge(("r",))),
    ]


def test_the_last_token_is_acknowledged_to_all_workers_that_may_keep_some(owner: OwnerCore) -> None:
    hears(owner, 0, [7], sender="prefill-0")
    assert hears(owner, 1, [0], finish=FinishReason.STOP) == [
        Deliver("r", (0,), FinishReason.STOP),
        Send("decode-0", Acknowledge(("r",))),
        Send("prefill-0", Acknowledge(("r",))),
    ]
    assert owner.num_open == 0


def test_a_gap_is_asked_for_once_and_then_filled(owner: OwnerCore) -> None:
    hears(owner, 0, [7])
    assert hears(owner, 2, [9], now=1.0) == [Send("decode-0", Resend("r", 0, 1)), SetTimer("r", 1.0 + RESEND_S)]
    assert hears(owner, 3, [5], now=1.1) == []
    assert hears(owner, 1, [8, 9, 5], now=1.2) == [Deliver("r", (8, 9, 5), None)]
    assert owner.handle(TimerFired("r"), 1.0 + RESEND_S) == []


def test_an_unanswered_gap_starts_the_next_attempt_after_what_was_delivered(owner: OwnerCore) -> None:
    hears(owner, 0, [7, 8])
    hears(owner, 3, [5], now=1.0)
    assert owner.handle(TimerFired("r"), 1.0 + RESEND_S) == [Send(ROUTER, Submit(SECOND))]


def test_tokens_of_an_older_attempt_are_dropped_and_their_sender_is_told_to_stop(owner: OwnerCore) -> None:
    """The worker was to drop the attempt, and did not hear of it."""
    hears(owner, 0, [7, 8])
    assert owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0) == [Send(ROUTER, Submit(SECOND))]
    assert hears(owner, 2, [9]) == [Send("decode-0", Cancel("r", 0))]
    assert hears(owner, 2, [0], finish=FinishReason.STOP) == [Send("decode-0", Cancel("r", 0))]
    assert hears(owner, 2, [9], attempt=1) == [Deliver("r", (9,), None)]


def test_tokens_of_an_older_attempt_break_no_silence(owner: OwnerCore) -> None:
    owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0)
    hears(owner, 0, [7], now=SILENCE_S - 1)
    assert Send(ROUTER, Inquire((("r", 1),))) in owner.handle(TimerFired(""), SILENCE_S)


def test_an_attempt_is_lost_once(owner: OwnerCore) -> None:
    assert owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0) == [Send(ROUTER, Submit(next_attempt(FIRST)))]
    assert owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0) == []
    assert owner.handle(said(ROUTER, AttemptLost("unknown", 0)), 0.0) == []


def test_a_request_that_comes_to_nothing_again_and_again_is_given_up(owner: OwnerCore) -> None:
    """The request itself may break its workers: without a limit it would be tried for ever."""
    for attempt in range(MOST_FRUITLESS - 1):
        (again,) = owner.handle(said(ROUTER, AttemptLost("r", attempt)), 0.0)
        assert isinstance(again, Send)
        assert isinstance(again.message, Submit)
    cancelled, rejected = owner.handle(said(ROUTER, AttemptLost("r", MOST_FRUITLESS - 1)), 0.0)
    assert cancelled == Send(ROUTER, Cancel("r", MOST_FRUITLESS - 1))
    assert isinstance(rejected, Reject)
    assert owner.num_open == 0


def test_a_token_proves_an_attempt_fruitful(owner: OwnerCore) -> None:
    for attempt in range(3 * MOST_FRUITLESS):
        hears(owner, attempt, [7], attempt=attempt)
        owner.handle(said(ROUTER, AttemptLost("r", attempt)), 0.0)
    assert owner.num_open == 1


def test_a_refused_request_is_rejected(owner: OwnerCore) -> None:
    assert owner.handle(said(ROUTER, Refused("r", 0, Rejection.QUEUED, "full", 1.0)), 0.0) == [
        Reject("r", Rejection.QUEUED, "full", 1.0)
    ]
    assert owner.num_open == 0


def test_a_request_that_no_frame_can_hold_is_rejected_at_once(owner: OwnerCore) -> None:
    cancelled, rejected = owner.handle(Unsent(ROUTER, Submit(FIRST), "too long"), 0.0)
    assert cancelled == Send(ROUTER, Cancel("r", 0))
    assert isinstance(rejected, Reject)
    assert (rejected.request, rejected.why) == ("r", "the request cannot be sent to the router: too long")
    assert owner.num_open == 0
    assert owner.handle(Unsent(ROUTER, Submit(FIRST), "too long"), 0.0) == []


def test_of_requests_that_do_not_go_into_a_frame_together_each_is_declared_alone(owner: OwnerCore) -> None:
    second = replace(FIRST, id="other")
    owner.handle(Opened(second), 0.0)
    alone = owner.handle(Unsent(ROUTER, Declare((FIRST, second)), "too long"), 0.0)
    assert alone == [Send(ROUTER, Declare((FIRST,), is_last=False)), Send(ROUTER, Declare((second,)))]
    commands = owner.handle(Unsent(ROUTER, Declare((second,)), "too long"), 0.0)
    assert commands[0] == Send(ROUTER, Declare(())), "the router waits for the last one"
    assert owner.num_open == 1, "the one that can be sent goes on"


def test_another_message_that_cannot_be_sent_ends_no_request(owner: OwnerCore) -> None:
    assert owner.handle(Unsent(ROUTER, Inquire((("r", 0),)), "odd"), 0.0) == []
    assert owner.num_open == 1


def test_a_client_that_leaves_cancels_its_request(owner: OwnerCore) -> None:
    assert owner.handle(Closed("r"), 0.0) == [Send(ROUTER, Cancel("r", 0))]
    assert owner.handle(Closed("r"), 0.0) == []
    assert hears(owner, 0, [7]) == [Send("decode-0", Cancel("r", 0)), Send(ROUTER, Cancel("r", 0))]
    assert hears(owner, 1, [0], finish=FinishReason.STOP) == [Send("decode-0", Acknowledge(("r",)))]


NEXT_ROUTER = replace(ROUTER_MEMBER, incarnation=2)


def test_a_new_router_is_told_what_is_open(owner: OwnerCore) -> None:
    assert owner.handle(MemberJoined(NEXT_ROUTER), 0.0) == [Send(ROUTER, Declare((FIRST,)))]
    owner.handle(Closed("r"), 0.0)
    assert owner.handle(MemberJoined(NEXT_ROUTER), 0.0) == [Send(ROUTER, Declare(()))], "it waits to hear so"


def test_many_open_requests_are_declared_in_several_frames(owner: OwnerCore) -> None:
    """The prompts of all requests together might be larger than a frame may be."""
    requests = [FIRST, *(request(f"r{number}") for number in range(2 * MOST_DECLARED))]
    for later in requests[1:]:
        owner.handle(Opened(later), 0.0)
    declared = [sent.message for sent in owner.handle(MemberJoined(NEXT_ROUTER), 0.0) if isinstance(sent, Send)]
    assert [len(command.requests) for command in declared if isinstance(command, Declare)] == [
        MOST_DECLARED,
        MOST_DECLARED,
        1,
    ]
    assert [each for command in declared if isinstance(command, Declare) for each in command.requests] == requests
    assert [command.is_last for command in declared if isinstance(command, Declare)] == [False, False, True]


class TestLostFrames:
    """The owner tells a member that its frames were lost, and repeats what matters where a member lost frames."""

    def test_of_a_worker_have_all_open_requests_asked_for(self, owner: OwnerCore) -> None:
        """Requests without output are included: the lost frame may have held all of their output."""
        missed = Send("prefill-0", Missed())
        assert owner.handle(LinkGap("prefill-0"), 0.0) == [missed, Send("prefill-0", Resend("r", 0, 0))]

    def test_to_a_worker_have_them_asked_for_as_well(self, owner: OwnerCore) -> None:
        """A lost frame may have been a Resend."""
        hears(owner, 0, [7, 8])
        assert owner.handle(said("decode-0", Missed()), 0.0) == [Send("decode-0", Resend("r", 0, 2))]

    def test_of_the_router_have_it_asked_what_it_knows(self, owner: OwnerCore) -> None:
        """A lost frame may have been an AttemptLost."""
        inquiry = Send(ROUTER, Inquire((("r", 0),)))
        assert owner.handle(LinkGap(ROUTER), 0.0) == [Send(ROUTER, Missed()), inquiry]

    def test_to_the_router_have_it_asked_as_well(self, owner: OwnerCore) -> None:
        """A lost frame may have been a Submit."""
        owner.handle(said(ROUTER, AttemptLost("r", 0)), 0.0)
        assert owner.handle(said(ROUTER, Missed()), 0.0) == [Send(ROUTER, Inquire((("r", 1),)))]

    def test_matter_to_nobody_when_nothing_is_open(self, owner: OwnerCore) -> None:
        owner.handle(Closed("r"), 0.0)
        assert owner.handle(said(ROUTER, Missed()), 0.0) == []
        assert owner.handle(LinkGap(ROUTER), 0.0) == [Send(ROUTER, Missed())]
        assert owner.handle(said("decode-0", Missed()), 0.0) == []


def test_a_silent_request_is_asked_for(owner: OwnerCore) -> None:
    """The owner asks the worker that may keep the tokens, and asks the router whether any member has the request."""
    hears(owner, 0, [7], now=1.0)
    assert owner.handle(TimerFired(""), 5.0) == [SetTimer("", 10.0)]
    assert owner.handle(TimerFired(""), 10.0) == [
        Send("decode-0", Resend("r", 0, 1)),
        Send(ROUTER, Inquire((("r", 0),))),
        SetTimer("", 15.0),
    ]
    owner.handle(Closed("r"), 11.0)
    assert owner.handle(TimerFired(""), 15.0) == []


def test_a_lost_attempt_is_not_asked_for_as_if_it_were_the_next(owner: OwnerCore) -> None:
    hears(owner, 0, [7], now=1.0)
    owner.handle(said(ROUTER, AttemptLost("r", 0)), 2.0)
    assert Send(ROUTER, Inquire((("r", 1),))) in owner.handle(TimerFired(""), 10.0)


def test_it_is_ready_while_all_that_a_request_needs_is_there() -> None:
    owner = OwnerCore(frozenset({Role.ROUTER, Role.DECODE}))
    owner.handle(MemberJoined(ROUTER_MEMBER), 0.0)
    assert not owner.ready
    owner.handle(MemberJoined(member("decode-0")), 0.0)
    assert owner.ready
    owner.handle(MemberLost(member("decode-0")), 0.0)
    assert not owner.ready


def test_it_knows_for_how_long_a_role_has_been_away() -> None:
    owner, first, second = OwnerCore(frozenset()), member("jobs-0", 1), member("jobs-0", 2)
    assert owner.away_s(Role.JOBS, 4.0) == 0, "it does not know yet"
    owner.handle(MemberJoined(ROUTER_MEMBER), 5.0)
    assert owner.away_s(Role.JOBS, 7.0) == 2.0
    owner.handle(MemberJoined(first), 8.0)
    assert owner.away_s(Role.JOBS, 9.0) == 0
    owner.handle(MemberLost(first), 10.0)
    assert owner.away_s(Role.JOBS, 13.0) == 3.0
    owner.handle(MemberJoined(second), 14.0)
    assert owner.away_s(Role.JOBS, 15.0) == 0


def test_it_knows_for_how_long_nothing_could_run() -> None:
    owner = OwnerCore(frozenset({Role.ROUTER, Role.DECODE}))
    assert owner.lacks_s(5.0) == math.inf
    owner.handle(MemberJoined(ROUTER_MEMBER), 5.0)
    owner.handle(MemberJoined(member("decode-0")), 6.0)
    assert owner.lacks_s(7.0) == 0
    owner.handle(MemberLost(member("decode-0")), 8.0)
    owner.handle(MemberLost(ROUTER_MEMBER), 9.0)
    assert owner.lacks_s(10.0) == 2.0
    owner.handle(MemberJoined(ROUTER_MEMBER), 11.0)
    owner.handle(MemberJoined(member("decode-0")), 12.0)
    assert owner.lacks_s(13.0) == 0


def test_an_owner_that_starts_again_lacks_members_only_since_then() -> None:
    """A deployment serves: who asks its new gateway waits for the members, and is not sent away."""
    owner = OwnerCore(frozenset({Role.ROUTER}), lost_at=5.0)
    assert owner.lacks_s(5.5) == 0.5


# --- Clients that do not read


def test_a_paused_request_runs_nowhere_and_goes_on_after_what_was_delivered(owner: OwnerCore) -> None:
    hears(owner, 0, [7, 8])
    assert owner.handle(Paused("r"), 1.0) == [Send(ROUTER, Cancel("r", 0))]
    assert owner.handle(Paused("r"), 1.0) == []
    assert hears(owner, 2, [9]) == [Send("decode-0", Cancel("r", 0))], "tokens that were on their way come again"
    assert owner.handle(Resumed("r"), 60.0) == [Send(ROUTER, Submit(SECOND))]
    assert owner.handle(Resumed("r"), 60.0) == []
    assert hears(owner, 2, [9], attempt=1) == [Deliver("r", (9,), None)]
    assert hears(owner, 2, [9], attempt=0) == [Send("decode-0", Cancel("r", 0))]
    ended = hears(owner, 3, [2], attempt=1, finish=FinishReason.STOP)
    assert ended[0] == Deliver("r", (2,), FinishReason.STOP)
    assert owner.held == {"requests": 0}


def test_nobody_is_asked_about_a_paused_request(owner: OwnerCore) -> None:
    hears(owner, 0, [7, 8])
    owner.handle(Paused("r"), 1.0)
    assert owner.handle(TimerFired(""), 100.0) == [SetTimer("", 100.0 + SILENCE_S)]
    assert owner.handle(LinkGap("decode-0"), 100.0) == [Send("decode-0", Missed())]
    assert owner.handle(said(ROUTER, Missed()), 100.0) == []
    assert owner.handle(MemberJoined(ROUTER_MEMBER), 100.0) == [Send(ROUTER, Declare((), True))]
    assert owner.handle(said(ROUTER, AttemptLost("r", 0)), 100.0) == []
    assert owner.handle(Resumed("r"), 101.0) == [Send(ROUTER, Submit(SECOND))]
    assert owner.handle(MemberJoined(ROUTER_MEMBER), 102.0) == [Send(ROUTER, Declare((SECOND,), True))]


def test_the_client_of_a_paused_request_may_go_and_one_that_has_ended_is_not_paused(owner: OwnerCore) -> None:
    owner.handle(Paused("r"), 1.0)
    assert owner.handle(Closed("r"), 2.0) == [Send(ROUTER, Cancel("r", 1))]
    assert owner.held == {"requests": 0}
    assert owner.handle(Paused("r"), 3.0) == []
    assert owner.handle(Resumed("r"), 3.0) == []


# --- What requests use


def used(owner: OwnerCore, seconds: float, joules: float, attempt: int = 0, name: str = "r") -> None:
    assert owner.handle(said("decode-0", Used((RequestUse(name, attempt, Spent(seconds, joules, "rapl")),))), 0.0) == []


def spent(commands: list[Command]) -> tuple[float, float]:
    (delivered,) = (command for command in commands if isinstance(command, Deliver))
    return delivered.spent[:2]


def test_what_a_request_has_used_comes_with_its_tokens(owner: OwnerCore) -> None:
    assert spent(hears(owner, 0, [7])) == (0.0, 0.0)
    used(owner, 1.0, 10.0)
    used(owner, 0.5, 5.0)  # it comes late, from the worker that had the request before
    used(owner, 9.0, 9.0, name="another")
    assert spent(hears(owner, 1, [8])) == (1.0, 10.0)
    used(owner, 1.5, 15.0)
    assert spent(hears(owner, 2, [9], finish=FinishReason.STOP)) == (1.5, 15.0)


def uses(owner: OwnerCore, seconds: float, name: str = "r") -> list[Command]:
    return owner.handle(said("decode-0", Used((RequestUse(name, 0, Spent(seconds, 10 * seconds, "rapl")),))), 0.0)


def test_a_client_that_leaves_is_charged_also_with_the_step_that_runs(owner: OwnerCore) -> None:
    assert uses(owner, 0.5) == []
    assert Charge("r", Spent(0.5, 5.0, "rapl")) in owner.handle(Closed("r"), 1.0)
    assert uses(owner, 0.75) == [Charge("r", Spent(0.75, 7.5, "rapl"))]
    assert uses(owner, 0.25) == [Charge("r", Spent(0.75, 7.5, "rapl"))]  # it comes late
    assert uses(owner, 1.0, "unknown") == []


def test_a_client_that_leaves_before_a_step_has_ended_is_charged_when_it_has(owner: OwnerCore) -> None:
    assert owner.handle(Closed("r"), 1.0) == [Send(ROUTER, Cancel("r", 0))]
    assert uses(owner, 0.25) == [Charge("r", Spent(0.25, 2.5, "rapl"))]


def test_a_request_that_is_given_up_is_charged(owner: OwnerCore) -> None:
    uses(owner, 0.5)
    commands: list[Command] = []
    for attempt in range(MOST_FRUITLESS):
        commands = owner.handle(said(ROUTER, AttemptLost("r", attempt, died=False)), 1.0)
    assert [type(command) for command in commands] == [Send, Charge, Reject]


def test_accounts_of_requests_that_left_are_no_more_than_a_thousand() -> None:
    settling = SettlingAccounts()
    for number in range(10 * MOST_SETTLING):
        settling.end(str(number), Account())
    told = [number for number in range(10 * MOST_SETTLING) if settling.note(str(number), 0, Spent(1.0, 1.0))]
    assert told == [*range(9 * MOST_SETTLING, 10 * MOST_SETTLING)]


def test_all_attempts_count(owner: OwnerCore) -> None:
    used(owner, 1.0, 10.0)
    hears(owner, 0, [7, 8])
    owner.handle(said(ROUTER, AttemptLost("r", 0, died=True)), 0.0)
    used(owner, 0.25, 2.0, attempt=1)
    used(owner, 3.0, 30.0)  # what the first attempt used, said too late
    assert spent(hears(owner, 2, [9], attempt=1)) == (1.25, 12.0)
