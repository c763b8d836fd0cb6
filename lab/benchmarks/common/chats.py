"""Chats beside best-effort documents: one load for two backends, a deployment over HTTP and the simulator.

Chats come at random times (prompts of 32-256 tokens, 16-96 out). Documents are always there, as many as the load says
(512-1,024 in, 32-128 out), as requests (service_tier flex) or over HTTP as lines of one batch job: the job
runner opens as many as it sees room for. Arrivals and lengths are the same for every run and for other servers (same
seeds). Tokens are other ones in every run: what came before would be found in the cache.

Over HTTP documents begin five seconds before the first chat. Lines count by what the batch's usage grows while chats
come, when lines end as they begin: some ten lines are open at both ends, so that is off by ten tokens a second and more
in runs of 30 s. Between two such runs nothing is asked for 10 s, so that documents are not held to what the chats
before needed. The simulator takes a machine's profile (machines.py); runs of several seeds count as one.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Protocol

from alignedserve.core import ServiceClass
from alignedserve.cost import profile as cost_profile
from alignedserve.cost.model import Uncertainty
from alignedserve.lab.benchmarks.common.batches import ENDED, Batches, jsonl
from alignedserve.lab.benchmarks.common.hog import HoggedTruth, hog
from alignedserve.lab.benchmarks.common.machines import GATEWAY_MS, MACHINES, save_profile
from alignedserve.lab.benchmarks.common.models import VOCAB, llama160m
from alignedserve.lab.benchmarks.common.report import several
from alignedserve.lab.benchmarks.common.serving import NAME, Answer, ask, serve
from alignedserve.lab.benchmarks.common.simulating import recorded, save_load
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.building import device_of, settings_of
from alignedserve.loads.figures.request_figures import has_finished
from alignedserve.loads.records.distribution import percentile
from alignedserve.loads.records.records import RequestRecord, RunRecord
from alignedserve.simulator.machines.world import World
from alignedserve.simulator.run import Simulation

SEED, HEAD_START_S, APART_S = 11, 5.0, 10.0
COUNTED_FROM = 1 / 3  # of a run: by then the first documents have their prompts behind them
CHAT, ANSWER = (32, 256), (16, 96)
DOCUMENT, SUMMARY = (512, 1024), (32, 128)
LINES = 2_000  # of a batch: more than are done


@dataclass(frozen=True)
class ChatPromise:
    name: str
    ttft_s: float
    tbt_s: float
    least_attained: float | None = None  # goals, where documents are there too
    least_tokens_s: float | None = None

    def is_kept(self, chat: Answer) -> bool:
        """Whether the first token came within TTFT, and the p99 of the gaps is within TBT, where the client reads."""
        if not chat.is_whole or chat.ttft_s > self.ttft_s:
            return False
        return not chat.gaps or percentile(chat.gaps, 99) <= self.tbt_s


DEFAULT = ChatPromise("default", 1.0, 0.1875, 99.0, 165.0)


@dataclass(frozen=True)
class ChatLoad:
    rate: float  # chats in a second
    seconds: float  # of arrivals
    documents: int  # at once
    document: tuple[int, int] = DOCUMENT  # least and most tokens of a document's prompt
    summary: tuple[int, int] = SUMMARY  # and of its output


@dataclass
class ChatRun:
    seconds: float
    chats: list[Answer]
    documents: list[Answer]
    meanwhile_tokens: int  # of documents, from the end of the run's first third to the last chat
    meanwhile_s: float
    num_preempted: float | None = None  # in a run, where the backend knows
    num_recomputed: float | None = None  # tokens that were computed again, in a run, where the backend knows

    @property
    def ttfts(self) -> list[float]:
        return [chat.ttft_s for chat in self.chats if chat.is_whole]

    @property
    def gaps(self) -> list[float]:
        return [gap for chat in self.chats if chat.is_whole for gap in chat.gaps]

    @property
    def tokens_s(self) -> float:
        """Count documents' tokens over the whole run, as other servers' clients count them."""
        return sum(document.num_tokens for document in self.documents if document.is_whole) / self.seconds

    @property
    def meanwhile_tokens_s(self) -> float:
        return self.meanwhile_tokens / self.meanwhile_s

    def attained(self, promise: ChatPromise) -> float:
        return 100 * sum(map(promise.is_kept, self.chats)) / max(1, len(self.chats))

    def in_time(self, promise: ChatPromise) -> float:
        """Return the share of the chats' tokens in time; a lost chat counts the token that it still waited for."""
        on_time = sum(ttft <= promise.ttft_s for ttft in self.ttfts) + sum(gap <= promise.tbt_s for gap in self.gaps)
        lost = sum(not chat.is_whole for chat in self.chats)
        return 100 * on_time / max(1, len(self.ttfts) + len(self.gaps) + lost)


class Backend(Protocol):
    def run(self, load: ChatLoad, promise: ChatPromise | None) -> ChatRun:
        """Play the load; without a promise there are no chats."""


