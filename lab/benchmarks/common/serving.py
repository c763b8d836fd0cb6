"""Deployments to measure: how a benchmark starts one, asks it for a stream of tokens, and finds its processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO, Any
from urllib.parse import urlparse

import httpx

NAME = "measured"  # of the model in the API
_PATIENCE_S = 600.0
_TITLES = (
    (re.compile(r"^alignedserve: (.*\S)"), "{}"),  # of parts that were forked, and of what forks them
    (re.compile(r"alignedserve\.launch\.start (\S+)"), "{}"),
    (re.compile(r"-m alignedserve serve"), "launcher"),
    (re.compile(r"alignedserve\.router\.side\.process"), "router's side"),
)


@dataclass(frozen=True)
class ServedDeployment:
    url: str
    pid: int  # of the launcher
    ready_s: float  # from its start until it served


def serve_command(model: Path | str, *flags: str, port: int = 0) -> list[str]:
    command = [sys.executable, "-m", "alignedserve", "serve", str(model), "--port", str(port)]
    return [*command, "--served-model-name", NAME, "--log-level", "warning", *flags]


@contextmanager
def serve(
    model: Path | str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    stderr: IO[Any] | None = None,
    port: int = 0,
) -> Iterator[ServedDeployment]:
    """Start a deployment, by a command that begins with `before`, and stop it at the end. It computes on the CPU, for
    which the loads are, unless a variable or a flag says otherwise."""
    command = [*before, *serve_command(model, *flags, port=port)]
    environment = {"ALIGNEDSERVE_ENGINE_DEVICE": "cpu", **(os.environ if environment is None else environment)}
    began = perf_counter()
    # The deployment has a session of its own, which Ctrl-C does not reach: the benchmark asks the launcher once to
    # stop, and waits until it has.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
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


# --- A request


@dataclass
class Answer:
    """Tokens of one answer and when the client read them."""

    asked_at: float
    status: int = 0
    num_tokens: int = 0  # of the output, as the usage says
    num_cached: int = 0  # tokens of the prompt that came from the pool
    tokens: list[int] = field(default_factory=list)
    token_at: list[float] = field(default_factory=list)
    begun_at: dict[int, float] = field(default_factory=dict)  # by choice, when the client read its first token

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and bool(self.token_at) and self.num_tokens > 0

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.asked_at

    @property
    def all_begun_s(self) -> float:
        """Return the time until every choice had a token."""
        return max(self.begun_at.values()) - self.asked_at

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_at, self.token_at[1:], strict=False)]


async def ask(url: str, prompt: list[int] | str, max_tokens: int, **more: Any) -> Answer:
    """Stream one greedy answer of exactly `max_tokens` tokens, without a client library: that would take its share of
    the same cores."""
    address = urlparse(url)
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    answer = Answer(perf_counter())
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.hostname}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    while line := await reader.readline():
        if not answer.status:
            answer.status = int(line.split()[1])
        if line.startswith(b"data: {"):
            _add(answer, json.loads(line[6:]))
    writer.close()
    return answer


def _add(answer: Answer, chunk: dict[str, Any]) -> None:
    if usage := chunk.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
        answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in chunk.get("choices", ()):
        # A server that does not say token ids counts one token for each piece of text.
        tokens, now = choice.get("token_ids"), perf_counter()
        count = 1 if tokens is None else len(tokens)
        answer.tokens += tokens or ()
        answer.token_at += [now] * count
        if count:
            answer.begun_at.setdefault(choice["index"], now)


async def ask_chat(url: str, messages: list[dict[str, str]], max_tokens: int) -> Any:
    """Return the whole answer to a chat, with the ids of the prompt's tokens."""
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
        return (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()


# --- Processes


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
