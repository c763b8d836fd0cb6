"""The facts beside the requests that a plan depends on: the time, the cost model, the limits of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from alignedserve.cost.model import CostModel, Kind
from alignedserve.scheduling.policy import Policy
from alignedserve.scheduling.slo import StepTimes

USUAL = 0.75  # of the bound: the predicted time of a step


@dataclass(slots=True)  # made at every step, and a frozen one takes three times as long
class StepContext:
    """The facts that a plan depends on beside the requests."""

    now: float
    cost: CostModel
    times: StepTimes  # of this worker's steps
    room: int  # tokens of a step; fewer than there are decodes only where memory was too little for more
    block_size: int
    chunk: int  # tokens of a prompt that run in a step, on average
    policy: Policy
    pivot: int  # tokens that saturate the hardware (S_pf)
    max_step_for_arrivals_s: float = inf  # for chats to come: most time of a step with documents
    # Callers whose chats may come, with the time of their prompts alone.
    expected_chats: Sequence[tuple[str, float]] = ()
    # For chats that are handed on: most time of a step with more than decodes of chats.
    max_step_for_handoffs_s: float = inf
    enough_s: float = 0.0  # least time of a step with prompts beside chats that asked for nothing
    layers: int = 0  # between which steps pause for chats' prompts (decode_worker/pausing.py)
    newest_batch: int = 0  # of requests of about one length (AlignedServe §3.4): older batches leave first

    def careful_s(self, bound_s: float, kind: Kind = Kind.MIXED) -> float:
        """Return the most that a step of this kind is to take, as predicted, to end within the bound.

        A step whose predicted time fills the bound would be late every other time. A chat has a few dozen gaps, so
        their 99th percentile is the longest gap, and all chats share the steps: only a step in some thousands is to be
        late. Gain: 13.8 points on 17 loads, up to 74; documents -2.3 to +20.6 %.
        """
        return bound_s / (1.0 + self.cost.uncertainty[kind].beyond(USUAL * bound_s))

    def surely_s(self, bound_s: float) -> float:
        """Return the most that a step and its pause are to take, as predicted, to end within the bound: only few steps
        pause, so less care is taken than for all. Simulated on a Zen 4, with half of this margin one chat in twenty has
        a late gap."""
        return bound_s / (1.0 + 2.0 * self.cost.uncertainty[Kind.MIXED].p90)
