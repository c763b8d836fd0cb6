"""The options that only these schedulers read."""

from __future__ import annotations

from dataclasses import dataclass, fields

from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.policy import Policy

_OF_TGI = 1.2  # its waiting_served_ratio


@dataclass(frozen=True)
class PaperPolicy(Policy):
    """A policy with the numbers of the papers. Settings give a plain policy, which has the papers' own numbers."""

    window_s: float = 0.75  # width in slack of the windows in which the best fit chooses (AccelGen's gamma)
    long_prompt: int = 4096  # tokens; by AccelGen's rules a single prompt of this length is unfinished at a time
    waiting_ratio: float = 0.0  # of TGI: waiting prompts per decode from which prompts interrupt decodes

    @classmethod
    def of(cls, policy: Policy) -> PaperPolicy:
        """Return the policy with these numbers, the papers' own where it has none."""
        if isinstance(policy, cls):
            return policy
        ratio = _OF_TGI if policy.scheduler == SchedulerName.TGI else 0.0
        given = {declared.name: getattr(policy, declared.name) for declared in fields(policy)}
        return cls(**given, waiting_ratio=ratio)

    @property
    def problem(self) -> str | None:
        if self.waiting_ratio and self.scheduler != SchedulerName.TGI:
            return f"waiting_ratio cannot be used with scheduler {self.scheduler}: set scheduler to tgi"
        return super().problem
