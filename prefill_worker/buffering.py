"""Hold KV for decode workers: of their candidates, prefetched from the pool, and of requests that had to leave their
devices (AlignedServe §3.2).

    Prefetch ── room: CopyIn ──────────┬─▶ filling ──▶ here: Prefetched ── Pull ──▶ sending ──▶ gone
    Evict ──── room: Pull, ReceiveKv ──┘      │ not intact  └── prompts lack memory ──┐
       └────── none ──────────────────────────┴─────────────▶ LetGo ◀─────────────────┘

No worker depends on it. What is prefetched is only a copy: the pool has the same, and a decode worker that finds
nothing here joins the request from the pool. What was evicted can be computed anew by the decode worker, which has all
else of it. So buffers have pairs that no prompt needs, no more than a share of them. Copies leave before what would
have to be computed, and of both first the one that has longest to wait (ALISE §3.2). Copies go on beside the steps, at
a pace that does not delay those. Pairs stay taken as long as a copy or a transfer writes or reads there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from alignedserve.core import Entry, units_for
from alignedserve.prefill_worker.candidates import Candidates
from alignedserve.protocol.commands import Command, CopyIn, ReceiveKv, Send, SendKv
from alignedserve.protocol.events import CopiedIn, Event, KvReceived, Received
from alignedserve.protocol.messages import Attempt, Evict, LetGo, Member, Prefetch, Prefetched, Pull
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.running import attempt_of


@dataclass(eq=False)
class Buffer:
    entry: Entry
    tokens: tuple[int, ...]  # that have KV
    pairs: tuple[int, ...]
    decode: Member  # the decode worker that it is for
    joins_at: float  # as far as can be expected
    copy: int | None = None  # to its pairs, while it is under way
    receiving: tuple[str, int] | None = None  # the same from a device: holder of the sender, number
    transfer: tuple[str, int] | None = None  # that reads its pairs: holder of the receiver, number
    is_copy: bool = True  # the pool has the same
    is_wanted: bool = True

    @property
    def key(self) -> Attempt:
        return attempt_of(self.entry.request)

    @property
    def is_here(self) -> bool:
        """Return whether it can be pulled."""
        return self.is_wanted and self._is_at_rest

    @property
    def is_over(self) -> bool:
        """Return whether its pairs can be freed."""
        return not self.is_wanted and self._is_at_rest

    @property
    def _is_at_rest(self) -> bool:
        return self.copy is None and self.receiving is None and self.transfer is None


class Buffers(CorePart):
    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        candidates: Candidates,
        copy_numbers: Iterator[int],
    ) -> None:
        """`candidates` knows the decode workers that KV can be sent to."""
        self._policy, self._pool, self._memory = common.policy, common.pool, common.memory
        self._faults, self._retirement = common.faults, common.retirement
        self._queue, self._candidates = queue, candidates
        self._copy_numbers = copy_numbers
        self._buffers: list[Buffer] = []
        self._pulls: Counter[str] = Counter()  # holder of a sender -> the number of the last Pull from it
        self._is_to_repeat = False  # that KV is here: the word of it may have been lost
        self.most_pairs = int(common.policy.candidate_share * common.limits.num_pairs)
        self.num_prefetched = 0

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def pairs(self) -> list[int]:
        """Return the pairs that all buffers have."""
        return [pair for buffer in self._buffers for pair in buffer.pairs]

    @property
    def num_pairs(self) -> int:
        return sum(len(buffer.pairs) for buffer in self._buffers)

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, Prefetch(entries, waits_s)):
                return self._prefetch(sender, entries, waits_s, now)
            case Received(sender, Evict(entry, wait_s)):
                return self._evict(sender, entry, wait_s, now)
            case KvReceived(number, source, intact):
                return self._end_receiving(source, number, intact)
            case CopiedIn(number, intact):
                return self._end_filling(number, intact)
        return []

    # --- From the pool

    def _prefetch(self, sender: str, entries: Iterable[Entry], waits_s: Iterable[float], now: float) -> list[Command]:
        commands, refused = list[Command](), list[Attempt]()
        decode = self._candidates.peer(sender)
        for entry, wait_s in zip(entries, waits_s, strict=True):
            attempt = attempt_of(entry.request)
            if any(buffer.key == attempt and buffer.is_wanted for buffer in self._buffers):
                continue  # the order is repeated
            takes = decode is not None and not self._retirement.is_retiring
            copy = self._copy_to_buffer(entry, decode, now + wait_s) if takes and decode is not None else None
            if copy is None:
                refused.append(attempt)
            else:
                commands.append(copy)
        return [*commands, Send(sender, LetGo(tuple(refused)))] if refused else commands

    def _copy_to_buffer(self, entry: Entry, decode: Member, joins_at: float) -> CopyIn | None:
        pool = self._pool.member
        if pool is None or (buffer := self._add(entry, decode, joins_at)) is None:
            return None
        buffer.copy = next(self._copy_numbers)
        return CopyIn(buffer.copy, pool.holder, entry.pages, buffer.pairs, buffer.tokens, aside=True)

    def _add(self, entry: Entry, decode: Member, joins_at: float) -> Buffer | None:
        """Return a buffer for the entry if there are pairs that no prompt needs. No request makes room for it."""
        needed = units_for(entry.num_held, self._memory.limits.block_size)
        left = self._memory.num_free - (self._queue.pairs_for_first if self._queue.waiting else 0)
        if needed > left or self.num_pairs + needed > self.most_pairs:
            return None
        pairs = self._memory.blocks.take(needed)
        if pairs is None:
            return None
        running = running_of(self._policy, entry.request, entry.output, entry.due)
        buffer = Buffer(entry, running.tokens(entry.dropped, entry.prefix), pairs, decode, joins_at)
        self._buffers.append(buffer)
        return buffer

    def _end_filling(self, number: int, intact: bool) -> list[Command]:
        """Right or not at all: a decode worker that joins the request from the pool finds what is wrong there."""
        buffer = next((buffer for buffer in self._buffers if buffer.copy == number), None)
        if buffer is None:
            return []
        buffer.copy = None
        self.num_prefetched += intact and buffer.is_wanted
        return self._announce(buffer, intact)

    def _announce(self, buffer: Buffer, intact: bool) -> list[Command]:
        """Tell the decode worker that KV is here, or that it is not."""
        if buffer.is_wanted and intact:
            return [Send(buffer.decode.name, Prefetched((buffer.key,)))]
        let_go = [Send(buffer.decode.name, LetGo((buffer.key,)))] if buffer.is_wanted else []
        self._forget([buffer])
        return [*let_go]

    def ask_again(self) -> None:
        self._is_to_repeat = True

    def announce_again(self, now: float) -> list[Command]:
        """Tell all decode workers again what is here, where the word of it may have been lost."""
        if not self._is_to_repeat:
            return []
        self._is_to_repeat = False
        return self._announce_all(self._buffers)

    def repeat(self, to: str) -> list[Command]:
        return self._announce_all(buffer for buffer in self._buffers if buffer.decode.name == to)

    def _announce_all(self, buffers: Iterable[Buffer]) -> list[Command]:
        here: dict[str, list[Attempt]] = {}
        for buffer in buffers:
            if buffer.is_here:
                here.setdefault(buffer.decode.name, []).append(buffer.key)
        return [Send(decode, Prefetched(tuple(attempts))) for decode, attempts in here.items()]

    # --- From a decode worker

    def _evict(self, sender: str, entry: Entry, wait_s: float, now: float) -> list[Command]:
        decode, attempt = self._candidates.peer(sender), attempt_of(entry.request)
        here = next((buffer for buffer in self._buffers if buffer.key == attempt and buffer.is_wanted), None)
        if here is not None and not here.is_copy and here.entry.prefix == entry.prefix:  # the order is repeated
            if here.receiving is not None:
                return [Send(sender, Pull(here.receiving[1], *attempt))]
            return [Send(sender, Prefetched((attempt,)))] if here.is_here else []
        if here is not None:  # of before it ran
            self._forget([here])
        buffer = None if decode is None else self._add(entry, decode, now + wait_s)
        if buffer is None:
            return [Send(sender, LetGo((attempt,)))]
        holder = buffer.decode.holder
        self._pulls[holder] += 1
        number, buffer.is_copy = self._pulls[holder], False
        buffer.receiving = (holder, number)
        return [ReceiveKv(number, holder, buffer.pairs, buffer.tokens), Send(sender, Pull(number, *attempt))]

    def _end_receiving(self, source: str, number: int, intact: bool) -> list[Command]:
        buffer = next((buffer for buffer in self._buffers if buffer.receiving == (source, number)), None)
        assert buffer is not None, "a transfer ended that was not begun"
        buffer.receiving = None
        self._faults.num_failed_transfers += not intact
        return self._announce(buffer, intact)

    # --- To a decode worker

    def find(self, attempt: Attempt) -> Buffer | None:
        """Return the buffer of this attempt that can be pulled."""
        return next((buffer for buffer in self._buffers if buffer.key == attempt and buffer.is_here), None)

    def is_coming(self, attempt: Attempt, sender: str) -> bool:
        """Return whether this attempt is on its way here, as far as this worker has heard."""
        same = (buffer.receiving for buffer in self._buffers if buffer.key == attempt and buffer.is_wanted)
        return any(receiving is not None and receiving[0] == sender for receiving in same)

    def send(self, buffer: Buffer, receiver: str, number: int) -> list[Command]:
        buffer.transfer = (receiver, number)
        return [SendKv(number, receiver, buffer.pairs, buffer.tokens)]

    def find_sending(self, receiver: str, number: int) -> Buffer | None:
        """Return the buffer whose pairs this transfer reads."""
        return next((buffer for buffer in self._buffers if buffer.transfer == (receiver, number)), None)

    def end_sending(self, buffer: Buffer, ok: bool) -> None:
        buffer.transfer = None
        self._forget([buffer])
        self._faults.num_failed_transfers += not ok

    # --- Buffers that leave

    def lose_decode(self, decode: Member) -> None:
        """Forget the buffers that were for a decode worker."""
        self._forget(buffer for buffer in self._buffers if buffer.decode == decode)

    def _forget(self, leaving: Iterable[Buffer]) -> None:
        for buffer in list(leaving):
            buffer.is_wanted = False
            if buffer.is_over:
                self._buffers.remove(buffer)
                self._memory.give(buffer.pairs)

    def drop(self, request: str, attempt: int) -> list[Command]:
        same = (buffer for buffer in self._buffers if buffer.key[0] == request)
        self._forget(buffer for buffer in same if buffer.key[1] <= attempt)
        return []

    def make_place(self, pairs: int) -> list[Command]:
        """Let buffers go until so many pairs are free: copies first, and of these what has longest to wait."""
        let_go: dict[str, list[Attempt]] = {}
        for buffer in sorted(self._buffers, key=lambda buffer: (buffer.is_copy, buffer.joins_at), reverse=True):
            if self._memory.num_free >= pairs:
                break
            if buffer.is_here:
                self._forget([buffer])
                let_go.setdefault(buffer.decode.name, []).append(buffer.key)
        return [Send(decode, LetGo(tuple(attempts))) for decode, attempts in let_go.items()]

    @property
    def awaits_answer(self) -> bool:
        return bool(self._buffers)
