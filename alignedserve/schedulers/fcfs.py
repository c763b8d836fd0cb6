"""First come, first served: requests run by arrival, and nothing is predicted. Two rules fill their steps.

Prompts get seats in the order of arrival, before a step is planned, until memory is full. Systems with the same rule
differ in numbers: the tokens and requests of a step, and when a request gets memory (config/presets.py). Where promises
or chunks of memory bound the steps of requests by arrival, in_order.py plans them.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Chunk
from alignedserve.schedulers.in_order import InOrder
from alignedserve.schedulers.scheduler import NO_LIMIT, Scheduler
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.step.ranks import of_old_batch
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, StepContext, StepView, all_of


class FirstCome(Scheduler):
    seats_by_arrival = True

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self._fill = prompts_first if policy.chunking is Chunking.NONE else decodes_first

    def plan(self, view: StepView) -> PlannedStep:
        return self._fill(view)


def prompts_first(view: StepView) -> PlannedStep:
    """Fill a step with whole prompts, or with decodes where no prompt waits.

    vLLM V0: prompts run alone whenever one fits. DistServe (§4.3) and AlignedServe (§3.2): prompts run by arrival on
    workers of their own. As many prompts run as fit; only a prompt that is longer than a step is cut.
    """
    at, chunks = view.at, list[Chunk]()
    budget = at.room
    for prompt in view.prompts:
        if chunks and prompt.num_ahead > budget:
            break
        chunks.append(chunk_of(prompt, budget))
        budget -= len(chunks[-1].tokens)
    return all_of((), tuple(chunks), at) if chunks else all_of(view.decodes[: at.room], (), at)


def decodes_first(view: StepView) -> PlannedStep:
    """Fill a step with all decodes, and with chunks of prompts in the tokens that are left.

    Sarathi-Serve (§4.3, Algorithm 3): first all running decodes, then prompts that have begun, then new prompts.
    vLLM V1: running requests first, then waiting ones, in the tokens of a step; the newest leaves, and is recomputed.
    DeepSpeed-FastGen (§3.B): long prompts are split and short prompts composed, to fill a fixed number of tokens.
    Orca (§4.1): requests join and leave between any two steps, and whole prompts run beside decodes. Only the last
    prompt of a step is cut. A prompt that may not be cut and does not fit becomes the first prompt of the next step.
    """
    at, chunks = view.at, list[Chunk]()
    budget = at.room - len(view.decodes)
    for prompt in view.prompts:
        if budget <= 0 or (chunks and prompt.request.runs_whole and prompt.num_ahead > budget):
            break
        chunks.append(chunk_of(prompt, budget))
        budget -= len(chunks[-1].tokens)
    return all_of(view.decodes[: at.room], tuple(chunks), at)


class LongestLeaves(FirstCome):
    """AlignedServe's paper: "we evict the request with the longest prefix" of the old batch (§3.4, case 3).

    That frees the most memory, and the old batch ends sooner.
    """

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return max(of_old_batch((*prompts, *decodes), at), key=lambda request: request.num_tokens)


class LongestLeavesInOrder(InOrder):
    leaving = LongestLeaves.leaving
