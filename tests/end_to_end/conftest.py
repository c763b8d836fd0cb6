"""Deployments that the tests of one module share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.end_to_end.deployment import LAUNCHERS, TOPOLOGIES, Deployment, deployed, wait_until


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=itertools.product(TOPOLOGIES, LAUNCHERS), ids="-".join)
def shared(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """For tests that leave it as it was, one for each topology and launcher."""
    topology, launcher = request.param
    with deployed(topology=topology, launcher=launcher) as deployment:
        yield deployment


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    yield shared
    wait_until(lambda: shared.metric("num_requests_running") == 0, 10, lambda: f"requests are left:\n{shared.log()}")
