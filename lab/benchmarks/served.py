"""Measure what serving costs beside the engine, and what it gains by keeping KV.

    python -m lab.benchmarks.served [--parts steps] [--model FOLDER] [-- SERVE FLAGS]    # a minute on two quiet cores
    python -m lab.benchmarks.served --parts nothing,siblings,memory
    python -m lab.benchmarks.served --parts memory --machine zen4    # simulated, with that machine's steps
    python -m lab.benchmarks.served --parts start --model FILE.gguf
    python -m lab.benchmarks.served --parts peers --model FILE.gguf --llama-cpp FOLDER [--streams 1,8,32] [--scale 0.25]

steps: documents are always in flight on a colocated deployment of a random 160 M Llama (512-1,024 tokens in, 32-128
out). Time and again the worker runs the steps of the last seconds once more, on the same engine in the same thread,
while no other part has work: the engine alone on the same steps. A row is the median of these pairs: the served tokens
in a second against those of the engine alone, the time between steps, how much longer steps take beside the other
parts, and the processor time of each part, in ms for each step; that of a worker comes by thread, too.

The other parts compare deployments of their own, or requests to one:

    nothing   16 prompts at once that begin like no other: time with the prefix cache, of the time without
    siblings  n = 8 on a new prompt of 1,024 tokens: time until all choices have a token, of the time for n = 1
    memory    chats beside documents with long outputs, with memory for half of their tokens: documents' tokens/s, of
              those of workers that drop the KV of requests that leave and reuse none
    start     seconds until it serves, with an empty cache, and with what the start before has left there
    peers     the same model on other servers, in turns: tokens/s, first tokens and the time of a token of each of
              `--loads` (those of Red Hat's suite, with lengths times `--scale`), at each number of `--streams`.
              llama.cpp and OpenVINO GenAI (`--openvino PYTHON`) have the GGUF file; vLLM (`--peer-python PYTHON`) has
              `--bf16 FOLDER`, which `python -m lab.benchmarks.common.models FILE.gguf FOLDER` writes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from threading import enumerate as threads
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch
from urllib.request import Request, urlopen

from alignedserve.lab.bench.report import ClassFigures, LoadFigures
from alignedserve.lab.bench.wording import IdWording
from alignedserve.lab.benchmarks.common.machines import GATEWAY_MS, MACHINES, save_profile
from alignedserve.lab.benchmarks.common.models import VOCAB, llama160m
from alignedserve.lab.benchmarks.common.peers import LLAMA_SERVER, serve_llama_cpp, serve_openvino, serve_vllm
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import NAME, ask, parts_under, played, serve
from alignedserve.lab.benchmarks.common.simulating import record_of, save_load
from alignedserve.lab.benchmarks.isolation import CHAT, DEFAULT, DOCUMENT, IN_FLIGHT, ChatRuns
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.loads.workload.spec import NAMED
from alignedserve.lab.reports.trial import SimulationTrial

PROGRAM = "alignedserve.lab.benchmarks.served"
OTHERS = "other processes"
FILE = "SERVED_STEPS"  # the environment variable that says where the worker writes
SHARE = 0.97  # of the engine's own tokens/s
KERNELS = "kernels and the system's"  # threads that are not Python's
WARM_S = 4.0  # until the first documents decode
REST_S = 1.0  # between steps that were run again and the next window
MAPPED_S = 8.0  # without work, in which the worker maps the pool

SETTLES_S = 0.3  # before each load of two that are compared
UNKNOWN, UNKNOWN_OUT = range(256, 512, 16), 32  # lengths of prompts that begin like no other; tokens out of each
NOTHING_SHARE = 1.01  # of the time without the cache
SIBLINGS, SYSTEM = 8, 1024  # choices, and tokens of their prompt
SIBLINGS_SHARE = 1.10  # of the time of one choice
LONG = {"prompt": "64-128", "output": "400-600", "max_tokens": 600, "in_flight": 64}
LONG_S = 30.0
MEMORY_SHARE = 1.2  # of the tokens/s without kept KV
SHORT = ("--kv-memory-mb", "282")  # of 8,000 tokens: in the mean of its half minute the load needs about 16,000
SHORT_BLOCKS = 500  # the same, of 16 tokens
REFUSES_NONE = ("--set", "schedule.refuse_ttfts=0")
DROPS_KV = ("schedule.reuse=false", "schedule.evict=false")

WARM_START_S = 6.0  # a 1.5B in Q4_K_M on two quiet cores, by the notes of users

LOADS = [name for name in NAMED if name.startswith("cpu-") and name != "cpu-mixed"]
ALL_AT_ONCE = "cpu-offline"
LONGEST, SLOT_ROOM = 8192, 64  # tokens of a request of these loads; of a slot besides
TOLD = {  # of the figures of a load
    "tokens_per_s": ("output", "tokens/s", 1.0),
    "ttft_s.p50": ("first token", "ms", 1e3),
    "tpot_s.p50": ("time of a token", "ms", 1e3),
}


def processor_s() -> dict[int, float]:
    """Return the processor time of each process of this machine so far."""
    found = Counter[int]()
    for file in Path("/proc").glob("[0-9]*/task/*/schedstat"):
        with suppress(OSError):
            found[int(file.parts[2])] += int(file.read_text().split()[0])
    return {pid: ns / 1e9 for pid, ns in found.items()}


def threads_s() -> dict[str, float]:
    """Return the processor time of this process so far, by the names of Python's threads."""
    names = {thread.native_id: thread.name for thread in threads()}
    found = Counter[str]()
    for file in Path("/proc/self/task").glob("[0-9]*/schedstat"):
        with suppress(OSError):
            found[names.get(int(file.parts[4]), KERNELS)] += int(file.read_text().split()[0])
    return {name: ns / 1e9 for name, ns in found.items()}


