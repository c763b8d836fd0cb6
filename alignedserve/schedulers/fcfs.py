"""First come, first served: requests run by arrival, and nothing is predicted.

Prompts get seats in the order of arrival, until memory is full. A step has all decodes, and chunks of prompts in the
tokens that are left. Without chunking, whole prompts run before all decodes. Where a policy is by arrival, but
promises or memory bound its steps, in_order.py plans them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.core import Chunk
from alignedserve.schedulers.in_order import InOrder
from alignedserve.scheduling.policy import Chunking
from alignedserve.worker.step.ranks import of_old_batch
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, StepContext, StepView, all_of


class FirstCome(InOrder):
    """Orca, vLLM, Sarathi-Serve, FastGen, DistServe differ in numbers alone (config/presets.py has each with its
    paper): whole prompts or chunks, the tokens and requests of a step, and when a request gets memory."""

    def plan(self, view: StepView) -> PlannedStep:
        if not self.policy.is_plain:
            return super().plan(view)
        at, prompts = view.at, view.prompts
        if self.policy.chunking is Chunking.NONE and prompts:
            return all_of((), whole(prompts, at.room), at)
        return all_of(view.decodes[: at.room], cut(prompts, at.room - len(view.decodes)), at)


class LongestLeaves(FirstCome):
    """AlignedServe's paper: "we evict the request with the longest prefix" of the old batch (§3.4, case 3).

    That frees the most memory, and the old batch ends sooner.
    """

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return max(of_old_batch((*prompts, *decodes), at), key=lambda request: request.num_tokens)


def cut(prompts: Iterable[WorkerRequest], budget: int) -> tuple[Chunk, ...]:
    """Return chunks of at most `budget` tokens together; only the last prompt of a step is cut short. A prompt that
    may not be cut and does not fit into the rest of the budget becomes the first prompt of the next step."""
    chunks: list[Chunk] = []
    for prompt in prompts:
        if budget <= 0 or (chunks and prompt.request.runs_whole and prompt.num_ahead > budget):
            break
        chunk = chunk_of(prompt, budget)
        budget -= len(chunk.tokens)
        chunks.append(chunk)
    return tuple(chunks)


def whole(prompts: Iterable[WorkerRequest], budget: int) -> tuple[Chunk, ...]:
    """Return as many whole prompts as fit; only a prompt that is longer than the budget by itself is cut."""
    chunks: list[Chunk] = []
    for prompt in prompts:
        if chunks and prompt.num_ahead > budget:
            break
        chunks.append(chunk_of(prompt, budget))
        budget -= len(chunks[-1].tokens)
    return tuple(chunks)
