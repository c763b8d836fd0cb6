"""A deployment whose launcher is the first process of a container, as in an image without an init."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial

import pytest

from tests.end_to_end import deployment as deployments
from tests.end_to_end.client import Wanted, check_greedy, client, tokens_of
from tests.end_to_end.deployment import deployed
from tests.first_process import as_first_process, first_process
from tests.rare import rare


@rare
def test_open_streams_end_after_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (*as_first_process(), sys.executable, "-m", "alignedserve")
    monkeypatch.setattr(deployments, "spawn", partial(deployments.spawn, program=program))
    with deployed("--drain-s", "600", by_command=True) as deployment:
        wanted = [Wanted((5, 6, 7 + number), 100, True, ignore_eos=True) for number in range(3)]

        async def serve_and_stop() -> list[list[int]]:
            async with client(deployment.url) as http:
                answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
                while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < len(wanted):
                    await asyncio.sleep(0.02)
                os.kill(first_process(deployment.process.pid), signal.SIGTERM)
                return await asyncio.gather(*answers)

        check_greedy(wanted, asyncio.run(serve_and_stop()))
        assert deployment.ended() == 0
        assert "it stops: open requests are finished within" in deployment.whole_log()
