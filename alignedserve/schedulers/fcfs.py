"""First come, first served: requests run by arrival, and nothing is predicted. Two rules fill their steps.

Prompts get seats in the order of arrival, before a step is planned, until memory is full. Orca, Sarathi-Serve and vLLM
V1 fill steps by one rule, and so do DistServe and vLLM V0: these differ in numbers, the tokens and requests of a step,
and when a request gets memory (config/presets.py). Where promises or chunks of memory bound the steps of requests by
arrival, in_order.py plans them.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Chunk
from alignedserve.schedulers.in_order import InOrder
from alignedserve.schedulers.scheduler import NO_LIMIT, Scheduler
from alignedserve.schedulers.wrapping import Wrapping
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.step.ranks import of_old_batch
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, StepContext, StepView, all_of


class PromptsFirst(Scheduler):
    """Whole prompts run alone, as many as fit; decodes where no prompt waits. Only a prompt that is longer than a step
    is cut.

    So does vLLM V0, before chunked prefill (PagedAttention §4.5; the newest leaves), and DistServe (§4.3), whose
    prompts and decodes run on workers of their own."""

    def plan(self, view: StepView) -> PlannedStep:
        at, chunks = view.at, list[Chunk]()
        budget = at.room
        for prompt in view.prompts:
            if chunks and prompt.num_ahead > budget:
                break
            chunks.append(chunk_of(prompt, budget))
            budget -= len(chunks[-1].tokens)
        return all_of((), tuple(chunks), at) if chunks else all_of(view.decodes[: at.room], (), at)


class DecodesFirst(Scheduler):
    """All decodes run, and chunks of prompts in the tokens that are left. Only the last prompt of a step is cut; a
    prompt that may not be cut and does not fit becomes the first prompt of the next step.

    So do Orca (§4.1, iteration-level scheduling; its preset has so large a step that no prompt is cut), Sarathi-Serve
    (§4.3, Algorithm 3) and vLLM V1 (`schedule` of its scheduler; the newest leaves, and is recomputed)."""

    def plan(self, view: StepView) -> PlannedStep:
        at, chunks = view.at, list[Chunk]()
        budget = at.room - len(view.decodes)
        for prompt in view.prompts:
            if budget <= 0 or (chunks and prompt.request.runs_whole and prompt.num_ahead > budget):
                break
            chunks.append(chunk_of(prompt, budget))
            budget -= len(chunks[-1].tokens)
        return all_of(view.decodes[: at.room], tuple(chunks), at)


def by_arrival(policy: Policy) -> type[Scheduler]:
    """Return the rule by arrival that the chunks and the memory of a policy ask for."""
    if not policy.is_plain:
        return InOrder
    return PromptsFirst if policy.chunking is Chunking.NONE else DecodesFirst


class FirstCome(Wrapping):
    """A scheduler whose steps are filled by arrival, by the rule that the policy asks for."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(by_arrival(policy)(policy, most))

    def plan(self, view: StepView) -> PlannedStep:
        return self.wrapped.plan(view)


class AlignedServePaper(FirstCome):
    """AlignedServe's paper: "we evict the request with the longest prefix" of the old batch (§3.4, case 3).

    Prompts run by arrival on workers of their own (§3.2). That the longest leaves frees the most memory, and the old
    batch ends sooner.
    """

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        return max(of_old_batch((*prompts, *decodes), at), key=lambda request: request.num_tokens)