class StepsAgain:
    """The steps of a worker, which are run again after each `window_s` seconds."""

    def __init__(self, file: Path, window_s: float) -> None:
        self._file, self._window_s = file, window_s
        self._ran = list[Any]()
        self._began, self._in_steps_s, self._before = perf_counter() + WARM_S, 0.0, dict[int, float]()
        self._threads = dict[str, float]()

    def ran(self, engine: Any, plan: Any, seconds: float) -> None:
        """Note a step that has ended just now."""
        now = perf_counter()
        if now < self._began:
            return
        if not self._before:  # the window begins with the end of this step
            self._began, self._in_steps_s, self._ran = now, 0.0, []
            self._before, self._threads = processor_s(), threads_s()
            return
        self._ran.append(plan)
        self._in_steps_s += seconds
        if now - self._began >= self._window_s:
            self._end(engine, now - self._began)

    def _end(self, engine: Any, served_s: float) -> None:
        after, threads_after = processor_s(), threads_s()
        used = {pid: used_s - self._before.get(pid, 0.0) for pid, used_s in after.items()}
        began = perf_counter()
        for plan in self._ran:
            engine.step(plan)
        alone_s = perf_counter() - began
        alone = {pid: used_s - after.get(pid, 0.0) for pid, used_s in processor_s().items()}
        by_thread = {name: used_s - self._threads.get(name, 0.0) for name, used_s in threads_after.items()}
        tokens = sum(part.sampling is not None for plan in self._ran for part in (*plan.parts, *plan.draws))
        row = {"steps": len(self._ran), "tokens": tokens, "served_s": served_s, "in_steps_s": self._in_steps_s}
        with self._file.open("a") as file:
            row |= {"alone_s": alone_s}
            print(json.dumps({**row, "used": used, "used_alone": alone, "threads": by_thread}), file=file)
        self._began, self._before = perf_counter() + REST_S, {}


