"""Measure what serving costs beside the engine: `python -m lab.benchmarks.served`, a minute on two quiet cores.

Documents are always in flight on a colocated deployment of a random 160 M Llama (512-1,024 tokens in, 32-128 out). Time
and again the worker runs the steps of the last seconds once more, on the same engine in the same thread, while no other
part has work: the engine alone on the same steps. A row is the median of these pairs: the served tokens in a second
against those of the engine alone, the time between steps, how much longer steps take beside the other parts, and the
processor time of each part, in ms for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

from alignedserve.bench.wording import IdWording
from alignedserve.lab.benchmarks.common.models import llama160m
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.serving import ask, parts_under, played, serve
from alignedserve.lab.benchmarks.common.simulating import save_load
from alignedserve.lab.benchmarks.isolation import DOCUMENT, IN_FLIGHT

PROGRAM = "alignedserve.lab.benchmarks.served"
OTHERS = "other processes"
FILE = "SERVED_STEPS"  # the environment variable that says where the worker writes
SHARE = 0.97  # of the engine's own tokens/s
WARM_S = 4.0  # until the first documents decode
REST_S = 1.0  # between steps that were run again and the next window
MAPPED_S = 8.0  # without work, in which the worker maps the pool


def processor_s() -> dict[int, float]:
    """Return the processor time of each process of this machine so far."""
    found = Counter[int]()
    for file in Path("/proc").glob("[0-9]*/task/*/schedstat"):
        with suppress(OSError):
            found[int(file.parts[2])] += int(file.read_text().split()[0])
    return {pid: ns / 1e9 for pid, ns in found.items()}


class StepsAgain:
    """The steps of a worker, which are run again after each `window_s` seconds."""

    def __init__(self, file: Path, window_s: float) -> None:
        self._file, self._window_s = file, window_s
        self._ran = list[Any]()
        self._began, self._in_steps_s, self._before = perf_counter() + WARM_S, 0.0, dict[int, float]()

    def ran(self, engine: Any, plan: Any, seconds: float) -> None:
        """Note a step that has ended just now."""
        now = perf_counter()
        if now < self._began:
            return
        if not self._before:  # the window begins with the end of this step
            self._began, self._in_steps_s, self._before, self._ran = now, 0.0, processor_s(), []
            return
        self._ran.append(plan)
        self._in_steps_s += seconds
        if now - self._began >= self._window_s:
            self._end(engine, now - self._began)

    def _end(self, engine: Any, served_s: float) -> None:
        after = processor_s()
        used = {pid: used_s - self._before.get(pid, 0.0) for pid, used_s in after.items()}
        began = perf_counter()
        for plan in self._ran:
            engine.step(plan)
        alone_s = perf_counter() - began
        alone = {pid: used_s - after.get(pid, 0.0) for pid, used_s in processor_s().items()}
        tokens = sum(part.sampling is not None for plan in self._ran for part in plan.parts)
        row = {"steps": len(self._ran), "tokens": tokens, "served_s": served_s, "in_steps_s": self._in_steps_s}
        with self._file.open("a") as file:
            print(json.dumps({**row, "alone_s": alone_s, "used": used, "used_alone": alone}), file=file)
        self._began, self._before = perf_counter() + REST_S, {}


def serve_watched() -> int:
    """Be `alignedserve`, with workers that run steps again: parts are forked from this process."""
    from alignedserve.cli.main import main
    from alignedserve.executor.hands import EngineHands
    from alignedserve.protocol.commands import RunStep
    from alignedserve.protocol.events import StepDone

    file, window_s = os.environ[FILE].split(",")
    again, perform = list[StepsAgain](), EngineHands.perform

    def watched(hands: EngineHands, order: Any) -> Any:
        done = perform(hands, order)
        if isinstance(order, RunStep) and isinstance(done, StepDone):
            if not again:
                again.append(StepsAgain(Path(file), float(window_s)))
            again[0].ran(hands._engine, order.plan, done.seconds)
        return done

    with patch.object(EngineHands, "perform", watched):
        return main()


def measure(args: argparse.Namespace, folder: Path) -> None:
    file = folder / "steps.jsonl"
    file.touch()
    os.environ[FILE] = f"{file},{args.window}"
    model, flags = args.model or llama160m(folder / "model"), ("--jobs-directory", str(folder / "jobs"), *args.flags)
    with serve(model, *flags, program=PROGRAM) as deployment:
        asyncio.run(ask(deployment.url, [3] * 20, 4))
        sleep(MAPPED_S)
        parts = parts_under(deployment.pid) | {deployment.pid: "launcher", os.getpid(): "client"}
        seconds = WARM_S + args.windows * (2 * args.window + REST_S)
        load = save_load(folder / "load.yaml", seconds, {**DOCUMENT, **IN_FLIGHT, "in_flight": args.documents})
        played(deployment.url, load, IdWording(Random()))
    rows = [json.loads(line) for line in file.read_text().splitlines()][: args.windows]
    tell(rows, parts)


def tell(rows: list[dict[str, Any]], parts: dict[int, str]) -> None:
    """Report the medians of these windows; `parts` are the names of the processes."""

    def per_step(name: str, ms: Callable[[dict[str, Any]], float]) -> None:
        report(name, median(1e3 * ms(row) / row["steps"] for row in rows), "ms")

    alone, served = (median(row["tokens"] / row[name] for row in rows) for name in ("alone_s", "served_s"))
    report("served", served, "tokens/s", baseline=alone)
    share = median(row["alone_s"] / row["served_s"] for row in rows)
    report("served, of the engine alone", share, "1", goal=SHARE, at_least=True)
    per_step("a step of the engine alone", lambda row: row["alone_s"])
    per_step("between two steps", lambda row: row["served_s"] - row["in_steps_s"])
    per_step("a step takes longer beside the other parts", lambda row: row["in_steps_s"] - row["alone_s"])
    for part in sorted({*parts.values(), OTHERS}):
        if not part.startswith("fork server"):
            per_step(f"processor time of {part}", lambda row, part=part: used(row, parts, part, "used"))
            per_step(f"the same, engine alone: {part}", lambda row, part=part: used(row, parts, part, "used_alone"))


def used(row: dict[str, Any], parts: dict[int, str], part: str, which: str) -> float:
    return sum(seconds for pid, seconds in row[which].items() if parts.get(int(pid), OTHERS) == part)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--documents", type=int, default=32, help="in flight")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window", type=float, default=4.0, help="seconds of served steps that are run again")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer, in place of random weights")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        measure(args, Path(folder))
    sys.exit(status())


if __name__ == "__main__":
    sys.exit(serve_watched() if sys.argv[1:2] == ["serve"] else main())
