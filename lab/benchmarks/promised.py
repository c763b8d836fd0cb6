"""Measure whether people who ask at once get what `alignedserve promise` says of this machine.

    python -m lab.benchmarks.promised MODEL [MODEL ...] [-- SERVE FLAGS]    # on a quiet machine, minutes a model

For each model the table is made first. Then a server is started with the same flags, and people ask it at once, each
with a new prompt, for an answer of 100 tokens; the next ask when all are answered. For each cell of the table: the 95th
percentile of a round's first tokens, the median of some rounds, with the table's as the baseline. Nobody is refused.
A virtual machine may be stopped for others: a round that lost more than a fiftieth of its time so is run again.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import Answer, ask, serve
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.trials.crowd import REFUSES_NONE

OFF = 0.2  # share of the table's first token by which the measured one may be off
MOST_STOLEN, TRIES = 0.02, 6  # share of the processors' time in a round, and the rounds for each that counts
VOCAB = 20_000  # tokens that each of the models has
MODELS = ["smollm2"]


def table_of(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the table of the command; the flags are those that it shares with `serve`."""
    asked = [sys.executable, "-m", "alignedserve", "promise", model, *flags, "--json"]
    told = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


async def at_once(url: str, people: int, prompt: int, output: int) -> list[Answer]:
    prompts = [[Random().randrange(1000, VOCAB) for _ in range(prompt)] for _ in range(people)]
    return await asyncio.gather(*(ask(url, tokens, output) for tokens in prompts))


def ticks() -> tuple[int, int]:
    """Return the time of all processors so far, and what of it others had who share the hardware."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + idle + iowait + irq + softirq + steal, steal


def measure(model: str, table: dict[str, Any], url: str, args: Any) -> None:
    asyncio.run(at_once(url, 2, 100, 20))  # a first request maps memory
    for cell in table["cells"]:
        people, prompt = cell["people"], cell["prompt"]
        if people not in args.people or prompt not in args.prompts:
            continue
        what, firsts, gaps = f"{model}: {people} at once, prompts of {prompt}", list[float](), list[float]()
        for _ in range(TRIES * args.rounds):
            before = ticks()
            answers = asyncio.run(at_once(url, people, prompt, table["answer"]))
            if not all(answer.is_whole for answer in answers):
                raise SystemExit(f"{what}: not all got a whole answer")
            took, stolen = (later - earlier for later, earlier in zip(ticks(), before, strict=True))
            if stolen > MOST_STOLEN * took:
                continue
            firsts.append(percentile((answer.ttft_s for answer in answers), 95))
            gaps += [gap for answer in answers for gap in answer.gaps]
            if len(firsts) == args.rounds:
                break
        else:
            raise SystemExit(f"{what}: the machine was stopped for others in too many rounds")
        off = abs(median(firsts) / cell["first_token_s"] - 1)
        report(f"{what}: first token (p95)", median(firsts), "s", baseline=cell["first_token_s"])
        report(f"{what}: first token, off by", off, "1", goal=OFF)
        report(f"{what}: gap (p99)", percentile(gaps, 99), "s", baseline=cell["gap_s"])


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help="folders, GGUF files or names")
    parser.add_argument("--people", type=several(int), default=[1, 4, 16], help="people at once, of the table's")
    parser.add_argument("--prompts", type=several(int), default=[100, 500, 2000], help="tokens, of the table's")
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = _parsed(parser)
    for model in args.models:
        table = table_of(model, flags)
        with serve(model, "--set", REFUSES_NONE, *flags) as deployment:
            measure(model.rpartition("/")[2], table, deployment.url, args)
    sys.exit(status())


def _parsed(parser: Any) -> tuple[Any, list[str]]:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:at]), words[at + 1 :]


if __name__ == "__main__":
    main()
