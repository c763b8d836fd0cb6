"""The pool's core: which pages are whose, and which waiting requests a decode worker gets next.

    AskPages ─▶ LeasePages ─▶ (the worker writes) ─▶ Commit ─▶ waiting ─▶ Batch ─▶ out ─▶ Release
                                                                  ▲                 │
                                                                  └─ worker lost ───┘

First come, first served. A lost worker's lease ends when its lock is free, not before: until then it
may still be writing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from alignedserve.core import Entry, Role
from alignedserve.kvpool.pages import Pages
from alignedserve.messages import (
    ROUTER,
    AskBatch,
    AskPages,
    Attempt,
    Backlog,
    Batch,
    Cancel,
    Command,
    Commit,
    Event,
    HolderGone,
    Holding,
    Inquire,
    LeasePages,
    LinkGap,
    MemberJoined,
    MemberLost,
    Missed,
    Progress,
    Received,
    Release,
    Send,
    SetTimer,
    TimerFired,
    WatchHolder,
    holder,
)
from alignedserve.policy import DEFAULT_POLICY, Order, Policy, Room
from alignedserve.promise import Promise, promise
from alignedserve.running import units_for
from alignedserve.slo import Standing, Work, in_order

REFRESH_S = 5.0  # between two inquiries after what is out
_REFRESH = "refresh"  # timer
MOST_CANCELLED = 10_000  # remembered, for a commit that is still on its way


@dataclass(frozen=True)
class _Wanted:
    holder: str
    ask: AskPages


class PoolCore:
    def __init__(self, num_pages: int, block_size: int, policy: Policy = DEFAULT_POLICY) -> None:
        self._block_size, self._policy = block_size, policy
        self._pages = Pages(num_pages)
        self._wanted: dict[str, _Wanted] = {}  # worker -> its ask, which could not be answered yet; in their order
        self._waiting: dict[str, Entry] = {}  # request -> entry, in the order of arrival
        self._promises: dict[str, Promise] = {}  # of those
        self._has_changed = False  # who waits, or who asks: since batches were looked for
        self._out: dict[str, tuple[str, Entry]] = {}  # request -> (the decode worker that has it, entry)
        self._asks: dict[str, AskBatch] = {}  # decode worker -> its room, in the order of asking
        self._progress: dict[str, list[Attempt]] = {}
        self._refreshing = False  # whether the timer is set
        self._cancelled: dict[str, int] = {}  # request -> attempts up to this one are not wanted

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Received(worker, AskPages() as ask, incarnation):
                self._pages.keep_only(holder(worker, incarnation), ask.kept)
                self._wanted[worker] = _Wanted(holder(worker, incarnation), ask)  # keeps the place of the ask before
            case Received(worker, Commit(entry), incarnation):
                self._commit(holder(worker, incarnation), entry)
            case Received(worker, AskBatch() as room):
                self._asks.pop(worker, None)
                self._asks[worker] = room
                self._has_changed = True
            case Received(message=Release(request, attempt)):
                self._release(request, attempt)
            case Received(message=Cancel(request, attempt)):
                commands += self._cancel(request, attempt)
            case MemberLost(member) if member.role in (Role.PREFILL, Role.DECODE):
                self._worker_lost(member.name)
                commands.append(WatchHolder(member.holder))
            case HolderGone(gone):
                self._pages.holder_gone(gone)
            case MemberJoined(member) if member.role is Role.ROUTER:
                commands.append(self._holding())
            case Received(message=Inquire(attempts)):
                commands += self._inquired(attempts)
            case Received(sender, Missed()):
                commands += self._say_again(sender)
            case LinkGap(sender):
                commands += [Send(sender, Missed()), *self._say_again(sender)]
            case TimerFired(name) if name == _REFRESH:
                self._refreshing = False
                for worker in sorted({at for at, _ in self._out.values()}):
                    commands += self._say_again(worker)
        return commands + self._leases() + self._batches(now) + self._refresh_later(now) + self._told()

    @property
    def held(self) -> dict[str, int]:
        """What is taken now, but for leases; nothing when no request is open."""
        return {
            "entries": len(self._waiting) + len(self._out),
            "pages": self._pages.num_stored,
            "unanswered asks": len(self._wanted),
        }

    @property
    def kept(self) -> set[str]:
        """Requests whose KV is here."""
        return {*self._waiting, *self._out}

    @property
    def pages(self) -> Pages:
        """For reading."""
        return self._pages

    @property
    def num_lent_pages(self) -> int:
        return self._pages.num_leased

    def _leases(self) -> list[Command]:
        commands: list[Command] = []
        for worker, wanted in list(self._wanted.items()):
            pages = self._pages.lease(wanted.holder, wanted.ask.pages)
            if pages is None:
                break
            del self._wanted[worker]
            commands.append(Send(worker, LeasePages(pages, wanted.ask.number)))
        return commands

    def _commit(self, by: str, entry: Entry) -> None:
        request = entry.request
        if self._cancelled.get(request.id, -1) >= request.attempt:
            self._pages.give_back(by, entry.pages)
            self._note("lost", entry)
            return
        self._forget(request.id)
        self._pages.adopt(by, entry.pages, request.id)
        self._wait(entry)
        self._note("committed", entry)

    def _batches(self, now: float) -> list[Command]:
        if not self._has_changed:
            return []
        self._has_changed = False
        commands: list[Command] = []
        for worker, room in list(self._asks.items()):
            entries = self._fitting(room, now)
            if entries:
                del self._asks[worker]
                sent = [self._hand_out(entry, worker) for entry in entries]
                commands.append(Send(worker, Batch(tuple(sent))))
        return commands

    def _hand_out(self, entry: Entry, worker: str) -> Entry:
        name = entry.request.id
        self._out[name] = (worker, replace(self._waiting.pop(name), due=self._promises.pop(name).due))
        return self._out[name][1]

    def _wait(self, entry: Entry) -> None:
        self._waiting[entry.request.id] = entry
        self._promises[entry.request.id] = promise(entry.request, self._policy, len(entry.output), entry.due)
        self._has_changed = True

    def _fitting(self, room: AskBatch, now: float) -> list[Entry]:
        """As many as fit; nobody is overtaken, else the large would wait for ever."""
        entries: list[Entry] = []
        pairs = room.pairs
        for entry in self._in_order(room, now):
            tokens = entry.request.most_tokens if self._policy.room is Room.WHOLE else entry.prefix + 1
            pairs -= units_for(tokens, self._block_size)
            if pairs < 0 or len(entries) >= room.requests:
                break
            entries.append(entry)
        return entries

    def _in_order(self, room: AskBatch, now: float) -> list[Entry]:
        if self._policy.order is Order.FCFS:
            return list(self._waiting.values())
        standings = [self._standing(entry, room, now) for entry in self._waiting.values()]
        return [self._waiting[one.id] for one in in_order(standings, room.times, self._policy.late)]

    def _standing(self, entry: Entry, room: AskBatch, now: float) -> Standing:
        """A copy and a decode away from its next token."""
        one = self._promises[entry.request.id]
        return one.standing(now, Work(tokens=one.tokens_due, transfer_s=entry.prefix * room.copy_token_s), room.times)

    def _release(self, request: str, attempt: int) -> None:
        out = self._out.get(request)
        if out is not None and out[1].request.attempt == attempt:
            del self._out[request]
            self._pages.free_entry(request)

    def _cancel(self, request: str, attempt: int) -> list[Command]:
        self._cancelled[request] = max(attempt, self._cancelled.pop(request, attempt))
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        waiting = self._waiting.get(request)
        if waiting is not None and waiting.request.attempt <= attempt:
            self._forget(request)
        out = self._out.get(request)
        if out is not None and out[1].request.attempt <= attempt:
            return [Send(out[0], Cancel(request, attempt))]  # it has the pages until it releases them
        return []

    def _worker_lost(self, name: str) -> None:
        """What it had waits again, at the front; what had joined there the router cancels."""
        self._asks.pop(name, None)
        self._wanted.pop(name, None)
        back = {request: entry for request, (worker, entry) in self._out.items() if worker == name}
        waiting, self._waiting = self._waiting, {}
        for request, entry in back.items():
            del self._out[request]
            self._wait(entry)
        self._waiting |= waiting

    def _forget(self, request: str) -> None:
        """An earlier attempt of the request, wherever it is."""
        self._promises.pop(request, None)
        self._has_changed = True
        if self._waiting.pop(request, None) or self._out.pop(request, None):
            self._pages.free_entry(request)

    # --- After lost frames

    def _refresh_later(self, now: float) -> list[Command]:
        if self._refreshing or not self._out:
            return []
        self._refreshing = True
        return [SetTimer(_REFRESH, now + REFRESH_S)]

    def _holding(self) -> Command:
        entries = [*self._waiting.values(), *(entry for _, entry in self._out.values())]
        return Send(ROUTER, Holding(tuple(map(_attempt, entries))))

    def _say_again(self, to: str) -> list[Command]:
        """A worker asks again by itself. Of a decode worker a Batch or a Release may have been lost."""
        if to == ROUTER:
            return [self._holding()]
        out = tuple(_attempt(entry) for worker, entry in self._out.values() if worker == to)
        return [Send(to, Inquire(out))] if out else []

    def _inquired(self, attempts: Iterable[Attempt]) -> list[Command]:
        """Of what is out, the decode worker must know: it releases what it does not."""
        commands: list[Command] = []
        for request, attempt in attempts:
            waiting, out = self._waiting.get(request), self._out.get(request)
            if out is not None and out[1].request.attempt == attempt:
                commands.append(Send(out[0], Inquire(((request, attempt),))))
            elif waiting is None or waiting.request.attempt != attempt:
                self._progress.setdefault("unknown", []).append((request, attempt))
        return commands

    def _note(self, stage: str, entry: Entry) -> None:
        self._progress.setdefault(stage, []).append(_attempt(entry))

    def _told(self) -> list[Command]:
        if not self._progress:
            return []
        stages = {stage: tuple(keys) for stage, keys in self._progress.items()}
        self._progress.clear()
        return [Send(ROUTER, Progress(**stages, free_pairs=0, backlog=Backlog()))]


def _attempt(entry: Entry) -> Attempt:
    return entry.request.id, entry.request.attempt
