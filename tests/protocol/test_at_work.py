"""For each kind of event, the attempts that it names: they are charged where a process ends at it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Request
from alignedserve.protocol.events import Event, Opened, TimerFired, attempts_of
from alignedserve.protocol.messages import (
    ROUTER,
    AskPrefix,
    Batch,
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
        (said("pool-0", Batch((entry(FIRST, [1]), entry(SECOND, [2])))), (("r", 2), ("s", 0))),
        (said("decode-0", Progress(committed=(("r", 1),), ended=(("s", 0),))), (("r", 1), ("s", 0))),
        (said("decode-0", Missed()), ()),
        (TimerFired("r"), ()),
    ],
)
def test_an_event_is_about_the_attempts_that_it_names(event: Event, attempts: tuple[tuple[str, int], ...]) -> None:
    assert attempts_of(event) == attempts
