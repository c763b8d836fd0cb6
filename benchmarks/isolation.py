"""Chats beside saturating best-effort requests, on a colocated deployment of a random 160 M Llama, through HTTP.

    python -m benchmarks.isolation [--seconds 30] [--rate 2] [--be 32] [--model FOLDER] [-- SERVE FLAGS]

Chats come at random times (prompts of 32-256 tokens, 16-96 out), as many best-effort requests as --be are always there
(512-1,024 in, 32-128 out; service_tier flex). First each alone, then both, with three promises to the chats, of which
the tight one is measured without documents, too: not all that misses it then is their doing:

    own        TTFT: 1.10 times the p95 of chats alone, and a median step more; TBT: 1.20 times the p95 of chats alone
    tight      0.3 s and 60 ms
    default    1 s and 187.5 ms

A chat attains when its first token came within its TTFT and the p99 of its gaps within its TBT, where the client reads.
Requests are the same for every run and for other servers (same seeds). `--seconds` is the length of each of six runs.
BE tokens count over a whole run, as other servers' clients count them: with five seconds before the first chat, and
what is left to do after the last one. "BE while chats come" is from the end of a run's first third to the last chat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlparse

from benchmarks.models import VOCAB, llama160m
from benchmarks.report import report

SEED, HEAD_START_S = 11, 5.0  # of best-effort requests
COUNTED_FROM = 1 / 3  # of a run: by then the first best-effort requests have their prompts behind them
CHAT, ANSWER = (32, 256), (16, 96)
DOCUMENT, SUMMARY = (512, 1024), (32, 128)
NAME = "isolation"  # of the model in the API
DEMO = Path(__file__).parent.parent / "alignedserve" / "demo_model"


@dataclass(frozen=True)
class Promise:
    name: str
    ttft_s: float
    tbt_s: float
    least_attained: float  # goals, where BE is there too
    least_tokens_s: float | None

    @property
    def body(self) -> dict[str, Any]:
        return {"slo": {"ttft_ms": 1e3 * self.ttft_s, "tbt_ms": 1e3 * self.tbt_s}}


TIGHT = Promise("tight", 0.3, 0.06, 95.0, 132.0)
DEFAULT = Promise("default", 1.0, 0.1875, 99.0, 165.0)


@dataclass
class Answer:
    asked_at: float
    status: int = 0
    num_tokens: int = 0
    token_at: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and bool(self.token_at) and self.num_tokens > 0

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.asked_at

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_at, self.token_at[1:], strict=False)]

    def attains(self, promise: Promise) -> bool:
        if not self.is_whole or self.ttft_s > promise.ttft_s:
            return False
        return not self.gaps or share(self.gaps, 0.99) <= promise.tbt_s


@dataclass
class Run:
    """What came of one."""

    seconds: float
    chats: list[Answer]
    documents: list[Answer]
    counted: tuple[float, float]  # from when until when tokens come while chats do

    @property
    def ttfts(self) -> list[float]:
        return [one.ttft_s for one in self.chats if one.is_whole]

    @property
    def gaps(self) -> list[float]:
        return [gap for one in self.chats if one.is_whole for gap in one.gaps]

    @property
    def tokens_s(self) -> float:
        return sum(one.num_tokens for one in self.documents if one.is_whole) / self.seconds

    @property
    def meanwhile_tokens_s(self) -> float:
        """While chats come."""
        since, until = self.counted
        num_tokens = sum(since <= at < until for one in self.documents for at in one.token_at)
        return num_tokens / (until - since)


def share(values: Sequence[float], of: float) -> float:
    return sorted(values)[min(len(values) - 1, int(of * len(values)))]


# --- The load


class Load:
    def __init__(
        self, url: str, model: str, rate: float, seconds: float, num_documents: int, vocab: int = VOCAB
    ) -> None:
        address = urlparse(url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port, self._model = address.hostname, address.port, model
        self._rate, self._seconds, self._num_documents, self._vocab = rate, seconds, num_documents, vocab

    async def run(self, promise: Promise | None, *, with_documents: bool) -> Run:
        """Without a promise there are no chats."""
        begun, documents = perf_counter(), list[Answer]()
        ends_at, draw = begun + self._seconds, Random(SEED + 1)
        closed = self._num_documents if with_documents else 0
        jobs = [self._documents(documents, draw, ends_at) for _ in range(closed)]
        chats = asyncio.create_task(self._chats(promise, begun + HEAD_START_S * with_documents, ends_at))
        await asyncio.gather(chats, *jobs)
        counted = (begun + COUNTED_FROM * self._seconds, ends_at)
        return Run(perf_counter() - begun, await chats, documents, counted)

    async def _documents(self, ended: list[Answer], draw: Random, ends_at: float) -> None:
        while perf_counter() < ends_at:
            size, most = draw.randint(*DOCUMENT), draw.randint(*SUMMARY)
            prompt = [draw.randrange(3, self._vocab) for _ in range(size)]
            ended.append(await self.ask(prompt, most, {"service_tier": "flex"}))

    async def _chats(self, promise: Promise | None, at: float, ends_at: float) -> list[Answer]:
        draw, tasks = Random(SEED), list[asyncio.Task[Answer]]()
        while promise is not None and (at := at + draw.expovariate(self._rate)) < ends_at:
            size, most = draw.randint(*CHAT), draw.randint(*ANSWER)
            prompt = [draw.randrange(3, self._vocab) for _ in range(size)]
            await asyncio.sleep(max(0.0, at - perf_counter()))
            tasks.append(asyncio.create_task(self.ask(prompt, most, promise.body)))
        return list(await asyncio.gather(*tasks))

    async def ask(self, prompt: list[int], most: int, more: dict[str, Any]) -> Answer:
        """By hand: a client library would take its share of the same cores."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # most tokens of random weights have no text in a small tokenizer
            **more,
        }
        answer = Answer(perf_counter())
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        while line := await reader.readline():
            if not answer.status:
                answer.status = int(line.split()[1])
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                if said.get("usage"):
                    answer.num_tokens = said["usage"]["completion_tokens"]
                for choice in said.get("choices", ()):
                    num_tokens = len(choice.get("token_ids") or ("some text",))
                    answer.token_at += [perf_counter()] * num_tokens
        writer.close()
        return answer


