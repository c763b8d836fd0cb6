"""A decode worker has the KV of its candidates fetched from the pool ahead of need, by a prefill worker.

    waits here ── Prefetch ──▶ (copied beside prompts) ── Prefetched ──▶ pulled when it joins
        └── room before that, or LetGo: it joins from the pool, as it would without

What is prefetched is only a copy: nothing waits for it, and a prefill worker that dies loses nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.commands import Command, Send
from alignedserve.core import Role
from alignedserve.decode_worker.candidates import Candidate
from alignedserve.decode_worker.pulling import PullingCore
from alignedserve.events import Event, MemberLost, Received
from alignedserve.kvpool.waiting_order import expected_waits
from alignedserve.messages import Attempt, Cancel, LetGo, Prefetch, Prefetched
from alignedserve.running import units_for


class PrefetchingCore(PullingCore):
    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(sender, Prefetched(attempts)):
                return self._prefetched(sender, attempts)
            case Received(sender, LetGo(attempts)):
                for attempt in attempts:
                    self._candidates.let_go(sender, attempt)
                return []
            case MemberLost(member) if member.role is Role.PREFILL:
                self._candidates.buffers_lost(member)
        return super()._happened(event)

    def _prefetch(self) -> list[Command]:
        """Those that could not join at once, in the order in which they will: as many as there may be room for."""
        pool = self._pool
        peers = [] if pool is None else [one for one in self._candidates.peers if one.node == pool.node]
        if not peers or not self._policy.prefetch:
            return []
        used = self._candidates.prefetched_pairs(self._limits.block_size)
        most = self._most_ahead
        wanted: dict[str, list[Candidate]] = {}
        for one in self._candidates.without_buffer:
            pairs = units_for(one.entry.prefix, self._limits.block_size)
            peer = min(peers, key=lambda peer: (used[peer.name], peer.name))
            if used[peer.name] + pairs > most:
                break
            used[peer.name] += pairs
            one.partner = peer
            wanted.setdefault(peer.name, []).append(one)
        if not wanted:
            return []
        waits = self._expected_waits()
        return [
            Send(name, Prefetch(tuple(one.entry for one in some), tuple(waits[one.key] for one in some)))
            for name, some in wanted.items()
        ]

    @property
    def _most_ahead(self) -> int:
        """Pairs that a prefill worker gives us, as far as we know."""
        return int(self._policy.candidate_share * self._limits.num_pairs)

    def _expected_waits(self) -> dict[Attempt, float]:
        """ALISE §3.2, where those before it join first and as many run as now."""
        waiting = list(self._candidates.waiting)
        waits = expected_waits(map(self._in_line, waiting), max(1, self._num_seated), self._policy.age_s)
        return dict(zip((one.key for one in waiting), waits, strict=True))

    def _prefetched(self, sender: str, attempts: Iterable[Attempt]) -> list[Command]:
        """What nobody waits for any more is told so: an earlier word may have been lost."""
        unwanted = [one for one in attempts if not self._candidates.can_be_pulled(sender, one)]
        return [Send(sender, Cancel(*attempt)) for attempt in unwanted]

    def _cancel_buffers(self) -> list[Command]:
        """Of who has joined from the pool, or is not wanted any more."""
        return [Send(name, Cancel(*attempt)) for name, attempt in self._candidates.take_in_vain()]
