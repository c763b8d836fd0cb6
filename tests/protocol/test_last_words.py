"""Which requests an event is about, and what a part whose core has failed there says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Request
from alignedserve.protocol.commands import Send
from alignedserve.protocol.events import Event, Opened, TimerFired
from alignedserve.protocol.last_words import FailedAt, attempts_of, last_words, working_on
from alignedserve.protocol.messages import (
    ROUTER,
    AskPrefix,
    AttemptLost,
    Commit,
    Declare,
    Missed,
    Output,
    Prefill,
    Progress,
    Submit,
    Tokens,
)
from tests.samples import entry, request, said

FIRST: Request = replace(request(), attempt=2)
A_TOKEN = Output("r", 1, 0, (5,), None)
SECOND: Request = replace(request("s"), owner="jobs-0")


@pytest.mark.parametrize(
    ("event", "attempts"),
    [
        (Opened(FIRST), (("r", 2),)),
        (said("gateway-0", Submit(FIRST)), (("r", 2),)),
        (said("gateway-0", Declare((FIRST, SECOND))), (("r", 2), ("s", 0))),
        (said(ROUTER, Prefill(FIRST)), (("r", 2),)),
        (said("decode-0", AskPrefix("r", 4, ())), (("r", 4),)),
        (said("decode-0", Commit(entry(FIRST, [1]))), (("r", 2),)),
        (
            said("decode-0", Tokens((Output("r", 1, 0, (5,), None), Output("s", 0, 0, (5,), None)))),
            (("r", 1), ("s", 0)),
        ),
        (said("decode-0", Missed()), ()),
        (TimerFired("r"), ()),
    ],
)
def test_an_event_is_about_the_attempts_that_it_names(event: Event, attempts: tuple[tuple[str, int], ...]) -> None:
    assert attempts_of(event) == attempts
    told = [Send(ROUTER, Progress(felled=attempts))] if attempts else []
    assert last_words("pool-0", event) == told


def test_a_router_tells_the_owners_who_count_a_death() -> None:
    assert last_words(ROUTER, said("gateway-0", Submit(FIRST))) == [
        Send(FIRST.owner, AttemptLost("r", 2, died=True, alone=True))
    ]
    assert last_words(ROUTER, said("gateway-0", Declare((FIRST, SECOND)))) == [
        Send(FIRST.owner, AttemptLost("r", 2, died=True)),
        Send("jobs-0", AttemptLost("s", 0, died=True)),
    ]
    assert last_words(ROUTER, said("decode-0", AskPrefix("r", 4, ()))) == []


def test_a_core_that_says_which_request_it_worked_on_charges_no_other() -> None:
    with pytest.raises(FailedAt) as failed, working_on(FIRST):
        raise ZeroDivisionError
    event = said("gateway-0", Submit(SECOND))
    assert last_words(ROUTER, event, failed.value) == [Send(FIRST.owner, AttemptLost("r", 2, died=True, alone=True))]
    assert last_words("pool-0", event, failed.value) == [Send(ROUTER, Progress(felled=(("r", 2),)))]
