"""What a prefill worker holds for decode workers: KV of their candidates, prefetched from the pool, and of those that
had to leave their devices (AlignedServe §3.2).

    Prefetch ── room: CopyIn ──────────┬─▶ filling ──▶ here: Prefetched ── Pull ──▶ sending ──▶ gone
    Evict ──── room: Pull, ReceiveKv ──┘      │ not intact  └── prompts lack memory ──┐
       └────── none ──────────────────────────┴─────────────▶ LetGo ◀─────────────────┘

Nobody depends on it. What is prefetched is only a copy: the pool has the same, and whoever finds nothing here joins
from there. What was evicted can be computed anew by the decode worker, which has all else of it. So it has pairs that
no prompt needs, no more than a share of them; copies leave before what would be computed, and of both first who has
longest to wait (ALISE §3.2). Copies go on beside the steps, at a pace that does not delay those. Pairs stay taken as
long as a copy or a transfer writes or reads there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core import CacheKind, Entry, Role, units_for
from alignedserve.prefill_worker.offering import OfferingCore
from alignedserve.protocol.commands import Command, CopyIn, ReceiveKv, Send, SendKv
from alignedserve.protocol.events import CopiedIn, Event, KvReceived, MemberLost, Received
from alignedserve.protocol.messages import Attempt, Evict, LetGo, Member, Prefetch, Prefetched, Pull
from alignedserve.worker.core import WorkerSetup, key


@dataclass(eq=False)
class Buffer:
    entry: Entry
    tokens: tuple[int, ...]  # that have KV
    pairs: tuple[int, ...]
    decode: Member  # for whom it is
    joins_at: float  # as far as can be expected
    copy: int | None = None  # to its pairs, while it is under way
    receiving: tuple[str, int] | None = None  # the same from a device: holder of the sender, number
    transfer: tuple[str, int] | None = None  # that reads its pairs: holder of the receiver, number
    is_copy: bool = True  # the pool has the same
    is_wanted: bool = field(default=True)

    @property
    def key(self) -> Attempt:
        return key(self.entry.request)

    @property
    def is_here(self) -> bool:
        """It can be pulled."""
        return self.is_wanted and self._is_at_rest

    @property
    def is_over(self) -> bool:
        return not self.is_wanted and self._is_at_rest

    @property
    def _is_at_rest(self) -> bool:
        return self.copy is None and self.receiving is None and self.transfer is None


class BufferingCore(OfferingCore):
    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self._buffers: list[Buffer] = []
        self.most_buffered_pairs = int(setup.policy.candidate_share * setup.limits.num_pairs)
        self._copy_number = 0
        self._pulls: Counter[str] = Counter()  # holder of a sender -> the number of the last one from it
        self.num_prefetched = 0
        self.num_evicted_here = 0

    @property
    def pairs(self) -> list[int]:
        return [*super().pairs, *(pair for one in self._buffers for pair in one.pairs)]

    @property
    def num_buffered_pairs(self) -> int:
        return sum(len(one.pairs) for one in self._buffers)

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(sender, Prefetch(entries, waits_s)):
                return self._prefetch(sender, entries, waits_s)
            case Received(sender, Evict(entry, wait_s)):
                return self._evict(sender, entry, wait_s)
            case KvReceived(number, source, intact):
                return self._received(source, number, intact)
            case CopiedIn(number, intact) if (filled := self._filling(number)) is not None:
                return self._filled(filled, intact)
            case MemberLost(member) if member.role is Role.DECODE:
                self._forget(one for one in self._buffers if one.decode == member)
        return super()._happened(event)

    # --- From the pool

    def _prefetch(self, sender: str, entries: Iterable[Entry], waits_s: Iterable[float]) -> list[Command]:
        commands, refused = list[Command](), list[Attempt]()
        decode = self._candidates.peer(sender)
        for entry, wait_s in zip(entries, waits_s, strict=True):
            if any(one.key == key(entry.request) and one.is_wanted for one in self._buffers):
                continue  # it is said again
            copy = None if decode is None or self._is_retiring else self._copy_to_buffer(entry, decode, wait_s)
            if copy is None:
                refused.append(key(entry.request))
            else:
                commands.append(copy)
        return [*commands, Send(sender, LetGo(tuple(refused)))] if refused else commands

    def _copy_to_buffer(self, entry: Entry, decode: Member, wait_s: float) -> CopyIn | None:
        if self._pool is None or (buffer := self._buffer_for(entry, decode, wait_s)) is None:
            return None
        self._copy_number += 1
        buffer.copy = self._copy_number
        return CopyIn(self._copy_number, self._pool.holder, entry.pages, buffer.pairs, buffer.tokens, aside=True)

    def _buffer_for(self, entry: Entry, decode: Member, wait_s: float) -> Buffer | None:
        """Nobody makes room for it."""
        needed = units_for(entry.prefix, self._limits.block_size)
        left = self._blocks.num_free - (self._most_urgent_need if self._waiting else 0)
        if self._kind is CacheKind.HIDDEN or needed > left:
            return None
        if self.num_buffered_pairs + needed > self.most_buffered_pairs or (pairs := self._blocks.take(needed)) is None:
            return None
        running = self._running_of(entry.request, entry.output, entry.due)
        buffer = Buffer(entry, running.tokens(0, entry.prefix), pairs, decode, self._now + wait_s)
        self._buffers.append(buffer)
        return buffer

    def _filling(self, number: int) -> Buffer | None:
        return next((one for one in self._buffers if one.copy == number), None)

    def _filled(self, buffer: Buffer, intact: bool) -> list[Command]:
        """Right or not at all: whoever joins from the pool will see what is wrong with it there."""
        buffer.copy = None
        self.num_prefetched += intact and buffer.is_wanted
        return self._has_come(buffer, intact)

    def _has_come(self, buffer: Buffer, intact: bool) -> list[Command]:
        if buffer.is_wanted and intact:
            return [Send(buffer.decode.name, Prefetched((buffer.key,)))]
        let_go = [Send(buffer.decode.name, LetGo((buffer.key,)))] if buffer.is_wanted else []
        self._forget([buffer])
        return [*let_go]

    def _offer_again(self) -> list[Command]:
        again = self._offers_again
        return [*super()._offer_again(), *(self._prefetched_again(self._buffers) if again else [])]

    def _say_again(self, to: str) -> list[Command]:
        its = [one for one in self._buffers if one.decode.name == to]
        return [*super()._say_again(to), *self._prefetched_again(its)]

    def _prefetched_again(self, buffers: Iterable[Buffer]) -> list[Command]:
        here: dict[str, list[Attempt]] = {}
        for one in buffers:
            if one.is_here:
                here.setdefault(one.decode.name, []).append(one.key)
        return [Send(decode, Prefetched(tuple(attempts))) for decode, attempts in here.items()]

    # --- From a decode worker

    def _evict(self, sender: str, entry: Entry, wait_s: float) -> list[Command]:
        decode, attempt = self._candidates.peer(sender), key(entry.request)
        here = next((one for one in self._buffers if one.key == attempt and one.is_wanted), None)
        if here is not None and not here.is_copy and here.entry.prefix == entry.prefix:  # it is said again
            if here.receiving is not None:
                return [Send(sender, Pull(here.receiving[1], *attempt))]
            return [Send(sender, Prefetched((attempt,)))] if here.is_here else []
        if here is not None:  # of before it ran
            self._forget([here])
        buffer = None if decode is None else self._buffer_for(entry, decode, wait_s)
        if buffer is None:
            return [Send(sender, LetGo((attempt,)))]
        holder = buffer.decode.holder
        self._pulls[holder] += 1
        number, buffer.is_copy = self._pulls[holder], False
        buffer.receiving = (holder, number)
        return [ReceiveKv(number, holder, buffer.pairs, buffer.tokens), Send(sender, Pull(number, *attempt))]

    def _received(self, source: str, number: int, intact: bool) -> list[Command]:
        buffer = next((one for one in self._buffers if one.receiving == (source, number)), None)
        assert buffer is not None, "a transfer ended that was not begun"
        buffer.receiving = None
        failed: list[Command] = []
        if not intact:
            self.num_failed_transfers += 1
            failed = [self._figures]
        self.num_evicted_here += intact and buffer.is_wanted
        return [*failed, *self._has_come(buffer, intact)]

    # --- To a decode worker

    def _pulled(self, receiver: str, number: int, attempt: Attempt) -> list[Command]:
        buffer = next((one for one in self._buffers if one.key == attempt and one.is_here), None)
        if buffer is None:
            return super()._pulled(receiver, number, attempt)
        if self._candidates.is_late(receiver, number):
            return []
        buffer.transfer = (receiver, number)
        return [SendKv(number, receiver, buffer.pairs, buffer.tokens)]

    def _sent(self, receiver: str, number: int, ok: bool) -> list[Command]:
        buffer = next((one for one in self._buffers if one.transfer == (receiver, number)), None)
        if buffer is None:
            return super()._sent(receiver, number, ok)
        buffer.transfer = None
        self._forget([buffer])
        if ok:
            return []
        self.num_failed_transfers += 1
        return [self._figures]

    # --- What leaves

    def _forget(self, leaving: Iterable[Buffer]) -> None:
        for one in list(leaving):
            one.is_wanted = False
            if one.is_over:
                self._buffers.remove(one)
                self._give(one.pairs)

    def _drop_buffers(self, request: str, attempt: int) -> None:
        self._forget(one for one in self._buffers if one.key[0] == request and one.key[1] <= attempt)

    def _make_place(self, pairs: int) -> list[Command]:
        """Prompts lack memory: first leaves what has longest to wait, of copies and then of others."""
        let_go: dict[str, list[Attempt]] = {}
        for one in sorted(self._buffers, key=lambda one: (one.is_copy, one.joins_at), reverse=True):
            if self._blocks.num_free >= pairs:
                break
            if one.is_here:
                self._forget([one])
                let_go.setdefault(one.decode.name, []).append(one.key)
        told = [Send(decode, LetGo(tuple(attempts))) for decode, attempts in let_go.items()]
        return [*told, *super()._make_place(pairs)]
