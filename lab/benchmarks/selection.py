"""Measure the time to choose a step, among thousands of waiting prompts and in an ordinary step.

    python -m lab.benchmarks.selection [--waiting 10000] [--steps 200] [--lengths FILE.csv]

Half of the waiting prompts are best-effort. Lengths are those of ShareGPT (tests/simulator/data). Between two steps,
time passes, and as many new prompts arrive as the step finished, as on a worker; this is part of a choice's time. The
first choice of each row files all prompts, as a choice does whenever step times have changed by a fifth. Times are
processor times, so other work on the machine matters little.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from time import thread_time

from alignedserve.core import Request, ServiceClass, Slo
from alignedserve.cost.model import Coefficients, CostModel, Kind
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.common.requests import LENGTHS, lengths, request
from alignedserve.schedulers.scheduler import Scheduler, SchedulerSetup
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.policy import Chunking, Order, Policy, PromptChoice, Room
from alignedserve.scheduling.promise import promise
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.step.running import Blocks, Running
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.view import Selection, StepContext, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

GOAL_MS = 1.0
BLOCK, STEP_TOKENS, PAIRS = 16, 2048, 32_768
# About an RTX PRO 6000 with Llama-3.1-8B: 11 ms for a step, 40 us for a prompt token, 0.1 us for a token of a prefix.
COST = CostModel({kind: Coefficients(fixed=0.011, token=(4e-5,), decode=2e-5, prefix=1e-7, work=1e-9) for kind in Kind})
TIMES = StepTimes(0.03, 0.09)
POLICIES = {
    "default": Policy(),
    "best fit": Policy(selection=PromptChoice.MULTI_RESOURCE),
    "fixed budget": Policy(chunking=Chunking.FIXED),
    "whole prompts": Policy(chunking=Chunking.NONE),
    "by arrival": Policy(Order.FCFS),
    "shortest": Policy(Order.SHORTEST_REMAINING),
    "memory by chunks": Policy(room=Room.CHUNKS),
    "as in the paper": Policy(room=Room.CHUNKS, as_in_paper=True),
    "first come": Policy(Order.FCFS, Chunking.FIXED, PromptChoice.IN_ORDER),
}


def drawn(path: Path, seed: int) -> Iterator[Request]:
    """Yield requests, half of them best-effort."""
    prompts = [prompt for prompt, _ in lengths(path)]
    draw, number = random.Random(seed), 0
    while True:
        number += 1
        is_rt = draw.random() < 0.5
        slo = Slo(ttft_s=draw.uniform(0.5, 30.0), tbt_s=0.1875) if is_rt else Slo(jct_s=draw.choice((600.0, 86_400.0)))
        service = ServiceClass.RT if is_rt else ServiceClass.BE
        yield request(f"request-{number}", (1,) * draw.choice(prompts), 512, service=service, slo=slo)


def running(asked: Request, policy: Policy, now: float, output: int = 0) -> Running:
    asked = replace(asked, arrival_at=now, emitted_at=None)
    found = Running(asked, promise(asked, policy, output), [7] * output)
    if output:
        found.prefix = len(asked.prompt) + output - 1
        found.promise.emitted(now, output)
    return found


def choice(
    scheduler: Scheduler, decodes: Sequence[Running], waiting: WaitingPrompts, blocks: Blocks, now: float
) -> Selection:
    policy = scheduler.policy
    at = StepContext(now, COST, TIMES, STEP_TOKENS, BLOCK, 256, policy, COST.pivot(STEP_TOKENS))
    by_chunk = policy.room is Room.CHUNKS
    seating = Seating(blocks, PAIRS, BLOCK, 1_000, by_chunk, lambda prompt: prompt.num_tokens, set)
    prompts: list[Running] = []
    for prompt in list(islice(waiting if policy.is_plain else (), 8)):  # the worker seats them in the order of arrival
        prompt.pairs = blocks.take(-(-prompt.num_tokens // BLOCK)) or ()
        waiting.remove(prompt)
        prompts.append(prompt)
    found = scheduler.plan(StepView(decodes, prompts, waiting, at, seating))
    for prompt in found.seated:
        waiting.remove(prompt)
    for prompt in (*prompts, *found.seated):
        blocks.give(prompt.pairs)  # as if the prompt's step had run
    return found


def chosen(policy: Policy, num_waiting: int, num_decodes: int, steps: int, path: Path) -> tuple[list[float], int]:
    """Return the seconds of each choice, and the number of prompts that all choices chose."""
    requests, now, waiting, blocks = drawn(path, seed=1), 0.0, WaitingPrompts(policy), Blocks(PAIRS)
    slo = Slo(ttft_s=1.0, tbt_s=0.1875)
    chats = (replace(next(requests), service=ServiceClass.RT, slo=slo) for _ in range(num_decodes))
    decodes = [running(chat, policy, now, 20) for chat in chats]
    for _ in range(num_waiting):
        waiting.add(running(next(requests), policy, now))
    scheduler, took, num_chosen = scheduler_of(SchedulerSetup(policy, 1_000)), list[float](), 0
    for _ in range(steps):
        now += 0.03
        for decode in decodes:
            decode.promise.emitted(now, 20)
        fresh = [running(next(requests), policy, now) for _ in range(num_waiting - len(waiting))]
        began = thread_time()
        for prompt in fresh:
            waiting.add(prompt)
        found = choice(scheduler, decodes, waiting, blocks, now)
        took.append(thread_time() - began)
        num_chosen += len(found.chunks)
        assert found.chunks or found.decodes, "a step is never empty while anything can run"
    return took, num_chosen


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="a CSV file with prompt_tokens and output_tokens")
    args = parser.parse_args()
    for name, policy in POLICIES.items():
        took, num_chosen = chosen(policy, args.waiting, 32, args.steps, args.lengths)
        label = f"a step among {args.waiting:,} waiting, {name}"
        report(f"{label}, median", median(took) * 1e3, "ms", goal=GOAL_MS)
        report(f"{label}, mean", mean(took[1:]) * 1e3, "ms")
        report(f"{label}, all filed anew", took[0] * 1e3, "ms")
        report(f"{label}, prompts chosen", num_chosen / args.steps, "1")
    for num_decodes in (8, 128):
        plain, _ = chosen(POLICIES["first come"], 2, num_decodes, args.steps, args.lengths)
        ours, _ = chosen(POLICIES["default"], 2, num_decodes, args.steps, args.lengths)
        base, value = median(plain) * 1e6, median(ours) * 1e6
        report(f"a step of {num_decodes} decodes, 2 waiting, default against first come", value, "us", baseline=base)
    sys.exit(status())


if __name__ == "__main__":
    main()
