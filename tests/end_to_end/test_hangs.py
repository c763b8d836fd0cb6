"""Tests that a part that hangs is ended and started again, whatever hangs in it, and that no token is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, wait_until
from tests.planted import Hangs

STILL_S = 4.0


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Hangs:
    return Hangs(tmp_path_factory.mktemp("hangs"))


@pytest.fixture(scope="module")
def deployment(hangs: Hangs) -> Iterator[Deployment]:
    with deployed("--set", f"launch.still_s={STILL_S}", topology="1+1", plant=hangs.plant) as deployment:
        yield deployment


@pytest.mark.parametrize(
    ("part", "place", "how"),
    [
        ("pool-0", "turn", "keeps the lock"),
        ("decode-0", "turn", "sleeps"),
        ("decode-0", "copy", "computes"),
        ("prefill-0", "step", "sleeps"),
        ("router", "stopped", ""),
    ],
)
def test_requests_go_on_when_a_part_hangs(
    deployment: Deployment, hangs: Hangs, part: str, place: str, how: str
) -> None:
    wanted, pid = mixed(6, seed=1, outputs=(60, 140)), deployment.pid(part)
    hang(hangs, pid, place, how)
    check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
    comes_back(deployment, part, pid)


@pytest.mark.parametrize(("place", "how"), [("event loop", "computes"), ("turn", "sleeps"), ("stopped", "")])
def test_a_gateway_that_hangs_is_ended_and_comes_back(
    deployment: Deployment, hangs: Hangs, place: str, how: str
) -> None:
    hang(hangs, pid := deployment.pid("gateway-0"), place, how)
    comes_back(deployment, "gateway-0", pid)
    check_greedy(few := mixed(2, seed=2), asyncio.run(all_tokens(deployment.url, few)))


def hang(hangs: Hangs, pid: int, place: str, how: str) -> None:
    if place == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        hangs.tell(pid, place, how)


def comes_back(deployment: Deployment, part: str, pid: int) -> None:
    wait_until(lambda: pid not in deployment.processes() and deployment.runs(part), BACK_S, deployment.log)
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