def serve_watched() -> int:
    """Be `alignedserve`, with workers that run steps again: parts are forked from this process."""
    from alignedserve.cli.main import main
    from alignedserve.executor.hands import EngineHands
    from alignedserve.protocol.commands import RunStep
    from alignedserve.protocol.events import StepDone

    file, window_s = os.environ[FILE].split(",")
    again, perform, begin_step = list[StepsAgain](), EngineHands.perform, EngineHands._begin_step

    def ran(hands: EngineHands, plan: Any, seconds: float) -> None:
        if not again:
            again.append(StepsAgain(Path(file), float(window_s)))
        again[0].ran(hands._engine, plan, seconds)

    def at_once(hands: EngineHands, order: Any) -> Any:
        done = perform(hands, order)
        if isinstance(order, RunStep) and isinstance(done, StepDone):
            ran(hands, order.plan, done.seconds)
        return done

    def in_order(hands: EngineHands, begin: Any, plan: Any) -> Any:
        """Watch a step of a thread of its own, which a worker has whose steps may pause."""
        began = perf_counter()
        begun = begin_step(hands, begin, plan)
        ran(hands, plan, perf_counter() - began)
        return begun

    with patch.object(EngineHands, "perform", at_once), patch.object(EngineHands, "_begin_step", in_order):
        return main()


def measure(args: argparse.Namespace, model: Path, folder: Path) -> None:
    file = folder / "steps.jsonl"
    file.touch()
    os.environ[FILE] = f"{file},{args.window}"
    with serve(model, "--jobs-directory", str(folder / "jobs"), *args.flags, program=PROGRAM) as deployment:
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
    for thread in sorted({name for row in rows for name in row["threads"]}):
        per_step(f"processor time of the worker's thread {thread}", lambda row, of=thread: row["threads"].get(of, 0.0))


def used(row: dict[str, Any], parts: dict[int, str], part: str, which: str) -> float:
    return sum(seconds for pid, seconds in row[which].items() if parts.get(int(pid), OTHERS) == part)


# --- KV that is kept


def new_tokens(count: int) -> list[int]:
    """Return a prompt that no server has seen."""
    return [Random().randrange(3, VOCAB) for _ in range(count)]


def warm_up(url: str) -> None:
    for _ in range(2):
        asyncio.run(ask_unknown(url))


async def ask_unknown(url: str) -> float:
    """Return the seconds until all prompts, which begin like no other, have their answers."""
    began, prompts = perf_counter(), [new_tokens(size) for size in UNKNOWN]
    answers = await asyncio.gather(*(ask(url, prompt, UNKNOWN_OUT) for prompt in prompts))
    assert not any(answer.read.num_cached for answer in answers)
    return max(answer.read.token_at[-1] for answer in answers) - began


def nothing(args: argparse.Namespace, model: Path, folder: Path) -> None:
    flags = (*REFUSES_NONE, "--jobs-directory", str(folder / "jobs"), *args.flags)
    took = list[list[float]]([[], []])
    with ExitStack() as stack:
        ours, without = (
            stack.enter_context(serve(model, *flags, *more)).url for more in ((), ("--set", "schedule.reuse=false"))
        )
        warm_up(ours), warm_up(without)
        for turn in range(args.turns):
            for place, url in ((0, ours), (1, without)) if turn % 2 else ((1, without), (0, ours)):
                sleep(SETTLES_S)
                took[place].append(asyncio.run(ask_unknown(url)))
    time, baseline = (1e3 * median(seconds) for seconds in took)
    report("nothing to find: time", time, "ms", baseline=baseline)
    ratio = median(with_cache / without_it for with_cache, without_it in zip(*took, strict=True))
    report("nothing to find: time, of that without the prefix cache", ratio, "1", goal=NOTHING_SHARE)


