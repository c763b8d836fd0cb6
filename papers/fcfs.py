"""First come, first served: requests run by arrival, and nothing is predicted. Two rules fill their steps.

Prompts get seats in the order of arrival, before a step is planned, until memory is full. Orca, Sarathi-Serve and vLLM
V1 fill steps by one rule, and so do DistServe and vLLM V0: these differ in numbers, the tokens and requests of a step,
and when a request gets memory (presets.py). Where promises or chunks of memory bound the steps of requests by
arrival, in_order.py plans them.

Others leave some requests out of a step, and fill the rest by these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from alignedserve.core import Chunk
from alignedserve.papers.in_order import InOrder
from alignedserve.papers.policy import PaperPolicy
from alignedserve.papers.wrapping import Wrapping
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.scheduler import NO_LIMIT, Scheduler
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.ranks import of_old_batch
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, RanStep, StepView, all_of
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


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


MOST_WAITING = 20  # steps of decodes that a prompt waits for at most (max_waiting_tokens)


class Tgi(FirstCome):
    """Text Generation Inference's router: whole prompts interrupt decodes once enough prompts wait
    (waiting_served_ratio), or decodes have run for long."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self._ratio = PaperPolicy.of(policy).waiting_ratio
        self._prompts_at = 0  # the number of the last step with prompts

    def plan(self, view: StepView) -> PlannedStep:
        ran = view.ran
        if ran.prompts:
            self._prompts_at = ran.number
        num_steps = ran.number - self._prompts_at
        is_early = len(view.prompts) < self._ratio * len(view.decodes) and num_steps < MOST_WAITING
        return super().plan(view._replace(prompts=()) if is_early else view)


class RoundRobin(FirstCome):
    """Chats and documents run in alternate steps, each by arrival; a class without requests passes its turn on. BROS
    compares with it (§7.1)."""

    def plan(self, view: StepView) -> PlannedStep:
        chats_turn = is_turn_of_chats(view.ran)
        for is_rt in (chats_turn, not chats_turn):
            decodes = [running for running in view.decodes if running.promise.is_rt is is_rt]
            prompts = [running for running in view.prompts if running.promise.is_rt is is_rt]
            if decodes or prompts:
                return super().plan(view._replace(decodes=decodes, prompts=prompts))
        return super().plan(view)

    def seating_order(self, waiting: WaitingPrompts, ran: RanStep) -> Iterable[WorkerRequest]:
        chats, documents = waiting.real_time, waiting.best_effort
        return chain(chats, documents) if is_turn_of_chats(ran) else chain(documents, chats)


def is_turn_of_chats(ran: RanStep) -> bool:
    return not any(running.promise.is_rt for running in chain(ran.decodes, ran.prompts))
