"""Measure a whole deployment on one GPU, with random weights of an 8B's shapes, over HTTP.

    python -m lab.benchmarks.gpu_server                         # all parts
    python -m lab.benchmarks.gpu_server --only streams,shared
    python -m lab.benchmarks.gpu_server --model tiny            # tried on a CPU

`streams` is `alignedserve bench` with 1, 32 and 128 chats at once; `beside` chats at random times beside documents that
are always there; `offline` 1,000 requests at once with ShareGPT's lengths; `shared` many chats over one long beginning;
`kill` a stream whose worker is killed with -9, which has to go on until its end. These share one deployment. `separate`
has prompts and decodes in two processes on the one GPU, where KV goes from one to the other by CUDA IPC, and long
prompts that join while others decode.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.lab.benchmarks.common.gpu_shapes import DEVICE, about, all_tried, asked, config_of, left_out
from alignedserve.lab.benchmarks.common.report import report
from alignedserve.lab.benchmarks.common.serving import Answer, ServedDeployment, ask, name_of, processes_under, serve
from alignedserve.lab.devices.devices import Model
from alignedserve.lab.loads.records.distribution import percentile

PARTS = ("streams", "beside", "offline", "shared", "kill", "separate")
IS_DRY = DEVICE.type != "cuda"
FLAGS = ("--load-format", "dummy", "--log-level", "info")
# Figures of `alignedserve bench`, in seconds where they are times.
SHOWN = [("requests.finished", "1"), ("attainment", "share"), ("tokens_in_time", "share"), ("tokens_per_s", "tokens/s")]
SHOWN += [(f"{name}.{part}", "ms") for name in ("ttft_s", "tpot_s", "gap_s") for part in ("p50", "p99")]
OFFLINE_GOAL = 16_000.0  # tokens/s of answers, of an 8B on an H100
TOKENS = range(100, 1_100)  # that prompts are made of


@dataclass(frozen=True)
class Size:
    """How much is asked; a dry run asks for little."""

    streams: tuple[int, ...] = (1, 32, 128)
    prompt: int = 512
    output: int = 128
    long_output: int = 768  # of streams beside which a worker is killed, or a prompt joins
    turns: int = 3  # requests of each stream
    beside_s: float = 20.0
    chats_s: float = 8.0  # chats in a second
    documents: int = 64
    offline: int = 1_000  # requests at once
    shared: tuple[int, int] = (64, 8_000)  # requests, and tokens that all begin with
    long: int = 8_000  # tokens of the prompts that join
    memory: tuple[str, ...] = ("--device", "cuda", "--pool-memory-mb", "8192", "--max-model-len", "16384")
    separate: tuple[str, ...] = ("--kv-memory-mb", "16384")


DRY = Size(
    streams=(1, 4),
    prompt=64,
    output=16,
    turns=1,
    beside_s=3.0,
    chats_s=1.0,
    documents=2,
    offline=8,
    shared=(4, 300),
    long=300,
    memory=("--device", "cpu", "--pool-memory-mb", "64"),
    separate=("--kv-memory-mb", "64"),
)


def folder_of(model: Model, folder: Path) -> Path:
    """Make a folder without weights: shapes, and the demo model's tokenizer; prompts are token ids."""
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO_FOLDER / name).read_bytes())
    return folder


