"""A custom policy chooses which seated requests run in a step; the scheduler decides all else.

    the policy names some    these may run, and those that it has left out of MOST_LEFT_OUT steps in a row
    none of them can run     for lack of memory, say: the scheduler chooses among all
    it has no answer         the same

So whatever the policy says, each request with memory runs sooner or later, and every step runs something that can run.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.decode_worker.requests.occupancy import Occupancy
from alignedserve.policies.facts import SeatedRequest
from alignedserve.policies.guard import USUAL_DECIDES, Guard
from alignedserve.policies.kinds import PolicyKind
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.view import Selection

MOST_LEFT_OUT = 64  # steps in a row that a request with memory is left out of


class OwnPacking:
    def __init__(self, guard: Guard, here: Occupancy) -> None:
        self._guard, self._here = guard, here
        self._left_out: dict[str, int] = {}  # request -> steps in a row without it
        self._has_chosen = self._passes = False  # whether the last choice was the policy's; whether the next is not

    def chosen(
        self, decodes: Sequence[Running], prompts: Sequence[Running]
    ) -> tuple[list[Running], list[Running]] | None:
        """Return the requests that may run in the next step; None where the scheduler says which."""
        passes, self._passes = self._passes, False
        answer = None if passes else self._answer((*decodes, *prompts))
        self._has_chosen = answer is not None
        if answer is None:
            return None
        names = {*answer, *(name for name, number in self._left_out.items() if number >= MOST_LEFT_OUT)}
        return _named(decodes, names), _named(prompts, names)

    def _answer(self, requests: Sequence[Running]) -> Sequence[str] | None:
        answer = self._guard.ask(tuple(map(_facts_of, requests))) if requests else USUAL_DECIDES
        return None if answer is USUAL_DECIDES else answer

    def lets_all_run(self) -> bool:
        """Leave the next choice to the scheduler, where the last one was the policy's; return whether it was."""
        self._passes, self._has_chosen = self._has_chosen, False
        return self._passes

    def planned(self, selection: Selection) -> None:
        """Count the steps that requests are left out of."""
        ran = {running.request.id for running in selection.decodes} | {chunk.request for chunk in selection.chunks}
        if ran:
            seated = (running.request.id for running in self._here.seated)
            self._left_out = {name: self._left_out.get(name, 0) + 1 for name in seated if name not in ran}


def own_packing(policy: Policy, here: Occupancy) -> OwnPacking | None:
    guard = policy.own.guard(PolicyKind.PACKING)
    return None if guard is None else OwnPacking(guard, here)


def _facts_of(running: Running) -> SeatedRequest:
    request = running.request
    return SeatedRequest(
        request.id,
        running.promise.is_rt,
        request.priority,
        request.arrival_at,
        running.num_tokens,
        len(running.output),
        0 if running.decodes else running.num_ahead,
    )


def _named(requests: Sequence[Running], names: set[str]) -> list[Running]:
    return [running for running in requests if running.request.id in names]
