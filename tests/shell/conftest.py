"""Links between real sockets on this machine, for the tests of links and shells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from alignedserve.core import Role
from alignedserve.protocol.events import LinkGap, Received
from alignedserve.protocol.messages import Heartbeat, Member
from alignedserve.shell.link_keys import DeploymentKeys, LinkKeys
from alignedserve.shell.links import Links, Pulse

DEADLINE_S = 60.0
MOST_BYTES = 1 << 16
OURS = DeploymentKeys.new()
Start = Callable[..., Links]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start links that are closed when the test ends; each member's router is the first that was started.

    They have a loopback address of this process: a port of it that was left is free when the next life wants it."""
    started: list[Links] = []
    loopback = f"tcp://127.77.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}:*"

    def make(name: str, incarnation: int = 1, bind: str = loopback, keys: LinkKeys = OURS.parts) -> Links:
        router = started[0].address if started else "tcp://127.0.0.1:9"
        links = Links(name, incarnation, bind, router, MOST_BYTES, keys)
        started.append(links)
        return links

    yield make
    for links in started:
        if not links._context.closed:
            links.close()


def wait_for(links: Links, count: int) -> list[Received | LinkGap]:
    events: list[Received | LinkGap] = []
    until = time.monotonic() + DEADLINE_S
    while len(events) < count:
        left = until - time.monotonic()
        assert left > 0, f"only {events} arrived"
        events += links.receive(left)
    return events


def member(links: Links) -> Member:
    return Member(links.name, Role.DECODE, "node0", links.incarnation, links.address)


def beat_of(heart: Member, router: str, interval_s: float = 0.01) -> Pulse:
    """Return a pulse that says to the router that the member lives."""
    return Pulse(heart.name, heart.incarnation, Heartbeat(heart), router, interval_s, OURS.parts)
