"""KV that a prefill worker holds for decode workers, prefetched or evicted (AlignedServe §3.2), and the answers to
their Pulls.

    Prefetch ── room: CopyIn ──────────┬─▶ filling ──▶ here: Prefetched ── Pull ──▶ sending ──▶ gone
    Evict ──── room: Pull, ReceiveKv ──┘      │ not intact  └── prompts lack memory ──┐
       └────── none ──────────────────────────┴─────────────▶ PrefetchDeclined ◀─────────────────┘
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alignedserve.core import Entry, Role, units_for
from alignedserve.protocol.commands import Command, CopyIn, ReceiveKv, Send, SendKv
from alignedserve.protocol.events import CopiedIn, KvReceived, KvSent, MemberLost, Received
from alignedserve.protocol.form_messages import Evict, Prefetch, PrefetchDeclined, Prefetched
from alignedserve.protocol.messages import Attempt, Member, Pull, holder
from alignedserve.worker.offering import Offering
from alignedserve.worker.part import Events, FormPart, Worker
from alignedserve.worker.step.request import attempt_of


@dataclass(eq=False)
class Buffer:
    entry: Entry
    tokens: tuple[int, ...]  # that have KV
    blocks: tuple[int, ...]
    decode: Member  # the decode worker that will pull the KV
    joins_at: float  # as expected now
    copy: int | None = None  # to the blocks, while under way
    receiving: tuple[str, int] | None = None  # the same from a device: holder of the sender, number
    transfer: tuple[str, int] | None = None  # that reads the blocks: holder of the receiver, number
    is_copy: bool = True  # the pool has the same
    is_wanted: bool = True

    @property
    def key(self) -> Attempt:
        return attempt_of(self.entry.request)

    @property
    def is_here(self) -> bool:
        """Return whether the KV can be pulled."""
        return self.is_wanted and self.is_at_rest

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing writes to the blocks, or reads there."""
        return self.copy is None and self.receiving is None and self.transfer is None


