"""Admission: by predicted first token, by memory, and by bounded queues; and when a refused request may come again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Estimate, Rejection, Request, ServiceClass, Slo
from alignedserve.router.placing.admission import (
    Admission,
    Bound,
    Queues,
    Refusal,
    WorkAhead,
    is_infeasible,
)
from alignedserve.router.placing.answers import Shortage
from alignedserve.router.placing.recent import MovingSum
from alignedserve.scheduling.policy import Policy, Room
from tests.samples import request

POLICY, OPEN, IDLE = Policy(), Queues(), WorkAhead()
SURE = 0.7  # of what the ttft leaves: most that a request may wait in a queue that stands
RESERVED = Policy(room=Room.WHOLE)  # each request holds its longest output from the start
NOW = 100.0


def rt(name: str, prompt: int = 100, upper: int = 100, ttft_s: float = 1.0) -> Request:
    new_request = request(name, prompt=prompt, max_tokens=upper)
    return replace(new_request, service=ServiceClass.RT, slo=Slo(ttft_s=ttft_s), estimate=Estimate(upper // 2, upper))


def be(name: str, prompt: int = 100) -> Request:
    return replace(rt(name, prompt), service=ServiceClass.BE, slo=Slo(jct_s=600.0))


def admission(policy: Policy = POLICY, most_open: int = 1000, queues: Queues = OPEN) -> Admission:
    return Admission(policy, most_open, queues)


def stands(found: Admission, for_s: float = 3.0) -> Admission:
    """Let the queue be calm for the last time so long before NOW."""
    assert found.refusal(rt("calm"), IDLE, NOW - for_s) is None
    assert found.refusal(rt("since"), WorkAhead(prompts_s=0.3), NOW - for_s + 0.5) is None
    return found


def take_in(into: Admission, *some: Request) -> None:
    for new_request in some:
        into.opened(new_request)
        into.queued(new_request)


def refused(by: Admission, request: Request, ahead: WorkAhead = IDLE) -> Refusal:
    refusal = by.refusal(request, ahead, NOW)
    assert refusal is not None
    return refusal


class TestAnswers:
    """A chat is refused beside which answers would stand still, its own or others', however soon its first token is."""

    SHORT = WorkAhead(memory=1000, shortage=Shortage(200.0, 7.0))

    def test_a_chat_whose_answer_finds_no_memory_is_to_come_again_when_there_is_some(self) -> None:
        refusal = refused(admission(), rt("a"), self.SHORT)
        assert (refusal.reason, refusal.retry_after_s) == (Rejection.LATE, 7.0)
        assert "200 tokens of memory" in refusal.why

    def test_nobody_else_is(self) -> None:
        enough = replace(self.SHORT, shortage=Shortage(-1.0, 7.0))
        assert admission().refusal(rt("a"), enough, NOW) is None
        assert admission().refusal(be("a"), self.SHORT, NOW) is None
        assert admission(Policy(refuse_ttfts=0.0)).refusal(rt("a"), self.SHORT, NOW) is None

    def test_a_caller_within_its_part_of_the_memory_is_taken_in(self) -> None:
        found = admission()
        take_in(found, *(replace(rt(f"o{number}"), salt="other") for number in range(20)))
        assert found.refusal(replace(rt("a"), salt="mine"), self.SHORT, NOW) is None
        assert found.refusal(replace(rt("b"), salt="other"), self.SHORT, NOW) is not None


