"""Faults of a deployment and its machine, as rows of lab.benchmarks.hostile. Baselines are of commit 0d46efdc."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from socket import socket
from time import perf_counter, sleep
from typing import Any, NamedTuple

import httpx

from alignedserve.core import Role
from alignedserve.kvpool.arena.shared_files import ALONE
from alignedserve.lab.benchmarks.common.report import report
from alignedserve.lab.benchmarks.common.serving import (
    NAME,
    Answer,
    ServedDeployment,
    ask,
    name_of,
    parts_under,
    serve,
    serve_command,
)
from tests.planted import LOST_LOGS, lost_log
from tests.poison.trial import Poison

INNOCENTS, TOKENS = 20, 200
MOST_DEATHS = 3
BACK_S = 240.0  # for a poisonous request to be given up, and for a part that was killed to come back
REST_S = 6.0  # before each: a worker that has just been ended would wait longer and longer for its next start
LOOK_S = 0.1
TOPOLOGIES = ("colocated", "2xcolocated", "1+1")
PLACES = {"prompt": "first chunk", "decode": "sixth decode on", "sampling": "sampling", "end": "last decode"}
SMALL = ("--pool-memory-mb", "256")  # half of the machine's memory would be filled at each start


class Harm(NamedTuple):
    """What one poisonous request did."""

    deaths: int
    lost: int  # innocents
    given_up_s: float  # infinite if it was not given up, or the time for which it was watched at that commit


BEFORE = {
    ("colocated", "prompt"): Harm(7, 20, 80),
    ("2xcolocated", "prompt"): Harm(10, 0, 30),
    ("2xcolocated", "decode"): Harm(28, 20, 130),
    ("1+1", "decode"): Harm(15, 20, 164),
    ("colocated", "hang"): Harm(0, 20, 405),
}


# --- Requests that end the worker that runs them, or hold it up


@contextmanager
def poisoned(model: str, topology: str) -> Iterator[tuple[ServedDeployment, Poison]]:
    with tempfile.TemporaryDirectory() as folder:
        poison = Poison(Path(folder))
        environment = {**os.environ, **poison.environment}
        with serve(model, "--topology", topology, *SMALL, environment=environment) as deployment:
            yield deployment, poison


async def is_ready(http: httpx.AsyncClient) -> bool:
    with suppress(httpx.TransportError):
        return (await http.get("/ready")).status_code == 200
    return False


async def attacked(
    deployment: ServedDeployment, poison: Poison, place: str, way: str, watch: Awaitable[object] | None = None
) -> Harm:
    """Send a poisonous request beside chats that stream, and watch what happens meanwhile."""

    async def num_tokens() -> float:
        exposed = (await http.get("/metrics")).text
        found = re.findall(r"^alignedserve:generation_tokens_total(?:{[^}]*})? (\S+)$", exposed, re.MULTILINE)
        return sum(map(float, found))

    async def given_up_s() -> float:
        began = perf_counter()
        path, body = poison.arm(place, way, NAME)
        answer = await http.post(path, json=body)
        return perf_counter() - began if answer.status_code == 500 else inf

    async with httpx.AsyncClient(base_url=deployment.url, timeout=BACK_S, trust_env=False) as http:
        while not await is_ready(http):
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(REST_S)
        deaths, tokens = poison.num_strikes, await num_tokens()
        chats = [asyncio.create_task(ask(deployment.url, [5 + at, 6, 7], TOKENS)) for at in range(INNOCENTS)]
        while await num_tokens() < tokens + INNOCENTS:
            await asyncio.sleep(0.02)
        watching = asyncio.ensure_future(watch or asyncio.sleep(0))
        took_s = inf
        with suppress(httpx.TransportError):  # it may have ended the deployment
            took_s = await given_up_s()
        await asyncio.wait(chats, timeout=BACK_S)
        watching.cancel()
    served = [chat.result() for chat in chats if chat.done() and chat.exception() is None]
    return Harm(poison.num_strikes - deaths, INNOCENTS - sum(is_whole(answer) for answer in served), took_s)


def is_whole(answer: Answer) -> bool:
    return answer.is_whole and answer.num_tokens == TOKENS


def report_harm(name: str, harm: Harm, before: Harm | None) -> None:
    was: Any = before or (None,) * 3
    deaths = f"{name}: deaths of workers until it is given up"
    report(deaths, harm.deaths, "", baseline=was[0] or None, goal=MOST_DEATHS)
    report(f"{name}: chats lost of {INNOCENTS}", harm.lost, "", baseline=was[1], goal=0)
    report(f"{name}: until its 500", harm.given_up_s, "s", baseline=was[2])


def measure_poison(model: str) -> None:
    for topology in TOPOLOGIES:
        with poisoned(model, topology) as (deployment, poison):
            for name, place in PLACES.items():
                harm = asyncio.run(attacked(deployment, poison, place, "SIGKILL"))
                report_harm(f"poison, {name}, {topology}", harm, BEFORE.get((topology, name)))


def measure_hang(model: str) -> None:
    not_ready_s = ended_s = inf

    async def watch() -> None:
        nonlocal not_ready_s, ended_s
        worker = pid_of(deployment, "decode-0")
        while not poison.num_strikes:
            await asyncio.sleep(LOOK_S)
        began = perf_counter()
        async with httpx.AsyncClient(base_url=deployment.url, timeout=BACK_S, trust_env=False) as http:
            while await is_ready(http):
                await asyncio.sleep(LOOK_S)
        not_ready_s = perf_counter() - began
        while Path(f"/proc/{worker}").exists():
            await asyncio.sleep(LOOK_S)
        ended_s = perf_counter() - began

    with poisoned(model, "colocated") as (deployment, poison):
        before = BEFORE["colocated", "hang"]
        harm = asyncio.run(attacked(deployment, poison, "sixth decode on", "sleeps", watch()))
        report("hang: until /ready is not 200", not_ready_s, "s", baseline=before.given_up_s, goal=10)
        report("hang: until the worker has ended itself", ended_s, "s", baseline=before.given_up_s, goal=15)
        report_harm("hang", harm, before)


# --- Logs, locks and memory


def pid_of(deployment: ServedDeployment, part: str) -> int | None:
    return next((pid for pid, name in parts_under(deployment.pid).items() if name == part), None)


def serves(url: str) -> bool:
    with suppress(OSError, ValueError, asyncio.TimeoutError):
        return asyncio.run(asyncio.wait_for(ask(url, [5, 6], 4), BACK_S)).is_whole
    return False


def outlives(deployment: ServedDeployment, part: str) -> bool:
    """Kill the part, and return whether it comes back, and requests are served."""
    pid = pid_of(deployment, part)
    if pid is None:
        return False
    os.kill(pid, signal.SIGKILL)
    deadline = perf_counter() + BACK_S
    while pid_of(deployment, part) in (None, pid) or not serves(deployment.url):
        if perf_counter() > deadline:
            return False
        sleep(LOOK_S)
    return True


def measure_log(model: str) -> None:
    parts, before = ("jobs-0", "decode-0", "gateway-0", "jobs-0"), {"its reader has gone": 4, "its disk is full": 3}
    for how in LOST_LOGS:
        with lost_log(how) as log, serve(model, *SMALL, stderr=log) as deployment:
            num_lost = sum(not outlives(deployment, part) for part in parts)
        name = f"the log, {how}: parts that do not come back, of {len(parts)}"
        report(name, num_lost, "", baseline=before.get(how), goal=0)


def with_memory(size: str, first: str = "") -> list[str]:
    """Return what to write before a command to give it a /dev/shm of its own, and run `first` before. It takes root."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} shm /dev/shm && {first} exec "$@"', "sh"]


