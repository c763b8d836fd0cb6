"""Deployments that tests share, and the kinds of deployments that other tests start for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import pytest

from tests.end_to_end.deployment import BACK_S, LOCAL, ONE_ON_RAY, TOPOLOGIES, Deployment, Kind, deployed, wait_until


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ONE_ON_RAY, ids="-".join)
def kind(request: pytest.FixtureRequest) -> Kind:
    topology, launcher = request.param
    return topology, launcher


def on(kinds: Sequence[Kind]) -> pytest.MarkDecorator:
    """Replace the kinds of the fixture `kind` for one test."""
    return pytest.mark.parametrize("kind", kinds, ids="-".join)


_FLAGS = ("--log-level", "debug")  # each move of a request


class Running:
    """Keeps one running deployment of each kind. It starts at its first use: a start takes some seconds of all cores.

    Ray is never idle, so it is stopped when tests go on without it; the tests on Ray run together (tests/conftest.py).
    """

    def __init__(self) -> None:
        self._started: dict[Kind, tuple[Deployment, ExitStack]] = {}

    def of(self, kind: Kind) -> Deployment:
        if kind in self._started and not self._started[kind][0].is_ready:
            self.drop(kind)
        topology, launcher = kind
        if launcher == "local":
            self._end_ray()
        if kind not in self._started:
            ends = ExitStack()
            self._started[kind] = ends.enter_context(deployed(*_FLAGS, topology=topology, launcher=launcher)), ends
        return self._started[kind][0]

    def _end_ray(self) -> None:
        for kind in [kind for kind in self._started if kind[1] == "ray"]:
            self._started.pop(kind)[1].close()

    def drop(self, kind: Kind) -> None:
        """End a deployment on which a test has failed, so that the next test does not fail too."""
        deployment, ends = self._started.pop(kind)
        deployment.kill()
        with suppress(AssertionError):  # the deployment ended with errors
            ends.close()

    def stop(self) -> None:
        with ExitStack() as all_ends:
            for _, ends in self._started.values():
                all_ends.push(ends)


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    found = Running()
    yield found
    found.stop()


@pytest.fixture(scope="module", params=LOCAL, ids="-".join)
def wounded(request: pytest.FixtureRequest, running: Running) -> Iterator[Deployment]:
    """Yield a deployment for the tests of one module that kill its parts; on Ray, the one that all modules share."""
    topology, launcher = request.param
    if launcher == "ray":
        yield running.of(request.param)
        return
    with deployed(topology=topology, launcher=launcher) as deployment:
        yield deployment


@pytest.fixture(scope="module", params=LOCAL, ids="-".join)
def shared(request: pytest.FixtureRequest, running: Running) -> Deployment:
    """Return a deployment for tests that leave it unchanged: all modules share it."""
    return running.of(request.param)


def shared_on(kinds: Sequence[Kind]) -> pytest.MarkDecorator:
    """Replace the kinds of the fixture `shared` for one test."""
    return pytest.mark.parametrize("shared", kinds, ids="-".join, indirect=True, scope="module")


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    yield shared
    wait_until(lambda: shared.metric("num_requests_open") == 0, BACK_S, lambda: f"requests are left:\n{shared.log()}")
