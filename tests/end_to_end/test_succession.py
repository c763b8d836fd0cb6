"""A launcher that is killed: its parts go on without it, and the next launcher at its port goes on with them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, command, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, Deployment, deployed, shared_memory, wait_until
from tests.rare import rare

PARTS = ("router", "pool-0", "prefill-0", "decode-0", "gateway-0")


@dataclass
class Followed:
    """A deployment whose launcher is killed, and how another is started at its port."""

    first: Deployment
    flags: tuple[str, ...]
    plant: str

    @property
    def pids(self) -> Mapping[str, int]:
        return {part: self.first.pid(part) for part in PARTS}

    def kill_launcher(self) -> None:
        self.first.process.kill()
        self.first.process.wait()

    @contextmanager
    def next_one(self, *flags: str) -> Iterator[Deployment]:
        options = {"topology": "1+1", "memory": self.first.memory, "plant": self.plant}
        with deployed(*self.flags, *flags, **options) as deployment:
            yield deployment
        self.first.check_nothing_is_left()


@contextmanager
def followed(outlive_s: float = BACK_S) -> Iterator[Followed]:
    """Yield a deployment whose parts outlive it for so long: a busy machine needs time to start the next one."""
    plant = f"from alignedserve.launch import launch\nlaunch.OUTLIVE_S = {outlive_s}"
    with socket.socket() as probe:  # at port 0 nobody could follow
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with shared_memory() as memory, tempfile.TemporaryDirectory() as jobs:
        flags = ("--port", str(port), "--set", f"jobs.directory={jobs}")
        first = Deployment(*flags, topology="1+1", memory=memory, plant=plant)
        try:
            yield Followed(first, flags, plant)
        finally:
            first.kill()
            first.forget()


def serves(url: str, seed: int) -> None:
    check_greedy(wanted := mixed(4, seed=seed, outputs=(1, 60)), asyncio.run(all_tokens(url, wanted)))


def test_streams_go_on_without_their_launcher_and_the_next_one_keeps_the_same_processes() -> None:
    wanted = [Wanted(request.prompt, 300, stream=True, ignore_eos=True) for request in mixed(4, seed=5)]
    with followed() as deployment:
        before = deployment.pids

        async def ask_and_kill() -> list[list[int]]:
            async with client(deployment.first.url) as http:
                answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
                while await asyncio.to_thread(deployment.first.metric, "generation_tokens_total") < 3 * len(wanted):
                    await asyncio.sleep(0.02)
                deployment.kill_launcher()
                return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

        check_greedy(wanted, asyncio.run(ask_and_kill()))
        with deployment.next_one() as follower:
            assert "it goes on with what a launcher that was killed has left" in follower.whole_log()
            assert deployment.pids == before
            serves(follower.url, seed=6)
            os.kill(before["decode-0"], signal.SIGKILL)  # it is the next one's to start again
            wait_until(lambda: follower.runs("decode-0"), BACK_S, follower.log)
            serves(follower.url, seed=7)


@rare  # tests/launch/test_succession.py has the parts of the story
def test_what_dies_while_no_launcher_is_there_is_started_by_the_next_one() -> None:
    with followed() as deployment:
        before = deployment.pids
        deployment.kill_launcher()
        os.kill(before["prefill-0"], signal.SIGKILL)
        with deployment.next_one() as follower:
            wait_until(lambda: follower.runs("prefill-0"), BACK_S, follower.log)
            serves(follower.url, seed=8)
            assert deployment.first.pid("decode-0") == before["decode-0"]


@rare
def test_a_launcher_that_is_asked_for_other_settings_ends_what_was_left() -> None:
    with followed() as deployment:
        deployment.kill_launcher()
        with deployment.next_one("--max-num-seqs", "3") as follower:
            assert "processes with other settings: they are ended" in follower.whole_log()
            assert not deployment.first.processes()
            serves(follower.url, seed=9)


@rare
def test_after_a_second_launcher_a_third_goes_on_too_and_knows_what_was_scaled() -> None:
    with followed() as deployment:
        port = str(deployment.first.port)
        assert command("scale", "--port", port, "--decode", "2").returncode == 0
        wait_until(lambda: deployment.first.runs("decode-1"), BACK_S, deployment.first.log)
        assert command("scale", "--port", port, "--decode", "1").returncode == 0
        deployment.kill_launcher()
        with followed() as _unrelated:  # it looks for what killed deployments have left, and finds nothing of its own
            pass
        memory, plant = deployment.first.memory, deployment.plant
        second = Deployment(*deployment.flags, topology="1+1", memory=memory, plant=plant)
        try:
            second.process.kill()
            with deployment.next_one() as third:
                serves(third.url, seed=10)
                assert not deployment.first.runs("decode-1")
                assert not third.runs("decode-1")
                assert not second.runs("decode-0")
        finally:
            second.kill()
            second.forget()


@rare
def test_nothing_is_left_where_no_launcher_follows_or_it_is_told_to_stop() -> None:
    with followed(outlive_s=1.0) as deployment:
        deployment.kill_launcher()
        deployment.first.check_nothing_is_left(files=False)
    with followed() as deployment:
        deployment.kill_launcher()
        stopped = command("stop", "--port", str(deployment.first.port))
        assert stopped.returncode == 0, stopped.stderr
        deployment.first.check_nothing_is_left(files=False)
