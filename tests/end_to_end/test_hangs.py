"""Tests that a part that hangs is ended and started again, whatever hangs in it, and that no token is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import count

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, documents, mixed
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, wait_until
from tests.planted import Hangs
from tests.rare import rare, rarely

STILL_S = 3.0


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Hangs:
    return Hangs(tmp_path_factory.mktemp("hangs"))


@pytest.fixture(scope="module")
def hanging(hangs: Hangs) -> Iterator[Deployment]:
    with deployed("--set", f"launch.still_s={STILL_S}", topology="1+1", plant=hangs.plant) as hanging:
        yield hanging


@pytest.mark.parametrize(
    ("part", "place", "how"),
    [
        ("decode-0", "turn", "sleeps"),
        rarely(("router", "stopped", "")),
        rarely(("pool-0", "turn", "keeps the lock")),
        rarely(("decode-0", "copy", "computes")),
        rarely(("prefill-0", "step", "sleeps")),
    ],
)
def test_requests_go_on_when_a_part_hangs(hanging: Deployment, hangs: Hangs, part: str, place: str, how: str) -> None:
    """Requests come until one brings the part to that place: prefill workers keep requests whose end they expect."""
    pid, sent = hanging.pid(part), count(1)
    hang(hangs, pid, place, how)
    ends_at = time.monotonic() + BACK_S
    while pid in hanging.processes() and time.monotonic() < ends_at:
        wanted = documents(2, seed=next(sent), outputs=(80, 100)) + mixed(2, seed=next(sent), outputs=(60, 100))
        check_greedy(wanted, asyncio.run(all_tokens(hanging.url, wanted)))
    comes_back(hanging, part, pid)


@rare  # tests/shell/test_event_loop.py has a loop that stands still
@pytest.mark.parametrize(("place", "how"), [("event loop", "computes"), ("turn", "sleeps"), ("stopped", "")])
def test_a_gateway_that_hangs_is_ended_and_comes_back(hanging: Deployment, hangs: Hangs, place: str, how: str) -> None:
    hang(hangs, pid := hanging.pid("gateway-0"), place, how)
    comes_back(hanging, "gateway-0", pid)
    check_greedy(few := mixed(2, seed=2, outputs=(1, 60)), asyncio.run(all_tokens(hanging.url, few)))


def hang(hangs: Hangs, pid: int, place: str, how: str) -> None:
    if place == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        hangs.tell(pid, place, how)


def comes_back(deployment: Deployment, part: str, pid: int) -> None:
    wait_until(lambda: pid not in deployment.processes() and deployment.runs(part), BACK_S, deployment.log)
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
