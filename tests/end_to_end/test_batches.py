"""Tests of batch jobs on whole deployments: the example of documents, and durability while each part is killed in
turn."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.launch.keeper import MOST_QUICK_DEATHS
from alignedserve.store.redis_client import connect, key_prefix
from alignedserve.store.storage import KEY_PREFIX
from tests.conftest import SOAK
from tests.end_to_end.client import Wanted, all_tokens, check_greedy, client, command, mixed, streamed, tokens_of
from tests.end_to_end.deployment import ANSWER_S, BACK_S, Deployment, deployed, wait_until
from tests.end_to_end.patient import ENDED, Patient
from tests.rare import rare, thinned
from tests.redis_server import PASSWORDS, REPLICATED, RedisServer, Servers

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extraction_batch.jsonl"
DONE_S = 1_800.0 if SOAK else 600.0
LINES = 2_000 if SOAK else 10
FAILOVER_LINES = 240  # more than run while the chats begin
KILLS = 32 if SOAK else 2
# seconds between two kills of one part: the launcher gives up a part that never lives for longer than 5 s
APART_S = 6.0
PARTS = {"colocated": ("decode-0",), "1+1": ("prefill-0", "decode-0", "pool-0")}
# parts that chats do not need: chats that run while one of these is killed get all their tokens
UNTOUCHED = ("jobs-0", "redis")
STREAMS_S = 240.0  # for chats to begin: a part that was killed before may still be starting again
# tests/jobs has both stores.
STORES = thinned([("redis", "1+1"), ("sqlite", "colocated"), ("sqlite", "1+1"), ("redis", "colocated")], usual=1)


def batch(deployment: Deployment, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return command("batch", *arguments, "--url", f"{deployment.url}/v1")


def test_the_example_of_documents_from_the_command_line(deployment: Deployment, tmp_path: Path) -> None:
    lines, out = tmp_path / "orders.jsonl", tmp_path / "facts.jsonl"
    asked = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    lines.write_text("".join(json.dumps(line | {"body": line["body"] | {"model": "demo"}}) + "\n" for line in asked))
    submitted = batch(deployment, "submit", lines, "--window", "1h", "--wait", "--out", out)
    assert submitted.returncode == 0, submitted.stderr
    id = submitted.stdout.split()[0]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(line["custom_id"] for line in asked)
    assert {row["response"]["status_code"] for row in rows} == {200}
    all_of = f"{len(asked)} done, 0 failed, {len(asked)} in all  window 1h"
    assert f"{id}  completed  {all_of}" in batch(deployment, "status", id).stdout
    assert id in batch(deployment, "list", "--limit", "3").stdout
    assert batch(deployment, "cancel", id).stderr.count("\n") == 1
    again = tmp_path / "again.jsonl"
    assert batch(deployment, "download", id, again).returncode == 0
    assert again.read_bytes() == out.read_bytes()


def test_a_file_that_is_wrong_is_told_line_by_line(deployment: Deployment, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(f"{EXAMPLE.read_text().splitlines()[0]}\n{{\n")
    submitted = batch(deployment, "submit", wrong, "--wait")
    assert submitted.returncode == 1
    assert "line 2: the line is not JSON" in submitted.stderr
    missing = batch(deployment, "submit", tmp_path / "nowhere")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


# --- Durability


@pytest.fixture
def redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer | None]:
    if request.param == "sqlite":
        yield None
        return
    server = RedisServer(tmp_path)
    yield server
    server.kill()


class Killer:
    """Kills parts, and the store, in turn, but the same part never too soon again; each ended part is started again."""

    def __init__(self, deployment: Deployment, topology: str, redis: RedisServer | None, seed: int) -> None:
        self._deployment, self._redis = deployment, redis
        self._draw = random.Random(seed)
        self._victims = ["jobs-0", "gateway-0", "router", *PARTS[topology], *(["redis"] if redis is not None else [])]
        self._at = dict.fromkeys(self._victims, -math.inf)
        self.killed: list[str] = []
        self._chats = [chat for chat in mixed(8 * KILLS, seed=5, outputs=(60, 90)) if chat.stream]
        self.chatted: list[tuple[Wanted, list[int]]] = []  # chats that ran during a kill

    def kill(self) -> None:
        rested = [victim for victim in self._victims if time.monotonic() - self._at[victim] > APART_S]
        fresh = [victim for victim in rested if victim not in self.killed] or rested
        if not fresh:
            return
        victim = self._draw.choice(fresh) if self.killed else "jobs-0"
        self.killed.append(victim)
        if victim in UNTOUCHED:
            asyncio.run(self._kill_beside_chats(victim))
        else:
            self._end(victim)
        self._at[victim] = time.monotonic()

    async def _kill_beside_chats(self, victim: str) -> None:
        wanted = [self._chats.pop(), self._chats.pop()]
        async with client(self._deployment.url) as http:
            begun = await asyncio.gather(*(_begun(http, request) for request in wanted))
            await asyncio.to_thread(self._end, victim)
            for request, (chunks, tokens) in zip(wanted, begun, strict=True):
                async for chunk in chunks:
                    tokens += chunk["choices"][0].get("token_ids") or ()
                self.chatted.append((request, tokens))

    def _end(self, victim: str) -> None:
        if victim == "redis":
            assert self._redis is not None
            self._redis.kill()
            self._redis.start()
        else:
            # the part has just ended by itself, and will start again
            with suppress(ProcessLookupError, AssertionError):
                os.kill(self._deployment.pid(victim), signal.SIGKILL)


async def _begun(http: httpx.AsyncClient, wanted: Wanted) -> tuple[AsyncGenerator[Any, None], list[int]]:
    """Return a stream and its first tokens; send the request again until the stream begins."""
    deadline = time.monotonic() + STREAMS_S
    while True:
        chunks = streamed(http, wanted.body)
        try:
            first = await anext(chunks)
            return chunks, list(first["choices"][0].get("token_ids") or ())
        except (httpx.TransportError, AssertionError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(("redis", "topology"), STORES, indirect=["redis"])
def test_whatever_is_killed_every_line_is_answered_once_and_right(redis: RedisServer | None, topology: str) -> None:
    wanted = mixed(LINES, seed=7, prompts=(3, 200), outputs=(20, 60))
    store = [] if redis is None else ["--jobs-store", redis.url]
    with deployed("--max-batch", "8", *store, topology=topology) as deployment:
        patient, killer = Patient(deployment), Killer(deployment, topology, redis, seed=11)
        id = patient.submit(wanted)
        killer.kill()  # later kills happen while the batch runs
        deadline = time.monotonic() + DONE_S
        while (batch := patient.look(id))["status"] not in ENDED:
            assert time.monotonic() < deadline, (batch, killer.killed, deployment.log())
            done = batch["request_counts"]["completed"]
            if done > len(killer.killed) * LINES // (KILLS + 1):
                killer.kill()
            time.sleep(0.1 * killer._draw.random())
        print(f"killed: {killer.killed}")
        # No kill happens while a gateway is starting again, and a short job may end by then.
        assert len(killer.killed) >= (KILLS - 1 if SOAK else 1), killer.killed
        answers = _answers(patient, id, LINES)
    check_greedy(wanted, answers)
    if killer.chatted:
        chats, tokens = zip(*killer.chatted, strict=True)
        check_greedy(chats, tokens)


@rare  # tests/store has such servers, and the test above a whole deployment on one Redis
@pytest.mark.parametrize("kind", ["sentinels with TLS and passwords", "cluster"])
def test_after_a_failover_every_line_is_answered_once_and_streams_go_on(tmp_path: Path, kind: str) -> None:
    """Batches are also submitted while there is no master: each that was acknowledged is there, and complete."""
    servers, lines = REPLICATED[kind](tmp_path), mixed(FAILOVER_LINES, seed=13, prompts=(3, 200), outputs=(60, 90))
    chats = [chat for chat in mixed(8, seed=14, outputs=(100, 150)) if chat.stream]
    later = [mixed(2, seed=seed, outputs=(5, 20)) for seed in range(15, 21)]

    async def chat_and_kill(url: str) -> tuple[list[str], list[list[int]]]:
        async with client(url) as http:
            begun = [await _begun(http, chat) for chat in chats]
            assert await _master(servers) == servers.servers[0]
            looked = await http.get(f"/v1/batches/{id}")
            assert looked.json()["request_counts"]["completed"] < FAILOVER_LINES, "the batch runs"
            await asyncio.to_thread(servers.kill, servers.servers[0])
            submitting = asyncio.create_task(asyncio.to_thread(lambda: [*map(patient.submit, later)]))
            for chunks, tokens in begun:
                async for chunk in chunks:
                    tokens += chunk["choices"][0].get("token_ids") or ()
        return await submitting, [tokens for _, tokens in begun]

    try:
        with deployed("--max-batch", "8", "--jobs-store", servers.url, topology="1+1") as deployment:
            patient = Patient(deployment)
            id = patient.submit(lines)
            wait_until(lambda: patient.look(id)["request_counts"]["completed"] >= 3, DONE_S, deployment.log)
            ids, tokens = asyncio.run(chat_and_kill(deployment.url))
            answers = []
            for each, wanted in zip([id, *ids], [lines, *later], strict=True):
                wait_until(lambda: patient.look(each)["status"] in ENDED, DONE_S, deployment.log)  # noqa: B023
                answers += _answers(patient, each, len(wanted))
            assert not re.search(PASSWORDS, deployment.whole_log())
    finally:
        servers.kill()
    check_greedy([*lines, *chain(*later)], answers)
    check_greedy(chats, tokens)


async def _master(servers: Servers) -> int:
    """Return the port of the server that has the jobs."""
    async with connect(servers.url, key_prefix(servers.url, KEY_PREFIX)) as redis:
        return int((await redis.info("server"))["tcp_port"])


def _answers(patient: Patient, id: str, total: int) -> list[list[int]]:
    """Return the tokens of each line of a batch that must have completed; each line has one answer."""
    batch = patient.look(id)
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": total, "completed": total, "failed": 0}
    rows = patient.rows(batch)
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in rows}
    assert len(rows) == len(answers) == total
    return [answers[str(number)]["token_ids"] for number in range(total)]


@rare  # the test above kills it too
def test_chats_do_not_notice_that_the_job_runner_was_killed(deployment: Deployment) -> None:
    lines, chats = mixed(8, seed=3, outputs=(40, 60)), mixed(2, seed=4, outputs=(100, 150))
    patient = Patient(deployment)

    async def chat_and_kill() -> list[list[int]]:
        before = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            answers = [asyncio.create_task(tokens_of(http, chat)) for chat in chats]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < before + 20:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(deployment.wound, "jobs-0")
            return await asyncio.gather(*answers)

    id = patient.submit(lines)
    check_greedy(chats, asyncio.run(chat_and_kill()))
    wait_until(lambda: patient.look(id)["status"] == "completed", DONE_S, deployment.log)


@rare  # tests/launch/test_keeper.py has such a part, and tests/jobs a store without a runner
def test_chats_go_on_while_the_job_runner_does_not_stay_up(deployment: Deployment) -> None:
    """Killed as soon as it is back, more often than a part may die that nothing can be served without, it stays away
    for longer and longer. New jobs are refused with 503 then, and nothing else ends."""
    others = ("router", "decode-0", "gateway-0")
    before, chats = {part: deployment.pid(part) for part in others}, mixed(4, seed=5, outputs=(30, 60))
    killed = set[int]()

    def add_job() -> int:
        return httpx.post(f"{deployment.url}/v1/batches", json={}, timeout=ANSWER_S, trust_env=False).status_code

    def kill_and_ask() -> bool:
        if deployment.runs("jobs-0"):
            killed.add(pid := deployment.pid("jobs-0"))
            os.kill(pid, signal.SIGKILL)
        return add_job() == 503

    assert add_job() == 400  # it names no file
    wait_until(kill_and_ask, BACK_S, deployment.log)
    check_greedy(chats, asyncio.run(all_tokens(deployment.url, chats)))
    assert len(killed) > MOST_QUICK_DEATHS
    wait_until(lambda: add_job() == 400, BACK_S, deployment.log)
    assert {part: deployment.pid(part) for part in others} == before
