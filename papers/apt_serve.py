"""Apt-Serve (§5): every request with memory runs, and before each step requests get memory by worth.

"The iteration type is chosen based on which queue has a higher cumulative pending time" (§5): where prompts are not
cut, a step runs either prompts or decodes. memory/worth.py says what memory is worth to a request.
"""

from __future__ import annotations

from alignedserve.papers.fcfs import FirstCome
from alignedserve.scheduling.policy import Chunking, Policy
from alignedserve.worker.scheduler import NO_LIMIT
from alignedserve.worker.step.view import PlannedStep, StepView


class AptServe(FirstCome):
    weighs_memory = True

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self._has_types = policy.chunking is Chunking.NONE  # a step runs prompts or decodes
        self._is_prefill = True
        self.most_seated = 0  # no prompt is seated as it comes

    def plan(self, view: StepView) -> PlannedStep:
        if self._has_types:
            runs_prompts = view.prompts and (self._is_prefill or not view.decodes)
            view = view._replace(decodes=()) if runs_prompts else view._replace(prompts=())
        return super().plan(view)

    def takes_prompts(self, prompts_s: float, decodes_s: float) -> bool:
        """Return whether prompts may get memory for the next step, by the times that these and decodes have been
        pending in all."""
        self._is_prefill = prompts_s >= decodes_s
        return self._is_prefill or not self._has_types
