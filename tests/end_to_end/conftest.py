"""Deployments that tests share, and the kinds of deployments that other tests start for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from alignedserve.gateway.access.keys import EVERY_SCOPE, Limits, make_key
from tests import times
from tests.conftest import timed
from tests.end_to_end.client import reference
from tests.end_to_end.deployment import BACK_S, LOCAL, NONE_ON_RAY, TOPOLOGIES, Deployment, Kind, deployed, wait_until
from tests.rare import rarely

Keys: TypeAlias = tuple[Path, Mapping[str, str]]  # a file of keys, and each by its name


def make_keys(folder: Path, *names: str) -> Keys:
    """Write a file of these keys, which may do everything, without limits."""
    path = folder / "keys.yaml"
    return path, {name: make_key(path, name, EVERY_SCOPE, Limits()) for name in names}


@pytest.fixture(params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=NONE_ON_RAY, ids="-".join)
def kind(request: pytest.FixtureRequest) -> Kind:
    topology, launcher = request.param
    return topology, launcher


def on(kinds: Sequence[Any]) -> pytest.MarkDecorator:
    """Replace the kinds of the fixture `kind` for one test."""
    return pytest.mark.parametrize("kind", kinds, ids="-".join)


def usually(kind: Kind, of: Sequence[Kind] = LOCAL) -> list[Any]:
    """Return the kinds for `on` or `shared_on`: this one in each run, and the others rarely."""
    return [kind, *(rarely((other,)) for other in of if other != kind)]


_FLAGS = ("--log-level", "debug", "--pool-verify-pages")  # each move of a request is logged, and each page checked


class SharedDeployments:
    """Keeps one running deployment of each kind. It starts at its first use: a start takes some seconds of all cores.

    Ray is never idle, so it is stopped when tests go on without it. Workers measure steps first, as those of users do.
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
            made = deployed(*_FLAGS, topology=topology, launcher=launcher, measured=True)
            self._started[kind] = ends.enter_context(made), ends
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
            while self._started:
                all_ends.push(self._started.popitem()[1][1])


@pytest.fixture(scope="package")
def running() -> Iterator[SharedDeployments]:
    found = SharedDeployments()
    yield found
    found.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that share deployments before the others of this folder."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.parent == here]
    sharing = {items[place].path for place in places if _shares(items[place])}
    ours = sorted((items[place] for place in places), key=lambda item: item.path not in sharing)  # a stable sort
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the model of reference before processes are forked (tests/processes.py): in each it would take seconds."""
    here, option = Path(__file__).parent, session.config.option
    if option.processes > 1 and not option.collectonly and any(item.path.parent == here for item in session.items):
        with redirect_stderr(StringIO()):  # a bar of its progress
            reference()


def _shares(item: pytest.Item) -> bool:
    return "shared" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module", autouse=True)
def none_runs_unused(request: pytest.FixtureRequest, running: SharedDeployments) -> None:
    """End the shared deployments before a file that does not use them: at rest they take some percent of a core."""
    if not any(_shares(item) for item in request.session.items if item.path == request.path):
        with timed(times.SHARED):
            running.stop()


@pytest.fixture(scope="module", params=usually(LOCAL[1]), ids="-".join)  # the topology with more parts
def shared(request: pytest.FixtureRequest, running: SharedDeployments) -> Deployment:
    """Return a deployment for tests that leave it unchanged: all modules share it."""
    return running.of(request.param)


def shared_on(kinds: Sequence[Any]) -> pytest.MarkDecorator:
    """Replace the kinds of the fixture `shared` for one test."""
    return pytest.mark.parametrize("shared", kinds, ids="-".join, indirect=True, scope="module")


@pytest.fixture
def deployment(shared: Deployment) -> Iterator[Deployment]:
    yield shared
    wait_until(lambda: shared.metric("num_requests_open") == 0, BACK_S, lambda: f"requests are left:\n{shared.log()}")