class Buffers(FormPart):
    """Copies of candidates, prefetched from the pool, and the KV of requests that had to leave their devices.

    No worker depends on a buffer. Prefetched KV is only a copy of what the pool has; evicted KV can be recomputed by
    the decode worker. So buffers have blocks that no prompt needs, and at most a share of them. Copies are given up
    before KV that would have to be computed, and of both first the KV with the longest wait ahead (ALISE §3.2). Blocks
    stay taken while a copy or a transfer writes or reads there.

    A decode worker may pull KV just sent here before this worker hears that the KV has come: a Pull is a message, and
    the end of a transfer is an event. Such a Pull waits for the event. Later Pulls wait too, since transfers between
    two workers run in order.
    """

    def __init__(self, worker: Worker, offering: Offering) -> None:
        super().__init__(worker)
        self._offering = offering
        self._waiting: dict[str, deque[tuple[int, Attempt]]] = {}  # holder of a receiver -> its Pulls that wait
        self._buffers: list[Buffer] = []
        self._pulls: Counter[str] = Counter()  # holder of a sender -> the number of the last Pull from it
        self._is_to_repeat = False  # that KV is here: the word of it may have been lost
        self.most_blocks = int(self._policy.candidate_share * self._limits.num_blocks)

    @property
    def events(self) -> Events:
        return {
            Prefetch: (self._prefetch,),
            Evict: (self._evict,),
            CopiedIn: (self._copied_in,),
            KvReceived: (self._received,),
            Pull: (self._pulled,),  # every one: `Offering` then sees its number as used, and ignores it
            KvSent: (self._sent,),
            (MemberLost, Role.DECODE): (self._decode_lost,),
        }

    def act(self, now: float) -> list[Command]:
        """Make place for prompts; tell all decode workers again what is here, where the message may have been lost."""
        commands, again, self._is_to_repeat = self._make_place(), self._is_to_repeat, False
        return [*commands, *self._announce_all(self._buffers)] if again else commands

    @property
    def held(self) -> Mapping[str, int]:
        return {"buffers": len(self._buffers)}

    @property
    def blocks(self) -> list[int]:
        return [block for buffer in self._buffers for block in buffer.blocks]

    @property
    def num_blocks(self) -> int:
        return sum(len(buffer.blocks) for buffer in self._buffers)

    # --- From the pool

    def _prefetch(self, message: Prefetch, frame: Received, now: float) -> list[Command]:
        sender, commands, refused = frame.sender, list[Command](), list[Attempt]()
        pool, decode = self._pool.member, self._candidates.peers.get(sender)
        for entry, wait_s in zip(message.entries, message.waits_s, strict=True):
            attempt = attempt_of(entry.request)
            if any(buffer.key == attempt and buffer.is_wanted for buffer in self._buffers):
                continue  # the order is repeated
            takes = decode is not None and pool is not None and not self._here.is_retiring
            buffer = self._add(entry, decode, now + wait_s) if takes and decode is not None else None
            if buffer is None or pool is None:
                refused.append(attempt)
            else:
                number = buffer.copy = next(self._here.copy_numbers)
                commands.append(CopyIn(number, pool.holder, entry.pages, buffer.blocks, buffer.tokens, aside=True))
        return [*commands, Send(sender, PrefetchDeclined(tuple(refused)))] if refused else commands

    def _add(self, entry: Entry, decode: Member, joins_at: float) -> Buffer | None:
        """Return a buffer for the entry if there are blocks that no prompt needs. No request makes room for it."""
        needed = units_for(entry.num_held, self._limits.block_size)
        left = self._memory.num_free - self._queue.blocks_for_first
        if needed > left or self.num_blocks + needed > self.most_blocks:
            return None
        blocks = self._memory.take(needed)
        if blocks is None:
            return None
        tokens = (entry.request.prompt + entry.output)[entry.dropped : entry.prefix]
        buffer = Buffer(entry, tokens, blocks, decode, joins_at)
        self._buffers.append(buffer)
        return buffer

    def _copied_in(self, event: CopiedIn, now: float) -> list[Command]:
        """Right or not at all: a decode worker that joins the request from the pool finds what is wrong there."""
        buffer = next((buffer for buffer in self._buffers if buffer.copy == event.number), None)
        if buffer is None:
            return []
        buffer.copy = None
        return self._announce(buffer, event.intact)

    def _announce(self, buffer: Buffer, intact: bool) -> list[Command]:
        """Tell the decode worker that KV is here, or that it is not."""
        if buffer.is_wanted and intact:
            return [Send(buffer.decode.name, Prefetched((buffer.key,)))]
        let_go: list[Command] = [Send(buffer.decode.name, PrefetchDeclined((buffer.key,)))] if buffer.is_wanted else []
        self._forget([buffer])
        return let_go

    def ask_again(self) -> None:
        self._is_to_repeat = True

    def repeat(self, to: str) -> list[Command]:
        return self._announce_all(buffer for buffer in self._buffers if buffer.decode.name == to)

    def _announce_all(self, buffers: Iterable[Buffer]) -> list[Command]:
        here: dict[str, list[Attempt]] = {}
        for buffer in buffers:
            if buffer.is_here:
                here.setdefault(buffer.decode.name, []).append(buffer.key)
        return [Send(decode, Prefetched(tuple(attempts))) for decode, attempts in here.items()]

    # --- From a decode worker

    def _evict(self, message: Evict, frame: Received, now: float) -> list[Command]:
        sender, entry = frame.sender, message.entry
        decode, attempt = self._candidates.peers.get(sender), attempt_of(entry.request)
        here = next((buffer for buffer in self._buffers if buffer.key == attempt and buffer.is_wanted), None)
        if here is not None and not here.is_copy and here.entry.prefix == entry.prefix:  # the order is repeated
            if here.receiving is not None:
                return [Send(sender, Pull(here.receiving[1], *attempt))]
            return [Send(sender, Prefetched((attempt,)))] if here.is_here else []
        if here is not None:  # of before it ran
            self._forget([here])
        buffer = None if decode is None else self._add(entry, decode, now + message.wait_s)
        if buffer is None:
            return [Send(sender, PrefetchDeclined((attempt,)))]
        holder = buffer.decode.holder
        self._pulls[holder] += 1
        number, buffer.is_copy = self._pulls[holder], False
        buffer.receiving = (holder, number)
        return [ReceiveKv(number, holder, buffer.blocks, buffer.tokens), Send(sender, Pull(number, *attempt))]

    def _received(self, event: KvReceived, now: float) -> list[Command]:
        intact, transfer = event.intact, (event.source, event.number)
        buffer = next((buffer for buffer in self._buffers if buffer.receiving == transfer), None)
        assert buffer is not None, "a transfer ended that was not begun"
        buffer.receiving = None
        self._counts.num_failed_transfers += not intact
        return [*self._announce(buffer, intact), *self._answer(event.source)]

    # --- To a decode worker

    def _pulled(self, pull: Pull, frame: Received, now: float) -> list[Command]:
        receiver = holder(frame.sender, frame.incarnation)
        if self._offering.is_late(receiver, pull.number):
            return []
        self._waiting.setdefault(receiver, deque()).append((pull.number, (pull.request, pull.attempt)))
        return self._answer(receiver)

    def _answer(self, receiver: str) -> list[Command]:
        """Answer the Pulls of a decode worker in order; stop where KV is still coming from there."""
        commands, pulls = list[Command](), self._waiting.get(receiver, deque())
        while pulls and not self._is_coming(pulls[0][1], receiver):
            commands.append(self._send(receiver, *pulls.popleft()))
        return commands

    def _is_coming(self, attempt: Attempt, sender: str) -> bool:
        """Return whether this attempt is on the way here, as this worker has heard."""
        same = (buffer.receiving for buffer in self._buffers if buffer.key == attempt and buffer.is_wanted)
        return any(receiving is not None and receiving[0] == sender for receiving in same)

    def _send(self, receiver: str, number: int, attempt: Attempt) -> Command:
        """Send the KV of a buffer, or else of a request that was offered."""
        buffer = next((buffer for buffer in self._buffers if buffer.key == attempt and buffer.is_here), None)
        if buffer is None:
            return self._offering.send(receiver, number, attempt)
        buffer.transfer = (receiver, number)
        return SendKv(number, receiver, buffer.blocks, buffer.tokens)

    def _sent(self, event: KvSent, now: float) -> None:
        buffer = next((buffer for buffer in self._buffers if buffer.transfer == (event.to, event.number)), None)
        if buffer is not None:
            buffer.transfer = None
            self._forget([buffer])
            self._counts.num_failed_transfers += not event.ok

    # --- Buffers that leave

    def _decode_lost(self, event: MemberLost, now: float) -> None:
        """Forget the Pulls of a decode worker, and the buffers for that worker."""
        self._waiting.pop(event.member.holder, None)
        self._forget(buffer for buffer in self._buffers if buffer.decode == event.member)

    def _forget(self, leaving: Iterable[Buffer]) -> None:
        for buffer in list(leaving):
            buffer.is_wanted = False
            if buffer.is_at_rest:
                self._buffers.remove(buffer)
                self._memory.give(buffer.blocks)

    def drop(self, request: str, attempt: int) -> None:
        same = (buffer for buffer in self._buffers if buffer.key[0] == request)
        self._forget(buffer for buffer in same if buffer.key[1] <= attempt)

    def _make_place(self) -> list[Command]:
        """Free buffers until the prompt that has waited longest finds memory: copies first, those with the longest wait
        before others."""
        blocks = self._queue.blocks_for_first
        let_go: dict[str, list[Attempt]] = {}
        for buffer in sorted(self._buffers, key=lambda buffer: (buffer.is_copy, buffer.joins_at), reverse=True):
            if self._memory.num_free >= blocks:
                break
            if buffer.is_here:
                self._forget([buffer])
                let_go.setdefault(buffer.decode.name, []).append(buffer.key)
        return [Send(decode, PrefetchDeclined(tuple(attempts))) for decode, attempts in let_go.items()]

    @property
    def awaits_answer(self) -> bool:
        return bool(self._buffers)