class TestFirstToken:
    """A chat is refused because of what others make it wait, and never because of its own prompt."""

    def calm(self, policy: Policy = POLICY, at: float = NOW) -> Admission:
        """Return an admission where a chat has just found nothing before it."""
        found = admission(policy)
        assert found.refusal(rt("calm"), IDLE, at) is None
        return found

    def standing(self) -> Admission:
        """Return an admission whose queue was not calm for longer than two seconds, until NOW."""
        return stands(admission())

    @pytest.mark.parametrize("prompt_s", [0.1, 1.0, 7.0, 1e4])
    def test_an_idle_server_refuses_nobody_however_long_the_prompt(self, prompt_s: float) -> None:
        ahead = WorkAhead(prompt_s=prompt_s)
        for found in (admission(), self.calm(), self.standing()):
            assert found.refusal(rt("a"), ahead, NOW) is None

    def test_a_burst_is_taken_in_up_to_two_ttfts(self) -> None:
        found = self.calm()
        assert found.refusal(rt("a"), WorkAhead(prompts_s=2.0, prompt_s=0.2), NOW + 1.9) is None
        assert refused(found, rt("a"), WorkAhead(prompts_s=2.1, prompt_s=0.2)).retry_after_s == 1.0

    def test_the_own_time_of_a_long_prompt_is_what_a_burst_may_cost_it_twice(self) -> None:
        found = self.calm()
        assert found.refusal(rt("a"), WorkAhead(prompts_s=6.0, prompt_s=3.0), NOW) is None
        assert found.refusal(rt("a"), WorkAhead(prompts_s=6.1, prompt_s=3.0), NOW) is not None

    def test_a_standing_queue_is_refused_beyond_a_share_of_what_is_left(self) -> None:
        """A prompt of 0.2 s leaves 0.8 s of its ttft."""
        most_s = SURE * 0.8
        assert self.standing().refusal(rt("a"), WorkAhead(prompts_s=most_s - 0.01, prompt_s=0.2), NOW) is None
        refusal = refused(self.standing(), rt("a"), WorkAhead(prompts_s=most_s + 2.0, prompt_s=0.2))
        assert refusal.retry_after_s == pytest.approx(2.0)

    def test_a_queue_of_long_prompts_stands_after_several_of_them(self) -> None:
        """The queue was calm three seconds ago."""
        ahead = WorkAhead(prompts_s=2.0, prompt_s=1.0)
        assert self.standing().refusal(rt("a", ttft_s=1.5), ahead, NOW) is None
        assert self.standing().refusal(rt("a", ttft_s=1.5), ahead, NOW + 2.5) is not None

    def test_a_moment_of_calm_is_the_end_of_a_standing_queue(self) -> None:
        found = self.standing()
        assert found.refusal(rt("a"), WorkAhead(prompts_s=0.09), NOW) is None
        assert found.refusal(rt("b"), WorkAhead(prompts_s=1.9), NOW) is None

    def test_it_forgets_a_refusal_after_half_a_minute(self) -> None:
        """Until then a moment of calm does not end the overload."""
        found, later = self.standing(), WorkAhead(prompts_s=0.8)
        refused(found, rt("a"), later)
        assert found.refusal(rt("calm"), IDLE, NOW + 28.0) is None
        assert found.refusal(rt("b"), later, NOW + 29.0) is not None
        assert found.refusal(rt("calm"), IDLE, NOW + 58.5) is None
        assert found.refusal(rt("c"), later, NOW + 59.5) is None, "half a minute after the last refusal"

    def test_the_text_says_what_would_help(self) -> None:
        refusal = refused(self.standing(), rt("a"), WorkAhead(prompts_s=7.0, prompt_s=0.4))
        assert refusal.why == (
            "the server is full for this promise: it would wait 7.00 s for others, and may wait 0.42 s with its ttft of"
            " 1 s; come again later, or ask for a longer slo.ttft_ms or service_tier flex"
        )

    def test_a_request_that_has_more_time_is_taken_in(self) -> None:
        assert self.calm().refusal(rt("a", ttft_s=4.0), WorkAhead(prompts_s=7.0), NOW) is None
        assert self.standing().refusal(rt("a", ttft_s=15.0), WorkAhead(prompts_s=7.0), NOW) is None

    def test_best_effort_waits_as_long_as_it_takes(self) -> None:
        assert self.standing().refusal(be("a"), WorkAhead(prompts_s=1e6), NOW) is None

    def test_it_can_be_turned_off(self) -> None:
        assert admission(Policy(refuse_ttfts=0.0)).refusal(rt("a"), WorkAhead(prompts_s=1e6), NOW) is None