def all_begun_s(url: str, choices: int) -> float:
    """Return the seconds until each of these choices of a new prompt has a token."""
    body = {"model": NAME, "prompt": new_tokens(SYSTEM), "n": choices, "max_tokens": 4, "seed": 1, "temperature": 1.0}
    asked = Request(
        f"{url}/v1/completions",
        json.dumps({**body, "stream": True, "return_token_ids": True, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    began, begun = perf_counter(), dict[int, float]()
    with urlopen(asked) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[len("data: ") :])["choices"]:
                    begun.setdefault(choice["index"], perf_counter() - began)
    assert len(begun) == choices, f"{len(begun)} choices"
    return max(begun.values())


def siblings(args: argparse.Namespace, model: Path, folder: Path) -> None:
    with serve(model, *REFUSES_NONE, "--jobs-directory", str(folder / "jobs"), *args.flags) as deployment:
        warm_up(deployment.url)
        took = list[tuple[float, ...]]()
        for _ in range(args.turns):
            sleep(SETTLES_S)
            took.append(tuple(all_begun_s(deployment.url, choices) for choices in (1, SIBLINGS)))
    one, every = (1e3 * median(pair[place] for pair in took) for place in (0, 1))
    report(f"n = {SIBLINGS}: first tokens", every, "ms", baseline=one)
    ratio = median(many / single for single, many in took)
    report(f"n = {SIBLINGS}: first tokens, of those of n = 1", ratio, "1", goal=SIBLINGS_SHARE)


def simulated(machine: str, profile: Path, load: str, options: tuple[str, ...]) -> list[RunRecord]:
    short = MACHINES[machine]
    save_profile(profile, replace(short, limits=replace(short.limits, num_blocks=SHORT_BLOCKS, max_batch=64)))
    trial = SimulationTrial("aligned", load, profile=str(profile), options=options, gateway_ms=GATEWAY_MS)
    return [record_of(replace(trial, seed=seed)) for seed in (0, 1)]


def memory(args: argparse.Namespace, model: Path, folder: Path) -> None:
    chats = {**CHAT, "rate": 2.0, "ttft_s": DEFAULT.ttft_s, "tbt_s": DEFAULT.tbt_s}
    load = save_load(folder / "long.yaml", LONG_S, chats, {**DOCUMENT, **IN_FLIGHT, **LONG})

    def run(drops: tuple[str, ...]) -> ChatRuns:
        if args.machine:
            return ChatRuns(simulated(args.machine, folder / "steps.json", load, drops), LONG_S)
        flags = [flag for setting in drops for flag in ("--set", setting)]
        with serve(model, "--jobs-directory", str(folder / "jobs"), *args.flags, *SHORT, *flags) as deployment:
            asyncio.run(ask(deployment.url, [3] * 20, 4))
            return ChatRuns([played(deployment.url, load, IdWording(Random()))], LONG_S)

    dropping, ours = run(DROPS_KV), run(())
    for name, of, goal in (
        ("documents while chats come", lambda run: run.meanwhile_tokens_s, MEMORY_SHARE),
        ("documents", lambda run: run.tokens_s, None),
    ):
        report(f"memory for half: {name}", of(ours), "tokens/s", baseline=of(dropping))
        report(f"memory for half: {name}, of dropped KV", of(ours) / of(dropping), "1", goal=goal, at_least=True)
    report("memory for half: chats attained", ours.attained, "%", baseline=dropping.attained)


def start(args: argparse.Namespace, model: Path, folder: Path) -> None:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        for name, goal in (("empty", None), *[("warm", WARM_START_S)] * args.starts):
            busy = os.getloadavg()[0]
            with serve(model, "--jobs-directory", str(folder / "jobs"), *args.flags) as deployment:
                report(f"start with a cache that is {name}, load {busy:.1f}", deployment.ready_s, "s", goal=goal)
                asyncio.run(ask(deployment.url, new_tokens(64), 4))


# --- Other servers


def peers(args: argparse.Namespace, model: Path, folder: Path) -> None:
    with ExitStack() as stack:
        urls = {"ours": stack.enter_context(serve(model, "--jobs-directory", str(folder / "jobs"), *args.flags)).url}
        for name, server in others(args, model).items():
            urls[name] = stack.enter_context(server)
        for url in urls.values():  # what a server does only once, it does now
            asyncio.run(ask(url, new_tokens(64), 4))
        for load in args.loads:
            scaled = f"{load},length_scale={args.scale}"
            for streams in [0] if load == ALL_AT_ONCE else args.streams:
                more = f",in_flight={streams},num_requests={2 * streams}" if streams else ""
                compare(urls, scaled + more, args.turns)


def others(args: argparse.Namespace, model: Path) -> dict[str, AbstractContextManager[str]]:
    """Return the servers that were asked for, which have not started yet."""
    context = round(args.scale * LONGEST) + SLOT_ROOM
    found: dict[str, AbstractContextManager[str]] = {}
    if args.llama_cpp is not None:
        found["llama.cpp"] = serve_llama_cpp(args.llama_cpp, model, max(args.streams), context)
    if args.openvino is not None:
        found["OpenVINO GenAI"] = serve_openvino(args.openvino, model)
    if args.peer_python is not None:
        found["vLLM"] = serve_vllm(args.peer_python, args.bf16)
    return found


def compare(urls: Mapping[str, str], load: str, turns: int) -> None:
    """Play a load on each server in turns, and report the medians of ours beside those of each other one."""
    figures = {name: list[ClassFigures]() for name in urls}
    for turn in range(turns):
        for name in list(urls)[:: 1 if turn % 2 else -1]:
            sleep(SETTLES_S)
            record = played(urls[name], load, IdWording(Random()))
            (found,) = LoadFigures.from_record(record).classes.values()
            assert found["requests.finished"] == found["requests.count"], f"{name}: {load}: not all have finished"
            figures[name].append(found)
    for path, (what, unit, scale) in TOLD.items():
        values = {name: scale * median(each[path] for each in found) for name, found in figures.items()}
        label = f"{load}: {what}"
        if len(values) == 1 and isfinite(values["ours"]):
            report(label, values["ours"], unit)
        for name in list(values)[1:]:
            report(f"{label}, against {name}", values["ours"], unit, baseline=values[name])


PARTS = {"steps": measure, "nothing": nothing, "siblings": siblings, "memory": memory, "start": start, "peers": peers}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--parts", type=several(str, PARTS), default=["steps"], help=", ".join(PARTS))
    parser.add_argument("--starts", type=int, default=1, help="start: with the cache that another left")
    parser.add_argument("--turns", type=int, default=10, help="nothing, siblings: loads of each kind")
    parser.add_argument("--documents", type=int, default=32, help="steps: in flight")
    parser.add_argument("--windows", type=int, default=5, help="steps")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of served steps that are run again")
    parser.add_argument("--model", type=Path, help="a model folder with a tokenizer, in place of random weights")
    parser.add_argument("--machine", choices=MACHINES, help="memory: simulate on this machine, two seeds")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help=f"peers: where {LLAMA_SERVER} is")
    parser.add_argument("--openvino", metavar="PYTHON", help="peers: a Python that has openvino-genai")
    parser.add_argument("--peer-python", metavar="PYTHON", help="peers: a Python that has vLLM's CPU build")
    parser.add_argument("--bf16", type=Path, metavar="FOLDER", help="peers: the model for vLLM")
    parser.add_argument("--loads", type=several(str, LOADS), default=["cpu-chat"], help=f"peers: {', '.join(LOADS)}")
    parser.add_argument("--streams", type=several(int), default=[1, 8], help="peers")
    parser.add_argument("--scale", type=float, default=0.25, help="peers: factor of all lengths")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    if args.machine and args.parts != ["memory"]:
        parser.error("--machine simulates the part memory: add --parts memory")
    if "peers" in args.parts and args.model is None:
        parser.error("peers compares a model that you name with --model")
    if (args.peer_python is None) != (args.bf16 is None):
        parser.error("--peer-python and --bf16 go together")
    with TemporaryDirectory() as folder:
        model = args.model or (Path() if args.machine else llama160m(Path(folder) / "model"))
        for part in args.parts:
            PARTS[part](args, model, Path(folder))
    sys.exit(status())


if __name__ == "__main__":
    sys.exit(serve_watched() if sys.argv[1:2] == ["serve"] else main())