# --- Over HTTP


class ChatClient:
    def __init__(self, url: str, vocabulary: int = VOCAB, priority: int | None = None) -> None:
        self.url, self._vocabulary, self._text = url, vocabulary, Random()
        self._best_effort = {"service_tier": "flex"} | ({} if priority is None else {"priority": priority})

    def run(self, load: ChatLoad, promise: ChatPromise | None) -> ChatRun:
        return asyncio.run(self.play(load, promise))

    async def play(self, load: ChatLoad, promise: ChatPromise | None) -> ChatRun:
        began, documents = perf_counter(), list[Answer]()
        ends_at, draw = began + load.seconds, Random(SEED + 1)
        clients = [self._documents(load, documents, draw, ends_at) for _ in range(load.documents)]
        first_at = began + HEAD_START_S * bool(load.documents)
        chats = asyncio.create_task(self.chats(load.rate, promise, first_at, ends_at))
        await asyncio.gather(chats, *clients)
        since = began + COUNTED_FROM * load.seconds
        meanwhile = sum(since <= at < ends_at for document in documents for at in document.token_at)
        return ChatRun(perf_counter() - began, await chats, documents, meanwhile, ends_at - since)

    async def _documents(self, load: ChatLoad, ended: list[Answer], draw: Random, ends_at: float) -> None:
        while perf_counter() < ends_at:
            size, most = draw.randint(*load.document), draw.randint(*load.summary)
            ended.append(await ask(self.url, self.prompt(size), most, **self._best_effort))

    async def chats(self, rate: float, promise: ChatPromise | None, at: float, ends_at: float) -> list[Answer]:
        draw, tasks = Random(SEED), list[asyncio.Task[Answer]]()
        while promise is not None and (at := at + draw.expovariate(rate)) < ends_at:
            size, most = draw.randint(*CHAT), draw.randint(*ANSWER)
            prompt, slo = self.prompt(size), {"ttft_ms": 1e3 * promise.ttft_s, "tbt_ms": 1e3 * promise.tbt_s}
            await asyncio.sleep(max(0.0, at - perf_counter()))
            tasks.append(asyncio.create_task(ask(self.url, prompt, most, slo=slo)))
        return list(await asyncio.gather(*tasks))

    def prompt(self, size: int) -> list[int]:
        return [self._text.randrange(3, self._vocabulary) for _ in range(size)]