class TestInfeasible:
    """The prompt alone takes longer than the ttft."""

    AHEAD = WorkAhead(prompt_s=2.5)

    def strict(self, ttft_s: float = 1.0) -> Request:
        return replace(rt("a"), slo=Slo(ttft_s=ttft_s, strict=True))

    def test_a_chat_is_and_a_document_is_not(self) -> None:
        assert is_infeasible(rt("a"), self.AHEAD)
        assert not is_infeasible(rt("a", ttft_s=2.5), self.AHEAD)
        assert not is_infeasible(be("a"), WorkAhead(prompt_s=1e6))

    def test_others_before_it_do_not_make_it_so(self) -> None:
        assert not is_infeasible(rt("a"), WorkAhead(prompts_s=10.0, prompt_s=0.5))

    def test_where_it_is_strict_it_is_refused_at_once_and_told_what_would_help(self) -> None:
        refusal = refused(admission(), self.strict(), self.AHEAD)
        assert refusal == Refusal(
            Rejection.INFEASIBLE,
            "its prompt alone takes 2.5 s, and its ttft is 1 s: "
            "ask for a longer slo.ttft_ms, for service_tier flex, or not for slo.strict",
            1.0,
        )
        assert refused(admission(Policy(refuse_ttfts=0.0)), self.strict(), self.AHEAD) == refusal

    def test_a_strict_request_that_can_be_in_time_is_as_any_other(self) -> None:
        assert admission().refusal(self.strict(2.5), self.AHEAD, NOW) is None
        assert admission().refusal(rt("a"), self.AHEAD, NOW) is None

    def test_its_refusal_is_no_overload(self) -> None:
        found = admission()
        assert found.refusal(rt("calm"), IDLE, NOW) is None
        refused(found, self.strict(), self.AHEAD)
        assert found.refusal(rt("b"), WorkAhead(prompts_s=1.9), NOW + 1.0) is None


class TestQueues:
    def test_each_class_has_its_own(self) -> None:
        found = admission(queues=Queues(rt=Bound(requests=1), be=Bound(requests=2)))
        take_in(found, rt("a"), be("b"))
        assert refused(found, rt("c")).why == "the server is full: 1 chats wait, and at most 1 may"
        assert found.refusal(be("c"), WorkAhead(), NOW) is None

    def test_tokens_are_bounded_too(self) -> None:
        found = admission(queues=Queues(be=Bound(tokens=250)))
        take_in(found, be("a"))
        assert found.refusal(be("b", prompt=150), WorkAhead(), NOW) is None
        assert refused(found, be("b", prompt=151)).why == (
            "the server is full: best-effort requests with 100 tokens of prompts wait, and 151 more would pass 250"
        )

    def test_a_request_alone_is_not_too_long_for_a_queue(self) -> None:
        assert admission(queues=Queues(be=Bound(tokens=10))).refusal(be("a"), WorkAhead(), NOW) is None

    def test_a_request_that_has_begun_leaves_the_queue_and_stays_open(self) -> None:
        found = admission(most_open=2, queues=Queues(rt=Bound(requests=1)))
        take_in(found, rt("a"))
        found.began(rt("a"))
        assert found.refusal(rt("b"), WorkAhead(), NOW) is None
        take_in(found, rt("b"))
        assert refused(found, be("c")).why == "the server is full: 2 requests are open, and at most 2 may be"

    def test_a_line_of_a_job_is_in_none(self) -> None:
        """A line waits in its store, not in a queue. Only too many open requests in total keep a line out."""
        found = admission(most_open=2, queues=Queues(be=Bound(requests=1)))
        take_in(found, be("a"))
        assert found.refusal(be("line"), WorkAhead(), NOW, is_line=True) is None
        assert refused(found, be("b")).why == "the server is full: 1 best-effort requests wait, and at most 1 may"
        found.opened(be("line"))
        assert found.refusal(be("next"), WorkAhead(), NOW, is_line=True) is not None


