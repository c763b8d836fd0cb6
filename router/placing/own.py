"""Policies of one's own that place and admit requests: what they are asked, and what becomes of their answers."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Request, ServiceClass
from alignedserve.policies.facts import LoadAhead, NewRequest, WorkerChoice
from alignedserve.policies.guard import USUAL_DECIDES, Guard, Usual
from alignedserve.policies.kinds import PolicyKind
from alignedserve.protocol.messages import Attempt
from alignedserve.scheduling.lengths import expected
from alignedserve.scheduling.policy import Policy


def facts_of(request: Request, policy: Policy) -> NewRequest:
    """Return what policies of one's own are told of a request."""
    slo = request.slo
    return NewRequest(
        request.id,
        request.service is ServiceClass.RT,
        request.priority,
        request.arrival_at,
        request.prompt,
        request.max_tokens,
        expected(request, policy).mean,
        slo.ttft_s,
        slo.tbt_s,
        slo.jct_s,
    )


class OwnPlacement:
    """Asks a policy for workers. The answer for a request that comes, whose wait is predicted first, is kept until it
    is placed: so a policy that counts its answers counts each attempt once."""

    def __init__(self, guard: Guard, policy: Policy) -> None:
        self._guard, self._policy = guard, policy
        self._asked: Attempt | None = None  # the attempt that it was asked for last
        self._answer: str | None = None

    def worker(self, request: Request, workers: Sequence[WorkerChoice]) -> str | None:
        """Return the name of one of these workers, or None where the default decides."""
        attempt, offered = (request.id, request.attempt), {worker.name for worker in workers}
        if attempt != self._asked or self._answer not in (None, *offered):
            answer = self._guard.ask(facts_of(request, self._policy), workers)
            self._asked, self._answer = attempt, None if answer is USUAL_DECIDES else answer
        return self._answer


class OwnAdmission:
    """Asks a policy which requests are refused because of the load."""

    def __init__(self, guard: Guard, policy: Policy) -> None:
        self._guard, self._policy = guard, policy
        self.why = f"the policy {guard.name} refuses it"

    def retry_after_s(self, request: Request, load: LoadAhead) -> float | Usual | None:
        """Return None to admit the request, or after how many seconds its client may try again."""
        answer: float | Usual | None = self._guard.ask(facts_of(request, self._policy), load)
        return answer


def own_placement(policy: Policy) -> OwnPlacement | None:
    guard = policy.own.guard(PolicyKind.PLACEMENT)
    return None if guard is None else OwnPlacement(guard, policy)


def own_admission(policy: Policy) -> OwnAdmission | None:
    guard = policy.own.guard(PolicyKind.ADMISSION)
    return None if guard is None else OwnAdmission(guard, policy)
