"""Custom policies of the router, which place and admit requests, and predict lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from alignedserve.core import Request, ServiceClass
from alignedserve.policies.guard import Guard
from alignedserve.policies.kinds import NewRequest, PolicyKind, WorkerChoice
from alignedserve.protocol.messages import Attempt
from alignedserve.scheduling.lengths import expected, hinted, is_exact
from alignedserve.scheduling.policy import Policy


def facts_of(request: Request, policy: Policy) -> NewRequest:
    """Return what custom policies are told of a request."""
    is_rt, slo, length = request.service is ServiceClass.RT, request.slo, expected(request, policy).mean
    told = request.id, is_rt, request.priority, request.arrival_at, request.prompt, request.max_tokens, length
    return NewRequest(*told, slo.ttft_s, slo.tbt_s, slo.jct_s)


class CustomPlacement:
    """Asks a policy for workers. A new request's wait is predicted first; the answer is kept until the request is
    placed: so a policy that counts answers counts each attempt once."""

    def __init__(self, policy: Policy) -> None:
        self._guard, self._policy = policy.own.guard(PolicyKind.PLACEMENT), policy
        self._asked: Attempt | None = None  # the attempt of the last ask
        self._answer: str | None = None

    @property
    def decides(self) -> bool:
        return self._guard is not None

    def worker(self, request: Request, workers: Sequence[WorkerChoice]) -> str | None:
        """Return the name of one of these workers, or None where the default decides."""
        attempt, offered = (request.id, request.attempt), {worker.name for worker in workers}
        if self._guard is not None and (attempt != self._asked or self._answer not in (None, *offered)):
            self._asked, self._answer = attempt, self._guard.ask(facts_of(request, self._policy), workers)
        return self._answer


def with_length(request: Request, guard: Guard, policy: Policy) -> Request:
    """Return the request with the length that a policy predicts. A length that is stated, or that is sure, stays; the
    default learns all the same, and predicts where the policy has no answer."""
    if request.estimate is not None or is_exact(request):
        return request
    length = guard.ask(facts_of(request, policy))
    return request if length is None else replace(request, estimate=hinted(ceil(min(length, request.max_tokens))))