class TestComingAgain:
    """Retry-After is the predicted time until there is room."""

    def full(self, **bound: int) -> Admission:
        found = admission(queues=Queues(rt=Bound(**bound)))
        take_in(found, *(rt(name) for name in "abcd"))
        return found

    def test_when_the_first_of_those_that_wait_has_begun(self) -> None:
        assert refused(self.full(requests=4), rt("e", ttft_s=60.0), WorkAhead(prompts_s=20.0)).retry_after_s == 5.0

    def test_when_so_many_tokens_have_begun(self) -> None:
        found, new = self.full(tokens=400), rt("e", prompt=200, ttft_s=60.0)
        assert refused(found, new, WorkAhead(prompts_s=20.0)).retry_after_s == 10.0

    def test_each_after_those_that_were_told_before_it(self) -> None:
        found, ahead = self.full(requests=4), WorkAhead(prompts_s=20.0)
        told = [refused(found, rt(name, ttft_s=60.0), ahead).retry_after_s for name in "efg"]
        assert told == [5.0, 10.0, 15.0]

    def test_no_longer_after_those_that_have_come_again(self) -> None:
        found, ahead = self.full(requests=4), WorkAhead(prompts_s=20.0)
        refused(found, rt("e", ttft_s=60.0), ahead)
        later = found.refusal(rt("f", ttft_s=60.0), ahead, NOW + 5.0)
        assert later is not None
        assert later.retry_after_s == 5.0

    def test_a_second_at_least_and_a_minute_at_most(self) -> None:
        assert refused(self.full(requests=4), rt("e")).retry_after_s == 1.0
        assert refused(self.full(requests=4), rt("e", ttft_s=1e4), WorkAhead(prompts_s=1e3)).retry_after_s == 60.0

    def test_too_late_a_first_token_counts_those_that_come_again(self) -> None:
        """The requests that come again are shared among the workers that run prompts."""
        found, ahead = stands(admission(), 11.0), WorkAhead(prompts_s=7.0, prompt_s=2.0, token_s=0.02, num_workers=4)
        told = [refused(found, rt(name, ttft_s=3.0), ahead).retry_after_s for name in "abc"]
        assert told == pytest.approx([7.0 - SURE, 7.5 - SURE, 8.0 - SURE]), "its ttft leaves 1 s"

    def test_too_many_open_requests_end_as_fast_as_lately(self) -> None:
        found = admission(most_open=2)
        for second in range(20):
            gone = rt(f"gone-{second}")
            take_in(found, gone)
            found.ends.add(1, NOW - 20 + second)
            found.closed(gone)
        take_in(found, rt("a"), rt("b"))
        told = [refused(found, rt(name)).retry_after_s for name in "cdefgh"]
        assert told == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rel=0.15)

    def test_a_request_that_comes_when_told_is_taken_in(self) -> None:
        """Thirty chats come at once to a worker that runs a prompt in 0.5 s and lets four wait."""
        found, queue, tries = admission(queues=Queues(rt=Bound(requests=4))), list[str](), Counter[str]()
        arrivals = [(0.0, f"{number:02}") for number in range(30)]
        free_at = 0.0
        while arrivals:
            now, name = heappop(arrivals)
            while queue and free_at <= now:
                found.began(rt(queue.pop(0)))
                free_at += 0.5
            free_at = free_at if queue else max(free_at, now)
            tries[name] += 1
            ahead = WorkAhead(prompts_s=max(0.0, free_at - now) + 0.5 * len(queue), prompt_s=0.5)
            refusal = found.refusal(rt(name, ttft_s=60.0), ahead, now)
            if refusal is None:
                take_in(found, rt(name))
                queue.append(name)
            else:
                heappush(arrivals, (now + refusal.retry_after_s, name))
        assert max(tries.values()) == 2


def test_what_came_free_long_ago_says_little() -> None:
    freed = MovingSum(30.0)
    for second in range(30):
        freed.add(100, float(second))
    assert freed.rate(30.0) == pytest.approx(100, rel=0.1)
    assert freed.rate(90.0) < 50


def test_a_queue_at_which_nobody_came_for_long_is_a_burst() -> None:
    late = WorkAhead(prompts_s=1.5)
    found = admission()
    assert found.refusal(rt("first"), WorkAhead(), NOW) is None
    assert found.refusal(rt("burst"), late, NOW + 3600) is None
    assert found.refusal(rt("still"), late, NOW + 3625) is not None


STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "begin", "end", "close"]), st.integers(0, 5), st.integers(1, 50), st.booleans()),
    max_size=60,
)


@given(STEPS)
def test_what_is_counted_is_what_is_there(steps: list[tuple[str, int, int, bool]]) -> None:
    bound = Bound(requests=3, tokens=120)
    found = admission(RESERVED, queues=Queues(bound, bound))
    there, waits = dict[str, Request](), dict[str, Request]()
    for step, number, prompt, is_rt in steps:
        name = str(number)
        if step == "open":
            waits[name] = there[name] = there.get(name) or (rt(name, prompt) if is_rt else be(name, prompt))
            take_in(found, there[name])
        elif name in there:
            waits.pop(name, None)
            found.began(there[name])
            if step == "end":
                found.ends.add(1, NOW)
            if step != "begin":
                found.closed(there.pop(name))
        assert found.num_open == len(there)
        for new in (rt("new", ttft_s=1e9), be("new")):
            sizes = [len(request.prompt) for request in waits.values() if request.service is new.service]
            fits = len(sizes) < 3 and (not sizes or sum(sizes) + 100 <= 120)
            assert (found.refusal(new, WorkAhead(), NOW) is None) is fits


