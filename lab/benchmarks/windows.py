"""Measure windows of batch jobs beside chats at 60 % of capacity: `python -m lab.benchmarks.windows`, 4 minutes.

    python -m lab.benchmarks.windows [--seconds 60] [--need 0.7] [--load 0.6] [--model FOLDER] [-- SERVE FLAGS]
    python -m lab.benchmarks.windows --backend simulated [--seconds 60]

Chats have prompts of 32-256 tokens and 16-96 out. First, enough clients to keep the deployment full measure the rate of
chats, of which `--load` is used. Then an endless job beside these chats measures the room for lines per second. Then

    kept        three jobs with windows of 1, 1.5 and 2 times --seconds, which together take --need of that room
    no room     a job with half of the lines possible within --seconds, and a job with three times as many as possible,
                at ten times the weight

Lines have prompts of 64-128 tokens and 16-48 out. Windows are shorter than the API allows (10m), so that a run is
short: the benchmark writes their records as the gateway would. The deployment is colocated, of a random 160 M Llama.
The simulated backend runs the same load on the cores, with the worker `usual` of lab/benchmarks/common/machines.py.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from uuid import uuid4

from alignedserve.lab.benchmarks.common.batches import ENDED, Batches, job_of, jsonl, submit_shorter
from alignedserve.lab.benchmarks.common.chats import ANSWER, CHAT, DEFAULT, SEED, Load, Served
from alignedserve.lab.benchmarks.common.machines import GATEWAY_MS, MACHINES, save_profile
from alignedserve.lab.benchmarks.common.models import llama160m
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.serving import NAME, ask, serve
from alignedserve.lab.benchmarks.common.simulating import recorded, save_load
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.batch_jobs import JobsSimulation, Submission
from alignedserve.lab.trials.building import settings_of
from alignedserve.loads.records.records import RequestOutcome
from alignedserve.store.job import JobStatus

PROMPT, OUTPUT = (64, 128), (16, 48)
FULL = 32  # chats at once that keep a deployment full
FULL_S, PROBE_S = 20.0, 40.0
EARLY = 0.3  # share of its window within which a job says that it cannot be kept
ATTAINED = 95.0  # per cent of chats


@dataclass(frozen=True)
class Ended:
    """The end of a job: its status and counts."""

    status: str
    total: int
    completed: int
    left_s: float  # rest of the job's window
    late_after_s: float | None  # when the job said that it would be late
    num_results: int  # lines in the job's files


@dataclass(frozen=True)
class Outcomes:
    attained: float  # share of the chats
    jobs: dict[str, Ended]


def kept(lines_s: float, seconds: int, need: float) -> list[Submission]:
    """Return jobs with later deadlines first and heavier: weight alone would serve them first."""
    job = partial(Submission, prompt=PROMPT, output=OUTPUT)
    half = max(1, int(need * lines_s * seconds / 2))
    return [
        job("later", half, 2 * seconds, weight=5),
        job("middle", half, seconds * 3 // 2),
        job("soon", 2 * half, seconds),
    ]


def without_room(lines_s: float, seconds: int) -> list[Submission]:
    job = partial(Submission, prompt=PROMPT, output=OUTPUT)
    room = max(1, int(lines_s * seconds))
    return [job("hopeless", 3 * room, seconds, weight=10), job("modest", max(1, room // 2), seconds)]


def measure(system: SimulatedJobs | ServedJobs, load: float, seconds: int, need: float) -> None:
    chats_s = load * _reported("chats alone, as many as it serves", system.chats_s(), "chats/s")
    probe = Submission("probe", 5_000, int(PROBE_S), PROMPT, OUTPUT)
    room = system.run(chats_s, PROBE_S, [probe]).jobs["probe"].completed / PROBE_S
    lines_s = _reported("room beside chats", room, "lines/s")
    found = system.run(chats_s, 2.0 * seconds, kept(lines_s, seconds, need))
    _chats("kept", found)
    for name, job in found.jobs.items():
        _in_time("kept", name, job)
    found = system.run(chats_s, 1.0 * seconds, without_room(lines_s, seconds))
    _chats("no room", found)
    _in_time("no room", "modest", found.jobs["modest"])
    hopeless, name = found.jobs["hopeless"], "no room: hopeless"
    late = seconds if hopeless.late_after_s is None else hopeless.late_after_s  # at the end of the window it is certain
    report(f"{name}: says so after", 100 * late / seconds, "% of its window", goal=100 * EARLY)
    done = 100 * hopeless.completed / hopeless.total
    report(f"{name}: done when it expired", done, "%", goal=0.1, at_least=True)
    report(f"{name}: lines in its files", hopeless.num_results, "1", goal=hopeless.total, at_least=True)
    assert hopeless.status == JobStatus.EXPIRED.value, hopeless.status


def _reported(name: str, value: float, unit: str) -> float:
    report(name, value, unit)
    if not value:
        sys.exit(f"{name}: nothing was done in time, the machine is too slow or too busy")
    return value


def _chats(name: str, found: Outcomes) -> None:
    report(f"{name}: chats attained", 100 * found.attained, "%", goal=ATTAINED, at_least=True)


def _in_time(of: str, name: str, job: Ended) -> None:
    report(f"{of}: {name}: lines done", job.completed, "1", goal=job.total, at_least=True)
    report(f"{of}: {name}: left of its window", job.left_s, "s", goal=0.0, at_least=True)


class SimulatedJobs:
    def __init__(self, folder: Path) -> None:
        self._folder, self._profile = folder, folder / "steps.json"
        save_profile(self._profile, MACHINES["usual"])

    def chats_s(self) -> float:
        record = self._ran({"arrivals": "closed", "in_flight": FULL}, FULL_S, []).record(1.0)
        return sum(request.outcome is RequestOutcome.FINISHED for request in record.requests) / record.duration_s

    def run(self, chats_s: float, seconds: float, jobs: list[Submission]) -> Outcomes:
        ran = self._ran({"rate": chats_s}, seconds, jobs)
        ended = dict[str, Ended]()
        for name, progress in ran.progress.items():
            job, done = progress.job, ran.counts(name).completed
            ended[name] = Ended(job.status.value, job.total, done, progress.left_s, progress.late_after_s, job.total)
        return Outcomes(RunFigures.from_record(ran.record(1.0)).at("rt.attainment"), ended)

    def _ran(self, pace: dict[str, Any], seconds: float, jobs: list[Submission]) -> JobsSimulation:
        chats = {"name": "chat", "kind": "sizes", "prompt": "32-256", "output": "16-96", "max_tokens": 96}
        promise = {"ttft_s": DEFAULT.ttft_s, "tbt_s": DEFAULT.tbt_s}
        workload = save_load(self._folder / "chats.yaml", seconds, chats | promise | pace)
        trial = SimulationTrial("aligned", workload, profile=str(self._profile), gateway_ms=GATEWAY_MS)
        simulation = JobsSimulation(settings_of(trial), jobs)
        recorded(simulation)
        return simulation


class ServedJobs:
    def __init__(self, url: str, data: Path) -> None:
        self._chats, self._data = Served(url), data

    def chats_s(self) -> float:
        return asyncio.run(self._full())

    async def _full(self) -> float:
        """Return the chats that end per second when this many are always open."""
        await ask(self._chats.url, [3] * 20, 4)  # warms up the deployment
        draw, began, num_done = Random(SEED), perf_counter(), 0

        async def client() -> None:
            nonlocal num_done
            while perf_counter() < began + FULL_S:
                size, most = draw.randint(*CHAT), draw.randint(*ANSWER)
                answer = await ask(self._chats.url, self._chats.prompt(size), most)
                num_done += answer.is_whole and perf_counter() < began + FULL_S

        await asyncio.gather(*(client() for _ in range(FULL)))
        return num_done / FULL_S

    def run(self, chats_s: float, seconds: float, jobs: list[Submission]) -> Outcomes:
        return asyncio.run(self._run(chats_s, seconds, jobs))

    async def _run(self, chats_s: float, seconds: float, jobs: list[Submission]) -> Outcomes:
        batches = Batches(self._chats.url)
        files = [await batches.upload(jsonl(self._bodies(job))) for job in jobs]
        chats = asyncio.create_task(self._chats.play(Load(chats_s, seconds, documents=0), DEFAULT))
        ended = await asyncio.gather(*(self._job(batches, job, file) for job, file in zip(jobs, files, strict=True)))
        attained = (await chats).attained(DEFAULT) / 100
        await batches.close()
        return Outcomes(attained, {job.name: result for job, result in zip(jobs, ended, strict=True)})

    def _bodies(self, job: Submission) -> list[dict[str, Any]]:
        draw, fixed = Random(job.name), {"model": NAME, "temperature": 0, "ignore_eos": True}
        return [
            {
                **fixed,
                "prompt": self._chats.prompt(draw.randint(*job.prompt)),
                "max_tokens": draw.randint(*job.output),
            }
            for _ in range(job.lines)
        ]

    async def _job(self, batches: Batches, job: Submission, file: str) -> Ended:
        created_at, id = int(time.time()), f"batch_{uuid4().hex}"
        await submit_shorter(self._data, job_of(id, file, created_at, job.window_s, job.weight))
        late_at: float | None = None
        while True:
            batch, headers = await batches.look(id)
            if late_at is None and headers.get("x-batch-late") == "true":
                late_at = time.time()
            if batch["status"] in ENDED:
                break
            await asyncio.sleep(0.5)
        ended_at = next(at for status in ENDED if (at := batch.get(f"{status}_at")))
        counts = batch["request_counts"]
        lines = [await batches.num_lines(batch.get(f"{kind}_file_id")) for kind in ("output", "error")]
        late_after_s = None if late_at is None else late_at - created_at
        left_s = batch["expires_at"] - ended_at
        return Ended(batch["status"], counts["total"], counts["completed"], left_s, late_after_s, sum(lines))


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--backend", choices=("real", "simulated"), default="real", help="default: %(default)s")
    parser.add_argument("--seconds", type=int, default=60, help="the shortest window")
    parser.add_argument("--need", type=float, default=0.7, help="of the room there is")
    parser.add_argument("--load", type=float, default=0.6, help="of chats")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer, in place of random weights")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        if args.backend == "simulated":
            measure(SimulatedJobs(folder), args.load, args.seconds, args.need)
            sys.exit(status())
        model, data = args.model or llama160m(folder / "model"), folder / "jobs"
        with serve(model, "--jobs-directory", str(data), *args.flags) as deployment:
            measure(ServedJobs(deployment.url, data), args.load, args.seconds, args.need)
    sys.exit(status())


if __name__ == "__main__":
    main()
