"""Rank 0 of a worker that has several ranks: it tells the others what it does before it does it.

    rank 0      shell ── command ──▶ EngineHands ── Order ──┐ ── the same on its own device
                                                            ▼
    rank 1 ..   follow() ─────────────────────────────▶ EngineHands

All ranks hear the same orders in the same order, so that what they compute together meets. Nothing goes on aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from alignedserve.core import Decode, StepPlan
from alignedserve.engine.device.ranks import Team
from alignedserve.engine.engine import Engine
from alignedserve.engine.sampling.reading import Begun
from alignedserve.protocol.commands import RunStep
from alignedserve.protocol.rank_orders import Order, decode, without_histories
from alignedserve.protocol.wire import pack

Say = Callable[[Order], None]


def say_nothing(order: Order) -> None:
    """Tell no other rank: there is none, or this rank only follows."""


def saying_to(team: Team) -> Say:
    """Return what tells an order to all other ranks."""
    return lambda order: team.say(pack(order))


class LeadingEngine(Engine):
    """The engine of rank 0: each of its steps, also those that are measured at start, runs on all ranks."""

    say: Say = staticmethod(say_nothing)

    def begin(self, plan: StepPlan) -> Begun:
        """Begin the step here and on the other ranks. These sample nothing, so rank 0 tells them the input tokens,
        except tokens that the step before handed on to all ranks."""
        if self.ranks.size == 1:
            return super().begin(plan)
        plan = self.without_ended(plan)
        handed_on = self.unread_rows(plan)

        def with_token(decode: Decode) -> Decode:
            is_known = decode.token is not None or decode.request in handed_on
            return decode if is_known else replace(decode, token=self.sampled(decode.request))

        told = replace(plan, decodes=tuple(map(with_token, plan.decodes)))
        self.say(RunStep(without_histories(told)))
        return super().begin(plan)


def follow(team: Team, do: Say, most_bytes: int) -> None:
    """Do what rank 0 orders until it has gone, which raises RankLost."""
    while True:
        do(decode(team.hear(most_bytes)))
