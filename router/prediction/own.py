"""A policy of one's own that predicts lengths: the router asks it as a request comes.

A length that the client has stated, or that is sure, stays. The side process learns all the same, and predicts where
the policy has no answer.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from alignedserve.core import Request
from alignedserve.policies.guard import USUAL_DECIDES, Guard
from alignedserve.policies.kinds import PolicyKind
from alignedserve.router.placing.own import facts_of
from alignedserve.scheduling.lengths import hinted, is_exact
from alignedserve.scheduling.policy import Policy


class OwnPredictor:
    def __init__(self, guard: Guard, policy: Policy) -> None:
        self._guard, self._policy = guard, policy

    def predicted(self, request: Request) -> Request:
        """Return the request with the length that the policy expects, or as it is."""
        if request.estimate is not None or is_exact(request):
            return request
        answer = self._guard.ask(facts_of(request, self._policy))
        if answer is USUAL_DECIDES:
            return request
        return replace(request, estimate=hinted(ceil(min(answer, request.max_tokens))))


def own_predictor(policy: Policy) -> OwnPredictor | None:
    guard = policy.own.guard(PolicyKind.PREDICTOR)
    return None if guard is None else OwnPredictor(guard, policy)
