"""The order in which candidates join."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduling.slo import Rank, Standing, Work
from alignedserve.worker.candidates import JoinCandidate
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.requests import Requests


class CandidateOrder:
    def __init__(self, pace: Pace, here: Requests, steps: StepsInFlight) -> None:
        self.pace, self.policy, self._steps = pace, pace.policy, steps
        self._candidates = here.candidates

    def arrange(self, now: float) -> None:
        """Sort the candidates once a step; by arrival, they are sorted as they come."""
        candidates = self._candidates
        if candidates.arranged_in == self._steps.number or self.policy.ordering.is_by_arrival:
            return
        candidates.arranged_in = self._steps.number
        if len(candidates.requests) > 1:
            candidates.arrange(lambda requests: self._as_they_join(requests, now))

    def _as_they_join(self, requests: Sequence[JoinCandidate], now: float) -> Sequence[JoinCandidate]:
        times, policy = self.pace.times, self.policy

        def standing_of(candidate: JoinCandidate) -> Standing:
            return self._standing(candidate, now)

        return list(policy.ordering.of_waits.sort(requests, standing_of, times, policy.late))

    def _standing(self, candidate: JoinCandidate, now: float) -> Standing:
        """Return the standing of a candidate that is a copy and a decode away from its next token."""
        work = Work(transfer_s=candidate.entry.num_held * self.pace.copy_token_s)
        return candidate.promise.standing(now, work, self.pace.times)

    def is_urgent(self, candidate: JoinCandidate, now: float) -> bool:
        """Return whether the candidate is real-time and its slack has run out."""
        return self._standing(candidate, now).rank(self.pace.times, self.policy.late) is Rank.URGENT_RT
