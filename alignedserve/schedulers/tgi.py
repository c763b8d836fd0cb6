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
        self._prompts_at = 0  # the number of the last step with prompts

    def plan(self, view: StepView) -> PlannedStep:
        ran = view.ran
        if ran.prompts:
            self._prompts_at = ran.number
        num_steps = ran.number - self._prompts_at
        is_early = len(view.prompts) < self.policy.waiting_ratio * len(view.decodes) and num_steps < MOST_WAITING
        return super().plan(view._replace(prompts=()) if is_early else view)
