"""Choices of steps among thousands of waiting prompts, half of them best-effort, with the lengths of ShareGPT."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from alignedserve.core import KvForm, Request, ServiceClass, Slo
from alignedserve.cost.model import Coefficients, CostModel, Kind
from alignedserve.schedulers.table import scheduler_of
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.scheduling.slo import StepTimes
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.blocks import Blocks
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.view import PlannedStep, StepContext, StepView
from alignedserve.worker.step.waiting_prompts import WaitingPrompts
from tests.ratchets.requests import LENGTHS, lengths, request

BLOCK, STEP_TOKENS, BLOCKS = 16, 2048, 32_768
# About an RTX PRO 6000 with Llama-3.1-8B: 11 ms for a step, 40 us for a prompt token, 0.1 us for a token of a prefix.
COST = CostModel({kind: Coefficients(fixed=0.011, token=(4e-5,), decode=2e-5, prefix=1e-7, work=1e-9) for kind in Kind})
TIMES = StepTimes(0.03, 0.09)


def drawn(seed: int) -> Iterator[Request]:
    """Yield requests, half of them best-effort."""
    prompts = [prompt for prompt, _ in lengths(LENGTHS)]
    draw, number = random.Random(seed), 0
    while True:
        number += 1
        is_rt = draw.random() < 0.5
        slo = Slo(ttft_s=draw.uniform(0.5, 30.0), tbt_s=0.1875) if is_rt else Slo(jct_s=draw.choice((600.0, 86_400.0)))
        service = ServiceClass.RT if is_rt else ServiceClass.BE
        yield request(f"request-{number}", (1,) * draw.choice(prompts), 512, service=service, slo=slo)


def running(asked: Request, policy: Policy, now: float, output: int = 0) -> WorkerRequest:
    asked = replace(asked, arrival_at=now, emitted_at=None)
    found = WorkerRequest(asked, promise(asked, policy, output), [7] * output)
    if output:
        found.prefix = len(asked.prompt) + output - 1
        found.promise.emitted(now, output)
    return found


def choice(
    scheduler: Scheduler, decodes: Sequence[WorkerRequest], waiting: WaitingPrompts, blocks: Blocks, now: float
) -> PlannedStep:
    policy = scheduler.policy
    at = StepContext(now, COST, TIMES, STEP_TOKENS, BLOCK, 256, policy, COST.pivot(STEP_TOKENS))
    by_chunk = policy.room is Room.CHUNKS
    seating = Seating(blocks, BLOCKS, BLOCK, 1_000, by_chunk, lambda prompt: prompt.num_tokens)
    prompts: list[WorkerRequest] = []
    for prompt in list(islice(waiting if policy.is_plain else (), 8)):  # the worker seats them in the order of arrival
        prompt.kv = KvForm(blocks.take(-(-prompt.num_tokens // BLOCK)) or ())
        waiting.remove(prompt)
        prompts.append(prompt)
    found = scheduler.plan(StepView(decodes, prompts, waiting, at, seating))
    for prompt in found.admitted:
        waiting.remove(prompt)
    for prompt in (*prompts, *found.admitted):
        blocks.give(prompt.blocks)  # as if the prompt's step had run
    return found


def choose(policy: Policy, num_waiting: int, num_decodes: int, steps: int) -> None:
    """Choose so many steps; as many new prompts arrive between two of them as the first finished, as on a worker."""
    requests, now, waiting, blocks = drawn(seed=1), 0.0, WaitingPrompts(policy), Blocks(BLOCKS)
    slo = Slo(ttft_s=1.0, tbt_s=0.1875)
    chats = (replace(next(requests), service=ServiceClass.RT, slo=slo) for _ in range(num_decodes))
    decodes = [running(chat, policy, now, 20) for chat in chats]
    for _ in range(num_waiting):
        waiting.add(running(next(requests), policy, now))
    scheduler = scheduler_of(policy, 1_000)
    for _ in range(steps):
        now += 0.03
        for decode in decodes:
            decode.promise.emitted(now, 20)
        for _ in range(num_waiting - len(waiting)):
            waiting.add(running(next(requests), policy, now))
        found = choice(scheduler, decodes, waiting, blocks, now)
        assert found.chunks or found.decodes, "a step is never empty while anything can run"