class ServedBatch(ChatClient):
    """Documents are the lines of one batch, which is cancelled at the end of a run."""

    async def play(self, load: ChatLoad, promise: ChatPromise | None) -> ChatRun:
        if not load.documents:
            return await super().play(load, promise)
        await asyncio.sleep(APART_S)
        batches = Batches(self.url)
        draw = Random(SEED + 1)
        batch = await batches.submit(await batches.upload(jsonl(self._line(load, draw) for _ in range(LINES))))
        await batches.until(batch, "in_progress")
        began = perf_counter()
        chats = asyncio.create_task(self.chats(load.rate, promise, began + HEAD_START_S, began + load.seconds))
        at, before = await _usage(batches, batch, began + COUNTED_FROM * load.seconds)
        ended_at, after = await _usage(batches, batch, began + load.seconds)
        answers = await chats
        failed = (await batches.look(batch))["request_counts"]["failed"]
        await batches.cancel(batch)
        await batches.until(batch, *ENDED)
        await batches.close()
        lines = [Answer(began, 500) for _ in range(failed)]
        if after > before:
            lines.append(Answer(began, 200, after - before, token_at=[at]))
        return ChatRun(ended_at - at, answers, lines, after - before, ended_at - at)

    def _line(self, load: ChatLoad, draw: Random) -> dict[str, Any]:
        size, most = draw.randint(*load.document), draw.randint(*load.summary)
        prompt = self.prompt(size)
        return {"model": NAME, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


async def _usage(batches: Batches, batch: str, at: float) -> tuple[float, int]:
    """Wait until then; return when the batch was looked at, and the output tokens of lines that had ended."""
    await asyncio.sleep(max(0.0, at - perf_counter()))
    found = await batches.look(batch)
    return perf_counter(), found["usage"]["output_tokens"]


# --- Simulated


class Simulated:
    def __init__(
        self, profile: Path, seeds: Sequence[int], options: tuple[str, ...] = (), has_hog: bool = False
    ) -> None:
        self._profile, self._seeds, self._has_hog = profile, seeds, has_hog
        self._trial = SimulationTrial("aligned", profile=str(profile), options=options, gateway_ms=GATEWAY_MS)

    def of_preset(self, preset: str) -> Simulated:
        """Return the same deployment with this preset."""
        other = copy(self)
        other._trial = replace(self._trial, preset=preset)
        return other

    def run(self, load: ChatLoad, promise: ChatPromise | None) -> ChatRun:
        runs = [self._of_seed(load, promise, seed) for seed in self._seeds]
        return ChatRun(
            sum(run.seconds for run in runs),
            [chat for run in runs for chat in run.chats],
            [document for run in runs for document in run.documents],
            sum(run.meanwhile_tokens for run in runs),
            sum(run.meanwhile_s for run in runs),
            sum(run.num_preempted or 0.0 for run in runs) / len(runs),
            sum(run.num_recomputed or 0.0 for run in runs) / len(runs),
        )

    def _of_seed(self, load: ChatLoad, promise: ChatPromise | None, seed: int) -> ChatRun:
        streams = [_chats(load, promise)] if promise else []
        streams += [_documents(load)] if load.documents else []
        workload = save_load(self._profile.with_name("load.yaml"), load.seconds, *streams)
        settings = settings_of(replace(self._trial, workload=workload, seed=seed))
        world = World(seed, settings.network, settings.checked)
        if self._has_hog:
            hogged = HoggedTruth(cost_profile.load(self._profile).model, seed, lambda: world.agenda.now)
            settings = replace(settings, timing=replace(device_of(self._trial), truth=hogged))
        record = recorded(Simulation(settings, world=world))
        chats = [request for request in record.requests if request.service is ServiceClass.RT]
        documents = [request for request in record.requests if request.service is ServiceClass.BE]
        since, until = (record.began_at + share * load.seconds for share in (COUNTED_FROM, 1.0))
        meanwhile = sum(since <= at < until for document in documents for at in document.token_at)
        preempted = sum(request.num_preempted for request in record.requests)
        answers = [[_answer(request) for request in requests] for requests in (chats, documents)]
        return ChatRun(
            record.duration_s, answers[0], answers[1], meanwhile, until - since, preempted, num_recomputed(record)
        )


def num_recomputed(record: RunRecord) -> int:
    """Return the tokens that chunks computed beyond the prompts of requests that got output: no two begin alike."""
    computed = sum(step.shape.chunk_tokens for step in record.steps)
    return computed - sum(request.num_prompt for request in record.requests if request.token_at)


def _chats(load: ChatLoad, promise: ChatPromise) -> dict[str, Any]:
    sizes = {"prompt": "{}-{}".format(*CHAT), "output": "{}-{}".format(*ANSWER), "max_tokens": ANSWER[1]}
    stream = {"name": "chat", "kind": "sizes", **sizes, "rate": load.rate}
    return stream | {"ttft_s": promise.ttft_s, "tbt_s": promise.tbt_s}


def _documents(load: ChatLoad) -> dict[str, Any]:
    prompt, output = ("{}-{}".format(*sizes) for sizes in (load.document, load.summary))
    sizes = {"prompt": prompt, "output": output, "max_tokens": load.summary[1]}
    closed = {"arrivals": "closed", "in_flight": load.documents, "jct_s": 600}
    return {"name": "documents", "kind": "sizes", "service": "be", **sizes, **closed}


def _answer(request: RequestRecord) -> Answer:
    status = 200 if has_finished(request) else 500
    return Answer(request.arrival_at, status, len(request.token_at), token_at=list(request.token_at))


# --- Which of them


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("real", "simulated"), default="real", help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="real: a model folder with a tokenizer, in place of random weights")
    parser.add_argument("--url", help="real: measure a server that runs, whose model is named measured")
    parser.add_argument("--priority", type=int, help="real: field that vLLM's server orders requests by, of documents")
    parser.add_argument("--machine", choices=MACHINES, default="zen4", help="simulated")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated: times that steps take")
    parser.add_argument("--off", type=several(float), help="simulated: how far predictions are off, such as 0.04,0.12")
    parser.add_argument("--hog", action="store_true", help="let another tenant take half of the memory bandwidth")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="simulated")
    parser.add_argument("flags", nargs="*", help="real: more flags for `alignedserve serve`, after --")


@contextmanager
def backend(args: argparse.Namespace, *, is_batch: bool) -> Iterator[Backend]:
    """Start what the options ask for. Documents are requests, or the lines of a batch."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if args.backend == "simulated":
            machine = MACHINES[args.machine]
            machine = replace(machine, off=Uncertainty(*args.off)) if args.off else machine
            save_profile(folder / "steps.json", machine, speed=args.speed)
            yield Simulated(folder / "steps.json", args.seeds, has_hog=args.hog)
            return
        if args.url:
            asyncio.run(ask(args.url, [3] * 20, 4))
            with hog() if args.hog else nullcontext():
                yield (ServedBatch if is_batch else ChatClient)(args.url, priority=args.priority)
            return
        model = args.model or llama160m(folder / "model")
        with serve(model, "--jobs-directory", str(folder / "jobs"), *args.flags) as deployment:
            asyncio.run(ask(deployment.url, [3] * 20, 4))  # what a first request warms up
            with hog() if args.hog else nullcontext():
                yield (ServedBatch if is_batch else ChatClient)(deployment.url)
