"""Tests of `alignedserve scale` and `alignedserve stop` on a deployment that serves meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli import main as cli
from alignedserve.shell import control
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, mixed, tokens_of
from tests.end_to_end.conftest import shared_on
from tests.end_to_end.deployment import BACK_S, LOCAL, Deployment, deployed, part_of, wait_until
from tests.rare import rare


def parts(deployment: Deployment) -> set[str]:
    return {part["name"] for part in deployment.ask("/status").json()["parts"]}


def serve_while(deployment: Deployment, wanted: list[Wanted], *command: str) -> list[list[int]]:
    """Return the outputs of the requests; run the command once all of them are running."""

    async def serve() -> list[list[int]]:
        before = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < before + 3 * len(wanted):
                await asyncio.sleep(0.02)
            assert await asyncio.to_thread(cli.main, [*command, "--port", str(deployment.port)]) == 0
            return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

    return asyncio.run(serve())


def test_workers_come_and_go_while_it_serves_and_then_it_stops(capsys: pytest.CaptureFixture[str]) -> None:
    with deployed("--log-level", "debug", topology="1+1") as deployment:
        assert serve_while(deployment, mixed(2, seed=31), "scale", "--prefill", "2", "--decode", "2")
        assert capsys.readouterr().out.splitlines() == ["prefill-1 starts", "decode-1 starts"]
        wait_until(lambda: parts(deployment) >= {"prefill-1", "decode-1"}, BACK_S, deployment.log)

        wanted = mixed(8, seed=32, outputs=(30, 60))
        check_greedy(wanted, serve_while(deployment, wanted, "scale", "--prefill", "1", "--decode", "1"))
        said = capsys.readouterr().out.splitlines()
        assert {"prefill-1 has ended", "decode-1 has ended"} <= set(said)
        assert not parts(deployment) & {"prefill-1", "decode-1"}
        log = deployment.whole_log()
        assert re.search(r"(prefill|decode)-1: ended request_id", log), "one of them was used"
        assert "decode-1 ended with" not in log, "it was not killed, and not started again"

        assert cli.main(["stop", "--port", str(deployment.port)]) == 0
        assert deployment.ended() == 0


def come_and_go(deployment: Deployment, name: str) -> None:
    """Check that a worker of this name starts while chats wait longer than promised, and ends after that."""

    async def rush() -> None:
        hurried = {"slo": {"ttft_ms": 1}, "max_tokens": 2, "ignore_eos": True}
        bodies = [request.body | hurried for request in mixed(24, seed=33, prompts=(200, 400))]
        async with client(deployment.url) as http:

            async def again(body: dict[str, Any]) -> None:
                prompt = body["prompt"]
                while name not in await asyncio.to_thread(parts, deployment):
                    (await http.post("/v1/completions", json=body | {"prompt": prompt})).raise_for_status()
                    prompt = (*prompt[1:], prompt[0])  # one that is not cached, so that the next chats wait for it

            await asyncio.wait_for(asyncio.gather(*map(again, bodies)), BACK_S)

    asyncio.run(rush())
    wait_until(lambda: name not in parts(deployment), BACK_S, deployment.log)


BY_LOAD = ("--scale-decode", "1-2", "--scale-shrink-after-s", "1")


@rare  # tests/simulator/test_scaling.py shows most of it
def test_a_worker_comes_with_the_load_and_goes_with_it() -> None:
    with deployed(*BY_LOAD) as deployment:
        come_and_go(deployment, "decode-1")
        log = deployment.whole_log()
        assert log.count("scales by itself: decode: ") >= 2
        assert "needs no more" in log
        assert "decode-1 ended with" not in log, "it went by itself, and was not started again"
        assert deployment.ask("/status").json()["scale"] == {"decode": "1-2"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--decode", "0"], "without a decode worker no request would decode: --decode is 1 at least"),
        ([], "scale to how many?"),
    ],
)
def test_what_cannot_be_is_said(
    flags: list[str], said: str, deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scale", *flags, "--port", str(deployment.port)]) == 2
    assert said in capsys.readouterr().err


@rare
@shared_on(LOCAL[:1])
def test_prompts_alone_need_the_other_topology(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", "--prefill", "2", "--port", str(deployment.port)]) == 2
    assert "the deployment is colocated: it has only decode workers" in capsys.readouterr().err


def test_a_worker_that_was_asked_for_and_cannot_be_is_left_out(deployment: Deployment) -> None:
    """The launcher drops this worker, and everything else goes on."""
    assert cli.main(["scale", "--decode", "2", "--port", str(deployment.port)]) == 0

    def is_left_out() -> bool:
        for pid, command in deployment.processes().items():
            if part_of(command) == "decode-1":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return "decode-1 is left out: it does not stay up" in deployment.whole_log()

    wait_until(is_left_out, BACK_S, deployment.log, look_s=0.0)  # it is ready half a second after it began
    check_greedy(few := mixed(2, seed=34), asyncio.run(all_tokens(deployment.url, few)))
    assert parts(deployment) >= {"decode-0", "gateway-0"}
    assert "decode-1" not in parts(deployment)


def test_nobody_else_may_speak_there(deployment: Deployment) -> None:
    folder = control.door_of(deployment.port).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def test_where_nothing_is_served_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stop", "--port", "1"]) == 2
    assert "you serve nothing on port 1 of this machine (--port names another)" in capsys.readouterr().err


def test_a_folder_that_others_may_enter_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"alignedserve-{os.getuid()}").mkdir(mode=0o755)
    assert cli.main(["stop", "--port", "1"]) == 2
    assert "is not a folder that only you can use" in capsys.readouterr().err