# --- The deployment


@contextmanager
def served(folder: Path, flags: Sequence[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "alignedserve", "serve", str(folder), "--port", "0"]
    command += ["--served-model-name", NAME, "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(found[0] for line in server.stdout if (found := re.findall(r"http://[\d.]+:\d+", line)))
        finally:
            server.send_signal(signal.SIGINT)


def random_model(folder: Path, make: Callable[[Path], Path] = llama160m) -> Path:
    """Prompts are token ids, so any tokenizer will do."""
    model = make(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model / name)
    return model


def own(alone: Run) -> Promise:
    """What chats get where nobody else is, and a little more."""
    step_s = median(alone.gaps)
    return Promise("own", 1.10 * share(alone.ttfts, 0.95) + step_s, 1.20 * share(alone.gaps, 0.95), 95.0, None)


# --- What came of it


def tell(of: str, run: Run, promise: Promise, alone: Run | None) -> bool:
    """Whether it is as it should be, beside best-effort requests that are measured alone too."""
    num, met = max(1, len(run.chats)), []
    attained = 100 * sum(one.attains(promise) for one in run.chats) / num
    report(f"{of}: chats", len(run.chats), "1")
    for name, values, promised in (("TTFT", run.ttfts, promise.ttft_s), ("TBT", run.gaps, promise.tbt_s)):
        for label, at in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            report(f"{of}: {name} {label}", 1e3 * share(values, at), "ms", baseline=1e3 * promised)
        in_time = 100 * sum(one <= promised for one in values) / max(1, len(values))
        goal = 95.0 if alone is not None and promise.name == "own" else None
        met.append(report(f"{of}: {name} in time", in_time, "%", goal=goal, at_least=True))
    if alone is None:
        report(f"{of}: chats attained", attained, "%")
        return True
    met.append(report(f"{of}: chats refused or failed", sum(not one.is_whole for one in run.chats), "1", goal=0))
    met.append(report(f"{of}: BE failed", sum(not one.is_whole for one in run.documents), "1", goal=0))
    goal_attained = None if promise.name == "own" else promise.least_attained
    met.append(report(f"{of}: chats attained", attained, "%", goal=goal_attained, at_least=True))
    goal = promise.least_tokens_s
    met.append(report(f"{of}: BE", run.tokens_s, "tokens/s", baseline=alone.tokens_s, goal=goal, at_least=True))
    report(f"{of}: BE while chats come", run.meanwhile_tokens_s, "tokens/s", baseline=alone.meanwhile_tokens_s)
    return all(met)


async def runs(load: Load) -> bool:
    await load.ask([3] * 20, 4, {})  # what a first request warms up
    alone = await load.run(DEFAULT, with_documents=False)
    tell("chats alone", alone, DEFAULT, None)
    documents = await load.run(None, with_documents=True)
    report("BE alone", documents.tokens_s, "tokens/s")
    met = []
    for promise in (own(alone), TIGHT, DEFAULT):
        report(f"{promise.name}: promised TTFT", 1e3 * promise.ttft_s, "ms")
        report(f"{promise.name}: promised TBT", 1e3 * promise.tbt_s, "ms")
        if promise is TIGHT:
            tell("tight, alone", await load.run(promise, with_documents=False), promise, None)
        met.append(tell(promise.name, await load.run(promise, with_documents=True), promise, documents))
    return all(met)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in each run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="chats in a second (default: %(default)s)")
    parser.add_argument("--be", type=int, default=32, help="best-effort requests at once (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer, in place of random weights")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder))
        with served(model, args.flags) as url:
            met = asyncio.run(runs(Load(url, NAME, args.rate, args.seconds, args.be)))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
