"""Chats that asked for no promise wait in line: in order, fair by caller, for as long as the server is patient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Rejection, Request, Role, Slo
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import TimerFired
from alignedserve.protocol.messages import (
    Backlog,
    Declare,
    Holding,
    Infeasible,
    InLine,
    Place,
    Prefill,
    Progress,
    Refused,
    Submit,
)
from alignedserve.router.placing.admission import Admission, Queues, WorkAhead
from alignedserve.router.placing.line import Line, Lines, Turn
from alignedserve.router.state import RouterCore
from alignedserve.scheduling.policy import Policy
from tests.router.routers import LIMITS, RECOVERED_AT, recovering, sent, serving
from tests.samples import request, said

NOTHING_ASKED = Slo(is_asked=False)
TOKEN_S = 0.01
LATEST_S = 60.0  # that a client is told


def chat(name: str, prompt: int = 100, caller: str = "", tries: int = 0) -> Request:
    salt = f"{caller:-<32}" if caller else ""
    return replace(request(name, prompt=prompt), slo=NOTHING_ASKED, salt=salt, tries=tries)


def asked(name: str, prompt: int = 100) -> Request:
    return request(name, prompt=prompt)


def line_of(*waiting: Request, more_s: float | None = None, at: float = 0.0) -> Line:
    """Return a line of these chats, of which each token takes TOKEN_S; prompts before them took `more_s` longer."""
    line = Line()
    if more_s is not None:
        earlier = [chat(f"e{number}") for number in range(5)]
        for of in earlier:
            line.join(of, 1.0, 0.0, at)
        line.join(chat("last"), 1.0, 0.0, at)
        for number, of in enumerate(earlier):
            line.begin(of.id, at - (5 - number) * (1.0 + more_s))
    for of in waiting:
        line.join(of, TOKEN_S * len(of.prompt), 0.0, at)
    line.leave("last")
    return line


def turns(line: Line, now: float = 0.0) -> dict[str, Turn]:
    return {of.id: turn for of, turn in line.turns(now)}


class TestTurns:
    def test_a_line_of_one_caller_is_in_order(self) -> None:
        found = turns(line_of(chat("a"), chat("b"), chat("c", prompt=200)))
        assert found == {"a": Turn(0, 0.0, 1.0), "b": Turn(1, 1.0, 2.0), "c": Turn(2, 2.0, 4.0)}

    def test_callers_take_turns(self) -> None:
        """A caller with three chats does not hold up one with a single chat."""
        line = line_of(*(chat(name, caller="x") for name in "abc"), chat("d", caller="y"))
        assert {name: turn.num_before for name, turn in turns(line).items()} == {"a": 1, "b": 2, "c": 3, "d": 1}

    def test_a_chat_that_comes_has_the_turn_that_it_is_told_later(self) -> None:
        for new in (chat("new", caller="y"), chat("new", caller="x"), chat("new", prompt=50, caller="z")):
            line = line_of(*(chat(name, caller="x") for name in "abc"), chat("d", caller="y"), more_s=0.5)
            before = line.turn(new, 1.0, 0.0)
            line.join(new, 1.0, 0.0, 0.0)
            assert turns(line)["new"] == before

    def test_a_caller_of_twice_the_weight_has_half_as_much_before_it(self) -> None:
        many = [chat(f"c{number}", caller="x") for number in range(8)]
        heavy = replace(chat("a", caller="y"), weight=2)
        assert line_of(*many).turn(heavy, 2.0, 0.0).wait_s == pytest.approx(1.0)

    @given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("xyz")), min_size=1, max_size=30))
    def test_nobody_waits_for_longer_than_all_take(self, sizes: list[tuple[int, str]]) -> None:
        chats = [chat(f"c{at}", size, caller) for at, (size, caller) in enumerate(sizes)]
        line = line_of(*chats)
        found, all_s = turns(line), TOKEN_S * sum(size for size, _ in sizes)
        assert line.takes_s == pytest.approx(all_s)
        assert all(0 < turn.first_s <= all_s + 1e-9 and turn.num_before < len(chats) for turn in found.values())
        assert max(turn.first_s for turn in found.values()) == pytest.approx(all_s)
        for caller in "xyz":
            own = [found[of.id].first_s for of in chats if of.salt.startswith(caller)]
            assert own == sorted(own), "in order within"
        for of in chats:
            line.leave(of.id)
            line.leave(of.id)
        assert (len(line), line.takes_s) == (0, 0.0)


class TestLearntWaits:
    def test_what_prompts_take_longer_counts_for_each_before(self) -> None:
        """The prompt that began last runs for 1.5 s, and each of the others takes half a second more than alone."""
        found = turns(line_of(chat("a"), chat("b"), chat("c"), more_s=0.5, at=10.0), 10.0)
        assert [turn.wait_s for turn in found.values()] == pytest.approx([0.0, 1.5, 3.0])

    def test_what_is_left_of_the_prompt_that_runs_counts_too(self) -> None:
        line = line_of(chat("a"), chat("b"), more_s=0.5, at=10.0)
        line.begin("a", 10.0)
        assert line.turn(chat("new"), 1.0, 10.5).wait_s == pytest.approx(1.0 + 1.5)

    def test_a_line_that_waits_for_seats_says_little_of_long_prompts(self) -> None:
        """Prompts of 0.02 s begin once a second, as answers end: one of 2 s does not take 100 s."""
        line, now = Line(), 0.0
        for number in range(40):
            line.join(chat(f"c{number}"), 0.02, 0.0, now)
        for number in range(20):
            line.begin(f"c{number}", now := now + 1.0)
        line.join(chat("long"), 2.0, 0.0, now)
        assert line.turn(chat("new"), 0.02, now).wait_s == pytest.approx(1.0 + 20 * 1.0 + 1.98 + 1.0, rel=0.05)

    def test_a_few_begins_say_nothing(self) -> None:
        line = line_of(chat("a"), chat("b"), chat("c"), chat("d"))
        for number, name in enumerate("abc"):
            line.begin(name, 2.0 * number)
        assert not line.is_known
        line.begin("d", 6.0)
        assert line.is_known

    def test_time_in_which_nobody_was_in_line_does_not_count(self) -> None:
        line = line_of(more_s=0.5, at=10.0)
        line.join(chat("a"), 1.0, 0.0, 40.0)
        line.begin("a", 40.1)
        line.join(chat("b"), 1.0, 0.0, 42.0)
        assert turns(line, 42.0)["b"].wait_s == 0.0
        assert line.turn(chat("c"), 1.0, 42.0).wait_s == pytest.approx(1.5)

    def test_after_a_minute_without_a_line_all_is_forgotten(self) -> None:
        line = line_of(more_s=30.0, at=10.0)
        for number in range(5):
            line.join(chat(f"c{number}"), 1.0, 0.0, 100.0)
        assert not line.is_known
        for number in range(4):
            line.begin(f"c{number}", 101.0 + 1.2 * number)
        assert line.turn(chat("new"), 1.0, 104.6).wait_s == pytest.approx(1.2 + 1.2)

    def test_each_worker_has_its_own(self) -> None:
        lines = Lines()
        for name, worker in (("a", "decode-0"), ("b", "decode-1"), ("c", "decode-1")):
            lines.join(worker, chat(name), 1.0, 0.0, 0.0)
        assert {of.id: turn.num_before for of, turn in lines.turns(0.0)} == {"a": 0, "b": 0, "c": 1}
        lines.join("decode-0", chat("c"), 1.0, 0.0, 0.0)  # its next attempt
        lines.begin("b", 1.0)
        lines.leave("gone")
        assert {of.id: turn.num_before for of, turn in lines.turns(1.0)} == {"a": 0, "c": 1}
        assert len(lines) == 2


def ahead(prompts_s: float, prompt: int = 100) -> WorkAhead:
    return WorkAhead(prompts_s, prompt * TOKEN_S, TOKEN_S, worker="decode-0", loaded_s=prompt * TOKEN_S)


class TestPatience:
    def admission(self, patience_s: float = 60.0) -> Admission:
        return Admission(Policy(), 1000, Queues(), patience_s=patience_s)

    def test_nobody_is_refused_within_it(self) -> None:
        found = self.admission()
        assert found.refusal(asked("a"), ahead(58.0), 0.0) is not None, "who asks for a second is"
        assert found.refusal(chat("b"), ahead(58.0), 0.0) is None
        assert found.refusal(chat("c", 1500), ahead(58.0, 1500), 0.0) is None, "five times its prompt is longer"

    def test_beyond_it_a_client_is_told_when_there_will_be_room(self) -> None:
        refusal = self.admission().refusal(chat("a"), ahead(79.0), 0.0)
        assert refusal is not None
        assert (refusal.reason, refusal.retry_after_s) == (Rejection.LATE, pytest.approx(20.0))
        assert refusal.why == (
            "the server is full: with 0 chats before it, its first token would come in about 80 s, and it may wait for"
            " 60 s (--patience-s)"
        )

    def test_each_of_those_who_are_to_come_again_is_told_another_time(self) -> None:
        found = self.admission()
        refusals = [found.refusal(chat(f"c{at}"), ahead(79.0), 0.0) for at in range(5)]
        assert [refusal and refusal.retry_after_s for refusal in refusals] == pytest.approx([20, 21, 22, 23, 24])

    def test_a_new_chat_does_not_overtake_those_who_are_to_come_again(self) -> None:
        found = self.admission()
        assert found.refusal(chat("a", 1000), ahead(79.0), 0.0) is not None
        assert found.refusal(chat("new"), ahead(55.0), 0.0) is not None
        assert found.refusal(chat("again", tries=1), ahead(55.0), 0.0) is None

    def test_who_asked_for_a_promise_passes_the_line(self) -> None:
        found = self.admission()
        for number in range(20):
            found.lines.join("decode-0", chat(f"c{number}"), 1.0, 0.0, 0.0)
        assert found.refusal(asked("a"), ahead(20.0), 0.0) is None
        assert found.refusal(asked("b"), ahead(24.0), 0.0) is not None, "4 s of them are of others that asked"

    def test_the_line_s_own_pace_counts(self) -> None:
        """30 prompts of a second wait, and the last ones took three seconds each."""
        found = self.admission()
        for number in range(34):
            found.lines.join("decode-0", chat(f"c{number}"), 1.0, 0.0, 0.0)
        for number in range(4):
            found.lines.begin(f"c{number}", 3.0 * number)
        refusal = found.refusal(chat("a"), ahead(30.0), 12.0)
        assert refusal is not None
        assert refusal.retry_after_s == pytest.approx(3 * 30 + 1 - 60)

    @given(st.lists(st.integers(50, 700), min_size=1, max_size=80), st.floats(0.2, 3.0), st.sampled_from([30.0, 60.0]))
    def test_two_retries_are_enough_for_a_crowd(self, prompts: list[int], slower: float, patience_s: float) -> None:
        """All come at once and again when they are told to, as the usual clients do; the machine is slower than the
        cost model believes. Only whoever would wait for more than four patiences is lost."""
        found, token_s = self.admission(patience_s), slower * TOKEN_S
        events = [(0.0, number, 0) for number in range(len(prompts))]
        free_at, line, refused = 0.0, list[tuple[float, int, str]](), list[int]()  # when each prompt in line begins
        while events:
            now, number, tries = heappop(events)
            while line and line[0][0] <= now:
                began_at, _, name = line.pop(0)
                found.lines.begin(name, began_at)
                found.began(chat(name, prompts[int(name[1:])]))
            size = prompts[number]
            new = chat(f"c{number}", size, tries=tries)
            work = ahead(max(0.0, free_at - now) / slower, size)
            refusal = found.refusal(new, work, now)
            if refusal is None:
                found.opened(new)
                found.queued(new)
                found.lines.join("decode-0", new, size * TOKEN_S, 0.0, now)
                line.append((max(now, free_at), size, new.id))
                free_at = max(now, free_at) + size * token_s
            elif tries < 2:
                heappush(events, (now + refusal.retry_after_s, number, tries + 1))
            else:
                refused.append(number)
        assert not refused or sum(prompts) * token_s > 4 * patience_s / max(1.0, slower)


class TestRouter:
    """A router that serves with one worker, which is busy for a while."""

    BUSY = Progress(backlog=Backlog(20.0, TOKEN_S, 20.0, TOKEN_S, TOKEN_S), free_blocks=1000)

    @pytest.fixture
    def busy(self) -> RouterCore:
        limits = replace(LIMITS, prompts_on=Role.DECODE, most_open=100)
        router = serving(("gateway-0", "pool-0", "decode-0"), limits)
        router.handle(said("decode-0", self.BUSY), 3.0)
        return router

    def submit(self, router: RouterCore, of: Request, now: float = 3.0) -> list[Command]:
        return router.handle(said("gateway-0", Submit(replace(of, arrival_at=now))), now)

    def test_a_chat_that_waits_is_told_its_place_at_once(self, busy: RouterCore) -> None:
        told = [sent(self.submit(busy, chat(name)), InLine) for name in "ab"]
        assert told == [[("gateway-0", InLine((place,)))] for place in (Place("a", 0, 0, 21.0), Place("b", 0, 1, 22.0))]

    def test_a_chat_that_asked_is_told_nothing(self, busy: RouterCore) -> None:
        [(_, refused)] = sent(self.submit(busy, asked("a")), Refused)
        assert refused.reason is Rejection.LATE

    def test_an_idle_server_tells_nothing(self) -> None:
        router = serving(("gateway-0", "pool-0", "decode-0"), replace(LIMITS, prompts_on=Role.DECODE))
        assert self.submit(router, chat("a")) == [Send("decode-0", Prefill(replace(chat("a"), arrival_at=3.0)))]

    def test_nobody_is_told_that_a_promise_is_infeasible_that_nobody_asked_for(self, busy: RouterCore) -> None:
        assert not sent(self.submit(busy, chat("a", prompt=500)), Infeasible)

    def test_its_worker_plans_for_its_turn(self, busy: RouterCore) -> None:
        """Dues are in the order of arrival, and late enough that the line is not late."""
        dues = list[float]()
        for at, name in enumerate("abc"):
            ((_, prompt),) = sent(self.submit(busy, chat(name), 3.0 + at), Prefill)
            dues.append(self.due(prompt))
        assert dues == pytest.approx([25.0, 26.0, 27.0])

    @staticmethod
    def due(prompt: Prefill) -> float:
        return prompt.request.arrival_at + prompt.request.slo.ttft_s

    def test_a_later_chat_is_not_due_before_an_earlier_one(self, busy: RouterCore) -> None:
        """The earlier one's wait was predicted longer than it turned out to be."""
        ((_, first),) = sent(self.submit(busy, chat("a")), Prefill)
        busy.handle(said("decode-0", replace(self.BUSY, backlog=Backlog(2.0, TOKEN_S, 2.0, TOKEN_S, TOKEN_S))), 4.0)
        ((_, second),) = sent(self.submit(busy, chat("b"), 4.0), Prefill)
        ((_, other),) = sent(self.submit(busy, chat("c", caller="other"), 4.0), Prefill)
        dues = [self.due(of) for of in (first, second, other)]
        assert dues[0] <= dues[1]
        assert dues[2] < dues[0], "another caller's is not behind it"

    def test_every_few_seconds_it_is_told_again(self, busy: RouterCore) -> None:
        for name in "ab":
            self.submit(busy, chat(name))
        busy.handle(said("decode-0", replace(self.BUSY, backlog=Backlog(8.0, TOKEN_S, 8.0, TOKEN_S, TOKEN_S))), 7.5)
        [(_, told)] = sent(busy.handle(TimerFired("refresh"), 8.0), InLine)
        assert told == InLine((Place("a", 0, 0, 16.0), Place("b", 0, 1, 17.0)))
        busy.handle(said("decode-0", replace(self.BUSY, joined=(("a", 0),))), 8.5)
        assert self.places(busy.handle(TimerFired("refresh"), 9.0)) == [("b", 0)]

    def test_after_a_restart_of_the_router_the_line_goes_on(self) -> None:
        """Of three declared chats one has begun: the newcomer comes after the two others, which hear their places."""
        limits = replace(LIMITS, prompts_on=Role.DECODE, most_open=100)
        router = recovering(("gateway-0", "pool-0", "decode-0"), limits)
        keys = [(name, 0) for name in "abc"]
        router.handle(said("decode-0", Holding(tuple(keys), 1000, waiting=tuple(keys))), 1.1)
        router.handle(said("gateway-0", Declare(tuple(chat(name) for name in "abc"))), 1.2)
        router.handle(said("decode-0", replace(self.BUSY, joined=(("a", 0),))), 1.3)
        router.handle(TimerFired("recovered"), RECOVERED_AT)
        assert self.places(self.submit(router, chat("d"))) == [("d", 2)]
        assert self.places(router.handle(TimerFired("refresh"), 8.0)) == [("b", 0), ("c", 1), ("d", 2)]

    def places(self, commands: Sequence[Command]) -> list[tuple[str, int]]:
        [(_, told)] = sent(commands, InLine)
        return [(place.request, place.num_before) for place in told.places]