class TestCallers:
    """What a caller's chats make late are its own, and others' only as far as these stay within their part."""

    def of(self, caller: str, new_request: Request) -> Request:
        return replace(new_request, salt=caller)

    def flooded(self, number: int = 40, **fields: int) -> Admission:
        """Return an admission with chats of ann's in its queue, which stands."""
        found = stands(admission(queues=Queues(Bound(requests=50))))
        take_in(found, *(self.of("ann", rt(f"ann-{at}", **fields)) for at in range(number)))
        return found

    def test_a_callers_flood_refuses_no_chat_of_anothers(self) -> None:
        found, ahead = self.flooded(), WorkAhead(prompts_s=4.0, prompt_s=0.1)
        assert refused(found, self.of("ann", rt("more")), ahead).reason is Rejection.LATE
        assert found.refusal(self.of("bob", rt("chat")), ahead, NOW) is None

    def test_a_chat_waits_for_as_much_of_others_as_it_has_itself(self) -> None:
        found, ahead = self.flooded(), WorkAhead(prompts_s=4.0, prompt_s=0.1)
        assert found.first_token_s(self.of("ann", rt("more")), ahead) == pytest.approx(4.1)
        assert found.first_token_s(self.of("bob", rt("chat")), ahead) == pytest.approx(0.2)
        take_in(found, *(self.of("bob", rt(f"bob-{at}")) for at in range(40)))
        assert found.first_token_s(self.of("bob", rt("chat")), ahead) == pytest.approx(4.1)

    def test_a_chat_waits_for_no_more_of_prompts_that_have_begun(self) -> None:
        """All of ann's flood has begun, so nothing waits: 4 s of its prompts are left on the worker."""
        found, ahead = self.flooded(), WorkAhead(prompts_s=4.0, prompt_s=0.1, token_s=1e-3, loaded_s=0.1)
        for at in range(40):
            found.began(self.of("ann", rt(f"ann-{at}")))
        assert refused(found, self.of("ann", rt("more")), ahead).reason is Rejection.LATE
        assert found.refusal(self.of("bob", rt("chat")), ahead, NOW) is None
        assert found.first_token_s(self.of("bob", rt("chat")), ahead) == pytest.approx(0.2)
        take_in(found, *(self.of("bob", rt(f"bob-{at}")) for at in range(40)))
        for at in range(40):
            found.began(self.of("bob", rt(f"bob-{at}")))
        assert found.first_token_s(self.of("bob", rt("chat")), ahead) == pytest.approx(4.1), "as much as ann has"
        for at in range(40):
            found.closed(self.of("ann", rt(f"ann-{at}")))
        assert found.first_token_s(self.of("bob", rt("chat")), ahead) == pytest.approx(4.1)

    def test_what_a_prompt_takes_longer_beside_decodes_is_no_prompt_of_others(self) -> None:
        """All of ann's prompts are through, and her decodes make bob's prompt take 0.6 s in place of 0.2."""
        found = self.flooded()
        for at in range(40):
            found.began(self.of("ann", rt(f"ann-{at}")))
        beside = WorkAhead(prompts_s=0.4, prompt_s=0.2, token_s=2e-3, num_workers=4, loaded_s=0.6)
        assert found.first_token_s(self.of("bob", rt("chat")), beside) == pytest.approx(0.6)

    def test_the_first_chat_of_a_caller_is_not_refused_for_what_others_have(self) -> None:
        """Beside ann's decodes steps falter, so that bob's prompt would take 4 s."""
        found, falters = self.flooded(), WorkAhead(prompts_s=4.0, prompt_s=0.1, loaded_s=4.0)
        bob, ann = self.of("bob", rt("chat")), self.of("ann", rt("more"))
        for at in range(40):
            found.began(self.of("ann", rt(f"ann-{at}")))
        assert found.first_token_s(bob, falters) > 3.0
        assert found.refusal(bob, falters, NOW) is None
        assert refused(found, ann, falters).reason is Rejection.LATE
        take_in(found, bob)
        assert refused(found, self.of("bob", rt("second")), falters).reason is Rejection.LATE

    def test_a_wait_that_is_short_by_a_callers_part_alone_makes_no_queue_calm(self) -> None:
        found, ahead = self.flooded(), WorkAhead(prompts_s=4.0, prompt_s=0.1)
        for at in range(10):
            assert found.refusal(self.of("bob", rt(f"bob-{at}")), ahead, NOW + at) is None
        less = WorkAhead(prompts_s=0.9, prompt_s=0.1)
        assert refused(found, self.of("ann", rt("more")), less).reason is Rejection.LATE

    def test_a_full_queue_has_a_place_for_who_has_none(self) -> None:
        found = self.flooded(50)
        assert refused(found, self.of("ann", rt("more"))).reason is Rejection.QUEUED
        assert found.refusal(self.of("bob", rt("chat")), IDLE, NOW) is None
        take_in(found, *(self.of("bob", rt(f"bob-{at}")) for at in range(25)))
        assert refused(found, self.of("bob", rt("one too many"))).reason is Rejection.QUEUED

    def test_documents_and_open_requests_have_places_for_who_has_none_too(self) -> None:
        found = admission(RESERVED, most_open=50, queues=Queues(be=Bound(requests=50)))
        take_in(found, *(self.of("ann", be(f"ann-{at}")) for at in range(50)))
        assert refused(found, self.of("ann", be("more"))).reason is Rejection.OPEN
        for new in (rt, be):
            assert found.refusal(self.of("bob", new("one")), IDLE, NOW) is None
        take_in(found, *(self.of("bob", be(f"bob-{at}")) for at in range(25)))
        assert refused(found, self.of("bob", be("too many"))).reason is Rejection.OPEN

    def test_a_part_of_a_queue_is_of_tokens_too(self) -> None:
        found = admission(RESERVED, queues=Queues(be=Bound(tokens=1000)))
        take_in(found, *(self.of("ann", be(f"ann-{at}", 100)) for at in range(10)))
        take_in(found, self.of("bob", be("any length", 900)))
        assert refused(found, self.of("bob", be("more", 100))).reason is Rejection.QUEUED
        assert found.refusal(self.of("cid", be("first", 900)), IDLE, NOW) is None

    def test_callers_together_find_twice_the_bound(self) -> None:
        """Each stays within its part of 40, 20, 13 and 10 as it comes: 83 and more, without a bound of all."""
        found = admission(RESERVED, most_open=40)
        for at in range(500):
            chat = self.of(f"key-{at // 100}", rt(f"chat-{at}"))
            if found.refusal(chat, IDLE, NOW) is None:
                take_in(found, chat)
        assert found.num_open == 80

    def test_a_caller_of_more_weight_waits_for_less_and_has_more_places(self) -> None:
        found, ahead = self.flooded(50), WorkAhead(prompts_s=5.0, prompt_s=0.1)
        weighty = replace(self.of("bob", rt("chat")), weight=4)
        assert found.first_token_s(weighty, ahead) == pytest.approx(0.1 + 5.0 / 50 / 4)
        take_in(found, *(replace(weighty, id=f"bob-{at}") for at in range(39)))
        assert found.refusal(replace(weighty, id="40"), IDLE, NOW) is None
        take_in(found, replace(weighty, id="40"))
        assert refused(found, replace(weighty, id="41")).reason is Rejection.QUEUED

    def test_who_has_gone_has_no_part(self) -> None:
        found, ahead = self.flooded(), WorkAhead(prompts_s=4.0, prompt_s=0.1)
        take_in(found, self.of("bob", rt("bob")))
        found.began(self.of("bob", rt("bob")))
        found.closed(self.of("bob", rt("bob")))
        for at in range(40):
            found.closed(self.of("ann", rt(f"ann-{at}")))
        assert found.first_token_s(self.of("bob", rt("chat")), ahead) == pytest.approx(4.1)
        assert refused(found, self.of("bob", rt("chat")), ahead).reason is Rejection.LATE

    @given(st.lists(st.sampled_from("aab"), max_size=30))
    def test_without_keys_all_count_together(self, names: str) -> None:
        alone, shared = admission(), admission()
        for at, caller in enumerate(names):
            take_in(alone, rt(str(at)))
            take_in(shared, self.of(caller, rt(str(at))))
        ahead = WorkAhead(prompts_s=1.0, prompt_s=0.1)
        assert alone.first_token_s(rt("chat"), ahead) == pytest.approx(1.1)
        assert shared.first_token_s(self.of("a", rt("chat")), ahead) <= 1.1 + 1e-9
