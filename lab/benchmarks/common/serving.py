"""Deployments to measure: how a benchmark starts one, plays a load on it, and finds its processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter

from alignedserve.lab.bench.answer import StreamedAnswer
from alignedserve.lab.bench.connections import Address, Connections
from alignedserve.lab.bench.core import Dialect, LoadTest
from alignedserve.lab.bench.player import CONNECT_S, Player
from alignedserve.lab.bench.wording import AnyWording
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.loads.workload import Load
from alignedserve.lab.loads.workload.spec import read_workload

NAME = "measured"  # of the model in the API
_PATIENCE_S = 600.0
_TITLES = (
    (re.compile(r"^alignedserve: (.*\S)"), "{}"),  # of parts that were forked, and of what forks them
    (re.compile(r"alignedserve\.launch\.start (\S+)"), "{}"),
    (re.compile(r"-m alignedserve\S* serve"), "launcher"),
    (re.compile(r"alignedserve\.router\.side\.process"), "router's side"),
)


@dataclass(frozen=True)
class ServedDeployment:
    url: str
    pid: int  # of the launcher
    ready_s: float  # from its start until it served


@contextmanager
def serve(model: Path | str, *flags: str, program: str = "alignedserve") -> Iterator[ServedDeployment]:
    """Start a deployment, and stop it at the end. It computes on the CPU, for which the loads are, unless a variable or
    a flag says otherwise."""
    command = [sys.executable, "-m", program, "serve", str(model), "--port", "0"]
    command += ["--served-model-name", NAME, "--log-level", "warning", *flags]
    environment = {"ALIGNEDSERVE_ENGINE_DEVICE": "cpu", **os.environ}
    began = perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a benchmark that is ended stops it, too
    # The deployment has a session of its own, which Ctrl-C does not reach: the benchmark asks the launcher once to
    # stop, and waits until it has.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        try:
            urls = (found[0] for line in launcher.stdout if (found := re.findall(r"http://[\d.]+:\d+", line)))
            if (url := next(urls, None)) is None:
                raise SystemExit("the deployment did not start: what it logged says why")
            yield ServedDeployment(url, launcher.pid, perf_counter() - began)
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait()


# --- Requests, by the client of `alignedserve bench`


@dataclass(frozen=True)
class Answer:
    asked_at: float
    read: StreamedAnswer

    @property
    def is_whole(self) -> bool:
        return self.read.failure is None and len(self.read.token_at) > 0

    @property
    def ttft_s(self) -> float:
        return self.read.token_at[0] - self.asked_at

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.read.token_at)]


async def ask(url: str, prompt: list[int] | str, max_tokens: int) -> Answer:
    """Stream one greedy answer of exactly `max_tokens` tokens."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    connections, asked_at = Connections(Address.parse(f"{url}/v1", None), perf_counter, CONNECT_S), perf_counter()
    try:
        return Answer(asked_at, await connections.ask("", "/completions", json.dumps(body).encode()))
    finally:
        connections.close()


def player_of(
    url: str,
    workload: str,
    wording: AnyWording,
    seed: int = 0,
    api_key: str | None = None,
    silence_s: float = _PATIENCE_S,
) -> tuple[Player, LoadTest]:
    """Return a load test of the workload that is written so, and what plays it. It hangs up on an answer that is
    silent for so long."""
    test = LoadTest(Load(read_workload(workload), ["bench"], seed), wording, Dialect(NAME))
    return Player(test, Address.parse(f"{url}/v1", api_key), silence_s, lambda *_: None), test


def played(
    url: str, workload: str, wording: AnyWording, api_key: str | None = None, silence_s: float = _PATIENCE_S
) -> RunRecord:
    player, test = player_of(url, workload, wording, api_key=api_key, silence_s=silence_s)
    asyncio.run(player.play())
    return test.record()


# --- Processes


@contextmanager
def beside(work: Callable[..., None], *arguments: object, times: int = 1) -> Iterator[Sequence[BaseProcess]]:
    """Run endless work in this number of processes while the block runs."""
    spawn = get_context("spawn")
    processes = [spawn.Process(target=work, args=arguments, daemon=True) for _ in range(times)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def processes_under(root: int) -> dict[int, str]:
    """Return the commands of all processes that this process has started, directly or not, by process id."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, open_ = dict[int, str](), [root]
    while open_:
        new = children.get(open_.pop(), [])
        open_ += new
        for pid in new:
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


def name_of(command: str) -> str | None:
    """Return the name of the part that a process runs, or None for another process, such as a shell."""
    found = ((pattern.search(command), name) for pattern, name in _TITLES)
    return next((name.format(*match.groups()) for match, name in found if match), None)


def parts_under(pid: int) -> dict[int, str]:
    """Return the parts of a deployment: process -> name."""
    names = {of: name_of(command) for of, command in processes_under(pid).items()}
    return {of: name for of, name in names.items() if name}


def memory_mb(pid: int, row: str) -> float:
    """Return VmRSS, what the process holds now, or VmHWM, the most that it held."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in rows if line.startswith(f"{row}:")) / 1024
