"""Tests that a deployment leaves nothing, however it ends; if it ends in good order, open requests run to their end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.end_to_end.client import Wanted, check_greedy, client, mixed, tokens_of
from tests.end_to_end.conftest import on, usually
from tests.end_to_end.deployment import (
    ANSWER_S,
    BACK_S,
    LOCAL,
    NONE_ON_RAY,
    Deployment,
    Kind,
    deployed,
    held,
    shared_memory,
    wait_until,
)
from tests.rare import rare

SIGNALS = (signal.SIGINT, signal.SIGTERM)
COLOCATED, SPLIT = LOCAL
ENDLESS_STREAMS = 4
DRAIN_S = 600.0  # how long a stopping deployment may wait for open requests
SOON_S = 120.0
# Ray's own agents, which hold nothing of ours. When their Ray is killed, they try for a minute to report to it.
RAYS_OWN = frozenset({"ray::DashboardAgent", "ray::RuntimeEnvAgent"})


@pytest.fixture
def stoppable(kind: Kind) -> Iterator[Deployment]:
    topology, launcher = kind
    apart = ("--set", "schedule.helps=false")  # else all may decode on prefill-0, and end while decode-0 is held
    with deployed("--drain-s", str(DRAIN_S), *apart, topology=topology, launcher=launcher) as deployment:
        yield deployment


@rare  # test_on_ray.py has it, and the test below, where a worker dies meanwhile
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_open_requests_end_and_new_requests_are_refused(stoppable: Deployment, number: signal.Signals) -> None:
    check_open_requests_end(stoppable, number)


def check_open_requests_end(stoppable: Deployment, number: signal.Signals) -> None:
    wanted = [Wanted(request.prompt, 150, request.stream, ignore_eos=True) for request in mixed(6, 4)]
    decode = stoppable.pid("decode-0")

    def num_taken() -> float:
        return stoppable.metric("request_success_total") + stoppable.metric("num_requests_open")

    async def serve_and_stop() -> list[list[int]]:
        async with client(stoppable.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted[:-1]]
            while await asyncio.to_thread(stoppable.metric, "generation_tokens_total") < len(wanted):
                await asyncio.sleep(0.02)
            with held(decode):  # keeps at least the last request open until new requests are refused
                answers.append(asyncio.create_task(tokens_of(http, wanted[-1])))
                while await asyncio.to_thread(num_taken) < len(wanted):
                    await asyncio.sleep(0.02)
                stoppable.send(number)
                await _refused(http)
            return await asyncio.gather(*answers)

    check_greedy(wanted, asyncio.run(serve_and_stop()))
    assert stoppable.ended() == 0
    assert "it stops: open requests are finished within" in stoppable.whole_log()


async def _refused(http: httpx.AsyncClient) -> None:
    """Check that new requests are refused once the gateway has heard of the stop."""
    while (await http.get("/status")).json()["state"] != "draining":
        await asyncio.sleep(0.02)
    answer = await http.post("/v1/completions", json=Wanted((5, 6), 1, stream=False).body)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    assert (await http.get("/ready")).status_code == 503


@on(usually(SPLIT, of=NONE_ON_RAY))
def test_a_worker_that_dies_while_it_drains_is_started_again_and_its_streams_end_whole(stoppable: Deployment) -> None:
    # Some have to be open still when the worker is held, a tenth of a second after the first tokens.
    wanted = [Wanted(request.prompt, 600, stream=True, ignore_eos=True) for request in mixed(4, 5)]
    decode = stoppable.pid("decode-0")

    async def serve_stop_and_kill() -> list[list[int]]:
        async with client(stoppable.url) as http:
            answers = [asyncio.create_task(tokens_of(http, request)) for request in wanted]
            while await asyncio.to_thread(stoppable.metric, "generation_tokens_total") < 3 * len(wanted):
                await asyncio.sleep(0.02)
            with held(decode):
                stoppable.send(signal.SIGTERM)
                await _refused(http)
                os.kill(decode, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*answers), BACK_S)

    check_greedy(wanted, asyncio.run(serve_stop_and_kill()))
    assert stoppable.ended() == 0
    assert "decode-0 was ended by SIGKILL" in stoppable.whole_log()
    assert "it stops: open requests are finished within" in stoppable.whole_log()


@contextmanager
def _endless(deployment: Deployment) -> Iterator[None]:
    """Open streams that still have long to go: a single stream would reach its last position in seconds."""
    body = Wanted((5, 6, 7), 2000, stream=True, ignore_eos=True).body
    with ExitStack() as streams:
        lines = []
        for _ in range(ENDLESS_STREAMS):
            answer = streams.enter_context(
                httpx.stream("POST", f"{deployment.url}/v1/completions", json=body, timeout=ANSWER_S)
            )
            lines.append(answer.iter_lines())  # kept, because a dropped iterator closes its stream
            assert next(lines[-1]).startswith("data: ")
        yield


@rare  # the others end in time, and in the next a second Ctrl-C cuts off
@on(usually(SPLIT, of=NONE_ON_RAY))
def test_what_does_not_end_in_time_is_cut_off(kind: Kind) -> None:
    topology, launcher = kind
    with deployed("--drain-s", "0.5", topology=topology, launcher=launcher) as deployment, _endless(deployment):
        with held(deployment.pid("decode-0")):
            assert deployment.stop() == 0
        assert f"{ENDLESS_STREAMS} requests did not end within 0.5 s" in deployment.whole_log()


@on(usually(COLOCATED, of=NONE_ON_RAY))
def test_a_deployment_without_its_launcher_ends_and_can_start_again_and_a_second_ctrl_c_ends_it_at_once(
    kind: Kind,
) -> None:
    topology, launcher = kind
    with shared_memory() as memory:
        killed = Deployment(topology=topology, launcher=launcher, memory=memory)
        try:
            with _endless(killed):
                killed.process.kill()
                killed.check_nothing_is_left(files=False, processes_but=RAYS_OWN)
            left = set(memory.iterdir())
            assert left, "this test is about the files that are left"
        finally:
            killed.kill()
            killed.forget()
        successor = Deployment("--port", str(killed.port), "--drain-s", str(DRAIN_S), memory=memory)
        try:
            assert successor.port == killed.port
            assert not left & set(memory.iterdir()), "the next start removes what was left"
            with _endless(successor), held(successor.pid("decode-0")):
                successor.send(signal.SIGINT)
                wait_until(lambda: successor.ask("/ready").status_code == 503, BACK_S)
                assert successor.stop(within_s=SOON_S) == 0
            successor.check_nothing_is_left()
        finally:
            successor.kill()
            successor.forget()
