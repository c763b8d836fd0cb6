"""KV of candidates that prefill workers fetch from the pool ahead of need.

    waits here ── Prefetch ──▶ (copied beside prompts) ── Prefetched ──▶ pulled when it joins
        └── room before that, or LetGo: it joins from the pool, as it would without

What is prefetched is only a copy: nothing waits for it, and a prefill worker that dies loses nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.core import WorkerLimits, units_for
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.requests.candidates import JoinCandidate
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, Received
from alignedserve.protocol.messages import Attempt, Cancel, LetGo, Prefetch, Prefetched
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.parts.part import CorePart


class Prefetching(CorePart):
    def __init__(self, stores: Stores) -> None:
        self._limits, self._policy, self._pool = stores.limits, stores.policy, stores.pool
        self._here, self._candidates, self._line = stores.here, stores.candidates, stores.line

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Prefetched(attempts)):
                return self._note_prefetched(sender, attempts)
            case Received(sender, LetGo(attempts)):
                for attempt in attempts:
                    self._candidates.let_go(sender, attempt)
        return []

    def _note_prefetched(self, sender: str, attempts: Iterable[Attempt]) -> list[Command]:
        """Tell the sender which of these are not wanted any more: an earlier word may have been lost.

        The answer to an Evict may be heard before, or after, its transfer is known to have been sent."""
        leaving = self._here.departures.attempts_to(sender)
        unwanted = [key for key in attempts if key not in leaving and not self._can_be_pulled(sender, key)]
        return [Send(sender, Cancel(*attempt)) for attempt in unwanted]

    def _can_be_pulled(self, partner: str, attempt: Attempt) -> bool:
        is_candidate = self._candidates.can_be_pulled(partner, attempt)
        return is_candidate or self._here.transfers.is_under_way(partner, attempt)

    def prefetch(self, now: float) -> list[Command]:
        """Ask prefill workers for the KV of candidates that could not join at once, in the order in which they join: as
        many as there may be room for."""
        wanted = self._assigned() if self._policy.prefetch else {}
        if not wanted:
            return []
        waits = self._line.expected_waits(now)
        return [
            Send(name, Prefetch(tuple(c.entry for c in chosen), tuple(waits[c.key] for c in chosen)))
            for name, chosen in wanted.items()
        ]

    def _assigned(self) -> dict[str, list[JoinCandidate]]:
        """Give candidates a partner of the pool's node while there is room; return them by their partners."""
        pool = self._pool.member
        peers = [] if pool is None else [peer for peer in self._candidates.peers if peer.node == pool.node]
        if not peers:
            return {}
        used = self._candidates.prefetched_pairs(self._limits.block_size)
        most = most_ahead(self._limits, self._policy)
        wanted: dict[str, list[JoinCandidate]] = {}
        for candidate in self._candidates.without_buffer:
            pairs = units_for(candidate.entry.num_held, self._limits.block_size)
            partner = min(peers, key=lambda peer: (used[peer.name], peer.name))
            if used[partner.name] + pairs > most:
                break
            used[partner.name] += pairs
            candidate.partner = partner
            wanted.setdefault(partner.name, []).append(candidate)
        return wanted

    def cancel(self, now: float) -> list[Command]:
        """Tell partners about copies of candidates that have joined from the pool, or are not wanted any more."""
        return [Send(name, Cancel(*attempt)) for name, attempt in self._candidates.take_in_vain()]


def most_ahead(limits: WorkerLimits, policy: Policy) -> int:
    """Return the pairs that a prefill worker gives this worker, as far as it knows."""
    return int(policy.candidate_share * limits.num_pairs)
