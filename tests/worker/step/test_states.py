"""The states of a request on a worker: the moves that exist, and an error with its story for every other."""

from __future__ import annotations

from itertools import product

import pytest

from alignedserve.scheduling.policy import DEFAULT_POLICY
from alignedserve.worker.requests import Requests
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import IllegalTransition, State, diagram
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.samples import next_attempt, request

# Every legal move, written by hand: state, and the states that may follow.
LEGAL = """
NEW        COMPILING ASKING WAITING CANDIDATE
COMPILING  ASKING WAITING GONE
ASKING     WAITING GONE
WAITING    FETCHING PROMPT GONE
FETCHING   PROMPT WAITING ABANDONED
PROMPT     RESIDENT LEAVING WAITING GONE
CANDIDATE  JOINING RECEIVING WAITING GONE
JOINING    RESIDENT ABANDONED GONE
RECEIVING  RESIDENT JOINING WAITING ABANDONED GONE
RESIDENT   LEAVING DEPARTING KEPT GONE
DEPARTING  CANDIDATE RESIDENT ABANDONED GONE
LEAVING    WAITING GONE
KEPT       GONE
ABANDONED  GONE
"""


def _legal() -> set[tuple[State, State]]:
    lines = (line.split() for line in LEGAL.split("\n")[1:-1])
    return {(State[before], State[state]) for before, *after in lines for state in after}


def requests() -> Requests:
    here = Requests()
    here.waiting = WaitingPrompts(DEFAULT_POLICY)
    return here


def made(name: str = "a", attempt: int = 0) -> WorkerRequest:
    first = request(name)
    return running_of(DEFAULT_POLICY, next_attempt(first) if attempt else first, ())


def test_a_request_makes_every_legal_move_and_no_other() -> None:
    legal = _legal()
    for before, after in product(State, State):
        running = made()
        running.story.append(before)
        if (before, after) in legal:
            running.becomes(after)
            assert running.state is after
        else:
            with pytest.raises(IllegalTransition):
                running.becomes(after)
            assert running.state is before


def test_an_illegal_transition_tells_the_story() -> None:
    running = made()
    for state in (State.WAITING, State.PROMPT, State.RESIDENT):
        running.becomes(state)
    with pytest.raises(IllegalTransition) as raised:
        running.becomes(State.FETCHING)
    assert str(raised.value) == (
        "request a, attempt 0, cannot become FETCHING; its story: NEW -> WAITING -> PROMPT -> RESIDENT"
    )


def test_the_picture_has_both_ends() -> None:
    lines = diagram().splitlines()
    assert "    [*] --> WAITING: prompt, nothing to ask" in lines
    assert "    KEPT --> [*]: answer in the pool" in lines


class TestRequests:
    def test_a_request_is_among_those_of_its_state_alone(self) -> None:
        here, a, b = requests(), made("a"), made("b")
        for running in (a, b):
            here.move(running, State.WAITING)
        here.move(a, State.PROMPT)
        assert (here.of(State.WAITING), here.of(State.PROMPT), here.find("a"), here.find("b")) == ([b], [a], a, None)
        assert here.attempts() == [("a", 0), ("b", 0)]
        here.move(a, State.GONE)
        assert (here.of(*State), here.find("a"), here.attempts()) == ([b], None, [("b", 0)])

    def test_the_first_to_come_is_first_but_for_those_that_are_put_before_or_behind(self) -> None:
        here = requests()
        first, second, third = (made(name) for name in "abc")
        here.move(first, State.WAITING)
        here.move(second, State.WAITING)
        here.move(third, State.WAITING, first=True)
        assert here.of(State.WAITING) == [third, first, second]
        for running in (first, second):
            here.begin_copy(running, State.FETCHING)
        here.put_last(first)
        assert (here.of(State.FETCHING), here.of(State.WAITING)) == ([second, first], [third])

    def test_a_copy_ends_once_and_only_that_of_a_request(self) -> None:
        here, running = requests(), made()
        here.move(running, State.WAITING)
        number = here.begin_copy(running, State.FETCHING)
        here.pool_lost()
        assert here.from_lost_pool == {number}
        here.move(running, State.ABANDONED)
        assert here.is_changing
        assert here.occupants() == []
        assert here.end_copy(number + 1) is None
        assert here.end_copy(number) is running
        assert here.end_copy(number) is None
        assert here.occupants() == [running]
        here.move(running, State.GONE)
        assert not here.is_changing

    def test_a_request_is_found_by_name_until_it_is_gone(self) -> None:
        here, first, second = Requests(), made(), made(attempt=1)
        assert here.newest("a") == -1
        for running in (first, second):
            here.move(running, State.CANDIDATE)
        assert here.named("a", State.CANDIDATE) == [first, second]
        assert here.find_attempt(("a", 1), *State) is second
        assert here.find_attempt(("a", 1), State.WAITING) is None
        for running in (second, first):
            here.move(running, State.GONE)
        assert (here.newest("a"), here.named("a", *State)) == (-1, [])
