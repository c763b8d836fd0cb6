"""The order in which candidates join, and how long each has to wait."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.protocol.messages import Attempt
from alignedserve.scheduling.lengths import tokens_left
from alignedserve.scheduling.levels import InLine, expected_waits, level_of
from alignedserve.scheduling.slo import Rank, Standing, Work
from alignedserve.worker.candidates import JoinCandidate
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.pace import Pace
from alignedserve.worker.requests import Requests


class CandidateOrder:
    def __init__(self, pace: Pace, here: Requests, steps: StepsInFlight) -> None:
        self.pace, self.policy, self._steps = pace, pace.policy, steps
        self._here, self._candidates = here, here.candidates

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

    def tokens_left(self, candidate: JoinCandidate) -> int:
        """Return how many more tokens of output are expected."""
        return tokens_left(candidate.entry.request, self.policy, len(candidate.entry.output))

    def expected_waits(self, now: float) -> dict[Attempt, float]:
        """Return how long each candidate waits (ALISE §3.2) if those before it join first and as many run as now."""

        def in_line(candidate: JoinCandidate) -> InLine:
            tokens = self.tokens_left(candidate)
            level = None if candidate.is_rt else level_of(tokens)
            return InLine(tokens * self.pace.times.mean_s, now - candidate.since, level)

        waiting = list(self._candidates.waiting)
        waits = expected_waits(map(in_line, waiting), max(1, self._here.num_seated), self.policy.age_s)
        return dict(zip((candidate.key for candidate in waiting), waits, strict=True))