def measure_locks(model: str) -> None:
    """Each lock is held by a file that the launcher has inherited, and never uses."""
    neighbour, name = with_memory("2g", "exec 9</dev/shm && flock 9 &&"), "a neighbour's lock on /dev/shm"
    with serve(model, *SMALL, before=neighbour) as deployment:
        report(f"{name}: until it serves", deployment.ready_s, "s", baseline=30, goal=30)
        is_lost = not outlives(deployment, "decode-0")
        report(f"{name}: parts that do not come back, of 1", is_lost, "", baseline=1, goal=0)

    ours, said_s, began = "/dev/shm/alignedserve-$(id -u)", inf, perf_counter()
    stuck = with_memory("2g", f"mkdir -m 700 {ours} && exec 9>>{ours}/{ALONE} && flock 9 &&")
    command = [*stuck, *serve_command(model, *SMALL)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        assert launcher.stderr is not None
        if any("waits for the lock" in line for line in launcher.stderr):
            said_s = perf_counter() - began
        launcher.kill()
    report("a lock that a stuck process of ours keeps: until the start says so", said_s, "s", goal=10)


def measure_memory(model: str) -> None:
    for size, flags in (("1m", ()), ("64m", ()), ("2g", ("--pool-memory-mb", "32"))):
        is_served = False
        with tempfile.TemporaryFile("w+") as log:
            with suppress(SystemExit), serve(model, *flags, stderr=log, before=with_memory(size)) as deployment:
                is_served = serves(deployment.url)
            log.seek(0)
            said = log.read().splitlines()
        name = " ".join([f"/dev/shm of {size}", *flags])
        is_riddle = not is_served and len(said) != 1
        report(f"{name}: neither serves nor says why in one line", is_riddle, "", baseline=1, goal=0)


# --- A launcher that is killed


def measure_launcher(model: str) -> None:
    """Kill the launcher, and start the next one at once, which goes on with the parts."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = (*SMALL, "--topology", "1+1", "--profile-s", "0", "--set", "engine.tune_s=0")  # what no later start repeats
    with serve(model, *flags, port=port) as first:
        parts = {pid: name for pid, name in parts_under(first.pid).items() if name.partition("-")[0] in set(Role)}
        os.kill(first.pid, signal.SIGKILL)
        killed_at = perf_counter()
        with serve(model, *flags, port=port) as second:
            greeted_s = perf_counter() - killed_at
            answer = asyncio.run(ask(second.url, [5, 6, 7], 4))
            lost = parts.keys() - {pid for pid, name in parts.items() if _is(pid, name)}
            new = [name for name in parts_under(second.pid).values() if name in parts.values()]
    name = "the launcher, killed"
    report(f"{name}: load average of the {os.cpu_count()} processors", os.getloadavg()[0], "")
    report(f"{name}: until the next one greets", greeted_s, "s", baseline=first.ready_s)
    first_token_s = answer.token_at[0] - killed_at if answer.is_whole else inf
    report(f"{name}: until the first token of a new request", first_token_s, "s", goal=15)
    report(f"{name}: of {len(parts)} parts, those that are other processes", len(lost) + len(new), "", goal=0)


def _is(pid: int, name: str) -> bool:
    with suppress(OSError):
        return name_of(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")) == name
    return False


FAULTS = {
    "poison": measure_poison,
    "hang": measure_hang,
    "launcher": measure_launcher,
    "log": measure_log,
    "locks": measure_locks,
    "memory": measure_memory,
}
