"""The table of a request's life: it allows some moves, all others raise, and every open state leads to every end."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Role
from alignedserve.router.lifecycle import (
    OPEN,
    PLACES,
    TRANSITIONS,
    Fact,
    IllegalTransition,
    OpenRequest,
    OpenRequests,
    State,
    diagram,
)
from tests.samples import member, request

ENDS = [state for state in State if state not in OPEN]


def opened(state: State = State.WAITING) -> OpenRequest:
    return OpenRequest(request("a"), 0.0, state=state)


# Every legal move, written by hand: state, what the router hears of the request, and where it may be then.
LEGAL = """
WAITING  placed    PREFILL DECODE
WAITING  held      PREFILL POOL DECODE
WAITING  arrived   PREFILL POOL DECODE
PREFILL  held      POOL DECODE
PREFILL  arrived   PREFILL POOL DECODE
PREFILL  returned  POOL
POOL     held      DECODE
POOL     arrived   POOL DECODE
DECODE   arrived   DECODE
DECODE   returned  POOL
"""


def _legal() -> set[tuple[State, Fact, State]]:
    """Return the moves above, and that every open state leads to every end by the fact of its name."""
    moves = {(before, Fact[end.name], end) for before in OPEN for end in ENDS}
    for line in LEGAL.split("\n")[1:-1]:
        before, fact, *after = line.split()
        moves |= {(State[before], Fact(fact), State[name]) for name in after}
    return moves


def test_a_request_makes_every_legal_move_and_no_other() -> None:
    legal = _legal()
    for before, fact, after in product(State, Fact, State):
        request = opened(before)
        if (before, fact, after) in legal:
            request.becomes(after, fact, "x")
            assert (request.state, request.at) == (after, "x")
        else:
            with pytest.raises(IllegalTransition):
                request.becomes(after, fact, "x")
            assert request.state is before


def test_an_illegal_transition_tells_the_story() -> None:
    request = opened()
    request.becomes(State.PREFILL, Fact.PLACED, "prefill-0")
    request.becomes(State.DECODE, Fact.ARRIVED, "decode-0")
    with pytest.raises(IllegalTransition) as raised:
        request.becomes(State.PREFILL, Fact.PLACED, "prefill-1")
    assert str(raised.value) == (
        "request a, attempt 0, is in DECODE at decode-0 and cannot be placed -> PREFILL at prefill-1; "
        "its story: placed -> PREFILL at prefill-0, arrived -> DECODE at decode-0"
    )


def test_the_diagram_has_every_transition_between_open_states() -> None:
    drawn = diagram()
    for before in OPEN:
        for fact, states in TRANSITIONS[before].items():
            for after in states:
                if after in OPEN:
                    line = next(line for line in drawn.splitlines() if f"{before.name} --> {after.name}:" in line)
                    assert fact.value in line


MOVES = st.lists(st.sampled_from([(role, fact) for role in PLACES for fact in (Fact.PLACED, Fact.ARRIVED, Fact.HELD)]))


@given(MOVES)
def test_counts_by_place_follow_the_moves(moves: list[tuple[Role, Fact]]) -> None:
    """A refused move changes no count; after the end the request is not counted."""
    requests, request = OpenRequests(), opened()
    requests.add(request)
    for role, fact in moves:
        before = request.state
        if PLACES[role] not in TRANSITIONS[before].get(fact, ()):
            continue
        requests.move(request, member(f"{role.value}-0"), fact, 1.0)
        assert astuple(requests.stages(request.request.service)) == tuple(int(state is request.state) for state in OPEN)
    requests.remove(request, State.ENDED, Fact.ENDED)
    assert set(astuple(requests.stages(request.request.service))) == {0}
