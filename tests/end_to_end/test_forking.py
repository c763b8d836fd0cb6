"""Deployments whose fork servers, or whose launcher, are killed while parts start and later."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from tests.end_to_end.client import all_tokens, check_greedy, mixed
from tests.end_to_end.deployment import (
    ANSWER_S,
    BACK_S,
    GONE_S,
    MODEL,
    START_S,
    Deployment,
    deployed,
    marked,
    shared_memory,
    spawn,
    wait_until,
)
from tests.hostile_folder import imported, make_hostile
from tests.rare import rare, thinned

PARTS = ("router", "pool-0", "decode-0", "gateway-0", "jobs-0")
SAID = "a fork server has ended: parts are started without it"


def fork_servers(mark: str) -> list[int]:
    return [pid for pid, command in marked(mark).items() if "fork server" in command]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def serves(deployment: Deployment, seed: int) -> None:
    wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
    check_greedy(wanted := mixed(2, seed=seed, outputs=(1, 60)), asyncio.run(all_tokens(deployment.url, wanted)))


@rare  # tests/launch/test_fork_server.py has servers that die
@pytest.mark.parametrize("by_command", [False, True])
def test_parts_live_on_without_their_fork_servers_and_start_again_without_them(
    tmp_path: Path, by_command: bool
) -> None:
    """The folder in which `serve` is typed has files named like modules: no way to start a part imports them."""
    folder = make_hostile(tmp_path / "hostile")
    with deployed(typed_in=folder, by_command=by_command) as deployment:
        serves(deployment, seed=3)
        with_torch = {part for part in PARTS if "libtorch" in Path(f"/proc/{deployment.pid(part)}/maps").read_text()}
        assert with_torch == {"decode-0"} or not by_command, "the other parts are small (docs/guides/cluster.md)"
        before = {part: deployment.pid(part) for part in PARTS}
        servers = fork_servers(deployment.mark)
        assert len(servers) == 2
        kill(servers)
        serves(deployment, seed=4)
        assert {part: deployment.pid(part) for part in PARTS} == before
        hurt, other = ("decode-0", "gateway-0") if by_command else ("gateway-0", "decode-0")
        deployment.wound(hurt)  # its start imports all it needs, which takes a worker for long
        serves(deployment, seed=5)
        assert deployment.whole_log().count(SAID) == 2
        titles = deployment.processes()
        assert titles[deployment.pid(other)] == f"alignedserve: {other}"
        assert titles[deployment.pid(hurt)].endswith(f"alignedserve.launch.start {hurt}")
    assert imported(folder) == []


class _Deprived(Deployment):
    """A deployment that loses its fork servers while they load, before any part is there."""

    def _wait_until_it_serves(self) -> str:
        wait_until(lambda: len(fork_servers(self.mark)) == 2, START_S, self.log)
        kill(fork_servers(self.mark))
        return super()._wait_until_it_serves()


@rare  # tests/launch kills one that loads, and the test above starts parts without them
def test_a_deployment_that_loses_its_fork_servers_while_they_load_serves() -> None:
    with shared_memory() as memory:
        deployment = _Deprived(memory=memory, by_command=True)
        try:
            serves(deployment, seed=7)
            assert re.search(SAID, deployment.whole_log())
            assert deployment.stop() == 0
            deployment.check_nothing_is_left()
        finally:
            deployment.kill()
            deployment.forget()


@pytest.mark.parametrize("way", thinned([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], usual=1))
def test_a_launcher_that_ends_while_libraries_are_loaded_leaves_nothing(way: signal.Signals) -> None:
    mark = uuid4().hex
    with shared_memory() as memory, tempfile.TemporaryFile() as log:
        flags = ("--pool-directory", memory, "--pool-memory-mb", "256")
        process = spawn(MODEL, "--port", "0", *flags, mark=mark, stderr=log)
        try:
            wait_until(lambda: len(fork_servers(mark)) == 2, START_S)
            process.send_signal(way)
            process.wait(ANSWER_S)
            wait_until(lambda: not marked(mark), GONE_S, lambda: f"{marked(mark)} are left")
        finally:
            process.kill()
            process.communicate()
