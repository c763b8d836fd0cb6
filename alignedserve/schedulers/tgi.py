"""Text Generation Inference's router: decodes run until it pays to interrupt them for prompts."""

from __future__ import annotations

from alignedserve.schedulers.fcfs import FirstCome
from alignedserve.schedulers.scheduler import NO_LIMIT
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.view import PlannedStep, StepView

MOST_WAITING = 20  # steps of decodes that a prompt waits for at most (max_waiting_tokens)


class Tgi(FirstCome):
    """Whole prompts interrupt decodes once enough prompts wait (waiting_served_ratio), or decodes have run for long."""

    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self._num_steps = 0  # of decodes since the last prompt

    def plan(self, view: StepView) -> PlannedStep:
        is_early = len(view.prompts) < self.policy.waiting_ratio * len(view.decodes) and self._num_steps < MOST_WAITING
        return super().plan(view._replace(prompts=()) if is_early else view)

    def planned(self, selection: PlannedStep) -> None:
        self._num_steps = 0 if selection.chunks else self._num_steps + 1
