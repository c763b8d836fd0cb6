"""Rank 0 of a worker that several ranks share: it says what it does before it does it, and the others follow.

    rank 0      shell ── command ──▶ EngineHands ── Order ──┐ ── the same on its own device
                                                            ▼
    rank 1 ..   follow() ─────────────────────────────▶ EngineHands

All hear the same orders in the same order, so what they compute together meets. Nothing goes on aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from alignedserve.core import StepPlan
from alignedserve.engine.device.ranks import Team
from alignedserve.engine.engine import Engine
from alignedserve.engine.sampling.reading import Begun
from alignedserve.protocol.commands import RunStep
from alignedserve.protocol.rank_orders import Order, decode, encode, without_histories

log = logging.getLogger("alignedserve.engine")

Say = Callable[[Order], None]


def nobody_hears(order: Order) -> None:
    """Of a worker with one rank, and of ranks that only hear."""


def saying_to(team: Team) -> Say:
    return lambda order: team.say(encode(order))


class LeadingEngine(Engine):
    """Steps that are measured at start run on all ranks too."""

    say: Say = staticmethod(nobody_hears)

    def begin(self, plan: StepPlan) -> Begun:
        """Which tokens go in, the others do not know, as they sample none, but for what was handed on to all."""
        if self.ranks.size == 1:
            return super().begin(plan)
        plan = self.without_ended(plan)
        handed_on = self.unread_rows(plan)
        decodes = tuple(
            one if one.token is not None or one.request in handed_on else replace(one, token=self.sampled(one.request))
            for one in plan.decodes
        )
        self.say(RunStep(without_histories(replace(plan, decodes=decodes))))
        return super().begin(plan)


class Follows(Protocol):
    def follow(self, order: Order) -> None: ...


def follow(team: Team, hands: Follows, most_bytes: int) -> None:
    """Until rank 0 has gone, which is RankLost."""
    while True:
        hands.follow(decode(team.hear(most_bytes)))
