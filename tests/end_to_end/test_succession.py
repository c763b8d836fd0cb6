"""A launcher that is killed: its parts go on without it, and the next launcher at its port goes on with them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, command, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, MODEL, Deployment, deployed, free_port, replace_weights, wait_until
from tests.rare import rare

PARTS = ("router", "pool-0", "prefill-0", "decode-0", "gateway-0")
GOES_ON = "it goes on with what a launcher that was killed has left"


@contextmanager
def followed(*flags: str, outlive_s: float = BACK_S, model: Path = MODEL) -> Iterator[Deployment]:
    """Yield a deployment whose parts outlive its launcher for so long: a busy machine needs time to start the next."""
    plant = f"from alignedserve.launch import launch\nlaunch.OUTLIVE_S = {outlive_s}"
    with deployed("--port", str(free_port()), *flags, topology="1+1", plant=plant, model=model) as deployment:
        yield deployment


def pids(deployment: Deployment) -> Mapping[str, int]:
    return {part: deployment.pid(part) for part in PARTS}


def serves(deployment: Deployment, seed: int) -> None:
    check_greedy(wanted := mixed(4, seed=seed, outputs=(1, 60)), asyncio.run(all_tokens(deployment.url, wanted)))


def test_streams_go_on_without_their_launcher_and_the_next_one_keeps_the_same_processes() -> None:
    wanted = [Wanted(request.prompt, 300, stream=True, ignore_eos=True) for request in mixed(4, seed=5)]
    with followed() as deployment:
        before = pids(deployment)

        async def ask_and_kill() -> list[list[int]]:
            async with client(deployment.url) as http:
                answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
                while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < 3 * len(wanted):
                    await asyncio.sleep(0.02)
                deployment.kill_launcher()
                return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

        check_greedy(wanted, asyncio.run(ask_and_kill()))
        deployment.launch_again()
        assert GOES_ON in deployment.whole_log()
        assert pids(deployment) == before
        serves(deployment, seed=6)
        deployment.wound("decode-0")  # it is the next one's to start again
        serves(deployment, seed=7)


@rare  # tests/launch/test_succession.py has the parts of the story
def test_what_dies_while_no_launcher_is_there_is_started_by_the_next_one() -> None:
    with followed() as deployment:
        before = pids(deployment)
        deployment.kill_launcher()
        os.kill(before["prefill-0"], signal.SIGKILL)
        deployment.launch_again()
        wait_until(lambda: deployment.runs("prefill-0"), BACK_S, deployment.log)
        serves(deployment, seed=8)
        assert deployment.pid("decode-0") == before["decode-0"]


@rare
def test_a_launcher_that_is_asked_for_other_settings_ends_what_was_left() -> None:
    with followed() as deployment:
        before = pids(deployment)
        deployment.kill_launcher()
        deployment.launch_again("--max-num-seqs", "3")
        assert "processes with other settings: they are ended" in deployment.whole_log()
        assert not before.items() & pids(deployment).items()
        serves(deployment, seed=9)


@rare
def test_replaced_weights_are_taken_by_the_next_launcher_and_by_no_restart(tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    with followed(model=model) as deployment:
        before, wanted = pids(deployment), mixed(1, seed=12, outputs=(20, 20))
        replace_weights(model)
        refused = command("restart", "--in-place", "--port", str(deployment.port))
        assert refused.returncode == 2
        assert f"nothing is restarted: {model} has other weights" in refused.stderr
        assert pids(deployment) == before
        check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))
        deployment.kill_launcher()
        deployment.launch_again()
        assert "processes with other weights: they are ended" in deployment.whole_log()
        with pytest.raises(AssertionError):
            check_greedy(wanted, asyncio.run(all_tokens(deployment.url, wanted)))


@rare
def test_after_a_second_launcher_a_third_goes_on_too_and_knows_what_was_scaled() -> None:
    with followed() as deployment:
        for number in ("2", "1"):
            assert command("scale", "--port", str(deployment.port), "--decode", number).returncode == 0
            wait_until(lambda: deployment.runs("decode-1") is (number == "2"), BACK_S, deployment.log)  # noqa: B023
        before = pids(deployment)
        for seed in (10, 11):
            deployment.kill_launcher()
            deployment.launch_again()
            serves(deployment, seed)
        assert pids(deployment) == before
        assert not deployment.runs("decode-1")
        assert deployment.whole_log().count(GOES_ON) == 2


@rare
def test_nothing_is_left_where_no_launcher_follows_or_it_is_told_to_stop() -> None:
    with followed(outlive_s=1.0) as deployment:
        deployment.kill_launcher()
        deployment.check_nothing_is_left(files=False)
        deployment.launch_again()  # removes the files
    with followed() as deployment:
        deployment.kill_launcher()
        stopped = command("stop", "--port", str(deployment.port))
        assert stopped.returncode == 0, stopped.stderr
        deployment.check_nothing_is_left(files=False)
        deployment.launch_again()
