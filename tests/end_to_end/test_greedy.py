"""The most important test, over HTTP and on every kind of deployment: many requests at once say what transformers
says."""

from __future__ import annotations

import asyncio

from tests.conftest import SOAK
from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.conftest import shared_on, usually
from tests.end_to_end.deployment import LOCAL, NONE_ON_RAY, Deployment

REQUESTS = 400 if SOAK else 10
# Tests of what hurts a colocated deployment compare its answers too: test_reload.py, test_surroundings.py and others.
ON_ANY = shared_on(usually(LOCAL[1], of=NONE_ON_RAY))


@ON_ANY
def test_many_requests_at_once_equal_transformers(deployment: Deployment) -> None:
    wanted = mixed(REQUESTS, seed=1, outputs=(20, 120))
    tally = check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
    assert tally.compared > 30 * REQUESTS


@ON_ANY
def test_the_longest_prompts_and_the_shortest_equal_transformers(deployment: Deployment) -> None:
    """The edges are prompts of one token, of a page less one token, of several steps, and outputs of one token."""
    edges = [length for at in (1, 16, 64, 512) for length in (at, at + 1, max(1, at - 1))]
    wanted = [
        request for length in edges for request in mixed(1, seed=length, prompts=(length, length), outputs=(1, 20))
    ]
    check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))


@ON_ANY
def test_none_of_its_processes_is_reached_from_elsewhere(deployment: Deployment) -> None:
    check_none_is_reached_from_elsewhere(deployment)


def check_none_is_reached_from_elsewhere(deployment: Deployment) -> None:
    addresses = deployment.listens_at()
    assert addresses
    assert all(address.is_loopback for address in addresses), addresses
