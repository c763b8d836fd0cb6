"""Deployments that the tests of one module share, and the kinds that others start for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.end_to_end.deployment import LOCAL, ONE_ON_RAY, TOPOLOGIES, Deployment, Kind, deployed, wait_until


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ONE_ON_RAY, ids="-".join)
def kind(request: pytest.FixtureRequest) -> Kind:
    topology, launcher = request.param
    return topology, launcher


def on(kinds: Sequence[Kind]) -> pytest.MarkDecorator:
    """The kinds that a test has, in place of those of the fixture `kind`."""
    return pytest.mark.parametrize("kind", kinds, ids="-".join)


@pytest.fixture(scope="module", params=LOCAL, ids="-".join)
def shared(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """For tests that leave it as it was, one of each kind."""
    topology, launcher = request.param
    with deployed(topology=topology, launcher=launcher) as deployment:
        yield deployment


def shared_on(kinds: Sequence[Kind]) -> pytest.MarkDecorator:
    """The kinds of `shared` that a test has, in place of its own."""
    return pytest.mark.parametrize("shared", kinds, ids="-".join, indirect=True, scope="module")


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    yield shared
    wait_until(lambda: shared.metric("num_requests_running") == 0, 10, lambda: f"requests are left:\n{shared.log()}")