class Served:
    def __init__(self, deployment: ServedDeployment, size: Size) -> None:
        self.url, self.pid, self.size = deployment.url, deployment.pid, size
        self._draw = Random(0)

    def prompt(self, tokens: int) -> list[int]:
        return self._draw.choices(TOKENS, k=tokens)

    def _bench(self, workload: str, *flags: str) -> dict[str, dict[str, float]]:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "run.json"
            asked = [sys.executable, "-m", "alignedserve", "bench", "--url", self.url, "--workload", workload]
            ended = subprocess.run([*asked, "--json", str(found), *flags], stdout=subprocess.PIPE, text=True)
            print(ended.stdout, file=sys.stderr)  # for the log: lines here are figures
            if ended.returncode:
                raise RuntimeError(f"bench ended with {ended.returncode}")
            run: dict[str, dict[str, float]] = json.loads(found.read_text())["runs"][0]["classes"]
            return run

    def measure(self, part: str) -> None:
        (self.joins if part == "separate" else getattr(self, part))()

    def streams(self) -> None:
        size = self.size
        for count in size.streams:
            lengths = (
                f"prompt={size.prompt},output={size.output},arrivals=closed,in_flight={count},replace=true,ttft_s=60"
            )
            classes = self._bench(f"sizes:{lengths},num_requests={size.turns * count}")
            _report_class(f"streams_{count}", classes["rt"])

    def beside(self) -> None:
        size = self.size
        documents = f"documents.in_flight={size.documents},first_s={size.beside_s}"
        classes = self._bench(f"coserve,rate={size.chats_s},{documents}")
        for name, found in classes.items():
            _report_class(f"beside_{name}", found)
        report("beside_chats_in_time", 100 * classes["rt"]["attainment"], "%", goal=100.0, at_least=True)

    def offline(self) -> None:
        """Send all at once, best effort, since no more than 512 chats may wait. Only tokens of answers count."""
        count = self.size.offline
        lengths = f"service=be,arrivals=closed,in_flight={count},replace=true,num_requests={count}"
        found = self._bench(f"sizes:{lengths}")["be"]
        _report_class("offline", found)
        report("offline_whole", found["requests.finished"], "1", goal=count, at_least=True)
        goal = OFFLINE_GOAL if "H100" in about()["gpu"] else None
        report("offline_answers", found["tokens_per_s"], "tokens/s", goal=goal, at_least=True)

    def shared(self) -> None:
        """Ask many requests over one beginning at once, after a first request has cached the beginning."""
        count, long = self.size.shared
        beginning = self.prompt(long)

        async def all_at_once() -> list[Answer]:
            await ask(self.url, beginning + self.prompt(8), 4)
            own = [beginning + self.prompt(16) for _ in range(count)]
            return await asyncio.gather(*(ask(self.url, prompt, self.size.output) for prompt in own))

        began = time.perf_counter()
        answers = asyncio.run(all_at_once())
        took = time.perf_counter() - began
        report("shared_whole", sum(answer.is_whole for answer in answers), "1", goal=count, at_least=True)
        whole = [answer for answer in answers if answer.is_whole]
        if whole:
            report("shared_rate", sum(len(answer.read.token_at) for answer in whole) / took, "tokens/s")
            report("shared_found", median(answer.read.num_cached for answer in whole), "tokens")
            report("shared_ttft", 1e3 * median(answer.ttft_s for answer in whole), "ms")
            report("shared_gap", 1e3 * median(gap for answer in whole for gap in answer.gaps), "ms")

    def kill(self) -> None:
        """Kill the worker in the middle of a stream: the answer has to be that of an undisturbed one."""
        prompt, output = self.prompt(self.size.prompt), self.size.long_output

        async def disturbed() -> Answer:
            stream = asyncio.create_task(ask(self.url, prompt, output))
            while not stream.done() and not stream.cancelled():
                await asyncio.sleep(0.2)
                if workers := [pid for pid, line in processes_under(self.pid).items() if _is_worker(line)]:
                    for pid in workers:
                        os.kill(pid, signal.SIGKILL)
                    break
            return await stream

        calm = asyncio.run(ask(self.url, prompt, output))
        began = time.perf_counter()
        hurt = asyncio.run(disturbed())
        report("kill_answered", time.perf_counter() - began, "s")
        report("kill_longest_gap", max(hurt.gaps, default=0.0), "s")
        report("kill_tokens", len(hurt.read.ids), "1", goal=output, at_least=True)
        # The next worker recomputes the KV of what was sent, which rounds differently. Random weights give many tokens
        # of nearly the same logit, so the answers may differ from one of these on. In fp32 they are equal
        # (tests/end_to_end).
        pairs = enumerate(zip(calm.read.ids, hurt.read.ids, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), output)
        report("kill_tokens_until_a_difference", same, "1")

    def joins(self) -> None:
        """Let long prompts join while others decode: how much longer do the others wait for a token than before?"""

        async def run() -> tuple[list[float], list[float], list[Answer]]:
            others = [asyncio.create_task(ask(self.url, self.prompt(64), self.size.long_output)) for _ in range(8)]
            await asyncio.sleep(0.3)
            began = time.perf_counter()
            longs = await asyncio.gather(*(ask(self.url, self.prompt(self.size.long), 16) for _ in range(3)))
            ended = time.perf_counter()
            answers = await asyncio.gather(*others)
            before, beside = list[float](), list[float]()
            for answer in answers:
                for at, gap in zip(answer.read.token_at[1:], answer.gaps, strict=True):
                    (beside if began < at < ended else before).append(gap)
            return before, beside, [*longs, *answers]

        before, beside, answers = asyncio.run(run())
        report("joins_whole", sum(answer.is_whole for answer in answers), "1", goal=len(answers), at_least=True)
        if not (before and beside):
            raise RuntimeError("the streams had no tokens before or beside the prompts that joined")
        for share in (50, 99):
            alone = 1e3 * percentile(before, share)
            report(f"joins_gap_p{share}", 1e3 * percentile(beside, share), "ms", baseline=alone)


def _is_worker(line: str) -> bool:
    return (name_of(line) or "").startswith(("worker", "decode", "colocated"))


def _report_class(name: str, found: dict[str, float]) -> None:
    for path, unit in SHOWN:
        if found.get(path) is not None:
            report(f"{name}_{path}", found[path] * (1e3 if unit == "ms" else 1), unit)


def run(parts: Sequence[str], model: Model, size: Size) -> bool:
    """Run all parts, also after one that fails; return whether none failed."""
    went_well = True
    with tempfile.TemporaryDirectory() as folder:
        made = folder_of(model, Path(folder))
        for topology, names in (("colocated", PARTS[:-1]), ("1+1", ("separate",))):
            wanted = [name for name in names if name in parts]
            if not wanted:
                continue
            is_separate = topology != "colocated"
            more = size.separate if is_separate else ()
            try:
                with serve(made, *FLAGS, *size.memory, "--topology", topology, *more) as deployment:
                    report(f"ready_{topology}", deployment.ready_s, "s")
                    served = Served(deployment, size)
                    went_well &= all_tried(wanted, served.measure)
            except (SystemExit, OSError) as error:
                left_out(topology, str(error)[:300])
                went_well = False
    return went_well


def main() -> int:
    parts, model = asked(__doc__, "gpu_server", PARTS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is stopped in any case
    return 0 if run(parts, model, DRY if IS_DRY else Size()) else 1


if __name__ == "__main__":
    sys.exit(main())
