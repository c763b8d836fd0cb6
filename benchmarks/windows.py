"""Windows of batch jobs beside chats at 60 % of what a deployment serves: `python -m benchmarks.windows`, 4 minutes.

    python -m benchmarks.windows [--seconds 60] [--need 0.7] [--load 0.6] [--model FOLDER] [-- SERVE FLAGS]
    python -m benchmarks.windows --simulated [--seconds 60]

Chats (prompts of 32-256 tokens, 16-96 out) are first asked for by as many clients as keep the deployment full, for
`--load` of that rate; then beside a job that has no end, for how many lines a second it leaves room. Then

    kept        three jobs with windows of 1, 1.5 and 2 times --seconds, which together take --need of that room
    no room     one with half of what there is within --seconds, and one with three times as much, and ten times its
                weight

Lines have prompts of 64-128 tokens and 16-48 out. Windows are shorter than the API allows (10m), so that a run is
short: their records are written as the gateway would write them. The deployment is colocated, of a random 160 M Llama.
With --simulated the same is asked of the cores, on the worker of benchmarks/packing.py.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from uuid import uuid4

import yaml

from alignedserve.cli.simulate_once import settings_of
from alignedserve.simulator.batch_jobs import JobsSimulation, Submission
from alignedserve.simulator.records.records import Outcome
from alignedserve.simulator.reports.figures import Figures
from alignedserve.simulator.reports.trial import Trial
from alignedserve.store.job import JobStatus
from benchmarks import isolation
from benchmarks.batch_client import ENDED, Batches, job_of, jsonl, submit_shorter
from benchmarks.models import VOCAB
from benchmarks.packing import small_worker
from benchmarks.report import report

PROMPT, OUTPUT = (64, 128), (16, 48)
FULL = 32  # chats at once keep a deployment full
FULL_S, PROBE_S = 20.0, 40.0
EARLY = 0.3  # of its window: by then a job says that it cannot be kept
ATTAINED = 95.0  # per cent of chats


@dataclass(frozen=True)
class Ended:
    """What came of one job."""

    status: str
    total: int
    completed: int
    left_s: float  # of its window
    late_after_s: float | None  # when it said so
    num_results: int  # lines in its files


@dataclass(frozen=True)
class Outcomes:
    attained: float  # share of the chats
    jobs: dict[str, Ended]


Chats = float  # in a second
RunJobs = Callable[[Chats, float, list[Submission]], Awaitable[Outcomes]]


def kept(lines_s: float, seconds: int, need: float) -> list[Submission]:
    """Those with later deadlines first, and heavier: by weight alone they would be served first."""
    some = partial(Submission, prompt=PROMPT, output=OUTPUT)
    half = max(1, int(need * lines_s * seconds / 2))
    return [
        some("later", half, 2 * seconds, weight=5),
        some("middle", half, seconds * 3 // 2),
        some("soon", 2 * half, seconds),
    ]


def without_room(lines_s: float, seconds: int) -> list[Submission]:
    some = partial(Submission, prompt=PROMPT, output=OUTPUT)
    room = max(1, int(lines_s * seconds))
    return [some("hopeless", 3 * room, seconds, weight=10), some("modest", max(1, room // 2), seconds)]


async def measure(run: RunJobs, chats_s: Chats, lines_s: float, seconds: int, need: float) -> bool:
    found = await run(chats_s, 2.0 * seconds, kept(lines_s, seconds, need))
    met = [_chats("kept", found)]
    met += [_in_time("kept", name, one) for name, one in found.jobs.items()]
    found = await run(chats_s, 1.0 * seconds, without_room(lines_s, seconds))
    met += [_chats("no room", found), _in_time("no room", "modest", found.jobs["modest"])]
    hopeless = found.jobs["hopeless"]
    of = "no room: hopeless"
    late = seconds if hopeless.late_after_s is None else hopeless.late_after_s  # at its end everybody knows
    met.append(report(f"{of}: says so after", 100 * late / seconds, "% of its window", goal=100 * EARLY))
    done = 100 * hopeless.completed / hopeless.total
    met.append(report(f"{of}: done when it expired", done, "%", goal=0.1, at_least=True))
    met.append(report(f"{of}: lines in its files", hopeless.num_results, "1", goal=hopeless.total, at_least=True))
    return all(met) and hopeless.status == JobStatus.EXPIRED.value


def _chats(of: str, found: Outcomes) -> bool:
    return report(f"{of}: chats attained", 100 * found.attained, "%", goal=ATTAINED, at_least=True)


def _in_time(of: str, name: str, one: Ended) -> bool:
    done = report(f"{of}: {name}: lines done", one.completed, "1", goal=one.total, at_least=True)
    left = report(f"{of}: {name}: left of its window", one.left_s, "s", goal=0.0, at_least=True)
    return done and left and one.status == JobStatus.COMPLETED.value


# --- Simulated


class Simulated:
    def __init__(self, folder: Path) -> None:
        self._folder, self._profile = folder, folder / "steps.json"
        small_worker(self._profile)

    def chats_s(self) -> Chats:
        record = self._ran({"arrivals": "closed", "in_flight": FULL}, FULL_S, []).record(1.0)
        num_done = sum(one.outcome is Outcome.FINISHED for one in record.requests)
        return num_done / (record.ended_at - record.began_at)

    def lines_s(self, chats_s: Chats) -> float:
        probe = Submission("probe", 100_000, int(PROBE_S), PROMPT, OUTPUT)
        return self._ran({"rate": chats_s}, PROBE_S, [probe]).counts("probe").completed / PROBE_S

    async def run(self, chats_s: Chats, seconds: float, jobs: list[Submission]) -> Outcomes:
        ran = self._ran({"rate": chats_s}, seconds, jobs)
        ended = {name: self._ended(ran, name) for name in ran.progress}
        return Outcomes(Figures.of(ran.record(1.0)).at("rt.attainment"), ended)

    def _ended(self, ran: JobsSimulation, name: str) -> Ended:
        one = ran.progress[name]
        job = one.job
        return Ended(job.status.value, job.total, job.counts.completed, one.left_s, one.late_after_s, job.total)

    def _ran(self, pace: dict[str, Any], seconds: float, jobs: list[Submission]) -> JobsSimulation:
        chats = {"name": "chat", "kind": "sizes", "prompt": "32-256", "output": "16-96", "max_tokens": 96}
        promise = {"ttft_s": isolation.DEFAULT.ttft_s, "tbt_s": isolation.DEFAULT.tbt_s}
        workload = self._folder / "chats.yaml"
        workload.write_text(yaml.safe_dump({"first_s": seconds, "streams": [chats | promise | pace]}))
        trial = Trial("aligned", str(workload), profile=str(self._profile), gateway_ms=8.0)
        simulation = JobsSimulation(settings_of(trial), jobs)
        simulation.run()
        assert simulation.problems == []
        return simulation


# --- Real


class Served:
    def __init__(self, url: str, data: Path) -> None:
        self._url, self._data = url, data
        self._batches = Batches(url)

    async def chats_s(self) -> Chats:
        load = _Chats(self._url, isolation.NAME, 0.0, FULL_S, 0)
        await load.ask([3] * 20, 4, {})  # what a first request warms up
        return await load.full(FULL)

    async def lines_s(self, chats_s: Chats) -> float:
        probe = Submission("probe", 5_000, int(PROBE_S), PROMPT, OUTPUT)
        return (await self.run(chats_s, PROBE_S, [probe])).jobs["probe"].completed / PROBE_S

    async def run(self, chats_s: Chats, seconds: float, jobs: list[Submission]) -> Outcomes:
        load = _Chats(self._url, isolation.NAME, chats_s, seconds, 0)
        files = {one.name: await self._batches.upload(_lines(one)) for one in jobs}
        chats = asyncio.create_task(load.run(isolation.DEFAULT, with_documents=False))
        ended = await asyncio.gather(*(self._job(one, files[one.name]) for one in jobs))
        answers = (await chats).chats
        attained = sum(one.attains(isolation.DEFAULT) for one in answers) / max(1, len(answers))
        return Outcomes(attained, {one.name: result for one, result in zip(jobs, ended, strict=True)})

    async def _job(self, asked: Submission, file: str) -> Ended:
        created_at, id = int(time.time()), f"batch_{uuid4().hex}"
        await submit_shorter(self._data, job_of(id, file, created_at, asked.window_s, asked.weight))
        late_at: float | None = None
        while True:
            batch, headers = await self._batches.look(id)
            if late_at is None and headers.get("x-batch-late") == "true":
                late_at = time.time()
            if batch["status"] in ENDED:
                break
            await asyncio.sleep(0.5)
        ended_at = next(at for status in ENDED if (at := batch.get(f"{status}_at")))
        counts = batch["request_counts"]
        lines = [await self._batches.num_lines(batch.get(f"{kind}_file_id")) for kind in ("output", "error")]
        late_after_s = None if late_at is None else late_at - created_at
        left_s = batch["expires_at"] - ended_at
        return Ended(batch["status"], counts["total"], counts["completed"], left_s, late_after_s, sum(lines))


class _Chats(isolation.Load):
    async def full(self, at_once: int) -> Chats:
        """As many as end in a second where so many are always there."""
        draw, begun = Random(isolation.SEED), perf_counter()
        num_done = 0

        async def client() -> None:
            nonlocal num_done
            while perf_counter() < begun + self._seconds:
                size, most = draw.randint(*isolation.CHAT), draw.randint(*isolation.ANSWER)
                answer = await self.ask([draw.randrange(3, VOCAB) for _ in range(size)], most, {})
                num_done += answer.is_whole and perf_counter() < begun + self._seconds

        await asyncio.gather(*(client() for _ in range(at_once)))
        return num_done / self._seconds


def _lines(asked: Submission) -> bytes:
    draw = Random(asked.name)

    def body() -> dict[str, Any]:
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(*asked.prompt))]
        most = draw.randint(*asked.output)
        return {"model": isolation.NAME, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}

    return jsonl(body() for _ in range(asked.lines))


# --- Both


async def _simulated(folder: Path, args: argparse.Namespace) -> bool:
    system = Simulated(folder)
    chats_s = args.load * _told("chats alone, as many as it serves", system.chats_s(), "chats/s")
    lines_s = _told("room beside chats", system.lines_s(chats_s), "lines/s")
    return await measure(system.run, chats_s, lines_s, args.seconds, args.need)


async def _served(url: str, data: Path, args: argparse.Namespace) -> bool:
    system = Served(url, data)
    chats_s = args.load * _told("chats alone, as many as it serves", await system.chats_s(), "chats/s")
    lines_s = _told("room beside chats", await system.lines_s(chats_s), "lines/s")
    return await measure(system.run, chats_s, lines_s, args.seconds, args.need)


def _told(name: str, value: float, unit: str) -> float:
    report(name, value, unit)
    if not value:
        sys.exit(f"{name}: nothing was done in time, the machine is too slow or too busy")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="ask the cores, and no engine")
    parser.add_argument("--seconds", type=int, default=60, help="the shortest window (default: %(default)s)")
    parser.add_argument("--need", type=float, default=0.7, help="of the room there is (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.6, help="of chats (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer, in place of random weights")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        if args.simulated:
            sys.exit(0 if asyncio.run(_simulated(folder, args)) else 1)
        model, data = args.model or isolation.random_model(folder / "model"), folder / "jobs"
        with isolation.served(model, ["--jobs-directory", str(data), *args.flags]) as url:
            met = asyncio.run(_served(url, data, args))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
