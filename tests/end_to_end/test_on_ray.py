"""Tests of what can fail on Ray alone, on one deployment: Ray takes many seconds to start.

It has a worker of two ranks, and is typed in a folder whose files are named like modules.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, documents, mixed
from tests.end_to_end.deployment import Deployment, deployed
from tests.end_to_end.test_failures import check_a_killed_gateway, check_no_token_is_lost
from tests.end_to_end.test_greedy import check_none_is_reached_from_elsewhere
from tests.end_to_end.test_ranks import check_a_killed_rank, check_ranks_come_and_go
from tests.end_to_end.test_stop import DRAIN_S, check_open_requests_end
from tests.hostile_folder import imported, make_hostile
from tests.rare import rare

pytestmark = rare  # tests/cluster/test_nodes.py has one story on Ray in each run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hostile(tmp_path_factory.mktemp("typed-in") / "hostile")


@pytest.fixture(scope="module")
def on_ray(folder: Path) -> Iterator[Deployment]:
    flags = ("--tensor-parallel-size", "2", "--pool-verify-pages", "--log-level", "debug", "--drain-s", str(DRAIN_S))
    with deployed(*flags, "--set", "engine.look_ahead=0", launcher="ray", typed_in=folder) as deployment:
        yield deployment


def test_two_ranks_say_what_transformers_says_and_run_no_code_of_their_folder(on_ray: Deployment, folder: Path) -> None:
    wanted = [*mixed(8, seed=3, outputs=(1, 40)), *documents(2, seed=5)]
    check_greedy(wanted, asyncio.run(all_tokens(on_ray.url, wanted)))
    assert imported(folder) == []


def test_none_of_its_processes_is_reached_from_elsewhere(on_ray: Deployment) -> None:
    check_none_is_reached_from_elsewhere(on_ray)


def test_a_killed_router_comes_back_and_no_token_is_lost(on_ray: Deployment) -> None:
    check_no_token_is_lost(on_ray, "router", seed=0)


def test_a_worker_with_a_killed_rank_comes_back_and_no_token_is_lost(on_ray: Deployment) -> None:
    check_a_killed_rank(on_ray, "decode-0-rank-1")


def test_the_streams_of_a_killed_gateway_end_and_it_comes_back(on_ray: Deployment) -> None:
    check_a_killed_gateway(on_ray)


def test_workers_of_two_ranks_come_and_go(on_ray: Deployment) -> None:
    check_ranks_come_and_go(on_ray)


def test_open_requests_end_and_new_requests_are_refused(on_ray: Deployment) -> None:
    """Ray handles SIGTERM itself unless it is prevented."""
    check_open_requests_end(on_ray, signal.SIGTERM)
